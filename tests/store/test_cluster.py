"""Links to a cluster: who serves what, and slots that are elsewhere, on their way or nobody's (S58)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MovedError, NoScriptError, ResponseError

from control.store.access import ClusterAccess, open_access
from control.store.cluster import Address, SlotLink, SlotMap, SpreadLink, _key_of, connection_to, slot_of
from control.store.keys import PartitionKeys
from control.store.link import LOST
from control.store.scripts import script
from tests.clusters import ValkeyCluster, until

pytestmark = pytest.mark.cluster

KEYS = PartitionKeys(0)


@pytest.fixture
async def access(cluster: ValkeyCluster) -> AsyncIterator[ClusterAccess]:
    access = open_access(cluster.url)
    assert isinstance(access, ClusterAccess)
    yield access
    await access.close()


@pytest.fixture
async def link(access: ClusterAccess) -> AsyncIterator[SlotLink]:
    """A link for partition 0."""
    link = access.link(KEYS.owner)
    assert isinstance(link, SlotLink)
    yield link
    await link.close()


@pytest.fixture
async def spread(access: ClusterAccess) -> AsyncIterator[SpreadLink]:
    link = access.spread()
    assert isinstance(link, SpreadLink)
    yield link
    await link.close()


def test_a_commands_key_is_found() -> None:
    assert _key_of(("GET", "a")) == "a"
    assert _key_of(("evalsha", "sha", 2, "a", "b", "argument")) == "a"
    assert _key_of(("EVAL", "return 1", "1", "a")) == "a"
    assert _key_of(("XREAD", "COUNT", 3, "BLOCK", 5, "STREAMS", "a", "b", "0-0", "0-0")) == "a"


def test_a_hash_tag_alone_makes_the_slot() -> None:
    assert slot_of("bargein:{3}:commands") == slot_of("{3}") == slot_of("3")
    assert slot_of("foo") == 12182
    assert slot_of("{}a") != slot_of("{}b"), "an empty tag is none"


def map_of(cluster: ValkeyCluster, access: ClusterAccess, asked: list[Address]) -> SlotMap:
    """A map that begins with a node that isn't there, and notes whom it asks."""

    def make(address: Address, timeout_s: float | None) -> Any:
        asked.append(address)
        return connection_to(access.pool, address, timeout_s)

    return SlotMap([("127.0.0.1", 1), ("127.0.0.1", cluster.nodes[0].port)], make)


async def test_the_map_is_asked_for_once_of_the_first_node_that_answers(
    cluster: ValkeyCluster, access: ClusterAccess
) -> None:
    asked: list[Address] = []
    slots = map_of(cluster, access, asked)
    found = await asyncio.gather(*(slots.find(slot) for slot in range(0, 16384, 7)))
    assert {port for _, port in found} == {node.port for node in cluster.masters()}
    assert asked == [("127.0.0.1", 1), ("127.0.0.1", cluster.nodes[0].port)]
    assert await slots.find(slot_of(KEYS.owner)) == ("127.0.0.1", cluster.master_of(KEYS.owner).port)
    slots.doubt()
    await slots.find(0)
    assert asked[2:] == [("127.0.0.1", cluster.nodes[0].port)], "who has answered is asked first"


async def test_a_node_that_names_itself_by_no_address_is_the_one_that_was_asked(access: ClusterAccess) -> None:
    slots = SlotMap([("h", 1)], lambda _address, _timeout_s: cast("Any", None))
    ranges = [[0, 100, [b"", 7000, b"id"]], [101, 200, [None, 7001, b"id"], [b"10.0.0.2", 7002, b"id"]]]
    slots._learn(ranges, ("h", 1))
    assert (await slots.find(100), await slots.find(101)) == (("h", 7000), ("h", 7001))
    assert set(slots._nodes) == {("h", 1), ("h", 7000), ("h", 7001), ("10.0.0.2", 7002)}
    with pytest.raises(RedisConnectionError, match="no node of the cluster serves slot 201"):
        await slots.find(201)


async def test_where_no_node_answers_all_are_named() -> None:
    access = open_access("redis+cluster://127.0.0.1:1,127.0.0.1:2", timeout_s=1.0)
    with pytest.raises(RedisConnectionError, match=r"127\.0\.0\.1:1: .*127\.0\.0\.1:2: "):
        await access.link("x").call("GET", "x")
    (answer,) = await access.spread().try_all([("GET", "x")])
    assert isinstance(answer, RedisConnectionError)
    await access.close()


async def test_a_server_that_is_no_cluster_says_so(redis_url: str) -> None:
    access = open_access(redis_url.replace("redis://", "redis+cluster://"))
    with pytest.raises(RedisConnectionError, match="cluster support disabled"):
        await access.link("x").call("GET", "x")
    await access.close()


