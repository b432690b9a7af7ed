"""Jobs on arq: taken once, gone on with after whatever has died, and never trusted for being there."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from msgspec.structs import replace

from control.store import keys
from control.store.server import Unusable
from tests.servers import ValkeyServer
from tests.workers.control_bed import Bed, end, local, until
from tests.workers.maintenance.site import give, maintained, site_of, until_over
from workers.maintenance import arq_jobs
from workers.maintenance.arq_jobs import QUEUE
from workers.maintenance.process import Maintenance
from workers.maintenance.record import Job, JobState, JobStore
from workers.maintenance.steps import STEPS, Site
from workers.maintenance.upkeep import Duty


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A kind of job that counts: `count`, done after `arguments["steps"]` of them. Its steps, by job."""
    taken: dict[str, int] = {}

    async def step(site: Site, job: Job) -> Job:
        del site
        taken[job.job_id] = taken.get(job.job_id, 0) + 1
        if job.arguments.get("bug"):
            raise ZeroDivisionError("planted")
        state = JobState.DONE if job.done + 1 >= job.arguments["steps"] else JobState.RUNNING
        return replace(job, state=state, done=job.done + 1, total=job.arguments["steps"], message="counting")

    monkeypatch.setitem(STEPS, "count", step)
    monkeypatch.setattr(arq_jobs, "STEP_S", 0.02)
    return taken


@pytest.fixture
async def bed(redis_url: str) -> Any:
    async with Bed(redis_url, local()) as bed:
        await bed.control("c1")
        yield bed


async def test_a_job_is_done_once_whoever_is_there_to_do_it(bed: Bed, steps: dict[str, int]) -> None:
    async with maintained(bed.url), maintained(bed.url), maintained(bed.url):
        jobs = [await give(bed, "count", {"steps": 10}) for _ in range(6)]
        assert len(await JobStore(bed.redis).list()) == 6
        for job in jobs:
            assert (await until_over(bed, job)).state is JobState.DONE
        assert set(steps.values()) == {10}


async def test_a_job_goes_on_where_it_was_when_its_process_leaves(
    bed: Bed, steps: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arq_jobs, "TRY_S", 0.1)
    async with maintained(bed.url):
        job = await give(bed, "count", {"steps": 40})
        await until(lambda: steps.get(job.job_id, 0) > 5)
    so_far = steps[job.job_id]
    assert so_far < 40
    async with maintained(bed.url):
        assert (await until_over(bed, job)).done == 40
    assert steps[job.job_id] - 40 <= 1, "a step that was cut short may come twice"


async def test_a_job_whose_process_was_killed_is_taken_up_when_its_lock_is_gone(
    bed: Bed, steps: dict[str, int]
) -> None:
    job = await give(bed, "count", {"steps": 3})
    await bed.redis.psetex(f"arq:in-progress:{job.job_id}", 1_000, b"1")  # all that it leaves behind
    async with maintained(bed.url):
        assert (await until_over(bed, job)).done == 3
    assert steps[job.job_id] == 3


async def test_a_job_that_arq_has_lost_goes_on_the_queue_again(bed: Bed, steps: dict[str, int]) -> None:
    job = await give(bed, "count", {"steps": 3})
    await bed.redis.delete(QUEUE, f"arq:job:{job.job_id}")
    async with maintained(bed.url) as maintenance:
        await until(lambda: maintenance.polled_s > 0)
        assert maintenance._runner is not None
        assert await maintenance._runner.resume(site_of(bed)) == 1
        assert (await until_over(bed, job)).state is JobState.DONE
        assert await maintenance._runner.resume(site_of(bed)) == 0
    assert steps[job.job_id] == 3


async def test_a_job_that_is_cancelled_ends_before_its_next_step(bed: Bed, steps: dict[str, int]) -> None:
    async with maintained(bed.url):
        job = await give(bed, "count", {"steps": 100_000})
        await until(lambda: steps.get(job.job_id, 0) > 2)
        await JobStore(bed.redis).cancel(job.job_id)
        job = await until_over(bed, job)
    assert (job.state, job.message) == (JobState.CANCELLED, "cancelled; counting")


