"""The metrics of a stage worker: what all its lives have counted, and how the current one is going.

Responsible for the numbers behind the names of `declared.py`, at the moment of a scrape. Leaves counting to the worker,
the web to `serving.py`. `collect` and `checks` are called from other threads: they read totals and the last look of the
pulse, which runs on the loop.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from workers.metrics import declared as d
from workers.metrics import declared_stage as s
from workers.metrics.families import Families
from workers.metrics.readiness import WITHIN_S, Pulse, check_stage

if TYPE_CHECKING:
    from stages.pipeline import Pipeline
    from workers.metrics.readiness import Check
    from workers.stage import StageWorker
    from workers.stage_stats import Progress

PART = "stage"
_INPUTS = ("accepted", "rejected", "discarded", "repeated", "unreadable")
_OUTPUTS = ("delivered", "forwarded", "duplicate", "dropped", "stopped", "late")


class StageMetrics:
    """Of one worker. `run` beside the worker, on its loop."""

    role = "stage"

    def __init__(self, worker: StageWorker, pipeline: Pipeline, stage_id: int, *, within_s: float = WITHIN_S) -> None:
        """`within_s`: how long the event loop may stand still."""
        self.pulse = Pulse(self._look)
        self._worker = worker
        self._stage = pipeline.stages[stage_id]
        self._within_s = within_s
        self._progress: Progress | None = None

    async def run(self) -> None:
        """Look until cancelled."""
        await self.pulse.run()

    def checks(self) -> list[Check]:
        """For `/readyz`."""
        return check_stage(self._worker, self._progress, self.pulse, self._within_s)

    def collect(self) -> Families:
        """Everything, as of now."""
        families, name = Families(), self._stage.name
        stats, times = self._worker.totals, self._worker.times
        families.put(d.LOOP_LAG, self.pulse.lag_s)
        for outcome in _INPUTS:
            families.put(s.STAGE_INPUTS, getattr(stats, outcome), name, outcome)
        for outcome in _OUTPUTS:
            families.put(s.OUTPUTS, getattr(stats, f"outputs_{outcome}"), name, outcome)
        families.put(s.REQUESTS_FAILED, stats.failed, name)
        families.put(s.ABORTS, stats.aborts, name, "received")
        families.put(s.ABORTS, stats.cleaned, name, "confirmed")
        families.put(s.ABORTS, stats.cleanup_failed, name, "failed")
        families.put_histogram(s.ABORT_SENT, times.sent, name)
        families.put_histogram(s.ABORT_CONFIRMED, times.cleaned, name)
        for ending, count in self._worker.endings.items():
            families.put(s.LIVES, count, name, ending.value)
        families.put(d.REDIS_ERRORS, stats.retries, PART)
        families.put(d.REDIS_RECONNECTS, stats.reconnects, PART)
        families.put(s.STAGE_CAPACITY, self._stage.capacity, name)
        if self._progress is not None:
            self._put_progress(families, self._progress)
        return families

    def _put_progress(self, families: Families, progress: Progress) -> None:
        name, load = self._stage.name, progress.load
        families.put(s.STAGE_REQUESTS, progress.requests, name)
        families.put(s.QUEUE_DEPTH, progress.submissions, name, "submissions")
        families.put(s.QUEUE_DEPTH, progress.aborts, name, "aborts")
        families.put(s.BUFFERED, progress.buffered_bytes, name)
        families.put(s.HEARTBEAT_AGE, max(0.0, time.monotonic() - progress.beaten_s), name)
        if not load:
            return
        families.put(s.ENGINE_RUNNING, load["running"], name)
        families.put(s.ENGINE_WAITING, load["waiting"], name)
        families.put(s.ENGINE_HELD, load["slots_used"], name)
        families.put(s.ENGINE_UTILISATION, load["utilisation"], name)
        families.put(s.ENGINE_ACCEPTS, load["accepts"], name)
        families.put(s.ENGINE_LATE, load["tick_late_ms"] / 1000, name)
        families.put(s.ENGINE_MISSED, load["missed_ticks"], name)
        families.put(s.ENGINE_MEMORY, load["memory_bytes"], name)

    def _look(self) -> None:
        self._progress = self._worker.progress()
