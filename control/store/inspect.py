"""What an operator asks: who owns the partitions, which sessions there are, which cleanups are owed, who works.

Responsible for read-only questions, each answered in one value a row. Leaves their looks to the command line. Talks to
Redis and never writes. Keeps clear of the hot path: big hashes are walked in pages, many keys are asked for in one
round trip, and nothing lists keys. What it reads may be a moment old and of different moments.

Times are the server's milliseconds; `_ms` in a row is a length of time as of now. A value that can't be read, because
somebody has put something else under its key, is None: an operator with a broken key wants to see the rest.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct
from redis.exceptions import NoPermissionError, ResponseError

from control.core.requests import RequestPhase
from control.core.session import Phase, Session
from control.store import keys
from control.store.commits import decode_cleanups, decode_session
from control.store.keys import PartitionKeys
from control.store.lives import KEPT_MS, LOAD_FIELDS, Entry
from control.store.server import fetch_now_ms

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from redis.asyncio import Redis

    from control.core.cleanup import Cleanup
    from control.core.fence import Fence

_NOTHING: dict[bytes, bytes] = {}
# What a stage worker's record has beside figures; the log of aborts is long and for those who measure.
_NO_FIGURES = {"state", "beat", "started_ms", "abort_log", *Entry.__struct_fields__}

PAGE = 200  # entries that one HSCAN looks at, roughly
KEYS_AT_ONCE = 32  # partitions that one round trip asks about


class StoredConfig(Struct, frozen=True, kw_only=True):
    """`bargein:config`."""

    protocol: int
    partitions: int
    layout: int


class PartitionRow(Struct, frozen=True, kw_only=True):
    """A partition. `owner` None: nobody's. `lease_left_ms` below 0: its owner has not renewed in time.

    `commands`, `acks` and `orders` wait to be applied (appends that wait for their stage among them), the oldest of the
    first two since `oldest_ms`. `sessions`: open or closing. `cleanups`: sessions that have some pending.
    """

    partition: int
    owner: str | None
    token: str | None
    lease_left_ms: int | None
    revision: int | None
    commands: int | None
    acks: int | None
    orders: int | None
    oldest_ms: int | None
    dead_letters: int | None
    sessions: int | None
    cleanups: int | None


class SessionRow(Struct, frozen=True, kw_only=True):
    """A session. `phase`: vacant, opening, open, closing, or unreadable. Requests by phase at the stages.

    `idle_ms`: since the last command or output. `detached_ms` None: attached. `append` is the seq of the append that
    waits for its stage. `debts`: slots that are still owed back.
    """

    session_id: str
    partition: int
    phase: str
    fence: Fence | None = None
    session_mode: str = ""
    lease_generation: int = 0
    idle_ms: int | None = None
    detached_ms: int | None = None
    append: int | None = None
    reserved: int = 0
    submitted: int = 0
    cleaning: int = 0
    cleanups: int = 0
    oldest_cleanup_ms: int | None = None
    debts: int = 0
    route: tuple[str, ...] = ()


class CleanupRow(Struct, frozen=True, kw_only=True):
    """A pending cleanup. `waits_for`: the stage workers that have not confirmed. `owed`: commands it will answer.

    `retry_in_ms` below 0: about to be tried again. `failed`: somebody was told `timeout` or `cleanup_failed`.
    """

    session_id: str
    partition: int
    number: int
    kind: str
    epochs: tuple[int, ...]
    age_ms: int
    attempts: int
    waits_for: tuple[str, ...]
    retry_in_ms: int
    owed: int
    failed: bool


class ControlRow(Struct, frozen=True, kw_only=True):
    """A control worker. `alive_for_ms`: until it counts as gone; None if it has gone and only its leases are left."""

    worker_id: str
    alive_for_ms: int | None
    partitions: tuple[int, ...]


class StageRow(Struct, frozen=True, kw_only=True):
    """One life of a stage worker. `state` None: the server has forgotten its record.

    `last_beat_ms`: since its last heartbeat. `load` and `counters` are the figures that came with it.
    """

    worker_id: str
    stage: str
    stage_id: int | None
    engine: str
    state: str | None
    slots_used: int | None
    capacity: int | None
    beats: int | None
    last_beat_ms: int | None
    age_ms: int | None
    load: dict[str, Any]
    counters: dict[str, Any]


class BrakeRow(Struct, frozen=True, kw_only=True):
    """A stage's brake. `silent` of its `workers` have had no heartbeat for long; `released_ms`: for how long yet."""

    stage: str
    workers: int
    silent: int
    longest_silence_ms: int
    released_ms: int | None


