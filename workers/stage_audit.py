"""What this life runs and holds, told to the owners now and then, for them to compare with what they know (S43, S44).

Responsible for the report: a word for each life of a session that has a request here or a slot. Leaves deciding to the
owners, sending to `stage_acks.py`. Talks to Redis, for the slots. Losing a report costs nothing but an interval.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING

from redis.exceptions import RedisError

from control.store import lives
from control.store.keys import partition_of
from control.store.link import LOST
from control.wire.stage import AuditAck
from workers.stage_acks import Queue

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from workers.stage_acks import AckOutbox
    from workers.stage_lanes import Lanes
    from workers.stage_setup import StageSetup

log = logging.getLogger("bargein.stage")


class Audit:
    """The audits of one life."""

    def __init__(self, redis: Redis, worker_id: str, setup: StageSetup, lanes: Lanes, acks: AckOutbox) -> None:
        self._redis = redis
        self._worker_id = worker_id
        self._stage_id = setup.stage_id
        self._partitions = setup.pipeline.partitions
        self._interval_s = setup.pipeline.control.audit_s
        self._lanes = lanes
        self._acks = acks

    async def run(self) -> None:
        """Report until cancelled; the workers of a stage not all at once."""
        wait_s = self._interval_s * random.random()
        while True:
            await asyncio.sleep(wait_s)
            wait_s = self._interval_s
            try:
                slots = await lives.fetch_slots(self._redis, self._worker_id)
            except (RedisError, *LOST) as error:
                log.warning("no audit of %s this time: %s", self._worker_id, error)
                continue
            for session_id, incarnation, epochs, has_slot in compare_with(self._lanes, slots):
                ack = AuditAck(session_id, incarnation, self._worker_id, self._stage_id, epochs, has_slot)
                self._acks.put(partition_of(session_id, self._partitions), Queue.SUBMISSIONS, (ack,))


def compare_with(lanes: Lanes, slots: dict[str, int]) -> list[tuple[str, int, tuple[int, ...], bool]]:
    """A row for each life of a session that has a request or a slot here: id, incarnation, epochs, has a slot."""
    epochs: dict[tuple[str, int], list[int]] = {life: [] for life in slots.items()}
    for session_id, incarnation, epoch in lanes.held():
        epochs.setdefault((session_id, incarnation), []).append(epoch)
    return [
        (session_id, incarnation, tuple(sorted(held)), slots.get(session_id) == incarnation)
        for (session_id, incarnation), held in epochs.items()
    ]
