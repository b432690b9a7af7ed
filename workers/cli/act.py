"""`bargein retry`, `brake` and `dead-letters`: what an operator does by hand and at once.

Responsible for the commands and their tables. Leaves what becomes of it to the owners and observers: an order is
decided like everything else, a brake is a word that they look for. Status 1 if there is nothing of that name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from redis.asyncio import Redis

from control.store import inspect, lives
from control.store.inspect import DeadLetterRow
from control.store.keys import PartitionKeys, partition_of
from control.store.orders import post_orders
from control.wire.orders import RetryOrder
from workers.cli.endings import Failure, Status, connected, plainly
from workers.cli.listening import require_partitions
from workers.cli.options import AsJson, PasswordFile, PipelineFile, RedisUrl
from workers.cli.output import note, print_json, print_table, spell_ms
from workers.maintenance.where import WhereError, parse_length_ms
from workers.settings import load_settings

T = TypeVar("T")

BODY_SHOWN = 60

brake_app = typer.Typer(add_completion=False, rich_markup_mode="rich", invoke_without_command=True)
letters_app = typer.Typer(add_completion=False, rich_markup_mode="rich", invoke_without_command=True)

StageName = Annotated[str, typer.Argument(metavar="STAGE", help="As the pipeline file names it")]


@plainly
def retry(
    session_id: Annotated[str, typer.Argument(metavar="SESSION", help="A session with pending cleanups")],
    redis_url: RedisUrl = None,
    redis_password_file: PasswordFile = None,
) -> None:
    """Try a session's pending cleanups again now, instead of when their backoff is over."""

    async def work(redis: Redis, partitions: int) -> None:
        partition = partition_of(session_id, partitions)
        pending = await inspect.ask(redis, [("HGET", PartitionKeys(partition).cleanups, session_id)])
        if pending[0] is None:
            raise Failure(f"session {session_id!r} has no pending cleanup; `bargein cleanups` lists them")
        if not await post_orders(redis, partitions, [RetryOrder(session_id)]):
            raise Failure(f"partition {partition} takes no orders: does anybody own it? See `bargein partitions`")
        note(f"the cleanups of session {session_id} are asked for again; `bargein cleanups` shows what comes of it")

    _do(work, redis_url, redis_password_file)


@brake_app.callback(invoke_without_command=True)
@plainly
def show_brakes(
    context: typer.Context,
    pipeline: PipelineFile = None,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
    redis_password_file: PasswordFile = None,
) -> None:
    """The brakes: which stages have silent workers that are not given up, since too many fell silent at once."""
    if context.invoked_subcommand is not None:
        return
    settings = load_settings(redis_url=redis_url, redis_password_file=redis_password_file, pipeline=pipeline)
    control = settings.load_pipeline().control

    async def ask(redis: Redis, partitions: int) -> list[inspect.BrakeRow]:
        del partitions
        return await inspect.fetch_brakes(redis, control.heartbeat_ms)

    rows = _do(ask, redis_url, redis_password_file)
    if as_json:
        print_json(rows)
        return
    print_table(
        "brakes",
        ["STAGE", "WORKERS>", "SILENT>", "FOR>", "RELEASED FOR>"],
        [
            [row.stage, row.workers, row.silent, spell_ms(row.longest_silence_ms), spell_ms(row.released_ms)]
            for row in rows
        ],
        empty="no stage workers",
    )
    if any(3 * row.silent > row.workers and row.released_ms is None for row in rows):
        note(f"sessions of silent workers are closed after {control.brake_s:g} s, or by: bargein brake release STAGE")


