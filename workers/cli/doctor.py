"""`bargein doctor`: is the server fit, is everything there that has to be, and what is to be done.

Responsible for the table and the exit status. Leaves questions and judgement to `control/store/examine.py`.

    0 nothing is bad   1 something is   2 settings   3 Redis can't be reached
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from control.store.examine import Finding, examine
from workers.cli.endings import Status, connected, plainly
from workers.cli.options import AsJson, PasswordFile, PipelineFile, RedisUrl
from workers.cli.output import print_json, print_table
from workers.settings import load_settings

MARKS = {"ok": "ok", "warn": "look at it", "bad": "BAD", "unknown": "?"}


@plainly
def doctor(
    pipeline: PipelineFile = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show only what isn't well")] = False,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
    redis_password_file: PasswordFile = None,
) -> None:
    """Examine the server and what runs on it: version, memory, persistence, scripts, clocks, owners, stages, backlog.

    Changes nothing. Ends with 1 if something is bad. What the Redis user may not ask is shown as a question mark; the
    user `maintenance` may ask most.
    """
    settings = load_settings(redis_url=redis_url, redis_password_file=redis_password_file, pipeline=pipeline)
    # The file that is shipped says nothing about what others have agreed on.
    partitions = settings.load_pipeline().partitions if settings.pipeline is not None else None

    async def ask() -> list[Finding]:
        async with connected(settings) as redis:
            return await examine(redis, settings.address, partitions)

    findings = asyncio.run(ask())
    shown = [each for each in findings if not quiet or each.verdict != "ok"]
    if as_json:
        print_json(shown)
    else:
        print_table(
            "doctor",
            ["CHECK", "", "FOUND", "WHAT TO DO"],
            [[each.check, MARKS[each.verdict], each.found, each.advice or None] for each in shown],
            empty="all is well",
        )
    if any(each.verdict == "bad" for each in findings):
        raise typer.Exit(Status.REFUSED)