class DeadLetterRow(Struct, frozen=True, kw_only=True):
    """An entry that nobody could answer. `body`: its first 4 KiB, empty where it may have held a token."""

    partition: int
    letter_id: str
    age_ms: int
    stream: str
    entry_id: str
    reason: str
    body: bytes


class Found(Struct, frozen=True):
    """Rows, and whether there were more than were asked for."""

    rows: list[Any]
    more: bool = False


async def fetch_config(redis: Redis) -> StoredConfig | None:
    """What the processes of this server have agreed on; None if none has ever started."""
    stored = _texts((await ask(redis, [("HGETALL", keys.CONFIG)]))[0])
    try:
        return StoredConfig(**{name: int(stored[name]) for name in StoredConfig.__struct_fields__})
    except (KeyError, ValueError):
        return None


async def fetch_partitions(redis: Redis, partitions: int) -> list[PartitionRow]:
    """Every partition, by number."""
    now_ms = await fetch_now_ms(redis)
    rows: list[PartitionRow] = []
    for first in range(0, partitions, KEYS_AT_ONCE):
        some = [PartitionKeys(p) for p in range(first, min(partitions, first + KEYS_AT_ONCE))]
        calls: list[tuple[Any, ...]] = []
        for known in some:
            calls += [
                ("HMGET", known.owner, "holder", "token", "until_ms", "revision"),
                ("XLEN", known.commands),
                ("XLEN", known.acks),
                ("XLEN", known.orders),
                ("XRANGE", known.commands, "-", "+", "COUNT", 1),
                ("XRANGE", known.acks, "-", "+", "COUNT", 1),
                ("XLEN", known.dead),
                ("HLEN", known.fences),
                ("HLEN", known.cleanups),
            ]
        answers = iter(await ask(redis, calls))
        for known in some:
            holder, token, until_ms, revision = next(answers) or (None,) * 4
            commands, acks, orders = next(answers), next(answers), next(answers)
            waiting = [_entry_ms(next(answers)), _entry_ms(next(answers))]
            oldest_ms = min((ms for ms in waiting if ms is not None), default=None)
            owner = _text(holder) or None
            rows.append(
                PartitionRow(
                    partition=known.partition,
                    owner=owner,
                    token=None if owner is None else _text(token),
                    lease_left_ms=None if owner is None else int(until_ms or 0) - now_ms,
                    revision=None if revision is None else int(revision),
                    commands=commands,
                    acks=acks,
                    orders=orders,
                    oldest_ms=None if oldest_ms is None else max(0, now_ms - oldest_ms),
                    dead_letters=next(answers),
                    sessions=next(answers),
                    cleanups=next(answers),
                )
            )
    return rows


async def fetch_session(redis: Redis, session_id: str, partition: int) -> Session | None:
    """A session's record without its cleanups. None: no record, or none that can be read."""
    return (await fetch_some_sessions(redis, partition, [session_id]))[0]


async def fetch_sessions(
    redis: Redis, partitions: int, phases: frozenset[Phase] | None = None, limit: int = 100
) -> Found:
    """Up to `limit` sessions by id; those of some `phases` only, or all, those without a life too.

    The walk ends as soon as it has enough, so where there are more it is chance which ones are shown.
    """
    now_ms = await fetch_now_ms(redis)
    found: dict[str, tuple[int, Session | None]] = {}
    async for partition, session_id, state in _walk(redis, [PartitionKeys(p).sessions for p in range(partitions)]):
        try:
            session = decode_session(state, None)
        except msgspec.DecodeError:
            session = None
        if phases is None or session is None or session.phase in phases:
            found[session_id] = (partition, session)
        if len(found) > limit:
            break
    shown = {session_id: found[session_id] for session_id in sorted(found)[:limit]}
    return Found(await _session_rows(redis, shown, now_ms), len(found) > limit)