async def test_answers_of_many_nodes_come_in_the_order_of_the_commands(spread: SpreadLink) -> None:
    commands = [("SET", f"key-{n}", n) for n in range(200)]
    assert await spread.call_all(commands) == [b"OK"] * 200
    assert await spread.call_all([("GET", f"key-{n}") for n in range(200)]) == [b"%d" % n for n in range(200)]


async def test_an_error_stands_in_its_place_and_the_others_are_answered(spread: SpreadLink) -> None:
    answers = await spread.try_all([("SET", "text", "x"), *[("SET", f"key-{n}", n) for n in range(20)]])
    assert answers == [b"OK"] * 21
    wrong, *others = await spread.try_all([("INCR", "text"), *[("INCR", f"key-{n}") for n in range(20)]])
    assert isinstance(wrong, ResponseError)
    assert others == list(range(1, 21))


async def test_every_node_is_told_of_a_script_that_it_does_not_know(cluster: ValkeyCluster, spread: SpreadLink) -> None:
    calls = [(script("acquire"), [PartitionKeys(p).owner], ["control-a", 1000, "r"]) for p in range(16)]
    assert {cluster.master_of(keys[0]).port for _, keys, _ in calls} == {node.port for node in cluster.masters()}
    assert [answer[0] for answer in await spread.run_all(calls)] == [1] * 16
    calls = [(known, keys, ["control-b", *rest]) for known, keys, (_, *rest) in calls]
    assert [answer[0] for answer in await spread.run_all(calls)] == [0] * 16
    wrong = ("EVALSHA", "0" * 40, 1, KEYS.owner)
    assert isinstance((await spread.try_all([wrong]))[0], NoScriptError)


async def test_s58_a_slot_that_has_moved_is_a_lost_connection_and_the_next_call_finds_it(
    cluster: ValkeyCluster, link: SlotLink
) -> None:
    await link.call("SET", KEYS.owner, "x")
    with cluster.moved(KEYS.owner):
        with pytest.raises(RedisConnectionError, match="has moved"):
            await link.call("GET", KEYS.owner)
        assert await link.call("GET", KEYS.owner) == b"x"
    with pytest.raises(LOST):
        await link.call_all([("GET", KEYS.owner), ("GET", KEYS.acks)])
    assert await link.call("GET", KEYS.owner) == b"x"


async def test_s58_a_blocked_read_ends_when_its_slot_has_moved(cluster: ValkeyCluster, link: SlotLink) -> None:
    await link.call("XADD", KEYS.commands, "1-1", "b", "x")
    read = asyncio.create_task(link.call("XREAD", "BLOCK", 4_000, "STREAMS", KEYS.commands, KEYS.acks, "1-1", "0-0"))
    node = cluster.client(cluster.master_of(KEYS.commands))
    await asyncio.to_thread(until, lambda: _blocked(node), "the read waits")
    with cluster.moved(KEYS.commands), pytest.raises(RedisConnectionError):
        await read


async def test_what_is_under_way_at_a_node_ends_when_its_slot_is_known_to_be_elsewhere(
    cluster: ValkeyCluster, access: ClusterAccess, link: SlotLink
) -> None:
    """A node that hangs doesn't say that it has been replaced; whoever else hears of it, does."""
    read = asyncio.create_task(link.call("XREAD", "BLOCK", 4_000, "STREAMS", KEYS.commands, "0-0"))
    node = cluster.client(cluster.master_of(KEYS.commands))
    await asyncio.to_thread(until, lambda: _blocked(node), "the read waits")
    access._slots.note_moved(MovedError(f"{slot_of(KEYS.owner)} 127.0.0.1:{cluster.another(KEYS.owner).port}"))
    async with asyncio.timeout(1.0):
        with pytest.raises(LOST):
            await read
    assert await link.call("GET", KEYS.owner) is None


async def test_whoever_sends_what_has_no_key_follows_the_slot_too(
    cluster: ValkeyCluster, access: ClusterAccess, link: SlotLink
) -> None:
    """Else a reader could not be woken any more: its waker would ask the node that the reader has left."""
    waker = access.link(KEYS.owner)
    await waker.call("CLIENT", "ID")
    await link.call("SET", KEYS.owner, "x")
    with cluster.moved(KEYS.owner):
        with pytest.raises(LOST):
            await link.call("GET", KEYS.owner)
        with pytest.raises(LOST):
            await waker.call("CLIENT", "ID")
        await waker.call("CLIENT", "ID")
        assert waker._connection is not None
        assert cast("Any", waker._connection).port == cluster.master_of(KEYS.owner).port
    await waker.close()


