"""`bargein tail`: a session's events as they come.

Responsible for gaps, for the end of a life and for going on after Redis was away. Leaves the lines to `describe.py`.
Status 0 at the session's end and after Ctrl-C.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from control.store.link import LOST
from workers.cli.describe import Heard, describe
from workers.cli.endings import connected, plainly
from workers.cli.leaving import run_until_interrupted
from workers.cli.listening import BLOCK_MS, Listener, require_partitions
from workers.cli.options import PasswordFile, RedisUrl
from workers.cli.output import note, to_json
from workers.settings import load_settings

if TYPE_CHECKING:
    from workers.settings import Settings

AWAY_S = 0.5


class Start(StrEnum):
    """Where to begin."""

    START = "start"
    NOW = "now"


@plainly
def tail(
    session_id: Annotated[str, typer.Argument(metavar="SESSION", help="The session's id")],
    start: Annotated[
        Start, typer.Option("--from", help="Begin with the oldest event that is kept, or with the next one")
    ] = Start.START,
    follow: Annotated[bool, typer.Option("--follow", help="Go on after the session's end, into its next life")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each event as JSON on a line of its own")] = False,
    redis_url: RedisUrl = None,
    redis_password_file: PasswordFile = None,
) -> None:
    """Follow a session's events until it ends: replies, outputs, what became of it.

    The columns are time, number in this life, kind, fence (incarnation/epoch/turn/response) and what it says. Numbers
    that are missing are pointed out. In JSON, bytes are base64.
    """
    settings = load_settings(redis_url=redis_url, redis_password_file=redis_password_file)
    asyncio.run(run_until_interrupted(_tail(settings, session_id, start, follow=follow, as_json=as_json)))


async def _tail(settings: Settings, session_id: str, start: Start, *, follow: bool, as_json: bool) -> None:
    async with connected(settings) as redis:
        listener = Listener(redis, session_id, await require_partitions(redis, settings))
        if start is Start.NOW:
            await listener.skip()
        watch = Watch(start is Start.START)
        silent = True
        while True:
            # At a life's end only what stands there already is still of interest.
            heard = await _read_patiently(listener, 0 if watch.has_ended and not follow else BLOCK_MS)
            if not heard:
                if watch.has_ended and not follow:
                    return
                if silent:
                    note(f"no events of session {session_id!r} yet (partition {listener.partition}); waiting")
                silent = False
            for event in heard:
                silent = False
                gap = watch.take(event)
                if gap:
                    print(to_json({"t": "gap", "missing": gap}).decode() if as_json else _tell_gap(gap), flush=True)
                print(_as_json(event) if as_json else describe(event), flush=True)


class Watch:
    """What a listener has to remember: which number comes next, and whether the life is over."""

    def __init__(self, from_start: bool) -> None:
        """`from_start`: the first event seen should be number 1."""
        self.has_ended = False
        self._next: int | None = 1 if from_start else None

    def take(self, event: Heard) -> int:
        """How many events are missing before this one."""
        if event.is_terminal:
            self.has_ended = True
        elif event.begins:
            self.has_ended = False
        if event.number < 1:
            return 0
        expected, self._next = self._next, event.number + 1
        # A lower number is a new life's, whose first may have been cut as well.
        if expected is not None and event.number < expected:
            expected = 1
        return 0 if expected is None else event.number - expected


async def _read_patiently(listener: Listener, block_ms: int) -> list[Heard]:
    away = False
    while True:
        try:
            heard = await listener.read(block_ms)
        except LOST as error:
            if not away:
                note(f"the connection to Redis is lost ({error or type(error).__name__}); trying again")
            away = True
            await asyncio.sleep(AWAY_S)
        else:
            if away:
                note("Redis is back")
            return heard


def _tell_gap(missing: int) -> str:
    return f"{'':12} {'':>5}  -- {missing} {'event is' if missing == 1 else 'events are'} missing here: cut before read"


def _as_json(event: Heard) -> str:
    line = {"t": event.kind, "n": event.number, "at_ms": event.at_ms, "id": event.entry_id, "body": event.body}
    return to_json(line).decode()
