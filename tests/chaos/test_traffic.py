"""The listener of the chaos run: it reads every stream to its end, and knows what it could not have seen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgpack
import pytest
from redis.asyncio import Redis

from control.store.keys import PartitionKeys
from tests.chaos.history import History
from tests.chaos.told import fence
from tests.chaos.traffic import Traffic

STREAM = PartitionKeys(0).events("s1")


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Any]:
    async with Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
async def traffic(redis_url: str) -> AsyncIterator[Traffic]:
    traffic = Traffic(redis_url, partitions=1, seed=1)
    yield traffic
    await traffic.close()


async def tell(redis: Any, n: int, event: str, life: int = 1) -> None:
    body = msgpack.packb({"event": event, "fence": fence(0, life), "reason": None})
    await redis.xadd(STREAM, {"t": "lifecycle", "n": n, "b": body})


async def heard(traffic: Traffic, history: History, count: int) -> None:
    while len(history.seen) < count:
        await traffic.wait_news(history.session_id, 0.05)


def nothing() -> asyncio.Future[None]:
    return asyncio.ensure_future(asyncio.sleep(0))


async def test_what_is_written_after_the_last_read_is_caught_up_with(redis: Any, traffic: Traffic) -> None:
    history = History("s1")
    traffic._listen_to(history)
    listening = asyncio.ensure_future(traffic.listen())
    await tell(redis, 1, "opened")
    await heard(traffic, history, 1)
    traffic._listening.clear()  # nobody listens to it any more
    await tell(redis, 2, "closing")
    await tell(redis, 3, "closed")
    await traffic.catch_up(listening)
    assert [entry.n for entry in history.seen] == [1, 2, 3]
    assert history.has_ended(1)
    assert not history.trimmed


async def test_a_life_of_which_a_part_was_cut_is_marked_and_the_next_is_not(redis: Any, traffic: Traffic) -> None:
    history = History("s1")
    traffic._listen_to(history)
    await tell(redis, 1, "opened")
    await traffic.catch_up(nothing())
    for n, event in ((2, "interrupted"), (3, "interrupted"), (4, "closed")):
        await tell(redis, n, event)
    await redis.xtrim(STREAM, maxlen=1, approximate=False)
    await tell(redis, 1, "opened", life=2)
    await tell(redis, 2, "closed", life=2)
    await traffic.catch_up(nothing())
    assert [entry.n for entry in history.seen] == [1, 4, 1, 2]
    assert history.trimmed == {1}


async def test_a_gap_in_a_stream_that_was_not_cut_is_left_to_the_checker(redis: Any, traffic: Traffic) -> None:
    history = History("s1")
    traffic._listen_to(history)
    await tell(redis, 1, "opened")
    await tell(redis, 3, "closed")
    await traffic.catch_up(nothing())
    assert [entry.n for entry in history.seen] == [1, 3]
    assert not history.trimmed
