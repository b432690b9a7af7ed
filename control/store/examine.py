"""An examination of the server and of what runs on it: what is well, what isn't, and what to do about it.

Responsible for the questions and for the judgement. Leaves showing to the command line. Changes nothing but what a
start of a worker would (scripts are loaded). Talks to Redis; says no with `Unusable` where there is nothing to examine.
What the user may not ask is `unknown`, which is no fault.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal, cast

from msgspec import Struct
from redis.exceptions import NoPermissionError, RedisError

from control.store.inspect import (
    fetch_brakes,
    fetch_cleanups,
    fetch_config,
    fetch_controls,
    fetch_partitions,
    fetch_stage_workers,
)
from control.store.scripts import SCRIPTS, script
from control.store.server import LAYOUT, Unusable, check_info, fetch_infos, fetch_now_ms
from control.wire.commands import PROTOCOL

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable

    from redis.asyncio import Redis

    from control.store.inspect import BrakeRow, CleanupRow, ControlRow, PartitionRow, StageRow, StoredConfig

Verdict = Literal["ok", "warn", "bad", "unknown"]

PINGS = 5
SLOW_PING_MS = 10.0
FULL, ALMOST_FULL = 0.95, 0.8
CLOCK_MS = 1_000
OLD_COMMAND_MS = 15_000
OLD_CLEANUP_MS = 60_000
SILENT_MS = 5_000
SLOTS_LEFT = 0.1


class Finding(Struct, frozen=True):
    """What was looked at, how it is, what was found, and what to do; empty where there is nothing to do."""

    check: str
    verdict: Verdict
    found: str
    advice: str = ""


async def examine(redis: Redis, address: str, partitions: int | None) -> list[Finding]:
    """All findings, in an order to read them in. `address`: without credentials. `partitions`: the pipeline file's."""
    infos = await fetch_infos(redis, address)
    found = [await _ping(redis)]
    for info in infos:
        found += judge_info(info, address, several=len(infos) > 1)
    if any(info.get("aof_enabled") for info in infos):
        found.append(await _ask_fsync(redis))
    found += [await _try_scripts(redis), await _compare_clocks(redis)]
    config = await fetch_config(redis)
    found.append(judge_config(config, partitions))
    if config is None:
        return found
    rows = await fetch_partitions(redis, config.partitions)
    controls = await fetch_controls(redis, config.partitions)
    found += judge_controls(controls, rows)
    found += judge_stages((await fetch_stage_workers(redis)).rows)
    found += await _unless_forbidden("brakes", _look_at_brakes(redis))
    cleanups = await fetch_cleanups(redis, config.partitions)
    found += judge_work(rows, cleanups.rows, more=cleanups.more)
    return found


def judge_info(info: dict[str, Any], address: str, *, several: bool) -> list[Finding]:
    """What a server's INFO says: version, eviction, role, memory, persistence."""
    of = f" of {info.get('tcp_port', '?')}" if several else ""
    found: list[Finding] = []
    try:
        check_info(info, address)
    except Unusable as error:
        found.append(Finding(f"server{of}", "bad", str(error), "no worker starts on it"))
    else:
        name = "Valkey" if "valkey_version" in info else "Redis"
        version = info.get("valkey_version", info.get("redis_version"))
        found.append(Finding(f"server{of}", "ok", f"{name} {version}, evicts nothing"))
    if info.get("role") != "master":
        advice = "name the Sentinels or the cluster in the URL, so that the master is found (docs/redis.md)"
        found.append(Finding(f"role{of}", "bad", f"a {info.get('role')}, which takes no writes", advice))
    found.append(_judge_memory(info, f"memory{of}"))
    found.append(_judge_persistence(info, f"persistence{of}"))
    return found


def _judge_memory(info: dict[str, Any], check: str) -> Finding:
    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    mib = f"{used / 2**20:,.0f} MiB in use"
    if not most:
        return Finding(check, "warn", f"{mib}, no bound", "set maxmemory below what the machine has")
    share = used / most
    found = f"{mib} of {most / 2**20:,.0f}"
    if share > ALMOST_FULL:
        verdict: Verdict = "bad" if share > FULL else "warn"
        return Finding(check, verdict, found, "raise maxmemory, or end sessions; at 100 % commands are refused")
    return Finding(check, "ok", found)


