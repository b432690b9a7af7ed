"""A stage worker's word and the end of its queue entries: one step, or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from redis.exceptions import ResponseError

from control.core import commands as c
from control.store.keys import PartitionKeys
from control.store.publishing import MAX_ENTRIES, Acknowledgement, acknowledge, acknowledge_all
from control.wire.stage import AcceptedAck, CleanedAck, RejectedAck, decode_ack
from tests.store.desk import KEYS, STAGE

if TYPE_CHECKING:
    from control.wire.stage import Ack
    from tests.store.desk import Store

QUEUE = KEYS.submissions(STAGE)


async def fill(store: Store, count: int) -> list[str]:
    return [(await store.redis.xadd(QUEUE, {"b": b"x"})).decode() for _ in range(count)]


async def heard(store: Store, keys: PartitionKeys = KEYS) -> list[tuple[str, c.Event]]:
    return [decode_ack(fields[b"b"]) for _, fields in await store.redis.xrange(keys.acks)]


async def test_acks_arrive_in_order_and_their_entries_are_gone(store: Store) -> None:
    first, second, third = await fill(store, 3)
    acks: list[Ack] = [AcceptedAck("a", 1, 7), RejectedAck("b", 2, 8, "timeout", "late")]
    assert await acknowledge(store.link, KEYS, STAGE, acks, QUEUE, [first, third])
    assert await heard(store) == [("a", c.Accepted(1, 7)), ("b", c.Rejected(2, 8, "timeout", "late"))]
    assert [entry_id.decode() for entry_id, _ in await store.redis.xrange(QUEUE)] == [second]


async def test_either_part_may_be_empty(store: Store) -> None:
    [entry_id] = await fill(store, 1)
    assert await acknowledge(store.link, KEYS, STAGE, [CleanedAck("a", 1, 2, STAGE)], QUEUE, [])
    assert await acknowledge(store.link, KEYS, STAGE, [], QUEUE, [entry_id])
    assert await heard(store) == [("a", c.Cleaned(1, 2, STAGE))]
    assert await store.redis.xlen(QUEUE) == 0


async def test_s40_a_fenced_life_acknowledges_nothing(store: Store) -> None:
    [entry_id] = await fill(store, 1)
    await store.redis.sadd(KEYS.fenced, STAGE)
    before = await store.dump()
    assert not await acknowledge(store.link, KEYS, STAGE, [AcceptedAck("a", 1, 7)], QUEUE, [entry_id])
    assert await store.dump() == before


async def test_many_partitions_go_in_one_write_and_fail_apart(real_store: Store) -> None:
    store = real_store
    other = PartitionKeys(4)
    await store.redis.set(KEYS.acks, "not a stream")
    calls = [Acknowledgement(keys, keys.submissions(STAGE), [AcceptedAck("a", 1, 7)]) for keys in (KEYS, other)]
    broken, fine = await acknowledge_all(store.link, STAGE, calls)
    assert isinstance(broken, ResponseError)
    assert fine is True
    assert await heard(store, other) == [("a", c.Accepted(1, 7))]


async def test_as_many_entries_as_are_allowed_fit(store: Store) -> None:
    entry_ids = await fill(store, MAX_ENTRIES)
    assert await acknowledge(store.link, KEYS, STAGE, [], QUEUE, entry_ids)
    assert await store.redis.xlen(QUEUE) == 0
    with pytest.raises(ValueError, match="at most 1000"):
        await acknowledge(store.link, KEYS, STAGE, [], QUEUE, ["1-1"] * (MAX_ENTRIES + 1))


async def test_s53_a_full_server_takes_acks_so_that_it_can_drain(real_store: Store) -> None:
    store = real_store
    [entry_id] = await fill(store, 1)
    try:
        await store.redis.config_set("maxmemory", "1")
        assert await acknowledge(store.link, KEYS, STAGE, [AcceptedAck("a", 1, 7)], QUEUE, [entry_id])
    finally:
        await store.redis.config_set("maxmemory", "0")
    assert await heard(store) == [("a", c.Accepted(1, 7))]
    assert await store.redis.xlen(QUEUE) == 0