async def walk_sessions(redis: Redis, partition: int) -> AsyncIterator[list[SessionRow]]:
    """All sessions of a partition, those without a life too, some at a time; each at least once."""
    some: dict[str, tuple[int, Session | None]] = {}
    async for _, session_id, state in _walk(redis, [PartitionKeys(partition).sessions]):
        try:
            some[session_id] = (partition, decode_session(state, None))
        except msgspec.DecodeError:
            some[session_id] = (partition, None)
        if len(some) >= PAGE:
            yield await _session_rows(redis, some, await fetch_now_ms(redis))
            some = {}
    if some:
        yield await _session_rows(redis, some, await fetch_now_ms(redis))


async def fetch_some_sessions(redis: Redis, partition: int, session_ids: Sequence[str]) -> list[Session | None]:
    """The sessions' records without their cleanups. None: no record, or none that can be read."""
    (states,) = await ask(redis, [("HMGET", PartitionKeys(partition).sessions, *session_ids)])
    found: list[Session | None] = []
    for state in states or [None] * len(session_ids):
        try:
            found.append(None if state is None else decode_session(state, None))
        except msgspec.DecodeError:
            found.append(None)
    return found


async def fetch_cleanups(redis: Redis, partitions: int, limit: int = 100) -> Found:
    """The `limit` oldest pending cleanups, oldest first."""
    now_ms = await fetch_now_ms(redis)
    count = 0
    # A heap whose root is the youngest of those kept: the one that an older cleanup displaces.
    kept: list[tuple[int, int, CleanupRow]] = []
    seen: set[str] = set()
    async for partition, session_id, blob in _walk(redis, [PartitionKeys(p).cleanups for p in range(partitions)]):
        if session_id in seen:
            continue
        seen.add(session_id)
        for cleanup in _cleanups(blob):
            count += 1
            item = (-cleanup.created_ms, count, _cleanup_row(session_id, partition, cleanup, now_ms))
            if len(kept) < limit:
                heapq.heappush(kept, item)
            else:
                heapq.heappushpop(kept, item)
    rows = sorted((row for *_, row in kept), key=lambda row: (-row.age_ms, row.session_id, row.number))
    return Found(rows, count > limit)


async def fetch_controls(redis: Redis, partitions: int) -> list[ControlRow]:
    """The control workers that count as alive, and those that hold leases without, by id."""
    now_ms = await fetch_now_ms(redis)
    members = (await ask(redis, [("ZRANGE", keys.CONTROLS, 0, 9_999, "WITHSCORES")]))[0] or ()
    alive = {_text(members[i]): int(float(members[i + 1])) for i in range(0, len(members), 2)}
    held: dict[str, list[int]] = {}
    for first in range(0, partitions, 16 * KEYS_AT_ONCE):
        some = range(first, min(partitions, first + 16 * KEYS_AT_ONCE))
        owners = await ask(redis, [("HGET", PartitionKeys(p).owner, "holder") for p in some])
        for partition, holder in zip(some, owners, strict=True):
            if holder:
                held.setdefault(_text(holder), []).append(partition)
    return [
        ControlRow(
            worker_id=worker_id,
            alive_for_ms=alive[worker_id] - now_ms if worker_id in alive else None,
            partitions=tuple(held.get(worker_id, ())),
        )
        for worker_id in sorted({*alive, *held})
    ]


async def fetch_stage_workers(redis: Redis, limit: int = 1000) -> Found:
    """Up to `limit` stage workers by id, dead ones that still hold slots or wait to be forgotten too."""
    now_ms = await fetch_now_ms(redis)
    about: dict[str, bytes] = {}
    async for _, worker_id, what in _walk(redis, [keys.STAGES]):
        about[worker_id] = what
        if len(about) > limit:
            break
    shown = sorted(about)[:limit]
    calls: list[tuple[Any, ...]] = []
    for worker_id in shown:
        state = keys.worker_state(worker_id)
        calls += [("HGETALL", state), ("PTTL", state), ("HLEN", keys.worker_slots(worker_id))]
    answers = iter(await ask(redis, calls))
    rows: list[StageRow] = []
    for worker_id in shown:
        told, left_ms, slots_used = _texts(next(answers)), next(answers), next(answers)
        rows.append(_stage_row(worker_id, about[worker_id], told, left_ms, slots_used, now_ms))
    return Found(rows, len(about) > limit)


