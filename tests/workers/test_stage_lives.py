"""A stage worker's lives that end otherwise than planned: fenced, forgotten, broken, or by the engine's death."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis

from control.store import keys
from control.store.link import Link, make_pool
from control.store.lives import Entry, LifeState, end_life, fetch_lives, register_life
from control.wire.stage import AcceptedAck
from tests.servers import ValkeyServer
from tests.workers.scripted import PATIENCE_S, ScriptedEngine
from tests.workers.stage_bed import StageBed, eventually, name_of, pipeline
from workers.stage_heartbeat import Heartbeat
from workers.stage_setup import StageSetup

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def own_server() -> Iterator[ValkeyServer]:
    """A server that the test may stop."""
    with ValkeyServer() as server:
        yield server


# A life that someone ends.


async def test_s40_a_fenced_life_says_nothing_more_and_a_new_one_begins_empty(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await bed.start("s")
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
        assert (await bed.the_life(old)).state is LifeState.DEAD
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
        await bed.start("s")
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
        await bed.start("s")
        bed.engine.stuck.add(name_of("s"))
        await end_life(bed.redis, bed.worker_id)
        await bed.next_life(bed.worker_id)
        assert (bed.builds, bed.engine.stops, bed.engine.starts) == (2, 1, 2)
        assert bed.engine.running == {}


async def test_a_queue_that_is_something_else_ends_the_life_and_not_the_worker(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await bed.redis.set(bed.keys("s").submissions(bed.worker_id), "no stream")
        old, bed.worker_id = bed.worker_id, await bed.next_life(bed.worker_id)
        left = {life.worker_id: life.has_left for life in await fetch_lives(bed.redis)}
        assert left == {old: True, bed.worker_id: False}
        await bed.submit("s")
        assert await bed.next_ack("s") == AcceptedAck("s", 1, 1)


# An engine that dies.


@pytest.mark.parametrize("how", ["says so", "is unhealthy"])
async def test_s41_a_dead_engine_ends_the_life_and_another_takes_its_place(redis_url: str, how: str) -> None:
    async with StageBed(redis_url) as bed:
        await bed.start("s")
        await bed.take_slots("s")
        old = bed.worker_id
        if how == "says so":
            bed.engine.die()
        else:
            bed.engine.is_healthy = False
        bed.worker_id = await bed.next_life(old)
        # Its sessions have to be told, so the dead life stays in the index.
        assert (await bed.the_life(old)).state is LifeState.DEAD
        assert (await bed.the_life()).state is LifeState.LIVE
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

        async def has_asked() -> bool:
            return asked >= 3

        async def has_beaten() -> bool:
            return (await fetch_lives(redis))[0].beat >= 3

        await eventually(has_asked)
        assert not await has_beaten()
        assert not heartbeat.is_good
        reading = True
        await eventually(has_beaten)
        assert heartbeat.is_good
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await link.close()
    await pool.disconnect()


# A server that goes away.


async def test_s52_a_server_that_hangs_and_comes_back_loses_nothing(own_server: ValkeyServer) -> None:
    async with StageBed(own_server.url) as bed:
        await bed.start("s")
        await bed.redis.client_pause(300)
        for number in range(100):
            bed.engine.emit(name_of("s"), number)
        assert [each["data"] for each in await bed.next_events("s", 100)] == list(range(100))
        assert bed.worker.worker_id == bed.worker_id


async def test_s51_a_server_that_restarts_empty_gets_a_new_life(own_server: ValkeyServer) -> None:
    async with StageBed(own_server.url) as bed:
        await bed.start("s")
        await asyncio.to_thread(own_server.restart, crash=True)
        bed.worker_id = await bed.next_life(bed.worker_id)
        assert bed.engine.running == {}
        async with asyncio.timeout(PATIENCE_S):
            await bed.submit("t")
            assert await bed.next_ack("t") == AcceptedAck("t", 1, 1)
