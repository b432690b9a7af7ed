"""S63: a stage worker is emptied: nothing new is placed there, nobody is cut off before the grace is over."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio import Redis

from bargein_client import AsyncBargein
from control.store import lives
from control.store.keys import worker_drain, worker_slots
from stages.pipeline import Pipeline, parse_pipeline
from tests.system import RunningSystem
from tests.workers.control_bed import Bed, until
from tests.workers.maintenance.site import give, maintained, site_of, until_over
from workers.maintenance.record import Job, JobState, JobStore
from workers.maintenance.steps import drain
from workers.stage import StageWorker

HOUR_MS = 3_600_000


def pipeline() -> Pipeline:
    content = {
        "partitions": 4,
        "control": {"lease_s": 1.0, "heartbeat_s": 2.0, "heartbeat_interval_s": 0.1},
        "stages": [{"name": "ear", "engine": "parrot", "capacity": 32}],
    }
    return parse_pipeline(content, "test")


class Twins(RunningSystem):
    """Two workers of the only stage."""

    def __init__(self, url: str) -> None:
        super().__init__(url, pipeline())
        self.stages.append(StageWorker(url, self.pipeline, 0))

    @property
    def names(self) -> list[str]:
        return [stage.worker_id or "" for stage in self.stages]


async def count(redis: Redis, worker: str) -> int:
    return len(await lives.fetch_slots(redis, worker))


async def until_changed(bed: Bed, job: Job, times: int) -> None:
    """Wait for so many steps more."""
    for _ in range(times):
        found = await JobStore(bed.redis).find(job.job_id)
        before_ms = 0 if found is None else found.changed_ms

        async def has_changed(before_ms: int = before_ms) -> bool:
            now = await JobStore(bed.redis).find(job.job_id)
            return now is not None and now.changed_ms > before_ms

        await until(has_changed)


async def test_s63_under_load_nothing_is_placed_there_and_nobody_is_cut_off_before_the_grace_is_over(
    redis_url: str,
) -> None:
    async with Twins(redis_url) as system, Bed(redis_url, system.pipeline) as bed, AsyncBargein(redis_url) as client:
        sessions = [await client.open(f"s{n}", input_modes=["append_tokens"]) for n in range(12)]
        for session in sessions:
            await session.append([1, 2], mode="append_tokens")
        drained, other = system.names
        held = set(await lives.fetch_slots(bed.redis, drained))
        assert len(held) == 6
        async with maintained(redis_url):
            job = await give(bed, "drain", {"worker": drained, "grace_ms": HOUR_MS}, drained)
            await until(lambda: not system.stages[0].is_ready)
            # The clients go on: some end by themselves, new ones come.
            gone, *left = [session for session in sessions if session.session_id in held]
            await gone.close()
            late = [await client.open(f"late{n}", input_modes=["append_tokens"]) for n in range(6)]
            await until_changed(bed, job, times=3)
            assert set(await lives.fetch_slots(bed.redis, drained)) == held - {gone.session_id}
            for session in (*left, *late):
                await session.append([3], mode="append_tokens")
            # An hour later.
            since_ms = int(await bed.redis.get(worker_drain(drained)))
            await bed.redis.set(worker_drain(drained), since_ms - HOUR_MS, keepttl=True)
            job = await until_over(bed, job)
        assert (job.state, job.done, job.total) == (JobState.DONE, 6, 6)
        assert not await bed.redis.exists(worker_slots(drained))
        assert await count(bed.redis, other) == 12
        for session in left:
            last: Any = [event async for event in session.events()][-1]
            assert (last.event, last.reason) == ("closed", "worker_drained")
        for session in late:
            await session.close()


async def test_a_worker_that_was_emptied_takes_sessions_again_when_it_is_told_so(redis_url: str) -> None:
    async with Twins(redis_url) as system, Bed(redis_url, system.pipeline) as bed, maintained(redis_url):
        drained = system.names[0]
        job = await until_over(bed, await give(bed, "drain", {"worker": drained, "grace_ms": 0}, drained))
        assert job.state is JobState.DONE
        assert "empty and takes no more" in job.message
        assert await lives.end_drain(bed.redis, drained)
        await until(lambda: system.stages[0].is_ready)


async def test_asking_again_changes_the_grace_of_the_job_that_runs(redis_url: str) -> None:
    async with Twins(redis_url) as system, Bed(redis_url, system.pipeline) as bed, AsyncBargein(redis_url) as client:
        await asyncio.gather(*(client.open(f"s{n}", input_modes=["append_tokens"]) for n in range(4)))
        drained = system.names[0]
        async with maintained(redis_url):
            first = await give(bed, "drain", {"worker": drained, "grace_ms": HOUR_MS}, drained)
            await until(lambda: not system.stages[0].is_ready)
            again = await give(bed, "drain", {"worker": drained, "grace_ms": 0}, drained)
            assert again.job_id == first.job_id
            assert (await until_over(bed, again)).state is JobState.DONE
            assert await count(bed.redis, drained) == 0


async def test_a_worker_that_dies_meanwhile_is_emptied_by_that(redis_url: str) -> None:
    async with Twins(redis_url) as system, Bed(redis_url, system.pipeline) as bed, AsyncBargein(redis_url) as client:
        await asyncio.gather(*(client.open(f"s{n}", input_modes=["append_tokens"]) for n in range(4)))
        drained = system.names[0]
        async with maintained(redis_url):
            job = await give(bed, "drain", {"worker": drained, "grace_ms": HOUR_MS}, drained)
            await until(lambda: not system.stages[0].is_ready)
            await lives.end_life(bed.redis, drained)
            job = await until_over(bed, job)
            assert job.state is JobState.DONE
            assert "is gone" in job.message


async def test_a_step_that_was_on_its_way_does_not_undo_what_was_undone(redis_url: str) -> None:
    async with Twins(redis_url) as system, Bed(redis_url, system.pipeline) as bed, AsyncBargein(redis_url) as client:
        await client.open("call", input_modes=["append_tokens"])
        (placed,) = [name for name in system.names if await count(bed.redis, name)]
        site = site_of(bed)
        job = await drain(site, await site.jobs.give("drain", {"worker": placed, "grace_ms": HOUR_MS}, placed))
        assert job.state is JobState.RUNNING
        assert await lives.end_drain(bed.redis, placed)
        job = await drain(site, job)
        assert (job.state, job.message) == (JobState.CANCELLED, f"{placed} was told to take sessions again")
        assert await lives.find_drain(bed.redis, placed) is None