async def fetch_brakes(redis: Redis, silent_ms: int) -> list[BrakeRow]:
    """The stages that have workers, by name. A worker counts as silent after `silent_ms` without a heartbeat."""
    workers = [row for row in (await fetch_stage_workers(redis)).rows if row.state != "dead"]
    stages = sorted({row.stage for row in workers})
    answers = await ask(redis, [("PTTL", keys.brake(stage)) for stage in stages])
    rows: list[BrakeRow] = []
    for stage, left_ms in zip(stages, answers, strict=True):
        ages_ms = [row.last_beat_ms or 0 for row in workers if row.stage == stage]
        rows.append(
            BrakeRow(
                stage=stage,
                workers=len(ages_ms),
                silent=sum(age_ms > silent_ms for age_ms in ages_ms),
                longest_silence_ms=max(ages_ms),
                released_ms=left_ms if left_ms is not None and left_ms > 0 else None,
            )
        )
    return rows


async def fetch_dead_letters(redis: Redis, partitions: int, limit: int = 100) -> Found:
    """The `limit` newest dead letters, newest first."""
    now_ms = await fetch_now_ms(redis)
    rows: list[DeadLetterRow] = []
    for first in range(0, partitions, KEYS_AT_ONCE):
        some = range(first, min(partitions, first + KEYS_AT_ONCE))
        calls = [("XREVRANGE", PartitionKeys(p).dead, "+", "-", "COUNT", limit + 1) for p in some]
        for partition, letters in zip(some, await ask(redis, calls), strict=True):
            rows += [_dead_letter_row(partition, entry_id, fields, now_ms) for entry_id, fields in letters or ()]
    rows.sort(key=lambda row: (row.age_ms, row.partition, row.letter_id))
    return Found(rows[:limit], len(rows) > limit)


def _dead_letter_row(partition: int, letter_id: bytes, fields: dict[bytes, bytes], now_ms: int) -> DeadLetterRow:
    name = _text(letter_id)
    return DeadLetterRow(
        partition=partition,
        letter_id=name,
        age_ms=max(0, now_ms - int(name.partition("-")[0])),
        stream=_text(fields.get(b"stream")),
        entry_id=_text(fields.get(b"entry")),
        reason=_text(fields.get(b"reason")),
        body=fields.get(b"b", b""),
    )


async def _session_rows(redis: Redis, found: dict[str, tuple[int, Session | None]], now_ms: int) -> list[SessionRow]:
    calls: list[tuple[Any, ...]] = []
    for session_id, (partition, _) in found.items():
        known = PartitionKeys(partition)
        calls += [("HGET", known.heard, session_id), ("HGET", known.cleanups, session_id)]
    answers = iter(await ask(redis, calls))
    return [
        _session_row(session_id, partition, session, int(next(answers) or 0), _cleanups(next(answers)), now_ms)
        for session_id, (partition, session) in found.items()
    ]


def _session_row(
    session_id: str, partition: int, session: Session | None, heard_ms: int, owed: tuple[Cleanup, ...], now_ms: int
) -> SessionRow:
    if session is None:
        return SessionRow(session_id=session_id, partition=partition, phase="unreadable")
    if session.phase is Phase.VACANT:
        return SessionRow(session_id=session_id, partition=partition, phase="vacant", debts=len(session.debts))
    lease = session.lease
    phases = [request.phase for request in session.requests]
    return SessionRow(
        session_id=session_id,
        partition=partition,
        phase=session.phase.name.lower(),
        fence=session.fence,
        session_mode=session.session_mode,
        lease_generation=lease.generation,
        idle_ms=max(0, now_ms - max(lease.last_activity_ms, heard_ms)),
        detached_ms=None if lease.detached_at_ms is None else max(0, now_ms - lease.detached_at_ms),
        append=None if session.append is None else session.append.seq,
        reserved=phases.count(RequestPhase.RESERVED),
        submitted=phases.count(RequestPhase.SUBMITTED),
        cleaning=phases.count(RequestPhase.CLEANING),
        cleanups=len(owed),
        oldest_cleanup_ms=max(0, now_ms - min(c.created_ms for c in owed)) if owed else None,
        debts=len(session.debts),
        route=session.route,
    )