@brake_app.command()
@plainly
def release(
    stage: StageName,
    for_: Annotated[str, typer.Option("--for", help="How long this holds: 30s, 10m, 1h")] = "10m",
    redis_url: RedisUrl = None,
    redis_password_file: PasswordFile = None,
) -> None:
    """Say that the silent workers of a stage are gone: their sessions are closed as stage_lost."""
    try:
        for_ms = parse_length_ms(for_)
    except WhereError as error:
        raise Failure(f"--for: {error}", Status.SETTINGS) from None
    if not 1_000 <= for_ms <= 3_600_000:
        raise Failure(f"--for: is {for_}; it must be from 1s to 1h", Status.SETTINGS)

    async def work(redis: Redis, partitions: int) -> None:
        del partitions
        await _require_stage(redis, stage)
        await lives.release_brake(redis, stage, for_ms // 1_000)
        note(f"silent workers of stage {stage} may be given up for {spell_ms(for_ms)}")

    _do(work, redis_url, redis_password_file)


@brake_app.command()
@plainly
def hold(stage: StageName, redis_url: RedisUrl = None, redis_password_file: PasswordFile = None) -> None:
    """Take that back: whoever is not given up yet is waited for."""

    async def work(redis: Redis, partitions: int) -> None:
        del partitions
        found = await lives.hold_brake(redis, stage)
        note(f"the brake of stage {stage} holds again" if found else f"the brake of stage {stage} wasn't released")

    _do(work, redis_url, redis_password_file)


@letters_app.callback(invoke_without_command=True)
@plainly
def show_letters(
    context: typer.Context,
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="How many to show at most")] = 50,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
    redis_password_file: PasswordFile = None,
) -> None:
    """Entries that nobody could be answered for, newest first: which partition, why, and what they held."""
    if context.invoked_subcommand is not None:
        return

    async def ask(redis: Redis, partitions: int) -> inspect.Found:
        return await inspect.fetch_dead_letters(redis, partitions, limit)

    found = _do(ask, redis_url, redis_password_file)
    if as_json:
        print_json(found.rows)
    else:
        print_table(
            "dead letters",
            ["P>", "LETTER", "AGE>", "STREAM", "ENTRY", "REASON", "BODY"],
            [_letter_cells(row) for row in found.rows],
            empty="no dead letters",
        )
    if found.more:
        note(f"there are more than these {limit}; --limit shows more")


@letters_app.command()
@plainly
def drop(
    partition: Annotated[int, typer.Argument(metavar="P", min=0, help="The letter's partition")],
    letter: Annotated[str, typer.Argument(metavar="LETTER", help="Its id; all: every one of the partition")],
    redis_url: RedisUrl = None,
    redis_password_file: PasswordFile = None,
) -> None:
    """Remove a dead letter, or all of a partition. After a week they go by themselves."""

    async def work(redis: Redis, partitions: int) -> None:
        if partition >= partitions:
            raise Failure(f"there is no partition {partition}; they go up to {partitions - 1}", Status.SETTINGS)
        dead = PartitionKeys(partition).dead
        if letter == "all":
            count = int(await redis.xtrim(dead, maxlen=0, approximate=False))
        elif not letter.replace("-", "", 1).isdecimal():
            raise Failure(f"{letter!r} is no letter's id; `bargein dead-letters` shows them", Status.SETTINGS)
        else:
            count = int(await redis.xdel(dead, letter))
            if not count:
                raise Failure(f"partition {partition} has no dead letter {letter}")
        note(f"{count} dead letter{'' if count == 1 else 's'} removed")

    _do(work, redis_url, redis_password_file)


def _letter_cells(row: DeadLetterRow) -> list[object]:
    body = row.body.decode(errors="backslashreplace")
    shown = body if len(body) <= BODY_SHOWN else f"{body[:BODY_SHOWN]}..."
    return [row.partition, row.letter_id, spell_ms(row.age_ms), row.stream, row.entry_id, row.reason, shown or None]


async def _require_stage(redis: Redis, stage: str) -> None:
    known = sorted({row.stage for row in (await inspect.fetch_stage_workers(redis)).rows})
    if stage not in known:
        raise Failure(f"no stage {stage!r} has workers; these have: {', '.join(known) or 'none'}")


def _do(work: Callable[[Redis, int], Awaitable[T]], redis_url: str | None, password_file: Path | None) -> T:
    settings = load_settings(redis_url=redis_url, redis_password_file=password_file)

    async def run() -> T:
        async with connected(settings) as redis:
            return await work(redis, await require_partitions(redis, settings))

    return asyncio.run(run())
