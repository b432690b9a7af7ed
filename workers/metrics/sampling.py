"""Samples of what is stored: each control worker looks at its own partitions, the owner of partition 0 at the rest.

Responsible for how often, and for staying out of the way: a client of its own, a page at a time, an upper bound to what
is looked at, and a pause after each look that keeps the sampling below a fiftieth of the process's time. Leaves what is
read to `control/store/census.py`. Talks to Redis. The results are replaced as a whole, for another thread to read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from redis.exceptions import RedisError

from control.store.access import open_access
from control.store.census import Census, SlotSample, check_slots, fetch_backlogs, probe_write, take_census
from control.store.link import LOST
from workers.tasks import run_together

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from control.store.census import Backlog, SlotName
    from workers.control import ControlWorker

log = logging.getLogger("bargein.metrics")

INTERVAL_S = 5.0
PROBE_S = 1.0
MOST_SESSIONS = 50_000
TIMEOUT_S = 3.0
# A look is followed by a pause of so many times what it took; what is measured, decoding, is a third of that.
_SHARE = 50 * 3
_NEVER = float("-inf")


class Sampler:
    """`run` until cancelled. A sample's `*_s` is the monotonic time at which it was complete; before, minus infinity.

    `missing` and `unowned`: slots astray in two samples in a row. `slots` None: partition 0 is another worker's.
    """

    def __init__(
        self, worker: ControlWorker, url: str, *, interval_s: float = INTERVAL_S, most: int = MOST_SESSIONS
    ) -> None:
        self.backlogs: list[Backlog] = []
        self.census = Census()
        self.slots: SlotSample | None = None
        self.missing: frozenset[SlotName] = frozenset()
        self.unowned: frozenset[SlotName] = frozenset()
        self.written_s = self.quick_s = self.census_s = self.slots_s = _NEVER
        self.rounds = 0
        self._worker = worker
        self._url = url
        self._interval_s = interval_s
        self._most = most

    async def run(self) -> None:
        """Sample until cancelled. Nothing that Redis does ends it."""
        # A URL that can't be used would have ended the worker before.
        access = open_access(self._url, timeout_s=TIMEOUT_S, name=f"{self._worker.worker_id}-metrics")
        self._redis = access.redis
        try:
            await run_together(
                self._again_and_again(self._probe, min(PROBE_S, self._interval_s)),
                self._again_and_again(self._look_quickly, self._interval_s),
                self._again_and_again(self._look_closely, self._interval_s),
            )
        finally:
            await access.close()

    async def _again_and_again(self, look: Callable[[], Awaitable[float]], interval_s: float) -> None:
        while True:
            spent_s = 0.0
            try:
                spent_s = await look()
            except LOST as error:
                log.debug("no sample: %s", error)
                self._worker.stats.note_trouble("metrics", lost=True)
            except RedisError as error:
                log.info("no sample: %s", error)
                self._worker.stats.note_trouble("metrics", lost=False)
            await asyncio.sleep(max(interval_s, _SHARE * spent_s))

    async def _probe(self) -> float:
        await probe_write(self._redis, self._worker.worker_id)
        self.written_s = time.monotonic()
        return 0.0

    async def _look_quickly(self) -> float:
        self.backlogs = await fetch_backlogs(self._redis, self._worker.owned)
        self.quick_s = time.monotonic()
        return 0.0

    async def _look_closely(self) -> float:
        owned = self._worker.owned
        census = await take_census(self._redis, owned, self._most)
        self.missing, self.census = frozenset(census.missing & self.census.missing), census
        self.census_s = time.monotonic()
        spent_s = census.spent_s
        if 0 in owned:
            workers = [life.worker_id for life in self._worker.observer.lives]
            slots = await check_slots(self._redis, workers, self._worker.ownership.partitions, self._most)
            before = self.slots.unowned if self.slots is not None else set[tuple[str, str, int]]()
            self.unowned, self.slots = frozenset(slots.unowned & before), slots
            self.slots_s = time.monotonic()
            spent_s += slots.spent_s
        else:
            self.slots, self.unowned = None, frozenset()
        self.rounds += 1
        return spent_s
