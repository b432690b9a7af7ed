"""Whether a process makes progress: its event loop, its own loops, what it owns or serves, Redis' willingness to write.

Responsible for the checks behind `/readyz` and their bounds (S60). Leaves answering to `serving.py`. Pure, but for the
pulse, which runs on the event loop and says when it last did. The checks read plain numbers and may be called from any
thread; times are monotonic seconds.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from workers.control import ControlWorker
    from workers.metrics.sampling import Sampler
    from workers.stage import StageWorker
    from workers.stage_stats import Progress

# An idle owner turns once a second, the ownership and the observer oftener; a connection is given up after five.
WITHIN_S = 5.0
_BEAT_S = 0.25
_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class Check:
    """One check: what was found, and what it should be; in words, or in seconds since."""

    name: str
    ok: bool
    value: str | float
    bound: str | float


class Pulse:
    """Beats on the event loop while that turns. `look` is called with each beat: what only the loop may look at."""

    def __init__(self, look: Callable[[], object] = lambda: None) -> None:
        self.beat_s = float("-inf")
        self._look = look
        self._worst = (0.0, 0.0)  # lateness within the window before this one, and within this one
        self._window_s = time.monotonic()

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            due_s = time.monotonic() + _BEAT_S
            self._look()
            self.beat_s = time.monotonic()
            await asyncio.sleep(_BEAT_S)
            now_s = time.monotonic()
            if now_s - self._window_s > _WINDOW_S:
                self._worst, self._window_s = (self._worst[1], 0.0), now_s
            self._worst = (self._worst[0], max(self._worst[1], now_s - due_s))

    @property
    def lag_s(self) -> float:
        """How late the loop is, or was at its worst within the last ten seconds or so. 0 before the first beat."""
        since_s = max(0.0, time.monotonic() - self.beat_s - _BEAT_S) if self.beat_s > 0 else 0.0
        return max(*self._worst, since_s)


def check_control(worker: ControlWorker, pulse: Pulse, sampler: Sampler, within_s: float = WITHIN_S) -> list[Check]:
    """The checks of a control worker."""
    now_s = time.monotonic()
    owners = worker.owners
    # Where some own partitions, those count; else that they would notice if they got some.
    busy = [owner for owner in owners if len(owner.owned)] or owners
    turned_s = min(owner.last_turn_ms for owner in busy) / 1000
    owned = sum(len(owner.owned) for owner in owners)
    share = worker.ownership.share
    leaving = any(owner.is_stopping for owner in owners)
    return [
        within("event_loop", now_s - pulse.beat_s, within_s),
        within("owner_loops", now_s - turned_s, within_s),
        within("ownership", now_s - worker.ownership.rounded_s, within_s),
        within("observer", now_s - worker.observer.looked_s, within_s),
        within("redis_writes", now_s - sampler.written_s, within_s),
        Check(
            "partitions", owned > 0 or share == 0, f"owns {owned}, should own {share}", "owns one, or should own none"
        ),
        Check("staying", not leaving, "leaving" if leaving else "staying", "staying"),
    ]


def check_stage(
    worker: StageWorker, progress: Progress | None, pulse: Pulse, within_s: float = WITHIN_S
) -> list[Check]:
    """The checks of a stage worker. `progress`: as the pulse last saw it."""
    now_s = time.monotonic()
    serves = "no life" if progress is None else "over" if progress.is_over else "serves"
    if worker.is_leaving or (progress is not None and progress.draining):
        serves = "leaving"
    checks = [
        within("event_loop", now_s - pulse.beat_s, within_s),
        Check("life", serves == "serves", serves, "serves"),
    ]
    if progress is not None:
        healthy = "healthy" if progress.is_healthy else "not healthy"
        checks += [
            Check("engine", progress.is_healthy, healthy, "healthy"),
            within("heartbeat", now_s - progress.beaten_s, progress.limit_s),
            within("queues", now_s - progress.read_s, progress.limit_s),
        ]
    return checks


def within(name: str, age_s: float, bound_s: float) -> Check:
    """A check that something was done lately."""
    # JSON has no infinity.
    value = round(max(0.0, age_s), 3) if age_s != float("inf") else "never"
    return Check(name, age_s <= bound_s, value, bound_s)
