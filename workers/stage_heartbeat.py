"""The heartbeat of one life: a counter that moves while work is done here, with the load and the counters.

Responsible for when to beat, and for the server's clock as seen from here. Leaves judging a silence to the control
workers' observer. Talks to Redis. It beats only while the queues are being read and the engine is healthy: a heartbeat
says that the worker makes progress, not that a process exists (S60). An answer that the life is over ends it (S40).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from redis.exceptions import RedisError

from control.store import lives
from control.store.link import LOST
from workers.stage_setup import Backoff
from workers.stage_stats import AbortLog, ServerTime, StageTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from control.store.link import Link
    from stages.engine import Engine
    from workers.metrics.histogram import Histogram
    from workers.stage_setup import StageSetup

log = logging.getLogger("bargein.stage")


class Heartbeat:
    """`figures` are written beside the load. `on_engine_lost(message)` and `on_over(message)` end the life."""

    def __init__(
        self,
        link: Link,
        worker_id: str,
        engine: Engine,
        setup: StageSetup,
        *,
        figures: Callable[[], Mapping[str, int]],
        is_reading: Callable[[float], bool],
        on_engine_lost: Callable[[str], None],
        on_over: Callable[[str], None],
        on_trouble: Callable[[Exception], None],
        times: StageTimes | None = None,
    ) -> None:
        self.load: dict[str, float] = {}
        self._is_leaving = False
        self._is_ordered = False
        self.aborts = AbortLog()
        self._link = link
        self._worker_id = worker_id
        self._engine = engine
        self._interval_s = setup.pipeline.control.heartbeat_interval_s
        self._limit_s = setup.pipeline.control.heartbeat_s
        self._figures = figures
        self._is_reading = is_reading
        self._on_engine_lost = on_engine_lost
        self._on_over = on_over
        self._on_trouble = on_trouble
        self._times = times or StageTimes()
        self._time = ServerTime()
        self._beaten_s = asyncio.get_running_loop().time()
        self._soon = asyncio.Event()

    @property
    def is_good(self) -> bool:
        """Whether the server took a heartbeat lately, and the next one has no reason to fail."""
        silent_s = asyncio.get_running_loop().time() - self._beaten_s
        return silent_s < self._limit_s and self._is_reading(self._limit_s) and self._is_healthy()

    @property
    def beaten_s(self) -> float:
        """When the server last took a heartbeat, by the loop's clock."""
        return self._beaten_s

    @property
    def limit_s(self) -> float:
        """How long it may be silent."""
        return self._limit_s

    @property
    def is_healthy(self) -> bool:
        """What the engine says of itself."""
        return self._is_healthy()

    @property
    def draining(self) -> bool:
        """Whether it takes no more sessions: since it leaves, or since an operator wants it emptied."""
        return self._is_leaving or self._is_ordered

    def drain(self) -> None:
        """Say at once that no slots are given any more."""
        self._is_leaving = True
        self._soon.set()

    def note_gone(self, request_id: str, entry_id: str) -> None:
        """The engine has dropped a request that the abort `entry_id` asked for."""
        now_ms = self._time.find_ms(asyncio.get_running_loop().time())
        if now_ms is not None:
            self.aborts.note(request_id, entry_id, now_ms)

    def note_sent(self, entry_id: str) -> None:
        """The engine is asked for what the abort `entry_id` wants gone."""
        self._note_since(entry_id, self._times.sent)

    def note_cleaned(self, entry_id: str) -> None:
        """The engine has dropped all of it."""
        self._note_since(entry_id, self._times.cleaned)

    def _note_since(self, entry_id: str, histogram: Histogram) -> None:
        now_ms = self._time.find_ms(asyncio.get_running_loop().time())
        if now_ms is not None:
            histogram.note_ms(now_ms - int(entry_id.partition("-")[0]))

    async def run(self) -> None:
        """Beat until cancelled, or until the life is over."""
        backoff = Backoff(0.05, max(0.05, self._interval_s))
        while True:
            wait_s = self._interval_s
            if not self._is_healthy():
                self._on_engine_lost("the engine says that it is not healthy")
                return
            if self._is_reading(self._limit_s):
                try:
                    if not await self._beat():
                        self._on_over("its record says that it is over, or the server has lost it")
                        return
                    backoff.reset()
                except (RedisError, *LOST) as error:
                    await self._link.close()
                    self._on_trouble(error)
                    self.aborts.put_back()
                    log.warning("the heartbeat of %s: %s; trying again", self._worker_id, error)
                    wait_s = backoff.next_s()
            else:
                log.warning("no heartbeat of %s: its queues have not been read lately", self._worker_id)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._soon.wait()
            self._soon.clear()

    async def _beat(self) -> bool:
        loop = asyncio.get_running_loop()
        state = lives.LifeState.DRAINING if self.draining else lives.LifeState.LIVE
        fields = {"state": state.value, **self._load(), **self._figures(), **self.aborts.take_figures()}
        heard = await lives.beat(self._link, self._worker_id, fields)
        if heard is lives.Beat.OVER:
            return False
        self._note_order(heard is lives.Beat.DRAIN)
        sent_s = self._beaten_s = loop.time()
        seconds, micros = await self._link.call("TIME")
        self._time.note(sent_s, loop.time(), int(seconds) * 1_000_000 + int(micros))
        return True

    def _note_order(self, drain: bool) -> None:
        if drain == self._is_ordered:
            return
        self._is_ordered = drain
        what = "takes no more sessions: an operator wants it emptied" if drain else "may take sessions again"
        log.info("stage worker %s %s", self._worker_id, what)
        if not drain:
            # This beat still said that it drains.
            self._soon.set()

    def _load(self) -> dict[str, float]:
        try:
            load = self._engine.load()
        except Exception:
            log.exception("the engine's load")
            return {}
        self.load = {name: float(getattr(load, name)) for name in lives.LOAD_FIELDS}
        return self.load

    def _is_healthy(self) -> bool:
        try:
            return self._engine.healthy()
        except Exception:
            log.exception("the engine's health")
            return False
