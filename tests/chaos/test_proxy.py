"""The proxy of the chaos run: a stall that two faults have begun is over when both are."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from tests.chaos.proxy import Proxy

SOON_S = 5.0
NOT_S = 0.1


@dataclass
class Talk:
    """A connection through a proxy to a server that says back each line."""

    proxy: Proxy
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def say(self, word: str, within_s: float = SOON_S) -> str | None:
        """The answer; None if none comes in that time."""
        self.writer.write(f"{word}\n".encode())
        return await self.hear(within_s)

    async def hear(self, within_s: float = SOON_S) -> str | None:
        try:
            return (await asyncio.wait_for(self.reader.readline(), within_s)).decode().strip()
        except TimeoutError:
            return None


@pytest.fixture
async def talk() -> AsyncIterator[Talk]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                writer.write(line)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = Proxy(server.sockets[0].getsockname()[1])
    await proxy.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    yield Talk(proxy, reader, writer)
    writer.close()
    await proxy.close()
    server.close()


async def test_what_was_said_during_a_stall_arrives_when_every_stall_is_over(talk: Talk) -> None:
    assert await talk.say("one") == "one"
    talk.proxy.stall("all")
    talk.proxy.stall("one")
    assert await talk.say("two", NOT_S) is None
    talk.proxy.flow("all")
    assert await talk.hear(NOT_S) is None
    talk.proxy.flow("one")
    assert await talk.hear() == "two"


async def test_lost_answers_stay_lost(talk: Talk) -> None:
    talk.proxy.lose_answers()
    assert await talk.say("one", NOT_S) is None
    talk.proxy.give_answers()
    assert await talk.say("two") == "two"


async def test_a_reset_ends_the_connection(talk: Talk) -> None:
    assert await talk.say("one") == "one"
    talk.proxy.reset()
    with pytest.raises(ConnectionResetError):
        await talk.reader.readline()
