"""The maintenance process: the operators' jobs and the upkeep.

Responsible for joining the two Redis servers (of the sessions, of the jobs; usually one) with `arq_jobs.py`, and for
counting. Leaves the figures' names to `workers/metrics`. Any number of these processes may run; each job and each duty
is done by one of them at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from redis.exceptions import RedisError

from control.store.access import open_access
from control.store.inspect import fetch_config
from control.store.link import LOST
from control.store.server import LAYOUT, Unusable, check_server
from control.wire.commands import PROTOCOL
from workers.maintenance.arq_jobs import Runner
from workers.maintenance.record import JobStore
from workers.maintenance.steps import STEPS, Site
from workers.metrics.histogram import Histogram
from workers.tasks import end_tasks

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from control.store.inspect import StoredConfig

log = logging.getLogger("bargein.maintenance")

TIMEOUT_S = 5.0
LOOK_S = 1.0


@dataclass(slots=True)
class DutyStats:
    """Of one duty, or of the steps of one kind of job. `well_s`: when it last went well, monotonic."""

    ok: int = 0
    failed: int = 0
    found: int = 0
    took: Histogram = field(default_factory=Histogram)
    well_s: float = field(default_factory=time.monotonic)


class Maintenance:
    """`run` until `stop`. `errors`, `lost`: answers of Redis that were errors, connections that were lost."""

    def __init__(self, redis_url: str, jobs_url: str | None = None) -> None:
        """`jobs_url`: of the server that the jobs are on, if that is another."""
        self.stats: dict[str, DutyStats] = {}
        self._redis_url = redis_url
        self._jobs_url = jobs_url or redis_url
        self.began_s = time.monotonic()
        self.errors = self.lost = 0
        self._runner: Runner | None = None
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Work until told to stop. Raises `Unusable` for a server that can't be used, or is of another version."""
        access = open_access(self._redis_url, timeout_s=TIMEOUT_S, name="bargein-maintenance")
        jobs = open_access(self._jobs_url, timeout_s=TIMEOUT_S, name="bargein-maintenance-jobs")
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await check_server(access.redis, self._redis_url)
            if self._jobs_url != self._redis_url:
                await check_server(jobs.redis, self._jobs_url)
            finding = asyncio.ensure_future(self._find_config(access.redis))
            await asyncio.wait({finding, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not finding.done():
                await end_tasks(finding)
                return
            site = Site(access.redis, finding.result().partitions, JobStore(jobs.redis))
            runner = self._runner = Runner(jobs.pool, site, self._note_run, self._note_trouble)
            self.stats |= {name: DutyStats() for name in (*(duty.name for duty in runner.duties), *STEPS)}
            log.info("maintenance does its rounds: %s", ", ".join(duty.name for duty in runner.duties))
            if self._stopping.is_set():
                return
            await runner.run()
        finally:
            stopping.cancel()
            await access.close()
            await jobs.close()

    @property
    def is_leaving(self) -> bool:
        """Whether it was told to stop."""
        return self._stopping.is_set()

    @property
    def polled_s(self) -> float:
        """When the queue of jobs was last looked at, monotonic; minus infinity if never."""
        return float("-inf") if self._runner is None else self._runner.polled_s

    def stop(self) -> None:
        """Return from `run` soon; what is under way goes on elsewhere or later."""
        self._stopping.set()
        if self._runner is not None:
            self._runner.stop()

    async def _find_config(self, redis: Redis) -> StoredConfig:
        """How many partitions there are; whoever owns them decides that."""
        told = False
        while True:
            try:
                config = await fetch_config(redis)
                if config is not None:
                    _check_versions(config)
                    return config
                if not told:
                    log.info("no control worker has ever started here; waiting for the first")
                    told = True
            except (RedisError, *LOST) as error:
                self._note_trouble(isinstance(error, LOST))
                log.warning("maintenance: Redis: %s; trying again", error)
            await asyncio.sleep(LOOK_S)

    def _note_run(self, name: str, outcome: str, found: int, took_s: float) -> None:
        stats = self.stats.get(name)
        if stats is None:
            return  # a job of a kind that this version doesn't know
        stats.took.note_ms(1000 * took_s)
        if outcome == "failed":
            stats.failed += 1
        else:
            stats.ok += 1
            stats.found += found
            stats.well_s = time.monotonic()

    def _note_trouble(self, lost: bool) -> None:
        if lost:
            self.lost += 1
        else:
            self.errors += 1


def _check_versions(config: StoredConfig) -> None:
    if (config.protocol, config.layout) != (PROTOCOL, LAYOUT):
        raise Unusable(
            f"the workers here speak protocol {config.protocol} and store layout {config.layout}; this process knows "
            f"{PROTOCOL} and {LAYOUT}. Run the version that the workers have"
        )
