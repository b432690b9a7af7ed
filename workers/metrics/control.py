"""The metrics of a control worker: what it has counted, what it owns, and the samples of what is stored.

Responsible for the numbers behind the names of `declared.py`, at the moment of a scrape. Leaves counting to the worker,
sampling to `sampling.py`, the web to `serving.py`. Talks to Redis only through the sampler. `collect` and `checks` are
called from other threads: they read numbers, and copies of what the loop may change.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from workers.control_stats import OTHER
from workers.metrics import declared as d
from workers.metrics.families import Families
from workers.metrics.readiness import WITHIN_S, Pulse, check_control
from workers.metrics.sampling import INTERVAL_S, MOST_SESSIONS, Sampler
from workers.tasks import run_together

if TYPE_CHECKING:
    from control.store.lives import Life
    from stages.pipeline import Pipeline
    from workers.control import ControlWorker
    from workers.metrics.readiness import Check

_STATES = ("live", "draining", "dead")


class ControlMetrics:
    """Of one worker. `run` beside the worker, on its loop."""

    role = "control"

    def __init__(
        self,
        worker: ControlWorker,
        pipeline: Pipeline,
        url: str,
        *,
        interval_s: float = INTERVAL_S,
        most: int = MOST_SESSIONS,
        within_s: float = WITHIN_S,
    ) -> None:
        """The keywords are for tests: how often to sample, how much of it, and how old progress may be."""
        self.pulse = Pulse()
        self.sampler = Sampler(worker, url, interval_s=interval_s, most=most)
        self._worker = worker
        self._pipeline = pipeline
        self._within_s = within_s
        self._stages = [stage.name for stage in pipeline.stages]

    async def run(self) -> None:
        """Sample until cancelled."""
        await run_together(self.pulse.run(), self.sampler.run())

    def checks(self) -> list[Check]:
        """For `/readyz`."""
        return check_control(self._worker, self.pulse, self.sampler, self._within_s)

    def collect(self) -> Families:
        """Everything, as of now."""
        families = Families()
        families.put(d.LOOP_LAG, self.pulse.lag_s)
        self._put_decisions(families)
        self._put_cleanups(families)
        self._put_ownership(families)
        self._put_samples(families)
        # A copy: the loop may change it meanwhile.
        if 0 in tuple(self._worker.ownership.held):
            self._put_global(families)
            self._put_slots(families)
        return families

    def _put_decisions(self, families: Families) -> None:
        stats = self._worker.stats
        for op, outcomes in stats.answered.items():
            for outcome, count in outcomes.items():
                families.put(d.COMMANDS, count, op, outcome)
            families.put_histogram(d.COMMAND_SECONDS, stats.latency[op], op)
        families.put(d.INPUTS, stats.commands, "commands")
        families.put(d.INPUTS, stats.acks, "acks")
        families.put(d.INPUTS, stats.orders, "orders")
        families.put(d.COMMITS, stats.commits, "committed")
        families.put(d.COMMITS, stats.refused_commits, "refused")
        families.put(d.MISSING, stats.missing_entries)
        families.put(d.DEAD_LETTERS, stats.dead_letters)
        families.put_histogram(d.BARGE_IN_FENCED, stats.fenced)
        families.put_histogram(d.BARGE_IN_CONFIRMED, stats.let_go)
        for part, count in stats.redis_errors.items():
            families.put(d.REDIS_ERRORS, count, part)
        for part, count in stats.redis_lost.items():
            families.put(d.REDIS_RECONNECTS, count, part)

    def _put_cleanups(self, families: Families) -> None:
        for kind, counts in self._worker.stats.cleanups.items():
            families.put(d.CLEANUPS, counts.begun, kind)
            families.put(d.CLEANUP_ATTEMPTS, counts.attempts, kind)
            families.put(d.CLEANUP_CONFIRMATIONS, counts.confirmed, kind)
            families.put(d.CLEANUP_JOINS, counts.joined, kind)
            for reason, count in counts.failures.items():
                families.put(d.CLEANUP_FAILURES, count, kind, reason)

    def _put_ownership(self, families: Families) -> None:
        worker, ownership = self._worker, self._worker.ownership
        families.put(d.PARTITIONS, ownership.partitions)
        families.put(d.PARTITIONS_OWNED, sum(len(owner.owned) for owner in worker.owners))
        families.put(d.CONTROL_WORKERS, len(ownership.members))
        families.put(d.HANDOVERS, ownership.handovers)
        families.put(d.TAKEOVERS, ownership.takeovers)
        held = [each for owner in worker.owners for each in list(owner.owned.values())]
        families.put(d.IN_MEMORY, sum(len(each.partition) for each in held))

    def _put_samples(self, families: Families) -> None:
        sampler, now_s = self.sampler, time.monotonic()
        owned = {number for owner in self._worker.owners for number in tuple(owner.owned)}
        for backlog in sampler.backlogs:
            # What was handed over since is for its new owner to say.
            if backlog.partition not in owned:
                continue
            number = str(backlog.partition)
            for stream, entries in (("commands", backlog.commands), ("acks", backlog.acks)):
                if entries is not None:
                    families.put(d.BACKLOG, entries, number, stream)
            if backlog.oldest_ms is not None:
                families.put(d.OLDEST_COMMAND, backlog.oldest_ms / 1000, number)
            if backlog.dead_letters is not None:
                families.put(d.DEAD_LETTERS_KEPT, backlog.dead_letters, number)
        census = sampler.census
        if sampler.census_s > 0:
            for phase, count in census.phases.items():
                families.put(d.SESSIONS, count, phase)
            for state, count in census.requests.items():
                families.put(d.REQUESTS, count, state)
            for kind, count in census.cleanups.items():
                families.put(d.PENDING_CLEANUPS, count, kind)
                families.put(d.OLDEST_CLEANUP, census.oldest_ms[kind] / 1000, kind)
            families.put(d.SLOTS_MISSING, len(sampler.missing))
            families.put(d.SAMPLE_AGE, now_s - sampler.census_s, "census")
            families.put(d.SAMPLE_CAPPED, census.capped, "census")
        if sampler.quick_s > 0:
            families.put(d.SAMPLE_AGE, now_s - sampler.quick_s, "quick")

    def _put_slots(self, families: Families) -> None:
        sampler, slots, limit = self.sampler, self.sampler.slots, self._pipeline.max_sessions
        if slots is None:
            return
        families.put(d.SLOTS_UNOWNED, len(sampler.unowned))
        families.put(d.SAMPLE_AGE, time.monotonic() - sampler.slots_s, "slots")
        families.put(d.SAMPLE_CAPPED, slots.capped, "slots")
        if limit is not None:
            families.put(d.ADMISSION_LIMIT, limit)
            families.put(d.ADMISSION_USED, slots.admitted)

    def _put_global(self, families: Families) -> None:
        lives: list[Life] = self._worker.observer.lives
        names = [*self._stages, OTHER]
        states = {(name, state): 0 for name in names for state in _STATES}
        used, capacity = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
        for life in lives:
            name = life.stage if life.stage in used else OTHER
            states[name, life.state.value] += 1
            if life.state != "dead":
                used[name] += life.used_slots
            if life.state == "live":
                capacity[name] += life.capacity
        for (name, state), count in states.items():
            families.put(d.STAGE_WORKERS, count, name, state)
        braked = self._worker.observer.braked
        for name in names:
            families.put(d.SLOTS_USED, used[name], name)
            families.put(d.SLOTS_CAPACITY, capacity[name], name)
            families.put(d.BRAKE_HELD, name in braked, name)
