"""The whole system on a master behind Sentinels: it dies, its replica is named, calls go on (S51)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from bargein_client import Bargein, Lifecycle
from control.store.access import open_access
from control.store.link import LOST
from tests.cluster.calls import FRAME, judge, traffic
from tests.clusters import SentinelPair
from tests.system import RunningSystem

pytestmark = pytest.mark.cluster


@pytest.fixture
def pair() -> Iterator[SentinelPair]:
    with SentinelPair() as pair:
        yield pair


async def test_s51_the_master_dies_and_its_replica_goes_on(pair: SentinelPair) -> None:
    async with RunningSystem(pair.url, controls=2) as system, traffic(pair.url) as under_way:
        began_s = time.monotonic()
        heir = await asyncio.to_thread(pair.kill_master)
        named_s = time.monotonic() - began_s
        await under_way.until_all_replied()
        print(f"named after {named_s:.1f} s, all served after {time.monotonic() - began_s:.1f} s")
        assert not any(control.observer.lost for control in system.controls)
    with heir.client() as where:
        assert [wrong for call in under_way.calls for wrong in judge(call, where)] == []


async def test_sentinels_that_are_asked_at_once_are_all_remembered(pair: SentinelPair) -> None:
    pair.sentinels[0].kill()  # the next to answer is put first, by each that asks
    access = open_access(pair.url)
    links = [access.link("x") for _ in range(20)]
    assert await asyncio.gather(*(link.call("PING") for link in links)) == [b"PONG"] * 20
    found = cast("Any", access.pool).sentinel_manager.sentinels
    assert len({id(each) for each in found}) == 3
    for link in links:
        await link.close()
    await access.close()


async def test_links_and_the_synchronous_client_find_the_master_again(pair: SentinelPair) -> None:
    def hold_a_call(client: Bargein, session_id: str) -> None:
        with client.open(session_id) as session:
            assert session.append(FRAME, final=True).ok
            assert session.interrupt().ok
            session.close()
            assert any(isinstance(event, Lifecycle) and event.terminal for event in session.events())

    access = open_access(pair.url)
    link = access.link("x")
    async with RunningSystem(pair.url):
        client = await asyncio.to_thread(Bargein, pair.url)
        await asyncio.to_thread(hold_a_call, client, "first")
        await link.call("SET", "x", "1")
        heir = await asyncio.to_thread(pair.kill_master)
        await asyncio.to_thread(hold_a_call, client, "second")
        await asyncio.to_thread(client.close)
        with pytest.raises(LOST):
            await link.call("GET", "x")
        assert await link.call("GET", "x") == b"1"
        with heir.client() as raw:
            assert raw.get("x") == b"1"
    await link.close()
    await access.close()
