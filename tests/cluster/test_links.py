"""Links and the client of a cluster whose nodes die or hang: what is lost is said, the rest is answered (S52, S58)."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any, cast

import pytest
from redis.asyncio.cluster import ClusterNode
from redis.exceptions import RedisError

from control.store.access import ClusterAccess, _Known, open_access
from control.store.cluster import MAP_TIMEOUT_S, slot_of
from control.store.keys import PartitionKeys
from control.store.link import LOST
from tests.clusters import ValkeyCluster

pytestmark = pytest.mark.cluster

KEY = PartitionKeys(3).owner


async def test_s58_a_node_that_is_gone_is_a_lost_connection_until_its_replica_serves(breakable: ValkeyCluster) -> None:
    access = open_access(breakable.url)
    link, spread = access.link(KEY), access.spread()
    names = [f"key-{number}" for number in range(30)]
    await link.call("SET", KEY, "x")
    await spread.call_all([("SET", name, "x") for name in names])
    victim = breakable.master_of(KEY)
    there = [breakable.master_of(name) is victim for name in names]
    breakable.kill_in_step(victim)
    with pytest.raises(LOST):
        await link.call("GET", KEY)
    answers = await spread.try_all([("GET", name) for name in names])
    assert [isinstance(answer, LOST) for answer in answers] == there
    assert {answer for answer in answers if isinstance(answer, bytes)} == {b"x"}
    await asyncio.to_thread(breakable.until_taken_over, KEY, victim)
    answers = await spread.try_all([("GET", name) for name in names])
    assert answers == [b"x"] * 30
    assert await link.call("GET", KEY) == b"x"
    await link.close()
    await spread.close()
    await access.close()


async def test_s52_a_node_that_hangs_holds_up_no_link_to_another(breakable: ValkeyCluster) -> None:
    access = open_access(breakable.url, timeout_s=1.0)
    assert isinstance(access, ClusterAccess)
    names = [f"key-{number}" for number in range(30)]
    spread = access.spread()
    await spread.call_all([("SET", name, "x") for name in names])
    victim = breakable.master_of(KEY)
    links = {name: access.link(name) for name in names if breakable.master_of(name) is not victim}
    for name, link in links.items():
        assert await link.call("GET", name) == b"x"
    os.kill(victim.pid, signal.SIGSTOP)
    spreading = asyncio.create_task(spread.try_all([("GET", name) for name in names]))
    began_s = time.monotonic()
    while not spreading.done():
        await asyncio.sleep(0)
        for name, link in links.items():
            before_s = time.monotonic()
            assert await link.call("GET", name) == b"x"
            assert time.monotonic() - before_s < 0.5
    answers = await spreading
    assert time.monotonic() - began_s < 1.0 + MAP_TIMEOUT_S + 1.0, "it waits for each node once"
    assert [isinstance(answer, LOST) for answer in answers] == [name not in links for name in names]
    for link in (*links.values(), spread):
        await link.close()
    await access.close()


async def test_a_new_link_finds_its_node_while_the_one_that_knew_the_map_hangs(breakable: ValkeyCluster) -> None:
    victim = breakable.master_of(KEY)
    other = next(name for name in (f"key-{n}" for n in range(100)) if breakable.master_of(name) is not victim)
    access = open_access(f"redis+cluster://127.0.0.1:{victim.port}," + breakable.url.partition("://")[2])
    os.kill(victim.pid, signal.SIGSTOP)
    began_s = time.monotonic()
    link = access.link(other)
    await link.call("SET", other, "x")
    assert time.monotonic() - began_s < 2 * MAP_TIMEOUT_S + 1.0
    await link.close()
    await access.close()


async def test_s58_the_shared_client_of_many_tasks_outlives_a_failover(breakable: ValkeyCluster) -> None:
    """redis-py's stumbles over its own closed connections and forgotten nodes; all that comes out is a lost one."""
    access = open_access(breakable.url, timeout_s=2.0)
    redis = access.redis
    good_s = [0.0] * 20
    over = False

    async def work(number: int) -> None:
        while not over:
            try:
                await redis.set(f"key-{number}", "x")
                async with redis.pipeline(transaction=False) as pipe:
                    for each in range(20):
                        pipe.get(f"key-{each}")
                    await pipe.execute(raise_on_error=False)
                await redis.hgetall(f"hash-{number}")
                good_s[number] = time.monotonic()
            except (*LOST, RedisError):
                pass
            await asyncio.sleep(0.01)

    working = [asyncio.create_task(work(number)) for number in range(20)]
    victim = breakable.master_of(KEY)
    victim.kill()
    await asyncio.to_thread(breakable.until_taken_over, KEY, victim)
    began_s = time.monotonic()
    while min(good_s) < began_s:
        assert time.monotonic() - began_s < 30
        ended, _ = await asyncio.wait(working, timeout=0.02, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    over = True
    await asyncio.gather(*working)
    await access.close()


async def test_s52_the_shared_client_comes_back_after_all_nodes_were_gone(breakable: ValkeyCluster) -> None:
    access = open_access(breakable.url, timeout_s=2.0)
    await access.redis.set("key", "x")
    for node in breakable.nodes:
        node.kill()
    for _ in range(8):  # more often than there are nodes to forget
        with pytest.raises(LOST):
            await access.redis.get("key")
    await asyncio.to_thread(breakable.mend)
    assert await access.redis.get("key") == b"x"
    await access.close()


async def test_s58_a_slot_that_nobody_serves_is_a_lost_connection(breakable: ValkeyCluster) -> None:
    access = open_access(breakable.url)
    slot, home = slot_of("key"), breakable.master_of("key")
    try:
        for node in breakable.nodes:
            breakable.client(node).execute_command("CLUSTER", "DELSLOTS", slot)
        with pytest.raises(LOST):
            await access.redis.get("key")
        async with access.redis.pipeline(transaction=False) as pipe:
            pipe.get("key")
            with pytest.raises(LOST):
                await pipe.execute()
        with pytest.raises(LOST):
            await access.link("key").call("GET", "key")
    finally:
        breakable.client(home).execute_command("CLUSTER", "ADDSLOTS", slot)
    await access.close()


def test_a_node_that_does_not_answer_is_asked_last_and_never_forgotten() -> None:
    known = _Known({name: cast("Any", name) for name in ("a", "b", "c")})
    seen: list[ClusterNode] = []
    for node in known.values():
        seen.append(node)
        known.pop("a", None)
    assert seen == ["a", "b", "c"]
    assert list(known) == ["b", "c", "a"]
    assert known.pop("nobody", None) is None
    assert known.pop("b") == "b", "one that has left the cluster goes"
    assert list(known) == ["c", "a"]
