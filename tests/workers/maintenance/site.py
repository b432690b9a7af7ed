"""A maintenance process beside a test's control workers and stages, and what a test asks of its jobs."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from tests.workers.control_bed import Bed, end, until
from workers.maintenance.arq_jobs import open_queue, submit
from workers.maintenance.process import Maintenance
from workers.maintenance.record import Job, JobStore
from workers.maintenance.steps import Site

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


def site_of(bed: Bed) -> Site:
    """Where a step of a job works, without a process around it."""
    return Site(bed.redis, bed.pipeline.partitions, JobStore(bed.redis))


async def give(bed: Bed, kind: str, arguments: dict[str, Any], only: str | None = None) -> Job:
    """A job as the command line gives it."""
    job = await JobStore(bed.redis).give(kind, arguments, only)
    await submit(open_queue(bed.pool), job.job_id)
    return job


async def until_over(bed: Bed, job: Job) -> Job:
    """The job when it is over."""
    found = job

    async def is_over() -> bool:
        nonlocal found
        found = await JobStore(bed.redis).find(job.job_id) or found
        return found.is_over

    await until(is_over)
    return found


@asynccontextmanager
async def maintained(url: str) -> AsyncGenerator[Maintenance]:
    """A maintenance process, as a task. Ended in order."""
    maintenance = Maintenance(url)
    task = asyncio.create_task(maintenance.run())
    try:
        yield maintenance
    finally:
        maintenance.stop()
        done, _ = await asyncio.wait({task}, timeout=10.0)
        await end(task)
        assert done, "it doesn't stop"
        task.result()
