"""Reading a session's events for the command line: where the stream is, and what comes next.

Responsible for the partition, for the position and for coming back after a lost connection. Leaves showing to
`tail.py` and `send.py`. Talks to Redis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from control.store.inspect import fetch_config
from control.store.keys import PartitionKeys, partition_of
from control.store.server import Unusable
from control.wire.commands import PROTOCOL
from workers.cli.describe import Heard, read_entry
from workers.cli.endings import SOCKET_TIMEOUT_S

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from workers.settings import Settings

BEGINNING = "0-0"
PAGE = 200
BLOCK_MS = 1_000
assert BLOCK_MS < SOCKET_TIMEOUT_S * 1000, "a blocking read must end before its connection gives up (S57)"


async def require_partitions(redis: Redis, settings: Settings) -> int:
    """How many partitions the processes have agreed on. Raises `Unusable` if none has ever started there."""
    config = await fetch_config(redis)
    if config is None:
        raise Unusable(
            f"no process of bargein has started on Redis at {settings.address} yet (there is no bargein:config); "
            "start `bargein control`, or all of it with `bargein up`"
        )
    if config.protocol != PROTOCOL:
        raise Unusable(
            f"the processes on Redis at {settings.address} speak protocol {config.protocol}, this one {PROTOCOL}; "
            "use the command line of their version"
        )
    return config.partitions


class Listener:
    """One session's events from a position on."""

    def __init__(self, redis: Redis, session_id: str, partitions: int) -> None:
        """Begins at the stream's beginning."""
        self.partition = partition_of(session_id, partitions)
        self.keys = PartitionKeys(self.partition)
        self._redis = redis
        self._name = self.keys.events(session_id)
        self._position = BEGINNING

    async def skip(self) -> None:
        """Go on from the stream's end as it is now."""
        last: list[Any] = await self._redis.xrevrange(self._name, count=1)
        if last:
            self._position = last[0][0].decode()

    async def read(self, block_ms: int) -> list[Heard]:
        """What comes next, some of it; empty if nothing came within `block_ms` (0: doesn't wait)."""
        streams: dict[Any, Any] = {self._name: self._position}
        answer: Any = await self._redis.xread(streams, count=PAGE, block=min(BLOCK_MS, block_ms) or None)
        # An entry that somebody has trimmed away meanwhile has no fields.
        entries: list[Any] = answer[0][1] if answer else []
        if entries:
            self._position = entries[-1][0].decode()
        return [read_entry(entry_id, fields or {}) for entry_id, fields in entries]
