"""A blocking read that can be woken from within the process.

Responsible for the blocked XREAD and for CLIENT UNBLOCK. Leaves what is read to `owner.py`. Talks to Redis on the two
connections that it is given. Says no with redis-py's exceptions; then `close` it and read again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from control.store.link import LOST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from control.store.link import Link


class WakeableReader:
    """One reading task; `wake` may come from any other."""

    def __init__(self, reader: Link, waker: Link) -> None:
        """Two connections to the server that has the streams."""
        self._reader, self._waker = reader, waker
        self._reader_id: int | None = None
        self._blocked = False
        self._unblocking: asyncio.Task[None] | None = None

    async def read(self, names: Sequence[str], positions: Sequence[str], *, count: int, block_ms: int) -> Any:
        """XREAD's answer; None after `block_ms` or a wake-up. 0: don't wait."""
        if self._reader_id is None:
            self._reader_id = await self._reader.call("CLIENT", "ID")
        blocking = ("BLOCK", block_ms) if block_ms > 0 else ()
        self._blocked = block_ms > 0
        try:
            return await self._reader.call("XREAD", "COUNT", count, *blocking, "STREAMS", *names, *positions)
        finally:
            self._blocked = False

    def wake(self) -> None:
        """End the wait, if there is one."""
        if self._blocked and (self._unblocking is None or self._unblocking.done()):
            self._unblocking = asyncio.create_task(self._unblock(), name="unblock")

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """What has to be ended with the reader."""
        return [] if self._unblocking is None else [self._unblocking]

    async def reset(self) -> None:
        """The connection was lost."""
        self._reader_id = None
        await self._reader.close()

    async def close(self) -> None:
        """Close both connections."""
        await self._reader.close()
        await self._waker.close()

    async def _unblock(self) -> None:
        try:
            while self._blocked and self._reader_id is not None:
                if await self._waker.call("CLIENT", "UNBLOCK", self._reader_id):
                    return
                # The read was on its way but had not arrived: it is blocked in a moment.
                await asyncio.sleep(0.001)
        except (*LOST, RedisError):
            return
