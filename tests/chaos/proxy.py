"""A TCP proxy between a worker and the server: it resets, stalls, and loses answers when it is told to.

One for each worker, so that one's network can fail alone. Leaves when to do what to `faults.py`. Talks TCP.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

CHUNK_BYTES = 1 << 16
ABORT = struct.pack("ii", 1, 0)  # SO_LINGER of no time: closing sends a reset


class Proxy:
    """`await start()`, then a worker connects to `port`; `target_port` is the server's."""

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self._target_port = target_port
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._deaf = False
        self._stalls: set[str] = set()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._meet, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def stall(self, by: str) -> None:
        """Nothing moves in either direction, and nobody is told, until whoever has stalled it says `flow`."""
        self._stalls.add(by)
        self._flowing.clear()

    def flow(self, by: str) -> None:
        """This stall is over."""
        self._stalls.discard(by)
        if not self._stalls:
            self._flowing.set()

    def lose_answers(self) -> None:
        """Commands arrive, their answers don't, until `give_answers`."""
        self._deaf = True

    def give_answers(self) -> None:
        """Answers to what is sent from now on arrive; what was lost is lost, so a `reset` comes before it."""
        self._deaf = False

    def reset(self) -> None:
        """Every connection is reset."""
        for writer in list(self._writers):
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError, AttributeError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
            writer.transport.abort()
        self._writers.clear()

    async def close(self) -> None:
        self._flowing.set()
        if self._server is not None:
            self._server.close()
        self.reset()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        other: asyncio.StreamWriter | None = None
        try:
            back, other = await asyncio.open_connection("127.0.0.1", self._target_port)
            self._writers.add(other)
            ways = [
                asyncio.ensure_future(self._carry(reader, other, answers=False)),
                asyncio.ensure_future(self._carry(back, writer, answers=True)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for each in (writer, other):
                if each is not None:
                    self._writers.discard(each)
                    each.transport.abort()
            self._tasks.discard(task)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await self._flowing.wait()
                if answers and self._deaf:
                    continue
                writer.write(data)
                await writer.drain()