def _judge_persistence(info: dict[str, Any], check: str) -> Finding:
    if not info.get("aof_enabled"):
        return Finding(check, "bad", "no append-only file", "CONFIG SET appendonly yes: a restart loses all sessions")
    for field, what in (
        ("aof_last_write_status", "the append-only file can't be written"),
        ("aof_last_bgrewrite_status", "the append-only file can't be rewritten"),
        ("rdb_last_bgsave_status", "the last snapshot failed"),
    ):
        if info.get(field, "ok") != "ok":
            return Finding(check, "bad", what, "look at the server's log: is the disk full, or not writable?")
    return Finding(check, "ok", "an append-only file")


def judge_config(config: StoredConfig | None, partitions: int | None) -> Finding:
    """Whether what is stored is what this version and this pipeline file say."""
    if config is None:
        return Finding("configuration", "warn", "nothing has ever run here", "start a control worker")
    wanted = {"protocol": PROTOCOL, "layout": LAYOUT, "partitions": partitions}
    for name, value in wanted.items():
        stored = getattr(config, name)
        if value is not None and stored != value:
            advice = "use the pipeline file that the others use; stored sessions don't move by themselves"
            if name != "partitions":
                advice = "this version of bargein can't work with what is stored; use the one that the others use"
            return Finding("configuration", "bad", f"{name} is {stored} there and {value} here", advice)
    return Finding("configuration", "ok", f"{config.partitions} partitions, protocol {config.protocol}")


def judge_controls(controls: Iterable[ControlRow], rows: Iterable[PartitionRow]) -> list[Finding]:
    """Whether every partition has a living owner."""
    alive = [row for row in controls if row.alive_for_ms is not None]
    if not alive:
        return [Finding("control workers", "bad", "none is alive", "start one: bargein control")]
    found = [Finding("control workers", "ok", f"{len(alive)} alive")]
    orphans = [row.partition for row in rows if row.owner is None or (row.lease_left_ms or 0) <= 0]
    if orphans:
        advice = "if that lasts for longer than a lease, look at the control workers' logs"
        return [*found, Finding("partitions", "bad", f"{len(orphans)} have no owner, {orphans[0]} first", advice)]
    return [*found, Finding("partitions", "ok", "each has an owner")]


def judge_stages(rows: Iterable[StageRow]) -> list[Finding]:
    """Whether each stage that has ever had a worker has a live one, with room."""
    stages: dict[str, list[StageRow]] = {}
    for row in rows:
        stages.setdefault(row.stage, []).append(row)
    found: list[Finding] = []
    for stage, lives in sorted(stages.items()):
        live = [row for row in lives if row.state == "live"]
        check = f"stage {stage}"
        if not live:
            states = ", ".join(sorted({row.state or "forgotten" for row in lives}))
            advice = f"no session can be opened; start one: bargein stage --stage {stage}"
            found.append(Finding(check, "bad", f"no live worker ({states})", advice))
            continue
        used, capacity = sum(row.slots_used or 0 for row in live), sum(row.capacity or 0 for row in live)
        text = f"{len(live)} live, {used} of {capacity} slots taken"
        silent = [row.worker_id for row in live if (row.last_beat_ms or 0) > SILENT_MS]
        if silent:
            found.append(Finding(check, "warn", f"{text}; {silent[0]} is silent", "is its host well? Look at its log"))
        elif used > (1 - SLOTS_LEFT) * capacity:
            found.append(Finding(check, "warn", text, "start another worker of it, before sessions are refused"))
        else:
            found.append(Finding(check, "ok", text))
    advice = "a pipeline without stages needs none; else start some"
    return found or [Finding("stages", "warn", "no stage worker is known", advice)]


