"""Reading the queues of a life: everything once, also over lost connections, and what an abort must know of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from redis.exceptions import ResponseError

from control.store.keys import PartitionKeys
from control.store.link import LOST, Link, make_pool
from control.store.queues import QueueReader, Reading
from control.store.reading import FIRST

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from redis.asyncio import ConnectionPool

    from tests.store.desk import Store

WORKER = "ear-1"
PARTITIONS = [PartitionKeys(0), PartitionKeys(1)]
NOW_MS = 1  # of blocking: these tests never wait for what will not come


class HeldLink(Link):
    """A link whose answers, once the server has given them, wait here until they are released."""

    def __init__(self, pool: ConnectionPool) -> None:
        super().__init__(pool)
        self.answered = asyncio.Event()
        self.released = asyncio.Event()
        self.released.set()

    async def call(self, *arguments: Any) -> Any:
        answer = await super().call(*arguments)
        self.answered.set()
        await self.released.wait()
        return answer


class Desk:
    """A reader on a connection of its own, and a producer for its queues."""

    def __init__(self, store: Store, link: HeldLink) -> None:
        self.redis = store.redis
        self.link = link
        self.queues = [each.submissions(WORKER) for each in PARTITIONS]
        self.aborts = [each.aborts(WORKER) for each in PARTITIONS]
        self.reader = QueueReader(
            link, dict(enumerate(self.queues)), block_ms=NOW_MS, glance=dict(enumerate(self.aborts))
        )

    async def add(self, partition: int = 0, body: bytes = b"x", **fields: Any) -> str:
        return (await self.redis.xadd(self.queues[partition], {"b": body, "p": b"", **fields})).decode()

    async def abort(self, partition: int = 0, after: str = "0-0") -> str:
        return (await self.redis.xadd(self.aborts[partition], {"b": b"abort", "a": after})).decode()

    async def delete(self, partition: int, *entry_ids: str) -> None:
        await self.redis.xdel(self.queues[partition], *entry_ids)
        self.reader.finish(partition, entry_ids)

    async def lose_connection(self) -> None:
        client_id = await self.link.call("CLIENT", "ID")
        await self.redis.client_kill_filter(_id=client_id)
        with pytest.raises(LOST):
            await self.reader.read()


@pytest.fixture
async def desk(one_server: Store) -> AsyncIterator[Desk]:
    """One reader of two partitions, as on one server; on a cluster each partition has one (tests/cluster)."""
    pool = make_pool(one_server.server.url)
    link = HeldLink(pool)
    yield Desk(one_server, link)
    await link.close()
    await pool.disconnect()


def ids(reading: Reading) -> list[tuple[int, str]]:
    return [(entry.partition, entry.entry_id) for entry in reading.entries]


async def test_entries_of_all_partitions_come_once_and_in_order(desk: Desk) -> None:
    first = [(0, await desk.add(0)), (0, await desk.add(0)), (1, await desk.add(1))]
    assert ids(await desk.reader.read()) == first
    later = (1, await desk.add(1, b"more", p=b"payload"))
    reading = await desk.reader.read()
    assert ids(reading) == [later]
    assert (reading.entries[0].body, reading.entries[0].payload) == (b"more", b"payload")
    assert (await desk.reader.read()).entries == []
    assert desk.reader.in_hand == 4


async def test_s52_after_a_lost_connection_only_what_is_not_in_hand_comes(desk: Desk) -> None:
    held = await desk.add()
    done = await desk.add()
    await desk.reader.read()
    await desk.delete(0, done)
    await desk.lose_connection()
    fresh = await desk.add()
    assert ids(await desk.reader.read()) == [(0, fresh)]
    await desk.delete(0, held, fresh)
    await desk.reader.read()
    assert desk.reader.in_hand == 0


async def test_an_entry_that_is_deleted_while_it_is_being_read_again_is_not_new(desk: Desk) -> None:
    entry_id = await desk.add()
    await desk.reader.read()
    await desk.lose_connection()
    desk.link.answered.clear()
    desk.link.released.clear()
    reading = asyncio.ensure_future(desk.reader.read())
    await desk.link.answered.wait()
    await desk.delete(0, entry_id)
    desk.link.released.set()
    assert (await reading).entries == []


async def test_s51_a_stream_that_begins_anew_is_read_from_its_beginning(desk: Desk) -> None:
    await desk.add()
    await desk.reader.read()
    await desk.lose_connection()
    await desk.redis.delete(*desk.queues)
    old = "5-1"
    await desk.redis.xadd(desk.queues[0], {"b": b"x"}, id=old)
    assert ids(await desk.reader.read()) == [(0, old)]


async def test_a_glance_shows_the_aborts_that_stood_beside_an_entry(desk: Desk) -> None:
    entry_id = await desk.add(1)
    abort_id = await desk.abort(1, after=entry_id)
    reading = await desk.reader.read()
    assert ids(reading) == [(1, entry_id)]
    [abort] = reading.seen
    assert (abort.partition, abort.entry_id, abort.body, abort.after) == (1, abort_id, b"abort", entry_id)


async def test_a_queue_is_read_to_an_entry_once_that_was_read(desk: Desk) -> None:
    entry_id = await desk.add()
    assert not desk.reader.has_read_to(0, entry_id)
    assert desk.reader.has_read_to(0, "0-0")
    await desk.reader.read()
    assert desk.reader.has_read_to(0, entry_id)
    assert not desk.reader.has_read_to(1, entry_id)


async def test_s55_what_was_deleted_by_hand_counts_as_read_once_the_queue_was(desk: Desk) -> None:
    entry_id = await desk.add()
    await desk.redis.xdel(desk.queues[0], entry_id)
    moment = desk.reader.moment
    assert not desk.reader.has_read_since(0, moment)
    await desk.reader.read()
    assert desk.reader.has_read_since(0, moment)
    assert not desk.reader.has_read_to(0, entry_id)


async def test_a_queue_that_holds_more_than_one_answer_is_not_read_yet(desk: Desk) -> None:
    for _ in range(FIRST + 1):
        await desk.add()
    moment = desk.reader.moment
    assert len((await desk.reader.read()).entries) == FIRST
    assert not desk.reader.has_read_since(0, moment)
    assert desk.reader.has_read_since(1, moment)
    assert len((await desk.reader.read()).entries) == 1
    assert desk.reader.has_read_since(0, moment)


async def test_a_queue_that_is_something_else_raises(desk: Desk) -> None:
    await desk.redis.set(desk.queues[1], "no stream")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await desk.reader.read()
