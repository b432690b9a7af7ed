"""`bargein send`: commands as JSON, one after the other, each with its reply.

Responsible for what a command may leave out. Leaves checking the rest to the worker, so that every refusal can be had.
A fence that is left out is the session's accepted one; for an open the id's next life; a cancel's `next_fence` the next
epoch and turn, as the clients do it. What came back as a refusal changed nothing (I8).

Says no with status 1 for a refusal, 4 where no reply came, 2 for what is no command at all.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from redis.exceptions import NoPermissionError

from control.core.commands import CANCEL_EVENTS
from control.core.session import Phase, Session
from control.store.inspect import fetch_session
from control.wire.commands import PROTOCOL
from workers.cli.endings import Failure, Status, connected, plainly
from workers.cli.listening import Listener, require_partitions
from workers.cli.options import PasswordFile, RedisUrl
from workers.cli.output import make_console, note, print_json, to_json
from workers.settings import load_settings

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from workers.settings import Settings

FENCE = ("incarnation", "epoch", "turn_id", "response_seq")


@plainly
def send(
    commands: Annotated[
        list[str], typer.Argument(metavar="JSON...", help="Commands, one or several in each word; - reads stdin")
    ],
    payload_file: Annotated[
        Path | None, typer.Option("--payload-file", help="An append's payload as raw bytes (for one command)")
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=0, max=3600, help="How long to wait for each reply (s); 0: not at all")
    ] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document: the list of replies")] = False,
    redis_url: RedisUrl = None,
    redis_password_file: PasswordFile = None,
) -> None:
    """Send commands and print their replies; each waits for the reply to the one before.

    v, control_id and fence may be left out: the fence is then the session's own. Example:

    bargein send '{"op": "open", "session_id": "first"}'
    """
    found = parse_commands(commands)
    payload = None
    if payload_file is not None:
        if len(found) != 1 or found[0].get("op") != "append":
            raise Failure("--payload-file: goes with one command, an append", Status.SETTINGS)
        try:
            payload = payload_file.read_bytes()
        except OSError as error:
            message = f"--payload-file: {payload_file} cannot be read: {error.strerror or error}"
            raise Failure(message, Status.SETTINGS) from None
    settings = load_settings(redis_url=redis_url, redis_password_file=redis_password_file)
    status = asyncio.run(_send(settings, found, payload, timeout_s, as_json=as_json))
    if status:
        raise typer.Exit(int(status))


async def _send(
    settings: Settings, commands: list[dict[str, Any]], payload: bytes | None, timeout_s: float, *, as_json: bool
) -> Status:
    replies: list[dict[str, Any]] = []
    statuses = [Status.OK]
    async with connected(settings) as redis:
        partitions = await require_partitions(redis, settings)
        for command in commands:
            reply = await _send_one(redis, command, payload, partitions, timeout_s)
            if reply is not None:
                replies.append(reply)
                statuses.append(Status.OK if reply.get("ok") else Status.REFUSED)
                if not as_json:
                    _show(reply)
            elif timeout_s:
                statuses.append(Status.NO_REPLY)
                note(
                    f"bargein: no reply to {command['control_id']} within {timeout_s:g} s; it may still come, and "
                    "sending the command again with the same control_id has no second effect"
                )
    if as_json:
        print_json(replies)
    return max(statuses)


async def _send_one(
    redis: Redis, command: dict[str, Any], payload: bytes | None, partitions: int, timeout_s: float
) -> dict[str, Any] | None:
    """The reply, or None."""
    session_id = str(command["session_id"])
    listener = Listener(redis, session_id, partitions)
    known = None
    with suppress(NoPermissionError):  # a producer may not look; it names the fence itself
        known = await fetch_session(redis, session_id, listener.partition)
    fill(command, known)
    await listener.skip()
    fields: dict[Any, Any] = {"b": json.dumps(command, ensure_ascii=False).encode("utf-8", "surrogatepass")}
    if payload is not None:
        fields["p"] = payload
    await redis.xadd(listener.keys.commands, fields)
    deadline_s = time.monotonic() + timeout_s
    console = make_console(stderr=True)
    # A reply is a matter of milliseconds, except a cancel's or a close's.
    waiting = console.status("waiting for the reply") if console.is_terminal else nullcontext()
    with waiting:
        while (left_s := deadline_s - time.monotonic()) > 0:
            for heard in await listener.read(max(1, int(left_s * 1000))):
                if heard.answers(str(command["control_id"])):
                    return heard.body
    return None


def fill(command: dict[str, Any], session: Session | None) -> None:
    """Put in what was left out, in place. `session` is what is stored under the command's id."""
    command.setdefault("v", PROTOCOL)
    command.setdefault("control_id", uuid.uuid4().hex)
    known: dict[str, Any] = dict.fromkeys(FENCE, 0)
    if session is not None and session.phase is not Phase.VACANT:
        known = {name: int(getattr(session.fence, name)) for name in FENCE}
    elif session is not None and session.ended is not None:
        known["incarnation"] = session.ended.incarnation + (command.get("op") == "open")
    given: object = command.get("fence", {})
    if not isinstance(given, dict):
        return
    fence = command["fence"] = known | cast("dict[str, Any]", given)
    if command.get("event") in CANCEL_EVENTS and all(isinstance(part, int) for part in fence.values()):
        following = {**fence, "epoch": fence["epoch"] + 1, "turn_id": fence["turn_id"] + 1, "response_seq": 0}
        command.setdefault("next_fence", following)


def parse_commands(words: list[str]) -> list[dict[str, Any]]:
    """The JSON objects in `words`, several in a word allowed, `-` for stdin. Raises `Failure`."""
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    found: list[dict[str, Any]] = []
    for word in words:
        text = sys.stdin.read() if word == "-" else word
        at = _skip_space(text, 0)
        while at < len(text):
            try:
                value, at = decoder.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                raise Failure(f"command {len(found) + 1} is not JSON: {error}", Status.SETTINGS) from None
            if not isinstance(value, dict):
                message = f"command {len(found) + 1} is not a JSON object but {type(value).__name__}"
                raise Failure(message, Status.SETTINGS)
            command = cast("dict[str, Any]", value)
            if not isinstance(command.get("session_id"), str):
                message = f"command {len(found) + 1}: session_id is missing or no text, so nobody could be answered"
                raise Failure(message, Status.SETTINGS)
            found.append(command)
            at = _skip_space(text, at)
    if not found:
        raise Failure("no command given", Status.SETTINGS)
    return found


def _show(reply: dict[str, Any]) -> None:
    console = make_console()
    if console.is_terminal:
        console.print_json(data=json.loads(to_json(reply)))
    else:
        print(to_json(reply).decode(), flush=True)


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
