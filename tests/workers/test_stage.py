"""A stage worker's beginning and leaving, as a process too, and the whole of it with real engines."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis

from control.store import keys
from control.store.lives import LifeState, count_slots, end_life, fetch_figures, fetch_lives
from control.store.server import Unusable
from control.wire.stage import AcceptedAck, CleanedAck
from stages.engine import EngineConfigError, load_engine
from stages.pipeline import Pipeline
from tests.workers.scripted import PATIENCE_S, ScriptedEngine
from tests.workers.stage_bed import StageBed, eventually, fence, name_of, pipeline
from workers.stage import StageWorker

if TYPE_CHECKING:
    pass


async def test_a_worker_is_in_the_index_with_what_it_runs(redis_url: str) -> None:
    async with StageBed(redis_url, stage_id=1, stages=2) as bed:
        life = await bed.the_life()
        assert life.worker_id.startswith("stage1-")
        assert (life.stage_id, life.stage, life.capacity, life.engine) == (1, "stage1", 4, "scripted")
        assert life.state is LifeState.LIVE
        await bed.until_life(lambda now: now.beat > life.beat + 2)
        assert bed.worker.is_ready
        assert await bed.redis.hgetall(keys.CONFIG) == {b"protocol": b"1", b"partitions": b"3", b"layout": b"1"}


async def test_its_load_and_its_counters_go_out_with_the_heartbeat(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await bed.start("s", "t")
        await bed.until_life(lambda life: life.load.get("running") == 2.0)
        figures = await fetch_figures(bed.redis, bed.worker_id)
        assert figures["accepted"] == figures["requests"] == "2"


async def test_no_worker_starts_on_a_server_with_other_partitions(redis_url: str) -> None:
    async with StageBed(redis_url):
        other = Pipeline.model_validate({**pipeline().model_dump(), "partitions": 5})
        with pytest.raises(Unusable, match="partitions = 3"):
            await StageWorker(redis_url, other, 0, build_engine=ScriptedEngine).run()


async def test_an_engine_that_can_not_start_stops_the_process(redis_url: str) -> None:
    class Broken(ScriptedEngine):
        async def start(self, port: Any) -> None:
            raise EngineConfigError("no such model")

    engine = Broken()
    with pytest.raises(EngineConfigError, match="no such model"):
        await StageWorker(redis_url, pipeline(), 0, build_engine=lambda: engine).run()
    assert engine.stops == 1


def test_a_stage_that_is_not_in_the_pipeline_is_refused() -> None:
    with pytest.raises(ValueError, match="has 1 stages"):
        StageWorker("redis://x", pipeline(), 1)


# Leaving.


async def leave(bed: StageBed, grace_s: float) -> asyncio.Task[None]:
    task = asyncio.ensure_future(bed.worker.stop(grace_s))
    await bed.until_life(lambda life: life.state is not LifeState.LIVE)
    return task


async def test_s45_a_leaving_worker_serves_what_it_has_and_says_goodbye(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await bed.start("s")
        await bed.take_slots("s")
        leaving = await leave(bed, grace_s=1000.0)
        assert (await bed.the_life()).state is LifeState.DRAINING
        assert not bed.worker.is_ready
        bed.engine.emit(name_of("s"), "still here")
        assert [each["data"] for each in await bed.next_events("s")] == ["still here"]
        await bed.submit("s", number=2)
        await bed.engine.until(lambda: len(bed.engine.submitted) == 2)
        await bed.abort("s", 0)
        await bed.until_drained("s")
        assert not leaving.done()
        await bed.redis.delete(keys.worker_slots(bed.worker_id))
        async with asyncio.timeout(PATIENCE_S):
            await leaving
        assert (await bed.the_life()).has_left
        assert (await bed.acks("s"))[-1] == CleanedAck("s", 1, 100, bed.worker_id)
        assert bed.engine.stops == 1


async def test_s45_when_the_grace_is_over_the_rest_is_aborted_and_its_sessions_are_told(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await bed.start("s")
        await bed.take_slots("s")
        async with asyncio.timeout(PATIENCE_S):
            await bed.worker.stop(grace_s=0.05)
        assert bed.engine.aborted == [name_of("s")]
        assert bed.engine.stops == 1
        assert (await bed.the_life()).state is LifeState.DEAD
        assert await count_slots(bed.redis, bed.worker_id) == 1


async def test_a_worker_may_be_stopped_while_its_engine_still_loads(redis_url: str) -> None:
    class Slow(ScriptedEngine):
        def __init__(self) -> None:
            super().__init__()
            self.begun = asyncio.Event()

        async def start(self, port: Any) -> None:
            self.begun.set()
            await asyncio.Event().wait()

    engine = Slow()
    worker = StageWorker(redis_url, pipeline(), 0, build_engine=lambda: engine)
    running = asyncio.ensure_future(worker.run())
    async with asyncio.timeout(PATIENCE_S):
        await engine.begun.wait()
        await worker.stop()
        await running
    assert engine.stops == 1


async def test_a_crash_says_no_goodbye(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await bed.start("s")
        await bed.crash()
        assert (await bed.the_life()).state is LifeState.LIVE


# As a process.

PROCESS = """
import asyncio, signal, sys
from tests.workers.scripted import ScriptedEngine
from tests.workers.stage_bed import pipeline
from workers.stage import StageWorker

