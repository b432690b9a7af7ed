"""Tokens from the producer's side, and a session with one on the real system."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import sys
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import Any

import msgpack
import pytest
from redis.asyncio import Redis

from bargein_client import FailedPreconditionError, Lifecycle
from bargein_client.conversation import Conversation
from bargein_client.mailbox import Options
from bargein_client.protocol import Command, require_token
from control.store.keys import PartitionKeys, partition_of
from tests.system import RunningSystem
from tests.workers.cli_process import ROOT, clean_environment, run

TOKEN = "sixteen bytes or möre"
OTHER = "some other sixteen bytes"
DIGEST = sha256(TOKEN.encode()).digest()


def every_command(talk: Conversation) -> list[Command]:
    return [
        talk.open("duplex", None, None),
        talk.append(b"raw", mode=None, final=True, operation_id=None, deadline_ms=None),
        talk.append([1], mode=None, final=False, operation_id="o", deadline_ms=5),
        talk.interrupt("barge_in"),
        talk.update({}, None),
        talk.touch("heartbeat"),
        talk.touch("detach"),
        talk.resume(None),
        talk.close("client_close"),
    ]


def test_every_command_of_a_session_carries_its_token() -> None:
    for command in every_command(Conversation("s0", 1, Options(), token=TOKEN)):
        assert msgpack.unpackb(command.fields["b"])["token"] == TOKEN
        assert TOKEN not in repr(command)


def test_a_session_without_a_token_sends_none() -> None:
    for command in every_command(Conversation("s0", 1, Options())):
        assert "token" not in msgpack.unpackb(command.fields["b"])


def test_a_bookmark_holds_no_token_and_whoever_goes_on_needs_it_again() -> None:
    talk = Conversation("s0", 1, Options(), token=TOKEN)
    bookmark = talk.bookmark()
    assert TOKEN not in str(dataclasses.asdict(bookmark))
    with_it = Conversation.at(bookmark, Options(), TOKEN)
    assert msgpack.unpackb(with_it.touch("attach").fields["b"])["token"] == TOKEN
    without = Conversation.at(bookmark, Options())
    assert "token" not in msgpack.unpackb(without.touch("attach").fields["b"])


@pytest.mark.parametrize("token", ["", "t" * 15, "ö" * 129, "t" * 257, "\ud800" * 20])
def test_a_token_that_no_worker_would_take_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(ValueError, match="token") as caught:
        Conversation("s0", 1, Options(), token=token)
    assert not token or token not in str(caught.value)


@pytest.mark.parametrize("token", ["t" * 16, "t" * 256, "ö" * 8, None])
def test_any_other_token_is_taken(token: str | None) -> None:
    assert require_token(token) == token


# --- on the real system ------------------------------------------------------------------------------------------


async def until_event(session: Any, name: str) -> list[str]:
    """The names of the session's lifecycle events up to that one."""
    told: list[str] = []
    async for event in session.events():
        if isinstance(event, Lifecycle):
            told.append(event.event)
            if event.event == name:
                break
    return told


@pytest.mark.parametrize("shown", [None, OTHER], ids=["no token", "another token"])
async def test_a_session_with_a_token_hears_nobody_who_does_not_show_it(
    redis_url: str, connect: Any, shown: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with RunningSystem(redis_url) as system, connect(system.url) as client, connect(system.url) as elsewhere:
        session = await client.open("call", input_modes=["append_audio_chunk"], token=TOKEN)
        await session.append(bytes(640))
        stranger = elsewhere.attach(session.bookmark(), shown)
        attempts: list[Callable[[], Awaitable[Any]]] = [
            lambda: stranger.append(bytes(640), final=True),
            stranger.interrupt,
            lambda: stranger.update(session_config={"voice": "b"}),
            stranger.heartbeat,
            stranger.detach,
            lambda: stranger.resume(0),
            stranger.close,
            lambda: elsewhere.open("call", token=shown),
        ]
        for attempt in attempts:
            with pytest.raises(FailedPreconditionError, match="token") as caught:
                await attempt()
            assert not caught.value.retryable
            assert (caught.value.accepted_fence, caught.value.lease_generation) == (None, None)
        assert (await session.append(bytes(640), final=True)).detail["seq"] == 2  # nothing of all that has counted
        await session.heartbeat()
        again = elsewhere.attach(session.bookmark(), TOKEN)
        assert (await again.resume()).lease_generation == 1
        await again.interrupt()
        await again.close()
        assert await until_event(session, "closed") == ["opened", "interrupted", "closed"]
    assert TOKEN not in caplog.text
    assert DIGEST.hex() not in caplog.text
    assert repr(DIGEST)[2:-1] not in caplog.text


async def test_neither_the_token_nor_its_digest_shows_anywhere_but_in_the_sessions_state(redis_url: str) -> None:
    async with RunningSystem(redis_url) as system, Redis.from_url(redis_url) as redis:
        home = PartitionKeys(partition_of("call", system.pipeline.partitions))

        async def send(**command: Any) -> list[dict[str, Any]]:
            # On standard input: arguments are for everybody to read.
            given = json.dumps({"session_id": "call", **command})
            done = await asyncio.to_thread(run, "send", "--json", "-", redis_url=redis_url, given=given)
            assert TOKEN not in done.output
            return json.loads(done.stdout)

        assert (await send(op="open", token=TOKEN, capabilities={"input_modes": ["append_tokens"]}))[0]["ok"]
        assert (await send(op="append", mode="append_tokens", payload=[1], token=TOKEN))[0]["ok"]
        assert (await send(op="touch", activity="heartbeat"))[0]["code"] == "failed_precondition"
        assert (await send(op="touch", activity="heartbeat", token=TOKEN))[0]["ok"]
        held = {key.decode() for key in await redis.keys() if DIGEST in (await dump(redis, key))}
        assert held == {home.sessions}
        assert not [key for key in await redis.keys() if TOKEN.encode() in (await dump(redis, key))]
        shown = [await shows(redis_url, *words) for words in (["sessions"], ["sessions", "--json"])]
        assert (await send(op="close", token=TOKEN))[0]["ok"]
        shown += [await shows(redis_url, "tail", "call", *flags) for flags in ([], ["--json"])]
        for text in shown:
            assert "call" in text
            for secret in (TOKEN, DIGEST.hex(), repr(DIGEST)[2:-1], "TokenDigest"):
                assert secret not in text
        assert not [key for key in await redis.keys() if DIGEST in (await dump(redis, key))]


async def shows(url: str, *words: str) -> str:
    """What a command of the command line prints."""
    words = (sys.executable, "-m", "workers.cli", *words)
    environment = clean_environment(redis_url=url)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, stdout=pipe, stderr=pipe, cwd=ROOT, env=environment)
    output, log = await process.communicate()
    assert process.returncode == 0, log
    return (output + log).decode()


async def dump(redis: Any, key: bytes) -> bytes:
    """Everything under a key, as the bytes that were put there."""
    match (await redis.type(key)).decode():
        case "string":
            parts = [await redis.get(key)]
        case "hash":
            parts = [part for pair in (await redis.hgetall(key)).items() for part in pair]
        case "list":
            parts = await redis.lrange(key, 0, -1)
        case "set":
            parts = list(await redis.smembers(key))
        case "zset":
            parts = await redis.zrange(key, 0, -1)
        case _:
            entries = await redis.xrange(key)
            parts = [part for _, fields in entries for pair in fields.items() for part in pair]
    return b"\n".join(parts)