def judge_work(rows: Iterable[PartitionRow], cleanups: Iterable[CleanupRow], *, more: bool = False) -> list[Finding]:
    """What waits, and for how long; `cleanups`: the oldest first, `more`: there are others."""
    rows = list(rows)
    waiting = sum((row.commands or 0) + (row.acks or 0) for row in rows)
    oldest_ms = max((row.oldest_ms or 0 for row in rows), default=0)
    is_old = oldest_ms > OLD_COMMAND_MS
    backlog = Finding(
        "backlog",
        "bad" if is_old else "ok",
        f"{waiting} entries, the oldest {oldest_ms / 1000:.1f} s old" if waiting else "nothing waits",
        "see BargeinCommandsWait in docs/runbooks.md" if is_old else "",
    )
    pending = list(cleanups)
    cleaning = Finding(
        "cleanups", "ok", f"{'more than ' if more else ''}{len(pending)} pending" if pending else "none is pending"
    )
    if pending and pending[0].age_ms > OLD_CLEANUP_MS:
        first = pending[0]
        found = f"{first.session_id} has waited {first.age_ms / 1000:.0f} s for {', '.join(first.waits_for)}"
        cleaning = Finding("cleanups", "bad", found, "see BargeinCleanupPending in docs/runbooks.md")
    letters = sum(row.dead_letters or 0 for row in rows)
    dead = Finding("dead letters", "ok", "none")
    if letters:
        dead = Finding("dead letters", "warn", f"{letters} kept", "bargein dead-letters shows what and why")
    return [backlog, cleaning, dead]


def judge_brakes(rows: Iterable[BrakeRow]) -> list[Finding]:
    """Stages of which many workers are silent."""
    return [
        Finding(
            f"brake of {row.stage}",
            "bad",
            f"{row.silent} of {row.workers} workers are silent",
            "see BargeinBrakeHeld in docs/runbooks.md",
        )
        for row in rows
        if row.silent > 1 and row.silent * 3 > row.workers and row.released_ms is None
    ]


async def _look_at_brakes(redis: Redis) -> list[Finding]:
    return judge_brakes(await fetch_brakes(redis, SILENT_MS))


async def _ping(redis: Redis) -> Finding:
    times: list[float] = []
    for _ in range(PINGS):
        begun_s = time.perf_counter()
        await redis.ping()
        times.append((time.perf_counter() - begun_s) * 1000)
    middle_ms = sorted(times)[PINGS // 2]
    if middle_ms > SLOW_PING_MS:
        return Finding("way there", "warn", f"{middle_ms:.1f} ms", "every barge-in takes some of these; move closer")
    return Finding("way there", "ok", f"{middle_ms:.1f} ms")


async def _ask_fsync(redis: Redis) -> Finding:
    try:
        answer: dict[Any, Any] = await cast("Any", redis).config_get("appendfsync")
    except RedisError as error:
        return _unknown("fsync", error)
    found: Any = next(iter(answer.values()), "unknown")
    value = found.decode() if isinstance(found, bytes) else str(found)
    lost = {"always": "nothing that was acknowledged", "everysec": "up to a second", "no": "what isn't on disk yet"}
    return Finding("fsync", "warn" if value == "no" else "ok", f"{value}: a power cut loses {lost.get(value, '?')}")


async def _try_scripts(redis: Redis) -> Finding:
    for name in SCRIPTS:
        try:
            await redis.script_load(script(name).text)
        except NoPermissionError as error:
            return _unknown("scripts", error)
        except RedisError as error:
            return Finding("scripts", "bad", f"{name}: {error}", "no commit works; is it a server that has no Lua?")
    return Finding("scripts", "ok", f"all {len(SCRIPTS)} compile")


async def _compare_clocks(redis: Redis) -> Finding:
    apart_ms = abs(await fetch_now_ms(redis) - time.time() * 1000)
    if apart_ms > CLOCK_MS:
        advice = "nothing is decided by it, but logs don't line up; is NTP running?"
        return Finding("clock", "warn", f"{apart_ms / 1000:.1f} s from this machine's", advice)
    return Finding("clock", "ok", f"{apart_ms:.0f} ms from this machine's")


async def _unless_forbidden(check: str, question: Awaitable[list[Finding]]) -> list[Finding]:
    try:
        return await question
    except NoPermissionError as error:
        return [_unknown(check, error)]


def _unknown(check: str, error: RedisError) -> Finding:
    return Finding(check, "unknown", f"may not be asked: {error}", "ask as another user")
