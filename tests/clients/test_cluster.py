"""The producers on a cluster: what a URL says, keys that are elsewhere, and nodes that come and go."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from redis import exceptions
from redis.crc import key_slot

from bargein_client import (
    AsyncBargein,
    Bargein,
    Lifecycle,
    Options,
    Output,
    UnreachableError,
    aio_nodes,
    sync_nodes,
    transport,
)
from bargein_client.places import SlotMap, read_url
from control.store.keys import PartitionKeys, partition_of
from tests.clusters import ValkeyCluster, until
from tests.system import RunningSystem

pytestmark = pytest.mark.cluster

FRAME = bytes(640)
PATIENT = Options(unreachable_after_s=30.0)


@pytest.mark.parametrize(
    ("url", "hosts", "plain", "service"),
    [
        ("redis://h:1/2", (), "redis://h:1/2", ""),
        ("unix:///run/redis.sock", (), "unix:///run/redis.sock", ""),
        ("redis+cluster://a:1,b", (("a", 1), ("b", 6379)), "redis://a:1", ""),
        ("rediss+cluster://me:p%40@a,b:2/0?x=1", (("a", 6379), ("b", 2)), "rediss://me:p%40@a/0?x=1", ""),
        ("redis+cluster://[::1]:7", (("::1", 7),), "redis://[::1]:7", ""),
        ("redis+sentinel://a,b:7/calls", (("a", 26379), ("b", 7)), "redis://a/", "calls"),
        ("rediss+sentinel://me:p@a/calls/3?x=1", (("a", 26379),), "rediss://me:p@a/3?x=1", "calls"),
    ],
)
def test_a_url_names_one_server_or_several(url: str, hosts: Any, plain: str, service: str) -> None:
    place = read_url(url)
    assert (place.hosts, place.plain, place.service) == (hosts, plain, service)


def test_the_sentinels_password_is_theirs_alone() -> None:
    place = read_url("redis+sentinel://me:hush@a/calls?sentinel_password=p%40ss&sentinel_username=who&x=1")
    assert place.about_sentinels == {"username": "who", "password": "p@ss"}
    assert place.plain == "redis://me:hush@a/?x=1"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis+cluster://h/3", "no databases"),
        ("redis+cluster://", "names no host"),
        ("redis+cluster://a,,b", "names no host"),
        ("redis+cluster://h:many", "ort could not be cast"),
        ("redis+sentinel://h", "names no service"),
    ],
)
@pytest.mark.parametrize("kind", [AsyncBargein, Bargein])
def test_a_url_that_cannot_be_used_is_refused(kind: Any, url: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        kind(url)


def test_a_map_is_learnt_and_corrected() -> None:
    slots = SlotMap((("h", 1),))
    assert slots.stale
    assert slots.candidates == [("h", 1)]
    ranges = [[0, 16000, [b"", 7000, b"id"], [b"r", 7001, b"id"]], [16001, 16382, [None, 7002, b"id"]]]
    assert slots.learn(ranges, ("h", 1)) == {("h", 7000), ("h", 7002)}
    assert slots.candidates == [("h", 1), ("h", 7000), ("r", 7001), ("h", 7002)]
    assert not slots.stale
    assert slots.find("foo") == ("h", 7000)  # slot 12182
    slots.note_moved(exceptions.MovedError("12182 new:7"))
    assert slots.find("foo") == ("new", 7)
    with pytest.raises(exceptions.ConnectionError, match="no node"):
        slots.find(next(f"key-{n}" for n in range(1_000_000) if key_slot(f"key-{n}".encode()) == 16383))
    assert slots.stale


@pytest.mark.parametrize(
    "error", [exceptions.RedisClusterException("Redis Cluster cannot be connected"), TimeoutError()]
)
async def test_a_cluster_that_cannot_be_connected_is_trouble_that_passes(error: Exception) -> None:
    """redis-py's own client says so while it knows no node; a caller's may be handed in."""

    class Troubled:
        tries = 0

        def get_connection_kwargs(self) -> dict[str, Any]:
            return {"socket_timeout": 1.0}

        async def hgetall(self, _key: str) -> dict[bytes, bytes]:
            self.tries += 1
            if self.tries < 3:
                raise error
            return {b"protocol": b"1", b"partitions": b"1"}

    redis: Any = Troubled()
    async with AsyncBargein(redis, options=Options(backoff_s=0.01)):
        assert redis.tries == 3


@pytest.mark.parametrize("kind", [AsyncBargein, Bargein])
async def test_where_no_node_answers_it_is_said_after_some_patience(kind: Any) -> None:
    client = kind("redis+cluster://127.0.0.1:1,127.0.0.1:2", options=Options(unreachable_after_s=0.2))
    with pytest.raises(UnreachableError, match=r"no node of the cluster answers: 127\.0\.0\.1:1: .*127\.0\.0\.1:2"):
        await (client.connect() if kind is AsyncBargein else asyncio.to_thread(client.connect))
    await (client.aclose() if kind is AsyncBargein else asyncio.to_thread(client.close))


@pytest.fixture
async def system(cluster: ValkeyCluster) -> AsyncIterator[RunningSystem]:
    async with RunningSystem(cluster.url) as system:
        yield system


async def test_a_call_is_held_on_a_cluster(system: RunningSystem, connect: Any) -> None:
    async with connect(system.url) as client:
        sessions = [await client.open(f"call-{number}") for number in range(6)]
        assert len({partition_of(f"call-{number}", 16) for number in range(6)}) > 3
        for session in sessions:
            await session.append(FRAME, final=True)
            async for event in session.events():
                if isinstance(event, Output):
                    break
            assert (await session.interrupt()).ok
            assert (await session.close()).ok
            async for event in session.events():
                if isinstance(event, Lifecycle) and event.terminal:
                    assert event.reason == "client_close"


async def test_s58_a_call_goes_on_while_its_slot_moves(
    cluster: ValkeyCluster, system: RunningSystem, connect: Any
) -> None:
    key = PartitionKeys(partition_of("call-9", 16)).owner
    async with connect(system.url) as client, await client.open("call-9") as session:
        await session.append(FRAME)
        with cluster.half_moved(key):
            # It is taken, and answered once the slot has arrived.
            appended = await session.append(FRAME, wait=False)
        assert (await appended).ok
        with cluster.moved(key):
            assert (await session.append(FRAME)).ok
        assert (await session.interrupt()).ok


async def test_s58_a_key_that_is_ahead_of_its_slot_is_asked_for_where_it_is(cluster: ValkeyCluster) -> None:
    first, last, new = "{0}:first", "{0}:last", "{0}:new"
    raw = cluster.client(cluster.master_of(first))
    raw.xadd(first, {"b": "x"}, id="1-1")
    raw.xadd(last, {"b": "x"}, id="1-1")
    aio = aio_nodes.open_nodes(cluster.url, PATIENT)
    sync = sync_nodes.open_nodes(cluster.url, PATIENT)
    with cluster.half_moved(first):
        assert len(cast("Any", raw.execute_command("CLUSTER", "GETKEYSINSLOT", key_slot(b"0"), 10))) == 1
        for key in (first, last):
            read = [(b"1-1", {b"b": b"x"})]
            assert await aio.call(key, lambda redis, key=key: redis.xrevrange(key)) == read
            assert sync.call(key, lambda redis, key=key: redis.xrevrange(key)) == read
            assert transport.entries_of(sync.call(key, lambda redis, key=key: redis.xread({key: "0"}, block=1))) == read
        await aio.call(new, lambda redis: redis.xadd(new, {"b": "1"}))
        sync.call(new, lambda redis: redis.xadd(new, {"b": "2"}))
    assert await aio.call(new, lambda redis: redis.xlen(new)) == 2
    await aio.aclose()
    sync.close()


async def test_s58_a_read_that_is_blocked_where_it_was_asked_for_is_sent_on(cluster: ValkeyCluster) -> None:
    """The slot arrives, or goes back, while the read waits at the new place: it is MOVED from there."""
    aio = aio_nodes.open_nodes(cluster.url, PATIENT)
    sync = sync_nodes.open_nodes(cluster.url, PATIENT)
    there: Any = cluster.client(cluster.another("{0}"))
    with cluster.half_moved("{0}"):
        reads = [
            asyncio.create_task(aio.call("{0}", lambda redis: redis.xread({"{0}": "$"}, block=3_000))),
            asyncio.create_task(
                asyncio.to_thread(sync.call, "{0}", lambda redis: redis.xread({"{0}": "$"}, block=3_000))
            ),
        ]
        await asyncio.to_thread(
            until, lambda: sum(each["flags"] == "b" for each in there.client_list()) == 2, "both reads wait"
        )
    assert await asyncio.gather(*reads) == [[], []]
    await aio.aclose()
    sync.close()


@pytest.fixture(scope="module")
def failing_cluster() -> Iterator[ValkeyCluster]:
    with ValkeyCluster() as cluster:
        yield cluster


@pytest.fixture(params=["aio", "sync"])
async def calls(request: pytest.FixtureRequest, failing_cluster: ValkeyCluster) -> AsyncIterator[list[Any]]:
    """Twenty calls through one client; each makes a round a moment, and notes when it was answered."""
    failing_cluster.flush()
    over = threading.Event()
    rounds: list[list[float]] = [[] for _ in range(20)]

    async def speak(client: AsyncBargein, number: int) -> None:
        async with await client.open(f"call-{number}") as session:
            while not over.is_set():
                await session.append(FRAME, final=True)
                assert (await session.interrupt()).ok
                rounds[number].append(time.monotonic())
                await asyncio.sleep(0.05)

    def speak_in_thread(client: Bargein, number: int) -> None:
        with client.open(f"call-{number}") as session:
            while not over.is_set():
                session.append(FRAME, final=True)
                assert session.interrupt().ok
                rounds[number].append(time.monotonic())
                time.sleep(0.05)

    async with RunningSystem(failing_cluster.url):
        if request.param == "aio":
            async with AsyncBargein(failing_cluster.url, options=PATIENT) as client:
                running: list[Any] = [asyncio.create_task(speak(client, number)) for number in range(20)]
                yield [rounds, running]
                over.set()
                await asyncio.gather(*running)
        else:
            loop = asyncio.get_running_loop()
            with ThreadPoolExecutor(20) as pool:
                sync_client = await loop.run_in_executor(pool, lambda: Bargein(failing_cluster.url, options=PATIENT))
                running = [loop.run_in_executor(pool, speak_in_thread, sync_client, number) for number in range(20)]
                yield [rounds, running]
                over.set()
                await asyncio.gather(*running)
                await loop.run_in_executor(pool, sync_client.close)
    failing_cluster.mend()


async def _until_all_spoke(calls: list[Any], patience_s: float = 40.0) -> None:
    rounds, running = calls
    began_s = time.monotonic()
    while not all(times and times[-1] > began_s for times in rounds):
        assert time.monotonic() - began_s < patience_s
        ended, _ = await asyncio.wait(running, timeout=0.02, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()


async def test_s58_twenty_calls_through_one_client_see_a_failover_as_a_delay(
    calls: list[Any], failing_cluster: ValkeyCluster
) -> None:
    await _until_all_spoke(calls)
    victim = failing_cluster.master_of(PartitionKeys(partition_of("call-0", 16)).owner)
    victim.kill()
    await asyncio.to_thread(failing_cluster.until_taken_over, PartitionKeys(partition_of("call-0", 16)).owner, victim)
    await _until_all_spoke(calls)


@pytest.mark.parametrize("kind", ["aio", "sync"])
async def test_s58_calls_at_a_master_that_hangs_end_once_another_has_its_slots(
    failing_cluster: ValkeyCluster, kind: str
) -> None:
    """All of them at once, those that wait for a connection too; none waits for its own timeout."""
    key = PartitionKeys(0).commands
    victim = failing_cluster.master_of(key)
    elsewhere = next(f"{{{n}}}" for n in range(16) if failing_cluster.master_of(f"{{{n}}}") is not victim)
    options = Options(reply_timeout_s=120.0, attempts=1)
    aio, sync = aio_nodes.open_nodes(failing_cluster.url, options), sync_nodes.open_nodes(failing_cluster.url, options)

    def length_of(name: str) -> Awaitable[int]:
        if kind == "aio":
            return aio.call(name, lambda redis: redis.xlen(name))
        return asyncio.to_thread(sync.call, name, lambda redis: redis.xlen(name))

    assert await length_of(key) == 0
    os.kill(victim.pid, signal.SIGSTOP)
    try:
        under_way = [asyncio.ensure_future(length_of(key)) for _ in range(4)]
        await asyncio.to_thread(failing_cluster.until_taken_over, key, victim)
        assert not any(each.done() for each in under_way)
        cast("Any", aio if kind == "aio" else sync)._slots.stale = True
        assert await length_of(elsewhere) == 0
        began_s = time.monotonic()
        ended = await asyncio.gather(*under_way, return_exceptions=True)
        assert time.monotonic() - began_s < 30.0  # each connection's patience is 62 s
        assert {type(error) for error in ended} == {exceptions.ConnectionError}
        assert await length_of(key) == 0
    finally:
        os.kill(victim.pid, signal.SIGCONT)
        await aio.aclose()
        sync.close()
        await asyncio.to_thread(failing_cluster.mend)


@pytest.mark.parametrize("nodes", [aio_nodes, sync_nodes])
def test_certificates_and_credentials_hold_for_every_node(nodes: Any) -> None:
    cluster = nodes.open_nodes("rediss+cluster://me:p%40ss@a:1,b:2?ssl_ca_certs=/ca.pem", Options())
    settings = cluster._client(("c", 3)).connection_pool.connection_kwargs
    assert (settings["host"], settings["port"], settings["password"]) == ("c", 3, "p@ss")
    assert settings["ssl_ca_certs"] == "/ca.pem"
    sentinel = nodes.open_nodes("rediss+sentinel://a/calls?ssl_ca_certs=/ca.pem&sentinel_password=x", Options())
    pool = sentinel._client.connection_pool
    assert pool.connection_kwargs["ssl_ca_certs"] == "/ca.pem"
    (about,) = [each.connection_pool.connection_kwargs for each in pool.sentinel_manager.sentinels]
    assert (about["ssl_ca_certs"], about["password"]) == ("/ca.pem", "x")
