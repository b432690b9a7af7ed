"""`bargein sessions`, `cleanups`, `workers` and `partitions`: what an operator asks first.

Responsible for the tables and for what of a row is worth a column; `--json` has everything. Leaves the questions to
`control/store/inspect.py`. Reads only. On a server where nothing has ever run there is nothing to show, which is no
error. Times in JSON are milliseconds; tables say how long ago in words.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from control.core.session import Phase
from control.store import inspect
from workers.cli.endings import connected, plainly
from workers.cli.options import AsJson, PasswordFile, RedisUrl
from workers.cli.output import note, print_json, print_table, spell_fence, spell_ms, spell_numbers
from workers.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from redis.asyncio import Redis

T = TypeVar("T")

LIVING = frozenset({Phase.OPENING, Phase.OPEN, Phase.CLOSING})

Limit = Annotated[int, typer.Option("--limit", min=1, max=100_000, help="How many to show at most")]


class PhaseChoice(StrEnum):
    """Which sessions."""

    LIVING = "living"
    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    VACANT = "vacant"
    ALL = "all"


@plainly
def sessions(
    phase: Annotated[
        PhaseChoice, typer.Option("--phase", help="Which: vacant are ids whose last life is remembered")
    ] = PhaseChoice.LIVING,
    limit: Limit = 100,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
    redis_password_file: PasswordFile = None,
) -> None:
    """The sessions: fence (incarnation/epoch/turn/response), activity, requests at the stages, cleanups owed."""
    match phase:
        case PhaseChoice.ALL:
            phases = None
        case PhaseChoice.LIVING:
            phases = LIVING
        case _:
            phases = frozenset({Phase[phase.name]})

    async def ask(redis: Redis, partitions: int) -> inspect.Found:
        return await inspect.fetch_sessions(redis, partitions, phases, limit)

    found = _ask(ask, inspect.Found([]), redis_url, redis_password_file)
    if as_json:
        print_json(found.rows)
    else:
        print_table(
            "sessions",
            [
                "SESSION",
                "P>",
                "PHASE",
                "FENCE",
                "MODE",
                "IDLE>",
                "DETACHED>",
                "APPEND>",
                "REQUESTS",
                "CLEANUPS>",
                "ROUTE",
            ],
            [_session_cells(row) for row in found.rows],
            empty="no sessions",
        )
    _say_more(found, limit)


def _session_cells(row: inspect.SessionRow) -> list[object]:
    requests = {"reserved": row.reserved, "submitted": row.submitted, "cleaning": row.cleaning}
    return [
        row.session_id,
        row.partition,
        row.phase,
        spell_fence(row.fence),
        row.session_mode or None,
        spell_ms(row.idle_ms),
        spell_ms(row.detached_ms),
        row.append,
        " ".join(f"{count} {name}" for name, count in requests.items() if count) or None,
        f"{row.cleanups} ({spell_ms(row.oldest_cleanup_ms)})" if row.cleanups else None,
        " ".join(row.route) or None,
    ]


@plainly
def cleanups(
    limit: Limit = 100,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
    redis_password_file: PasswordFile = None,
) -> None:
    """The pending cleanups, oldest first: how often they were tried, and which stage workers have not confirmed."""

    async def ask(redis: Redis, partitions: int) -> inspect.Found:
        return await inspect.fetch_cleanups(redis, partitions, limit)

    found = _ask(ask, inspect.Found([]), redis_url, redis_password_file)
    if as_json:
        print_json(found.rows)
    else:
        print_table(
            "cleanups",
            [
                "SESSION",
                "P>",
                "NO>",
                "KIND",
                "EPOCHS",
                "AGE>",
                "ATTEMPTS>",
                "NEXT TRY>",
                "OWED>",
                "FAILED",
                "WAITS FOR",
            ],
            [_cleanup_cells(row) for row in found.rows],
            empty="no cleanups are pending",
        )
    _say_more(found, limit)


def _cleanup_cells(row: inspect.CleanupRow) -> list[object]:
    return [
        row.session_id,
        row.partition,
        row.number,
        row.kind,
        spell_numbers(row.epochs),
        spell_ms(row.age_ms),
        row.attempts,
        "now" if row.retry_in_ms <= 0 else f"in {spell_ms(row.retry_in_ms)}",
        row.owed,
        "yes" if row.failed else "no",
        " ".join(row.waits_for) or None,
    ]


@plainly
def workers(
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
    redis_password_file: PasswordFile = None,
) -> None:
    """The control workers with their partitions, and the stage workers with slots, load and last heartbeat."""

    async def ask(redis: Redis, partitions: int) -> tuple[list[inspect.ControlRow], inspect.Found]:
        return await inspect.fetch_controls(redis, partitions), await inspect.fetch_stage_workers(redis)

    nothing: tuple[list[inspect.ControlRow], inspect.Found] = ([], inspect.Found([]))
    controls, stages = _ask(ask, nothing, redis_url, redis_password_file)
    if as_json:
        print_json([*[_tagged("control", row) for row in controls], *[_tagged("stage", row) for row in stages.rows]])
        return
    print_table(
        "control workers",
        ["CONTROL WORKER", "ALIVE FOR>", "OWNS>", "PARTITIONS"],
        [
            [
                row.worker_id,
                "gone" if row.alive_for_ms is None else spell_ms(row.alive_for_ms),
                len(row.partitions),
                spell_numbers(row.partitions),
            ]
            for row in controls
        ],
        empty="no control workers",
    )
    print_table(
        "stage workers",
        ["STAGE WORKER", "STAGE", "ENGINE", "STATE", "SLOTS>", "LAST BEAT>", "AGE>", "LOAD", "COUNTERS"],
        [_stage_cells(row) for row in stages.rows],
        empty="no stage workers",
    )
    _say_more(stages, len(stages.rows))


def _stage_cells(row: inspect.StageRow) -> list[object]:
    return [
        row.worker_id,
        row.stage,
        row.engine,
        row.state or "forgotten",
        f"{'?' if row.slots_used is None else row.slots_used}/{'?' if row.capacity is None else row.capacity}",
        "never" if row.last_beat_ms is None else f"{spell_ms(row.last_beat_ms)} ago",
        spell_ms(row.age_ms),
        " ".join(f"{name}={value:.3g}" for name, value in row.load.items() if name != "slots_used") or None,
        # All of them are in the JSON; here those that have something to say.
        " ".join(f"{name}={value}" for name, value in row.counters.items() if value) or None,
    ]


@plainly
def partitions(
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
    redis_password_file: PasswordFile = None,
) -> None:
    """The partitions: who owns each and for how long yet, what waits to be applied, dead letters, sessions."""
    rows = _ask(inspect.fetch_partitions, [], redis_url, redis_password_file)
    if as_json:
        print_json(rows)
        return
    print_table(
        "partitions",
        [
            *["P>", "OWNER", "LEASE>", "TOKEN", "REVISION>", "COMMANDS>", "ACKS>", "ORDERS>"],
            *["OLDEST>", "DEAD>", "SESSIONS>", "CLEANUPS>"],
        ],
        [_partition_cells(row) for row in rows],
        empty="no partitions: no process of bargein has started here yet",
    )


def _partition_cells(row: inspect.PartitionRow) -> list[object]:
    lease = row.lease_left_ms
    return [
        row.partition,
        row.owner or "nobody",
        "expired" if lease is not None and lease < 0 else spell_ms(lease),
        row.token,
        *["?" if value is None else value for value in (row.revision, row.commands, row.acks, row.orders)],
        spell_ms(row.oldest_ms),
        *["?" if value is None else value for value in (row.dead_letters, row.sessions, row.cleanups)],
    ]


def _ask(
    question: Callable[[Redis, int], Awaitable[T]], nothing: T, redis_url: str | None, password_file: Path | None
) -> T:
    """The answer to `question(redis, partitions)`; `nothing` where no process has ever started."""
    settings = load_settings(redis_url=redis_url, redis_password_file=password_file)

    async def ask() -> T:
        async with connected(settings) as redis:
            config = await inspect.fetch_config(redis)
            return nothing if config is None else await question(redis, config.partitions)

    return asyncio.run(ask())


def _tagged(role: str, row: Any) -> dict[str, Any]:
    return {"role": role, **{name: getattr(row, name) for name in row.__struct_fields__}}


def _say_more(found: inspect.Found, limit: int) -> None:
    if found.more:
        note(f"there are more than these {limit}; --limit shows more")
