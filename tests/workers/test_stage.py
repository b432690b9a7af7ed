"""A stage worker's lives: begun, seen, drained, lost and begun anew; and the whole of it with real engines."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis

from control.store import keys
from control.store.link import Link, make_pool
from control.store.lives import Entry, LifeState, count_slots, end_life, fetch_figures, fetch_lives, register_life
from control.store.server import Unusable
from control.wire.stage import AcceptedAck, CleanedAck
from stages.engine import EngineConfigError, load_engine
from stages.pipeline import Pipeline
from tests.servers import ValkeyServer
from tests.workers.scripted import PATIENCE_S, ScriptedEngine
from tests.workers.stage_bed import StageBed, fence, name_of, pipeline
from workers.stage import StageWorker
from workers.stage_heartbeat import Heartbeat
from workers.stage_setup import StageSetup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from control.store.lives import Life


@pytest.fixture
def own_server() -> Iterator[ValkeyServer]:
    """A server that the test may stop."""
    with ValkeyServer() as server:
        yield server


async def start(bed: StageBed, *session_ids: str) -> None:
    for session_id in session_ids:
        await bed.set_fence(session_id)
        await bed.submit(session_id)
        await bed.engine.until(lambda name=name_of(session_id): name in bed.engine.running)
    await bed.until_drained(*session_ids)


async def the_life(bed: StageBed, worker_id: str | None = None) -> Life:
    [life] = [each for each in await fetch_lives(bed.redis) if each.worker_id == (worker_id or bed.worker_id)]
    return life


async def until_state(bed: StageBed, wanted: Callable[[Life], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not wanted(await the_life(bed)):
            await asyncio.sleep(0.01)


async def test_a_worker_is_in_the_index_with_what_it_runs(redis_url: str) -> None:
    async with StageBed(redis_url, stage_id=1, stages=2) as bed:
        life = await the_life(bed)
        assert life.worker_id.startswith("stage1-")
        assert (life.stage_id, life.stage, life.capacity, life.engine) == (1, "stage1", 4, "scripted")
        assert life.state is LifeState.LIVE
        await until_state(bed, lambda now: now.beat > life.beat + 2)
        assert bed.worker.is_ready
        assert await bed.redis.hgetall(keys.CONFIG) == {b"protocol": b"1", b"partitions": b"3", b"layout": b"1"}


async def test_its_load_and_its_counters_go_out_with_the_heartbeat(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await start(bed, "s", "t")
        await until_state(bed, lambda life: life.load.get("running") == 2.0)
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


# A life that someone ends.


async def test_s40_a_fenced_life_says_nothing_more_and_a_new_one_begins_empty(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await start(bed, "s")
        old, acks = bed.worker_id, await bed.length(bed.keys("s").acks)
        await end_life(bed.redis, old)
        await bed.redis.sadd(bed.keys("s").fenced, old)
        bed.engine.emit(name_of("s"), "from the grave")
        await bed.submit("s", number=2)
        new = await bed.next_life(old)
        assert new != old
        assert bed.engine.running == {}
        assert await bed.redis.exists(bed.keys("s").events("s")) == 0
        assert await bed.length(bed.keys("s").acks) == acks
        assert (await the_life(bed, old)).state is LifeState.DEAD
        # What is left in the old queues is nobody's any more; the new life has its own.
        assert await bed.length(bed.keys("s").submissions(old)) == 1
        bed.worker_id = new
        await bed.submit("t")
        assert await bed.next_ack("t") == AcceptedAck("t", 1, 1)
        assert bed.builds == 1


async def test_s40_a_partition_that_has_fenced_it_ends_the_life_before_any_heartbeat(redis_url: str) -> None:
    slow = pipeline(control={"heartbeat_s": 2000.0, "heartbeat_interval_s": 1000.0})
    async with StageBed(redis_url, pipeline=slow) as bed:
        await bed.redis.sadd(bed.keys("s").fenced, bed.worker_id)
        await bed.submit("s")
        await bed.next_life(bed.worker_id)
        assert await bed.redis.exists(bed.keys("s").acks) == 0


async def test_s50_a_server_that_has_lost_everything_gets_a_new_life(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await start(bed, "s")
        await bed.redis.flushall()
        await bed.redis.script_flush()
        old, bed.worker_id = bed.worker_id, await bed.next_life(bed.worker_id)
        assert [life.worker_id for life in await fetch_lives(bed.redis)] == [bed.worker_id] != [old]
        assert bed.engine.running == {}
        assert await bed.redis.hget(keys.CONFIG, "partitions") == b"3"
        await bed.submit("t")
        assert await bed.next_ack("t") == AcceptedAck("t", 1, 1)


async def test_i2_an_engine_that_still_holds_something_is_built_anew_before_the_next_life(redis_url: str) -> None:
    async with StageBed(redis_url, abort_timeout_s=0.05) as bed:
        await start(bed, "s")
        bed.engine.stuck.add(name_of("s"))
        await end_life(bed.redis, bed.worker_id)
        await bed.next_life(bed.worker_id)
        assert (bed.builds, bed.engine.stops, bed.engine.starts) == (2, 1, 2)
        assert bed.engine.running == {}


async def test_a_queue_that_is_something_else_ends_the_life_and_not_the_worker(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await bed.redis.set(bed.keys("s").submissions(bed.worker_id), "no stream")
        old, bed.worker_id = bed.worker_id, await bed.next_life(bed.worker_id)
        assert [life.worker_id for life in await fetch_lives(bed.redis)] == [bed.worker_id] != [old]
        await bed.submit("s")
        assert await bed.next_ack("s") == AcceptedAck("s", 1, 1)


# An engine that dies.


@pytest.mark.parametrize("how", ["says so", "is unhealthy"])
async def test_s41_a_dead_engine_ends_the_life_and_another_takes_its_place(redis_url: str, how: str) -> None:
    async with StageBed(redis_url) as bed:
        await start(bed, "s")
        await bed.take_slots("s")
        old = bed.worker_id
        if how == "says so":
            bed.engine.die()
        else:
            bed.engine.is_healthy = False
        bed.worker_id = await bed.next_life(old)
        # Its sessions have to be told, so the dead life stays in the index.
        assert (await the_life(bed, old)).state is LifeState.DEAD
        assert (await the_life(bed)).state is LifeState.LIVE
        assert (bed.builds, bed.engine.stops, bed.engine.starts) == (2, 1, 2)
        assert await bed.length(bed.keys("s").acks) == 1
        await bed.submit("t")
        await bed.engine.until(lambda: name_of("t") in bed.engine.running)


async def test_s41_an_engine_that_does_not_come_back_at_once_is_tried_again(redis_url: str) -> None:
    class Moody(ScriptedEngine):
        failures = 0

        async def start(self, port: Any) -> None:
            if self.starts and self.failures < 1:
                self.failures += 1
                raise RuntimeError("the device is busy")
            await super().start(port)

    async with StageBed(redis_url, Moody()) as bed:
        bed.engine.die()
        await bed.next_life(bed.worker_id)
        assert (bed.engine.failures, bed.builds) == (1, 3)


async def test_s60_a_worker_that_does_not_read_does_not_beat(redis_url: str) -> None:
    pool = make_pool(redis_url)
    link = Link(pool)
    engine = ScriptedEngine()
    policy: Any = None
    setup = StageSetup(pipeline=pipeline(), stage_id=0, policy=policy, adapter=policy, abort_timeout_s=1.0)
    reading, asked = False, 0

    def is_reading(_: float) -> bool:
        nonlocal asked
        asked += 1
        return reading

    def never(_: object) -> None:
        raise AssertionError

    async with Redis.from_url(redis_url) as redis:
        await register_life(redis, "w", Entry(stage_id=0, stage="stage0", capacity=1, engine="scripted"))
        heartbeat = Heartbeat(
            link,
            "w",
            engine,
            setup,
            figures=dict,
            is_reading=is_reading,
            on_engine_lost=never,
            on_over=never,
            on_trouble=never,
        )
        task = asyncio.ensure_future(heartbeat.run())
        async with asyncio.timeout(PATIENCE_S):
            while asked < 3:
                await asyncio.sleep(0.01)
            assert (await fetch_lives(redis))[0].beat == 1
            assert not heartbeat.is_good
            reading = True
            while (await fetch_lives(redis))[0].beat < 3:
                await asyncio.sleep(0.01)
        assert heartbeat.is_good
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await link.close()
    await pool.disconnect()


# A server that goes away.


async def test_s52_a_server_that_hangs_and_comes_back_loses_nothing(own_server: ValkeyServer) -> None:
    async with StageBed(own_server.url) as bed:
        await start(bed, "s")
        await bed.redis.client_pause(300)
        for number in range(100):
            bed.engine.emit(name_of("s"), number)
        assert [each["data"] for each in await bed.next_events("s", 100)] == list(range(100))
        assert bed.worker.worker_id == bed.worker_id


async def test_s51_a_server_that_restarts_empty_gets_a_new_life(own_server: ValkeyServer) -> None:
    async with StageBed(own_server.url) as bed:
        await start(bed, "s")
        await asyncio.to_thread(own_server.restart, crash=True)
        bed.worker_id = await bed.next_life(bed.worker_id)
        assert bed.engine.running == {}
        async with asyncio.timeout(PATIENCE_S):
            await bed.submit("t")
            assert await bed.next_ack("t") == AcceptedAck("t", 1, 1)


# Leaving.


async def leave(bed: StageBed, grace_s: float) -> asyncio.Task[None]:
    task = asyncio.ensure_future(bed.worker.stop(grace_s))
    await until_state(bed, lambda life: life.state is not LifeState.LIVE)
    return task


async def test_s45_a_leaving_worker_serves_what_it_has_and_says_goodbye(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await start(bed, "s")
        await bed.take_slots("s")
        leaving = await leave(bed, grace_s=1000.0)
        assert (await the_life(bed)).state is LifeState.DRAINING
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
        assert await fetch_lives(bed.redis) == []
        assert (await bed.acks("s"))[-1] == CleanedAck("s", 1, 100, bed.worker_id)
        assert bed.engine.stops == 1


async def test_s45_when_the_grace_is_over_the_rest_is_aborted_and_its_sessions_are_told(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await start(bed, "s")
        await bed.take_slots("s")
        async with asyncio.timeout(PATIENCE_S):
            await bed.worker.stop(grace_s=0.05)
        assert bed.engine.aborted == [name_of("s")]
        assert bed.engine.stops == 1
        assert (await the_life(bed)).state is LifeState.DEAD
        assert await count_slots(bed.redis, bed.worker_id) == 1


async def test_a_worker_may_be_stopped_while_its_engine_still_loads(redis_url: str) -> None:
    class Slow(ScriptedEngine):
        async def start(self, port: Any) -> None:
            self.starts += 1
            await asyncio.Event().wait()

    engine = Slow()
    worker = StageWorker(redis_url, pipeline(), 0, build_engine=lambda: engine)
    running = asyncio.ensure_future(worker.run())
    async with asyncio.timeout(PATIENCE_S):
        while not engine.starts:
            await asyncio.sleep(0.001)
        await worker.stop()
        await running
    assert engine.stops == 1


async def test_a_crash_says_no_goodbye(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await start(bed, "s")
        await bed.crash()
        assert (await the_life(bed)).state is LifeState.LIVE


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
    async with asyncio.timeout(PATIENCE_S):
        while True:
            live = [life for life in await fetch_lives(redis) if life.state is LifeState.LIVE]
            if live and live[0].worker_id != other_than:
                return live[0].worker_id
            await asyncio.sleep(0.02)


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
        await bed.submit("t", [3])
        await bed.set_fence("t")
        assert isinstance(await bed.next_ack("t"), AcceptedAck)
        assert await bed.length(bed.keys("s").events("s")) == 1
        assert await bed.length(bed.keys("s").acks) == acks + (bed.keys("s").acks == bed.keys("t").acks)
        process.terminate()
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0
        assert [life.state for life in await fetch_lives(bed.redis) if life.worker_id == bed.worker_id] == []
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
    async with _parrots(redis_url, both) as (thinker, voice):
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


@contextlib.asynccontextmanager
async def _parrots(redis_url: str, both: Pipeline) -> Any:
    engines = [load_engine(each.engine, each.options) for each in both.stages]
    async with (
        StageBed(redis_url, engines[0], stage_id=0, pipeline=both) as thinker,
        StageBed(redis_url, engines[1], stage_id=1, pipeline=both) as voice,
    ):
        yield thinker, voice
