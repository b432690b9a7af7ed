"""The limit of sessions, compared with the sessions now and then: who holds a place, and is nobody (S43).

Responsible for finding places without an open session and asking the partitions about them. One control worker does it,
the owner of partition 0. Leaves deciding to the owners, as for every holder of slots. Talks to Redis.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, cast

from redis.exceptions import RedisError

from control.core.scene import ADMISSION
from control.store import keys
from control.store.keys import PartitionKeys, partition_of
from control.store.link import LOST
from control.store.slots import read_slot
from control.wire.stage import AuditAck, encode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from redis.asyncio import Redis

log = logging.getLogger("bargein.control")

PAGE = 500


class AdmissionAudit:
    """`is_ours`: whether this worker owns partition 0 now."""

    def __init__(self, redis: Redis, partitions: int, interval_s: float, is_ours: Callable[[], bool]) -> None:
        self._redis = redis
        self._partitions = partitions
        self._interval_s = interval_s
        self._is_ours = is_ours

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            if not self._is_ours():
                continue
            try:
                await self.look()
            except (RedisError, *LOST) as error:
                log.warning("no audit of the limit of sessions this time: %s", error)

    async def look(self) -> int:
        """Ask about every place that no open or closing session holds; how many there are."""
        asked, cursor = 0, 0
        while True:
            page = self._redis.hscan(keys.ADMISSION_SLOTS, cursor, count=PAGE)
            cursor, held = await cast("Awaitable[tuple[int, dict[bytes, bytes]]]", page)
            asked += await self._ask_about(
                {name.decode(errors="replace"): read_slot(value) for name, value in held.items()}
            )
            if not cursor:
                return asked

    async def _ask_about(self, held: dict[str, int | None]) -> int:
        of_partition: dict[int, list[str]] = {}
        for session_id in held:
            of_partition.setdefault(partition_of(session_id, self._partitions), []).append(session_id)
        async with self._redis.pipeline(transaction=False) as pipe:
            for partition, session_ids in of_partition.items():
                pipe.hmget(PartitionKeys(partition).fences, session_ids)
            found: list[list[bytes | None]] = await pipe.execute()
        asked = 0
        for (partition, session_ids), fences in zip(of_partition.items(), found, strict=True):
            for session_id, fence in zip(session_ids, fences, strict=True):
                incarnation = held[session_id]
                # A fence record says that the session is open or closing: then it knows of its place itself.
                if incarnation is None or (fence is not None and fence.split(b" ")[0] == b"%d" % incarnation):
                    continue
                ack: dict[Any, Any] = {"b": encode(AuditAck(session_id, incarnation, ADMISSION, -1, (), has_slot=True))}
                await self._redis.xadd(PartitionKeys(partition).acks, ack)
                asked += 1
        return asked