async def main():
    engine = ScriptedEngine({"echo": True})
    worker = StageWorker(sys.argv[1], pipeline(), 0, build_engine=lambda: engine)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.request_stop, 0.0)
    await worker.run()

asyncio.run(main())
"""


async def next_worker(redis: Redis, other_than: str = "") -> str:
    found: list[str] = []

    async def look() -> list[str]:
        lives = await fetch_lives(redis)
        found[:] = [each.worker_id for each in lives if each.state is LifeState.LIVE and each.worker_id != other_than]
        return found

    await eventually(look)
    return found[0]


async def test_s40_s45_a_process_that_was_stopped_wakes_up_fenced_and_leaves_on_sigterm(redis_url: str) -> None:
    bed = StageBed(redis_url)  # for its queues; the worker is another process
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", PROCESS, redis_url)
    try:
        bed.worker_id = old = await next_worker(bed.redis)
        await bed.set_fence("s")
        await bed.submit("s", [1])
        assert [each["data"] for each in await bed.next_events("s")] == [[1]]
        process.send_signal(signal.SIGSTOP)
        # It is taken for lost, and its session goes on elsewhere under a fence that its outputs would still pass.
        await bed.submit("s", [2], number=2)
        assert await end_life(bed.redis, old)
        await bed.redis.sadd(bed.keys("s").fenced, old)
        acks = await bed.length(bed.keys("s").acks)
        process.send_signal(signal.SIGCONT)
        bed.worker_id = await next_worker(bed.redis, old)
        await bed.set_fence("t")
        await bed.submit("t", [3])
        assert isinstance(await bed.next_ack("t"), AcceptedAck)
        assert await bed.length(bed.keys("s").events("s")) == 1
        assert await bed.length(bed.keys("s").acks) == acks + (bed.keys("s").acks == bed.keys("t").acks)
        process.terminate()
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0
        assert (await bed.the_life()).has_left
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await bed.redis.aclose()


# Two stages with the shipped engine.


async def test_two_parrots_say_every_sample_back_and_fall_silent_when_interrupted(redis_url: str) -> None:
    stages = [
        {"name": "thinker", "engine": "parrot", "options": {"pace": "fast", "frame_ms": 20}},
        {"name": "voice", "engine": "parrot", "options": {"pace": "fast", "reply": "stream", "frame_ms": 20}},
    ]
    both = Pipeline.model_validate({**pipeline(2).model_dump(), "stages": stages})
    speech = bytes(range(256)) * 100
    engines = [load_engine(each.engine, each.options) for each in both.stages]
    async with (
        StageBed(redis_url, engines[0], stage_id=0, pipeline=both) as thinker,
        StageBed(redis_url, engines[1], stage_id=1, pipeline=both) as voice,
    ):
        route = (thinker.worker_id, voice.worker_id)
        await thinker.set_fence("s")
        await thinker.submit("s", speech[:12_800], final=False, route=route, number=1)
        await thinker.submit("s", speech[12_800:], route=route, number=2)
        heard: list[dict[str, Any]] = []
        while not heard or not heard[-1]["turn_end"]:
            heard += await thinker.next_events("s")
        assert b"".join(each["data"] for each in heard) == speech
        assert {each["stage_id"] for each in heard} == {1}
        assert [each["seq"] for each in heard] == list(range(len(heard)))
        assert [ack.number for ack in await thinker.next_acks("s", 2)] == [1, 2]
        # The cancel: one commit raises the floor and orders both aborts.
        await thinker.set_fence("s", fence(1), floor=1)
        for bed in (thinker, voice):
            queue, order = bed.abort_entry("s", 0)
            await bed.redis.xadd(queue, {**order, "a": "0-0"})
        cleaned = await thinker.next_acks("s", 2)
        assert {ack.worker_id for ack in cleaned if isinstance(ack, CleanedAck)} == set(route)
        assert not len(thinker.worker.lanes)
        assert not len(voice.worker.lanes)


async def test_a_capacity_that_its_engine_can_not_hold_stops_the_process(redis_url: str) -> None:
    class Small(ScriptedEngine):
        capacity_limit = 3

    engine = Small()
    worker = StageWorker(redis_url, pipeline(), 0, build_engine=lambda: engine)
    with pytest.raises(EngineConfigError, match="capacity is 4, and its engine scripted holds at most 3"):
        await worker.run()
    assert engine.stops == 1