async def test_s58_a_key_that_is_ahead_of_its_slot_is_asked_for_where_it_is(
    cluster: ValkeyCluster, link: SlotLink, spread: SpreadLink
) -> None:
    first, last = "{0}:first", "{0}:last"
    await link.call_all([("SET", first, "1"), ("SET", last, "2")])
    here = cluster.client(cluster.master_of(first))
    with cluster.half_moved(first):
        left = {key.decode() for key in here.execute_command("CLUSTER", "GETKEYSINSLOT", slot_of(first), 10)}
        assert len(left) == 1, "one key has gone, one is left"
        for each in (link, spread):
            assert await each.call_all([("GET", first), ("GET", last)]) == [b"1", b"2"]
        # A new key is begun at the new place.
        assert await link.call("XADD", "{0}:new", "1-1", "b", "x") == b"1-1"
        assert await spread.call("XLEN", "{0}:new") == 1
        assert here.execute_command("CLUSTER", "COUNTKEYSINSLOT", slot_of(first)) == 1
    assert await spread.call("XLEN", "{0}:new") == 1


async def test_s58_a_read_that_is_blocked_where_it_was_asked_for_is_sent_on(
    cluster: ValkeyCluster, access: ClusterAccess, link: SlotLink
) -> None:
    """The slot arrives, or goes back, while the read waits at the new place: it is MOVED from there."""
    there = cluster.client(cluster.another(KEYS.commands))
    with cluster.half_moved(KEYS.commands):
        command = ("XREAD", "BLOCK", 4_000, "STREAMS", KEYS.commands, "$")
        spread = access.spread()
        reads = [asyncio.create_task(each.call(*command)) for each in (link, spread)]
        await asyncio.to_thread(until, lambda: _blocked(there) == 2, "both reads wait")
    with pytest.raises(RedisConnectionError):
        await reads[0]
    # The other is asked for again where the slot is, and hears nothing there either.
    assert await reads[1] is None
    await spread.close()


def _blocked(node: Any) -> int:
    return sum(each["flags"] == "b" for each in node.client_list())


async def test_s58_a_script_is_loaded_where_its_key_is_asked_for(
    cluster: ValkeyCluster, link: SlotLink, spread: SpreadLink
) -> None:
    with cluster.half_moved(KEYS.owner):
        answer = await link.run("acquire", [KEYS.owner], ["control-a", 60_000, "r"])
        assert answer[0] == 1
        for node in cluster.masters():
            cluster.client(node).script_flush()
        (answer,) = await spread.run_all([(script("acquire"), [KEYS.owner], ["control-b", 60_000, "r"])])
        assert answer[0] == 0
    (holder,) = await spread.call_all([("HGET", KEYS.owner, "holder")])
    assert holder == b"control-a"


async def test_s58_keys_on_both_sides_make_a_script_wait_for_the_slot(
    cluster: ValkeyCluster, link: SlotLink, spread: SpreadLink
) -> None:
    names = [f"{{0}}:{n}" for n in range(4)]
    await link.call_all([("SET", name, "x") for name in names])
    with cluster.half_moved(names[0]):
        with pytest.raises(RedisConnectionError, match=f"slot {slot_of(names[0])} is not settled"):
            await link.call("MGET", *names)
        (answer,) = await spread.try_all([("MGET", *names)])
        assert isinstance(answer, ResponseError)
    assert await _until_answered(link, "MGET", *names) == [b"x"] * 4


async def _until_answered(link: SlotLink, *command: str) -> Any:
    async with asyncio.timeout(20):
        while True:
            try:
                return await link.call(*command)
            except LOST:
                await asyncio.sleep(0.01)


async def test_a_map_that_is_wrong_is_put_right_by_the_nodes(
    cluster: ValkeyCluster, access: ClusterAccess, link: SlotLink, spread: SpreadLink
) -> None:
    await link.call("SET", KEYS.owner, "x")
    await link.close()
    wrong = cluster.another(KEYS.owner)
    access._slots.note_moved(MovedError(f"{slot_of(KEYS.owner)} 127.0.0.1:{wrong.port}"))
    with pytest.raises(RedisConnectionError, match="has moved"):
        await link.call("GET", KEYS.owner)
    access._slots.note_moved(MovedError(f"{slot_of(KEYS.owner)} 127.0.0.1:{wrong.port}"))
    assert await spread.call("GET", KEYS.owner) == b"x"
    assert await link.call("GET", KEYS.owner) == b"x"


async def test_a_replica_in_the_map_sends_us_to_its_master(
    cluster: ValkeyCluster, access: ClusterAccess, spread: SpreadLink
) -> None:
    await spread.call("SET", KEYS.owner, "x")
    replica = cluster.replica_of(cluster.master_of(KEYS.owner))
    access._slots.note_moved(MovedError(f"{slot_of(KEYS.owner)} 127.0.0.1:{replica.port}"))
    assert await spread.call("GET", KEYS.owner) == b"x"
