"""Taking, keeping and giving up a partition, and who shares them out."""

from __future__ import annotations

from typing import Any

import pytest

from control.core import commands as c
from control.store import keys
from control.store.keys import FIXED_TYPES
from control.store.mending import mend
from tests.store.desk import KEYS, SID, Desk, Store, command, until


async def acquire(store: Store, worker: str, lease_ms: int = 60_000, random_id: str = "r") -> list[Any]:
    return await store.run("acquire", [KEYS.owner], [worker, lease_ms, random_id])


async def test_a_free_partition_is_taken_and_a_held_one_is_not(store: Store) -> None:
    before = await store.now_ms()
    taken, token, revision, now_ms, unclean, *_ = await acquire(store, "control-a")
    assert (taken, revision, unclean) == (1, 0, 0)
    assert before <= now_ms <= await store.now_ms()
    assert token == f"{now_ms}:r".encode()
    refused, holder, until_ms, _ = await acquire(store, "control-b")
    assert (refused, holder) == (0, b"control-a")
    assert 59_000 < int(until_ms) - now_ms <= 60_000


async def test_s79_tokens_differ_and_rise_whoever_takes_the_partition(store: Store) -> None:
    numbers: list[int] = []
    tokens: set[bytes] = set()
    for attempt in range(20):
        _, token, *_ = await acquire(store, "control-a", random_id=f"r{attempt}")
        numbers.append(int(token.partition(b":")[0]))
        tokens.add(token)
    assert numbers == sorted(set(numbers))
    assert len(tokens) == 20


async def test_s79_a_token_whose_write_was_lost_is_never_given_again(store: Store) -> None:
    first = await store.acquire()
    # A failover: the master dies before it has replicated what it answered; the next one knows nothing of it.
    await store.redis.delete(KEYS.owner)
    second = await store.run("acquire", [KEYS.owner], ["control-b", 60_000, "another"])
    assert second[1].decode() != first.token
    stale = Desk(store, KEYS, first.token, 0)
    stale.open()
    before = await store.dump()
    assert (await stale.commit()).status != 0
    assert await store.dump() == before


async def test_a_token_is_above_the_last_one_even_if_the_servers_clock_goes_back(store: Store) -> None:
    await store.acquire()
    far = await store.now_ms() + 3_600_000
    await store.redis.hset(KEYS.owner, mapping={"number": far, "holder": ""})
    _, token, *_ = await acquire(store, "control-b")
    assert int(token.partition(b":")[0]) == far + 1


async def test_a_token_is_not_above_the_clock_for_nothing(store: Store) -> None:
    await store.redis.hset(KEYS.owner, "number", 17)
    _, token, _, now_ms, *_ = await acquire(store, "control-b")
    assert int(token.partition(b":")[0]) == now_ms


async def test_a_partition_that_was_handed_over_is_taken_cleanly_at_once(store: Store) -> None:
    desk = await store.acquire()
    desk.open()
    await desk.must_commit()
    assert await store.run("renew", [KEYS.owner], [desk.token, 0]) > 0
    taken, token, revision, _, unclean, *_ = await acquire(store, "control-b")
    assert (taken, revision, unclean) == (1, 1, 0)
    assert token.decode() != desk.token


async def test_a_lease_that_ran_out_is_taken_over_uncleanly_and_not_before(store: Store) -> None:
    await acquire(store, "control-a", lease_ms=80)
    first = await acquire(store, "control-b")
    assert first[0] == 0
    taken: list[Any] = []

    async def is_taken() -> bool:
        taken[:] = await acquire(store, "control-b")
        return taken[0] == 1

    await until(is_taken)
    assert taken[4] == 1
    assert taken[3] >= int(first[2])


async def test_a_renewal_moves_the_end_and_one_with_an_old_token_does_not(store: Store) -> None:
    desk = await store.acquire(lease_ms=1_000)
    now_ms = await store.run("renew", [KEYS.owner], [desk.token, 30_000])
    assert int(await store.redis.hget(KEYS.owner, "until_ms")) == now_ms + 30_000
    newer = await store.acquire(worker="control-a")
    before = await store.redis.hgetall(KEYS.owner)
    assert await store.run("renew", [KEYS.owner], [desk.token, 90_000]) == 0
    assert await store.run("renew", [KEYS.owner], [desk.token, 0]) == 0
    assert await store.redis.hgetall(KEYS.owner) == before
    assert newer.token == before[b"token"].decode()


async def test_i6_a_deposed_owner_that_wakes_up_much_later_can_change_nothing(store: Store) -> None:
    old = await store.acquire(lease_ms=1)
    old.open()

    async def is_over() -> bool:
        return (await acquire(store, "control-b"))[0] == 1

    await until(is_over)
    before = await store.dump()
    assert (await old.commit()).status != 0
    assert await store.run("renew", [KEYS.owner], [old.token, 60_000]) == 0
    assert await store.dump() == before


async def test_members_come_and_go(store: Store) -> None:
    now_ms, next_ms, *members = await store.run("join", [keys.CONTROLS], ["control-b", 60_000])
    assert (next_ms, members) == (0, [b"control-b"]), "there is nobody to miss"
    later_ms, next_ms, *members = await store.run("join", [keys.CONTROLS], ["control-a", 90_000])
    assert set(members) == {b"control-a", b"control-b"}
    assert next_ms == now_ms + 60_000, "b is the first to be missed"
    _, next_ms, *_ = await store.run("join", [keys.CONTROLS], ["control-b", 60_000])
    assert next_ms == later_ms + 90_000, "one is not missed by oneself"
    assert 0 <= await store.redis.zscore(keys.CONTROLS, "control-b") - now_ms <= 90_000
    _, _, *members = await store.run("join", [keys.CONTROLS], ["control-b", 0])
    assert members == [b"control-a"]
    await store.redis.zadd(keys.CONTROLS, {"control-a": now_ms - 1})
    _, _, *members = await store.run("join", [keys.CONTROLS], ["control-c", 60_000])
    assert members == [b"control-c"]
    _, _, *members = await store.run("join", [keys.CONTROLS], ["control-c", 0])
    assert members == []
    assert not await store.redis.exists(keys.CONTROLS)


@pytest.mark.parametrize("attribute", FIXED_TYPES)
async def test_a_fixed_key_of_a_wrong_type_is_removed_and_only_it(store: Store, attribute: str) -> None:
    desk = await store.acquire()
    desk.open()
    desk.decide(command(c.Touch, "stranger", activity="attach"), "stranger")
    desk.batch.set_deadline(SID, 5)
    desk.batch.fence_worker("ear-0")
    await desk.must_commit()
    assert await mend(store.link, KEYS) == []
    broken = getattr(KEYS, attribute)
    await store.redis.delete(broken)
    before = await store.dump()
    await store.redis.set(broken, "not ours")
    assert await mend(store.link, KEYS) == [broken]
    assert await store.dump() == before
