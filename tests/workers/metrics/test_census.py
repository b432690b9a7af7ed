"""What is read for samples: nothing is changed by it, and keys that hold something else are nobody's end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from control.store import keys
from control.store.census import UNREADABLE, check_slots, fetch_backlogs, probe_write, take_census
from control.store.keys import PartitionKeys

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.servers import RealServer

P0, P1 = PartitionKeys(0), PartitionKeys(1)


@pytest.fixture
async def redis(any_server: RealServer) -> AsyncIterator[Any]:
    async with Redis.from_url(any_server.url) as client:
        yield client


async def test_the_probe_is_a_write_that_changes_nothing(redis: Any) -> None:
    await probe_write(redis, "control-a")
    assert await redis.exists(keys.CONTROLS) == 0
    await redis.zadd(keys.CONTROLS, {"control-a": 5, "control-b": -5})
    await probe_write(redis, "control-a")
    await probe_write(redis, "gone")
    assert await redis.zrange(keys.CONTROLS, 0, -1, withscores=True) == [(b"control-b", -5), (b"control-a", 5)]


async def test_the_probe_is_refused_where_a_producer_s_write_would_be(redis: Any) -> None:
    await redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(ResponseError, match=r"OOM|maxmemory"):
            await probe_write(redis, "control-a")
    finally:
        await redis.config_set("maxmemory", 0)


async def test_an_empty_server_has_nothing_of_anything(redis: Any) -> None:
    census = await take_census(redis, [0, 1], 100)
    assert not any((*census.phases.values(), *census.requests.values(), *census.cleanups.values()))
    assert (census.missing, census.capped) == (set(), False)
    slots = await check_slots(redis, ["ear-1"], 2, 100)
    assert (slots.unowned, slots.admitted, slots.capped) == (set(), 0, False)
    assert [(b.commands, b.acks, b.oldest_ms, b.dead_letters) for b in await fetch_backlogs(redis, [0, 1])] == [
        (0, 0, 0, 0)
    ] * 2
    assert await fetch_backlogs(redis, []) == []


async def test_keys_that_hold_something_else_are_left_out(redis: Any) -> None:
    for name in (P0.commands, P0.sessions, P0.cleanups, keys.worker_slots("ear-1"), keys.ADMISSION_SLOTS):
        await redis.set(name, "in the way")
    await redis.hset(P1.sessions, "broken", b"\xc1")
    await redis.hset(P1.cleanups, "broken", b"\xc1")
    await redis.xadd(P1.dead, {"b": "x"})
    await redis.hset(keys.worker_slots("ear-2"), mapping={"ghost": "3 1", "odd": "nonsense"})
    census = await take_census(redis, [0, 1], 100)
    assert {name: count for name, count in census.phases.items() if count} == {UNREADABLE: 1}
    slots = await check_slots(redis, ["ear-1", "ear-2"], 1, 100)
    # Whether somebody owns it can't be said: its partition's sessions can't be read.
    assert slots.unowned == set()
    assert [(b.commands, b.oldest_ms, b.dead_letters) for b in await fetch_backlogs(redis, [0, 1])] == [
        (None, None, 0),
        (0, 0, 1),
    ]
    await redis.delete(P0.sessions)
    assert (await check_slots(redis, ["ear-1", "ear-2"], 1, 100)).unowned == {("ear-2", "ghost", 3)}