def _cleanup_row(session_id: str, partition: int, cleanup: Cleanup, now_ms: int) -> CleanupRow:
    return CleanupRow(
        session_id=session_id,
        partition=partition,
        number=cleanup.number,
        kind=cleanup.kind.value,
        epochs=cleanup.epochs,
        age_ms=max(0, now_ms - cleanup.created_ms),
        attempts=cleanup.attempts,
        waits_for=cleanup.waiting,
        retry_in_ms=cleanup.retry_at_ms - now_ms,
        owed=len(cleanup.owed),
        failed=cleanup.failed,
    )


def _stage_row(
    worker_id: str, about: bytes, told: dict[str, str], left_ms: int | None, slots_used: int | None, now_ms: int
) -> StageRow:
    try:
        entry = msgspec.msgpack.decode(about, type=Entry)
    except msgspec.DecodeError:
        entry = None
    figures = {name: _number(value) for name, value in sorted(told.items()) if name not in _NO_FIGURES}
    started_ms = _number(told.get("started_ms", ""))
    beats = _number(told.get("beat", ""))
    return StageRow(
        worker_id=worker_id,
        stage="?" if entry is None else entry.stage,
        stage_id=None if entry is None else entry.stage_id,
        engine="?" if entry is None else entry.engine,
        state=told.get("state"),
        slots_used=slots_used,
        capacity=None if entry is None else entry.capacity,
        beats=beats if isinstance(beats, int) else None,
        # Each beat sets the record's time to live anew, so what has gone of it is the time since.
        last_beat_ms=max(0, KEPT_MS - left_ms) if left_ms is not None and left_ms >= 0 else None,
        age_ms=max(0, now_ms - started_ms) if isinstance(started_ms, int) else None,
        load={name: figures[name] for name in LOAD_FIELDS if name in figures},
        counters={name: value for name, value in figures.items() if name not in LOAD_FIELDS},
    )


async def ask(redis: Redis, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Read-only commands in one round trip. One that the server refuses, because of what is stored, gives None.

    One that this user may not give raises `NoPermissionError`: nothing found would be a lie.
    """
    if not calls:
        return []
    async with redis.pipeline(transaction=False) as pipe:
        for call in calls:
            pipe.execute_command(*call)
        answers = await pipe.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, NoPermissionError) or (
            isinstance(answer, Exception) and not isinstance(answer, ResponseError)
        ):
            raise answer
    return [None if isinstance(answer, ResponseError) else answer for answer in answers]


async def _walk(redis: Redis, names: Sequence[str]) -> AsyncIterator[tuple[int, str, bytes]]:
    """The fields of hashes: the hash's place in `names`, the field, its value. A field may come twice.

    Each round trip takes a page of a few hashes, so that neither many small ones nor one big one costs much at a time.
    """
    for first in range(0, len(names), KEYS_AT_ONCE):
        cursors = dict.fromkeys(range(first, min(len(names), first + KEYS_AT_ONCE)), 0)
        while cursors:
            places = list(cursors)
            answers = await ask(redis, [("HSCAN", names[p], cursors[p], "COUNT", PAGE) for p in places])
            for place, answer in zip(places, answers, strict=True):
                cursor, fields = answer or (0, _NOTHING)
                cursors[place] = int(cursor)
                if not cursors[place]:
                    del cursors[place]
                for name, value in fields.items():
                    yield place, _text(name), value


def _cleanups(blob: bytes | None) -> tuple[Cleanup, ...]:
    try:
        return () if blob is None else decode_cleanups(blob)
    except msgspec.DecodeError:
        return ()


def _entry_ms(entries: Any) -> int | None:
    """When the first of a stream's entries was added."""
    return int(bytes(entries[0][0]).partition(b"-")[0]) if entries else None


def _number(text: str) -> Any:
    """A hash's value as what it was before it was stored."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _text(value: bytes | str | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""


def _texts(fields: dict[bytes, bytes] | None) -> dict[str, str]:
    return {_text(name): _text(value) for name, value in (fields or _NOTHING).items()}
