"""A connection of one's own: commands packed by hiredis, many sent in one write, the answers read in order.

Responsible for the hot path's connections and for scripts that the server has forgotten. Leaves reconnecting to its
user, who has to drop what it knew anyway. Talks to Redis. Says no with redis-py's exceptions; after a `ConnectionError`
or a `TimeoutError` the link is closed and the outcome of what was sent is unknown.

redis-py packs commands in Python even where hiredis is installed (1.75 µs an argument against 0.2), and its client
asks the pool for a connection for every command; both are too much for the commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import hiredis
from redis.asyncio import BlockingConnectionPool, ConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisClusterException, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from control.store.scripts import Script, script

if TYPE_CHECKING:
    from redis.asyncio.connection import AbstractConnection

Value = str | bytes | int | float
_pack = cast("Callable[[tuple[Value, ...]], bytes]", hiredis.pack_command)
# What says that the server, or on a cluster whoever should serve a key, is out of reach.
LOST = (RedisConnectionError, RedisTimeoutError, RedisClusterException, OSError, asyncio.TimeoutError)


class Link:
    """One connection. Not for two tasks at once."""

    def __init__(self, pool: ConnectionPool) -> None:
        """`pool` gives the address, the credentials and the time-outs."""
        self._pool = pool
        self._connection: AbstractConnection | None = None

    async def call(self, *arguments: Value) -> Any:
        """One command, one answer."""
        return (await self.call_all([arguments]))[0]

    async def call_all(self, commands: Sequence[Sequence[Value]]) -> list[Any]:
        """Every command in one write. Raises the first error answer after all answers are read."""
        answers = await self.try_all(commands)
        for answer in answers:
            if isinstance(answer, RedisError):
                raise answer
        return answers

    async def try_all(self, commands: Sequence[Sequence[Value]]) -> list[Any]:
        """As `call_all`, but an error answer stands in its place in the list."""
        packed = b"".join([_pack(tuple(command)) for command in commands])
        connection = self._connection
        try:
            if connection is None:
                connection = self._connection = await self._make_connection()
                await connection.connect()
            # Not by the connection's own method: it makes a task of every write, and before Python 3.12 a cancellation
            # that meets the end of such a task is lost.
            writer: asyncio.StreamWriter = cast("Any", connection)._writer  # noqa: SLF001  there is no other way to it
            writer.write(packed)
            async with asyncio.timeout(connection.socket_timeout):
                await writer.drain()
            answers: list[Any] = []
            for _ in commands:
                try:
                    answers.append(await connection.read_response())
                except ResponseError as error:
                    answers.append(error)
        except BaseException:
            await self.close()
            raise
        return answers

    async def run(self, name: str, keys: Sequence[str], arguments: Sequence[Value]) -> Any:
        """One script."""
        return (await self.run_all([(script(name), keys, arguments)]))[0]

    async def run_all(self, calls: Sequence[tuple[Script, Sequence[str], Sequence[Value]]]) -> list[Any]:
        """Scripts in one write. Raises the first error answer after all answers are read."""
        answers = await self.try_run_all(calls)
        for answer in answers:
            if isinstance(answer, RedisError):
                raise answer
        return answers

    async def try_run_all(self, calls: Sequence[tuple[Script, Sequence[str], Sequence[Value]]]) -> list[Any]:
        """As `run_all`, but an error answer stands in its place in the list.

        A script that the server doesn't know yet is loaded, and its calls are run after the others.
        """
        commands = [("EVALSHA", s.sha, len(keys), *keys, *args) for s, keys, args in calls]
        answers = await self.try_all(commands)
        unknown = [index for index, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:
            texts = {calls[index][0].text for index in unknown}
            again = [*(("SCRIPT", "LOAD", text) for text in texts), *(commands[index] for index in unknown)]
            for index, answer in zip(unknown, (await self.try_all(again))[len(texts) :], strict=True):
                answers[index] = answer
        return answers

    async def _make_connection(self) -> AbstractConnection:
        """A connection that is not open yet."""
        return self._pool.make_connection()

    async def close(self) -> None:
        """Close the connection; the next call opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.disconnect(nowait=True)


def is_of_the_script(error: RedisError) -> bool:
    """Whether a script ran and failed. Else the server runs none now: it is a replica, is loading, can't save."""
    return "script:" in str(error)


def make_pool(
    url: str, *, timeout_s: float = 5.0, name: str = "bargein", max_connections: int = 64
) -> BlockingConnectionPool:
    """Connections to `url` (redis://, rediss://, unix://). `timeout_s` must be above every BLOCK that is used (S57)."""
    # A socket of this machine has none, and redis-py refuses to be told so.
    keepalive = {} if url.startswith("unix:") else {"socket_keepalive": True}
    return BlockingConnectionPool.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        **keepalive,
        client_name=name,
        max_connections=max_connections,
        timeout=timeout_s,
    )
