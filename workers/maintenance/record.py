"""The operators' jobs as they are kept: what was wanted, how far it is, how it ended.

Responsible for the record, and for one job a thing that can be done only once. Leaves running them to `arq_jobs.py`,
what a job does to `steps.py`. Talks to the Redis of the jobs. A record stays for a week.
"""

from __future__ import annotations

import time
import uuid
from enum import StrEnum
from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from control.store import keys

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from redis.asyncio import Redis

KEPT_S = 7 * 86_400
MOST = 1_000
FIELDS = ["record", "arguments"]


class JobState(StrEnum):
    """`queued`: no maintenance process has taken it yet."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Job(Struct, frozen=True, kw_only=True):
    """One job. `done` of `total` sessions are seen to; `message` says in words how it goes, or how it ended.

    `at`: a place to go on from, the job's own business. Times are those of whoever wrote them, and for people only.
    """

    job_id: str
    kind: str
    arguments: dict[str, Any]
    state: JobState = JobState.QUEUED
    given_ms: int = 0
    changed_ms: int = 0
    total: int = 0
    done: int = 0
    at: int = 0
    message: str = ""
    counts: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen."""
        return self.state in {JobState.DONE, JobState.FAILED, JobState.CANCELLED}


class JobStore:
    """The records. `redis`: of the jobs."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis

    async def give(self, kind: str, arguments: dict[str, Any], only: str | None = None) -> Job:
        """A new job. `only`: a name under which there is one at a time; a job that runs takes the new arguments on."""
        job_id = f"{kind}-{only or uuid.uuid4().hex[:12]}"
        running = await self.find(job_id) if only else None
        if running is not None and not running.is_over:
            job = replace(running, arguments=arguments)
        else:
            now_ms = time.time_ns() // 1_000_000
            job = Job(job_id=job_id, kind=kind, arguments=arguments, given_ms=now_ms)
            await self.redis.delete(keys.job(job_id), keys.job_targets(job_id))
            await self.save(job)
        # By itself: whoever runs the job saves the rest at any time.
        packed: Any = msgspec.msgpack.encode(arguments)
        await cast("Awaitable[int]", self.redis.hset(keys.job(job_id), "arguments", packed))
        await self.redis.zadd(keys.JOBS, {job_id: job.given_ms})
        await self.redis.zremrangebyrank(keys.JOBS, 0, -MOST - 1)
        return job

    async def save(self, job: Job) -> Job:
        """The job with the time of now."""
        job = replace(job, changed_ms=time.time_ns() // 1_000_000)
        name = keys.job(job.job_id)
        async with self.redis.pipeline(transaction=True) as pipe:
            pipe.hset(name, "record", cast("Any", msgspec.msgpack.encode(job)))
            pipe.expire(name, KEPT_S)
            pipe.expire(keys.job_targets(job.job_id), KEPT_S)
            await pipe.execute()
        return job

    async def find(self, job_id: str) -> Job | None:
        """The job; None if there is none, or none that can be read."""
        return _read(await cast("Awaitable[list[bytes | None]]", self.redis.hmget(keys.job(job_id), FIELDS)))

    async def list(self, limit: int = 100) -> list[Job]:
        """The newest jobs, newest first."""
        names: list[bytes] = await self.redis.zrevrange(keys.JOBS, 0, limit - 1)
        async with self.redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hmget(keys.job(name.decode()), FIELDS)
            found: list[list[bytes | None]] = await pipe.execute()
        jobs = [_read(each) for each in found]
        return [job for job in jobs if job is not None]

    async def cancel(self, job_id: str) -> None:
        """Have it end before its next step. What it has done stays done."""
        await cast("Awaitable[int]", self.redis.hset(keys.job(job_id), "cancel", "1"))

    async def is_cancelled(self, job_id: str) -> bool:
        """Whether an operator has said so."""
        return bool(await cast("Awaitable[bool]", self.redis.hexists(keys.job(job_id), "cancel")))


def _read(found: list[bytes | None]) -> Job | None:
    record, arguments = found
    try:
        if record is None or arguments is None:
            return None
        job = msgspec.msgpack.decode(record, type=Job)
        return replace(job, arguments=msgspec.msgpack.decode(arguments, type=dict[str, Any]))
    except msgspec.DecodeError:
        return None
