"""The metrics of a maintenance process, and whether it makes progress.

Responsible for the numbers behind the names of `declared_maintenance.py`, at the moment of a scrape. Leaves counting to
the process, the web to `serving.py`. `collect` and `checks` are called from other threads.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from workers.maintenance.steps import STEPS
from workers.metrics import declared as d
from workers.metrics import declared_maintenance as m
from workers.metrics.families import Families
from workers.metrics.readiness import WITHIN_S, Check, Pulse, within

if TYPE_CHECKING:
    from workers.maintenance.process import Maintenance

PART = "maintenance"
# It polls twice a second, and waits for a server that is away.
POLLED_S = 10.0


class MaintenanceMetrics:
    """Of one process. `run` beside it, on its loop."""

    role = "maintenance"

    def __init__(self, maintenance: Maintenance) -> None:
        self.pulse = Pulse()
        self._maintenance = maintenance

    async def run(self) -> None:
        """Beat until cancelled."""
        await self.pulse.run()

    def checks(self) -> list[Check]:
        """For `/readyz`."""
        now_s, leaving = time.monotonic(), self._maintenance.is_leaving
        return [
            within("event_loop", now_s - self.pulse.beat_s, WITHIN_S),
            within("polls", now_s - self._maintenance.polled_s, POLLED_S),
            Check("staying", not leaving, "leaving" if leaving else "staying", "staying"),
        ]

    def collect(self) -> Families:
        """Everything, as of now."""
        families, now_s, maintenance = Families(), time.monotonic(), self._maintenance
        families.put(d.LOOP_LAG, self.pulse.lag_s)
        families.put(d.REDIS_ERRORS, maintenance.errors, PART)
        families.put(d.REDIS_RECONNECTS, maintenance.lost, PART)
        families.put(m.POLL_AGE, now_s - max(maintenance.began_s, maintenance.polled_s))
        for name, stats in list(maintenance.stats.items()):
            families.put(m.UPKEEP_RUNS, stats.ok, name, "ok")
            families.put(m.UPKEEP_RUNS, stats.failed, name, "failed")
            families.put_histogram(m.UPKEEP_SECONDS, stats.took, name)
            if name not in STEPS:
                families.put(m.UPKEEP_FOUND, stats.found, name)
                families.put(m.UPKEEP_AGE, now_s - stats.well_s, name)
        return families