async def test_a_job_with_a_bug_fails_and_the_others_go_on(
    bed: Bed, steps: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    async with maintained(bed.url):
        broken = await until_over(bed, await give(bed, "count", {"steps": 1, "bug": True}))
        unknown = await until_over(bed, await give(bed, "fly", {}))
        assert (await until_over(bed, await give(bed, "count", {"steps": 1}))).state is JobState.DONE
    assert (broken.state, steps[broken.job_id]) == (JobState.FAILED, 1)
    assert "ZeroDivisionError: planted" in broken.message
    assert unknown.state is JobState.FAILED
    assert "planted" in caplog.text


async def test_a_queue_that_somebody_else_has_written_to_runs_nothing(
    bed: Bed, steps: dict[str, int], tmp_path: Any
) -> None:
    """arq's own choice is pickle, which runs whatever it reads."""
    marker = tmp_path / "marker"

    class Bomb:
        def __reduce__(self) -> Any:
            return marker.touch, ()

    for name, body in {"bomb": pickle.dumps(Bomb()), "noise": b"\xc1\x00", "empty": b""}.items():
        await bed.redis.set(f"arq:job:{name}", body)
        await bed.redis.zadd(QUEUE, {name: 1})
    async with maintained(bed.url):
        job = await until_over(bed, await give(bed, "count", {"steps": 2}))

        async def is_empty() -> bool:
            return not await bed.redis.exists(QUEUE)

        await until(is_empty)
    assert job.state is JobState.DONE
    assert not marker.exists()
    assert steps[job.job_id] == 2


async def test_a_record_that_can_not_be_read_is_nobody_s_job(bed: Bed) -> None:
    store = JobStore(bed.redis)
    job = await store.give("drain", {"worker": "w", "grace_ms": 1}, only="w")
    await bed.redis.hset(keys.job(job.job_id), "record", b"\xc1")
    assert await store.find(job.job_id) is None
    assert await store.list() == []
    again = await store.give("drain", {"worker": "w", "grace_ms": 2}, only="w")
    assert [each.arguments["grace_ms"] for each in await store.list()] == [2]
    assert again.job_id == job.job_id


async def test_the_newest_jobs_are_listed_first_and_no_more_than_a_thousand_kept(bed: Bed) -> None:
    store = JobStore(bed.redis)
    await bed.redis.zadd(keys.JOBS, {f"old-{n}": n for n in range(1_000)})
    jobs = [await store.give("close", {"where": []}) for _ in range(3)]
    assert {job.job_id for job in await store.list(3)} == {job.job_id for job in jobs}
    assert len(await store.list(2)) == 2
    assert await bed.redis.zcard(keys.JOBS) == 1_000
    assert 0 < await bed.redis.ttl(keys.job(jobs[0].job_id)) <= 7 * 86_400


async def test_a_server_that_dies_is_waited_for(steps: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arq_jobs, "LOCK_S", 1.0)
    with ValkeyServer(persist=True) as server:
        async with Bed(server.url, local()) as bed:
            await bed.control("c1")
            async with maintained(server.url) as maintenance:
                job = await give(bed, "count", {"steps": 200})
                await until(lambda: steps.get(job.job_id, 0) > 5)
                await asyncio.to_thread(server.kill)
                await until(lambda: maintenance.lost + maintenance.errors > 0)
                await asyncio.to_thread(server.restart)
                assert (await until_over(bed, job)).done == 200


async def test_maintenance_waits_for_the_first_control_worker(redis_url: str) -> None:
    maintenance = Maintenance(redis_url)
    task = asyncio.create_task(maintenance.run())
    async with Bed(redis_url, local()) as bed:
        await asyncio.sleep(0.2)
        assert maintenance.polled_s < 0
        await bed.control("c1")
        await until(lambda: maintenance.polled_s > 0)
        maintenance.stop()
        await asyncio.wait_for(task, 10)
    stopped = Maintenance(redis_url)
    stopped.stop()
    await asyncio.wait_for(stopped.run(), 10)
    await end(task)


async def test_maintenance_of_another_version_ends_before_it_has_begun(redis_url: str) -> None:
    async with Bed(redis_url, local()) as bed:
        await bed.redis.hset(keys.CONFIG, mapping={"protocol": 1, "partitions": 4, "layout": 2})
        with pytest.raises(Unusable, match="store layout 2; this process knows 1 and 1"):
            await Maintenance(redis_url).run()


async def test_a_server_that_can_not_be_used_ends_it_with_the_reason(redis_url: str) -> None:
    with pytest.raises(Unusable, match="can't be reached"):
        await Maintenance("redis://127.0.0.1:1/0").run()
    with pytest.raises(Unusable, match="can't be reached"):
        await Maintenance(redis_url, "redis://127.0.0.1:1/0").run()


async def test_a_duty_that_outlasts_the_lock_of_a_job_is_left_in_peace(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """arq took it for one that was left behind, and gave it up as tried too often."""
    begun: list[float] = []
    done = asyncio.Event()

    async def work(site: Site) -> int:
        del site
        begun.append(asyncio.get_running_loop().time())
        await asyncio.sleep(2.0)  # four times the lock, and as many polls
        done.set()
        return 0

    monkeypatch.setattr(arq_jobs, "LOCK_S", 0.5)
    monkeypatch.setattr(arq_jobs, "UPKEEP", (Duty("slow", work, {"second": set(range(0, 60, 5))}, "{}"),))
    async with maintained(bed.url) as maintenance:
        await asyncio.wait_for(done.wait(), 30)
        await until(lambda: maintenance.stats["slow"].ok == 1)
    assert len(begun) == 1
    assert "exceeded" not in caplog.text
