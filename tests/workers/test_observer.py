"""Judging a loss: once, by a heartbeat that stood still under one's own eyes, and never by one's own silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from control.store import keys
from control.store.link import Link, make_pool
from control.store.lives import Entry, beat, fetch_lives, register_life
from tests.servers import ValkeyServer
from tests.workers.control_bed import end, until
from workers.observer import Observer
from workers.placement import Directory

HEARTBEAT_MS = 1_000
LATER_S = HEARTBEAT_MS / 1000 + 0.001


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Any]:
    async with Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
async def link(redis_url: str) -> AsyncIterator[Link]:
    pool = make_pool(redis_url)
    link = Link(pool)
    yield link
    await link.close()
    await pool.disconnect()


def observer(redis: Any, stages: int = 1) -> Observer:
    return Observer(redis, Directory(stages), stages, HEARTBEAT_MS, lambda: None)


async def register(redis: Any, worker_id: str, stage_id: int = 0, capacity: int = 2) -> None:
    await register_life(redis, worker_id, Entry(stage_id=stage_id, stage=f"s{stage_id}", capacity=capacity, engine="x"))


def pass_time(watcher: Observer, seconds: float) -> None:
    """As if it had looked all the while: every pulse is that much older."""
    for pulse in watcher._pulses.values():
        pulse.since_s -= seconds


async def state(redis: Any, worker_id: str) -> bytes:
    return await redis.hget(keys.worker_state(worker_id), "state")


async def test_live_workers_with_free_slots_are_what_placement_chooses_from(redis: Any) -> None:
    watcher = observer(redis, stages=2)
    await watcher.look()
    assert watcher.directory.choose_route() is None
    for worker_id, stage_id in (("ear-1", 0), ("ear-2", 0), ("mouth-1", 1), ("nose-1", 7)):
        await register(redis, worker_id, stage_id)
    await redis.hset(keys.worker_slots("ear-1"), "somebody", "0 1")
    await watcher.look()
    assert watcher.directory.choose_route() == ("ear-2", "mouth-1"), "fewest sessions first"
    assert watcher.directory.choose_route() == ("ear-1", "mouth-1")
    assert watcher.directory.choose_route() is None, "the mouth is full"
    await redis.hset(keys.worker_state("ear-1"), "state", "draining")
    await watcher.look()
    assert [watcher.directory.choose_route() for _ in range(2)] == [("ear-2", "mouth-1")] * 2
    assert len(watcher.lives) == 4
    watcher.directory.note_full("mouth-1")
    assert watcher.directory.choose_route() is None


async def test_a_worker_that_beats_is_never_judged(redis: Any, link: Link) -> None:
    watcher = observer(redis)
    await register(redis, "ear-1")
    for _ in range(5):
        await watcher.look()
        pass_time(watcher, LATER_S)
        assert await beat(link, "ear-1", {})
    await watcher.look()
    assert watcher.lost == {}
    assert await state(redis, "ear-1") == b"live"


async def test_a_heartbeat_that_stands_still_ends_that_life_for_everyone(redis: Any, link: Link) -> None:
    watcher = observer(redis)
    await register(redis, "ear-1")
    await register(redis, "ear-2")
    await redis.hset(keys.worker_slots("ear-1"), mapping={"a": "0 1", "b": "0 1"})
    await watcher.look()
    pass_time(watcher, LATER_S - 0.5)
    await watcher.look()
    assert watcher.lost == {}, "not yet"
    assert await beat(link, "ear-2", {})
    pass_time(watcher, 0.5)
    await watcher.look()
    assert {worker_id: set(sessions) for worker_id, sessions in watcher.lost.items()} == {"ear-1": {"a", "b"}}
    assert await state(redis, "ear-1") == b"dead"
    assert not await beat(link, "ear-1", {}), "when it wakes it is told"
    assert watcher.directory.choose_route() == ("ear-2",)
    other = observer(redis)
    await other.look()
    assert set(other.lost) == {"ear-1"}, "who has watched for no moment yet reads that it is over"


async def test_a_loss_is_told_again_while_sessions_hold_slots_there_and_then_forgotten(redis: Any) -> None:
    woken: list[int] = []
    watcher = Observer(redis, Directory(1), 1, HEARTBEAT_MS, lambda: woken.append(1))
    await register(redis, "ear-1")
    await redis.hset(keys.worker_state("ear-1"), "state", "dead")
    await redis.hset(keys.worker_slots("ear-1"), "a", "0 1")
    for told in range(1, 4):
        await watcher.look()
        assert watcher.lost == {"ear-1": ("a",)}
        assert len(woken) == told
        watcher.lost["ear-1"] = ()
    await redis.hdel(keys.worker_slots("ear-1"), "a")
    await watcher.look()
    assert not await redis.hexists(keys.STAGES, "ear-1")
    await watcher.look()
    assert await fetch_lives(redis) == []
    assert watcher.lost == {}


async def test_a_dead_worker_without_sessions_is_told_before_it_is_forgotten(redis: Any) -> None:
    watcher = observer(redis)
    await register(redis, "ear-1")
    await redis.hset(keys.worker_state("ear-1"), "state", "dead")
    await watcher.look()
    assert watcher.lost == {"ear-1": ()}
    assert await redis.hexists(keys.STAGES, "ear-1")
    await watcher.look()
    assert not await redis.hexists(keys.STAGES, "ear-1")


async def test_s71_an_observer_that_was_stopped_judges_nobody_by_the_time_it_missed(redis: Any) -> None:
    watcher = observer(redis)
    await register(redis, "ear-1")
    await watcher.look()
    pass_time(watcher, LATER_S)
    watcher._looked_s -= LATER_S
    await watcher.look()
    assert watcher.lost == {}
    assert await state(redis, "ear-1") == b"live"
    pass_time(watcher, LATER_S)
    await watcher.look()
    assert set(watcher.lost) == {"ear-1"}, "from then on it has watched"


async def test_s71_a_server_that_was_away_for_longer_than_the_heartbeat_time_loses_nobody() -> None:
    with ValkeyServer(persist=True) as server:
        async with Redis.from_url(server.url) as client:
            redis: Any = client
            watcher = observer(redis)
            await register(redis, "ear-1")
            running = asyncio.create_task(watcher.run())
            await until(lambda: watcher._pulses)
            pass_time(watcher, LATER_S - 0.2)
            server.kill()
            await until(lambda: not watcher._pulses)
            server.start()
            await until(lambda: watcher._pulses)
            assert watcher.lost == {}
            assert await state(redis, "ear-1") == b"live"
            await end(running)


async def test_s76_a_record_that_cannot_be_read_is_neither_chosen_nor_lost(redis: Any) -> None:
    watcher = observer(redis)
    await register(redis, "ear-1")
    await watcher.look()
    await redis.set(keys.worker_state("ear-1"), "not ours")
    for _ in range(3):
        pass_time(watcher, LATER_S)
        await watcher.look()
    assert watcher.lost == {}
    assert watcher.directory.choose_route() is None
    assert await redis.hexists(keys.STAGES, "ear-1")


async def test_an_index_that_cannot_be_read_is_an_error_that_passes(redis: Any) -> None:
    watcher = observer(redis)
    await redis.set(keys.STAGES, "not ours")
    running = asyncio.create_task(watcher.run())
    await asyncio.sleep(0.05)
    assert not running.done()
    await redis.delete(keys.STAGES)
    await register(redis, "ear-1")
    await until(watcher.directory.choose_route)
    await end(running)
