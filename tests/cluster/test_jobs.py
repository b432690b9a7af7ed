"""Operators' jobs and upkeep where the sessions are on a cluster, and the jobs on a server of their own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from bargein_client import AsyncBargein
from control.store.access import open_access
from control.store.keys import PartitionKeys, partition_of
from control.store.link import make_pool
from stages.pipeline import Pipeline
from tests.system import RunningSystem
from tests.workers.control_bed import end, until
from workers.maintenance import upkeep
from workers.maintenance.arq_jobs import open_queue, submit
from workers.maintenance.process import Maintenance
from workers.maintenance.record import JobState, JobStore

if TYPE_CHECKING:
    from tests.clusters import ValkeyCluster
    from workers.maintenance.record import Job

pytestmark = pytest.mark.cluster


async def test_jobs_and_upkeep_reach_the_sessions_of_all_nodes(
    cluster: ValkeyCluster, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "LOOK_AGAIN_S", 0.05)
    pipeline = Pipeline.example()
    pool = make_pool(redis_url)
    store, queue = JobStore(open_queue(pool)), open_queue(pool)

    async def do(kind: str, **arguments: object) -> Job:
        job = await store.give(kind, arguments)
        await submit(queue, job.job_id)

        async def is_over() -> bool:
            found = await store.find(job.job_id)
            return found is not None and found.is_over

        await until(is_over)
        found = await store.find(job.job_id)
        assert found is not None
        return found

    async with RunningSystem(cluster.url, pipeline) as system, AsyncBargein(cluster.url) as client:
        names = [f"call-{number}" for number in range(12)]
        places = {
            cluster.master_of(PartitionKeys(partition_of(name, pipeline.partitions)).owner).port for name in names
        }
        assert len(places) == 3
        sessions = [await client.open(name, input_modes=["append_audio_chunk"]) for name in names]
        for session in sessions:
            await session.append(bytes(640))
        maintenance = Maintenance(cluster.url, redis_url)
        task = asyncio.create_task(maintenance.run())
        try:
            await until(lambda: maintenance.polled_s > 0)
            closed = await do("close", where=["id=call-[0-5]"], reason="operator_close")
            assert (closed.state, closed.done) == (JobState.DONE, 6)
            worker = system.stages[1].worker_id
            drained = await do("drain", worker=worker, grace_ms=0)
            assert (drained.state, drained.done) == (JobState.DONE, 6)
            access = open_access(cluster.url)
            await access.redis.sadd(PartitionKeys(5).fenced, "dead-1")
            await access.redis.xadd(PartitionKeys(2).submissions("dead-1"), {"b": "x"})
            await access.redis.xadd(PartitionKeys(3).dead, {"reason": "old"}, id="1-1")
            await access.close()
            assert maintenance._runner is not None
            for duty in maintenance._runner.duties:
                await maintenance._runner.do(duty)
            assert sum(stats.failed for stats in maintenance.stats.values()) == 0
            found = {name: stats.found for name, stats in maintenance.stats.items() if stats.found}
            assert found == {"sweep_queues": 1, "prune_dead_letters": 1}
            for session in sessions:
                last = [event async for event in session.events()][-1]
                assert getattr(last, "event", None) == "closed"
        finally:
            maintenance.stop()
            await asyncio.wait({task}, timeout=10)
            await end(task)
            await store.redis.aclose()
            await queue.aclose()
            await pool.disconnect()
