"""Lives of stage workers: begun once, ended for everyone, and never by somebody who could not look."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from control.store import keys
from control.store.lives import (
    KEPT_MS,
    Beat,
    Entry,
    Life,
    LifeState,
    beat,
    count_slots,
    end_drain,
    end_life,
    fetch_figures,
    fetch_lives,
    fetch_slots,
    order_drain,
    put_back,
    register_life,
    say_goodbye,
    sweep_queues,
)
from control.store.slots import Slot, slot_call

if TYPE_CHECKING:
    from tests.store.desk import Store

ENTRY = Entry(stage_id=1, stage="voice", capacity=2, engine="parrot")
WORKER = "voice-00c0ffee"
_calls = itertools.count(1)
STATE = keys.worker_state(WORKER)


async def take_slot(store: Store, session_id: str = "s") -> Slot:
    call = slot_call(
        "take", WORKER, session_id, 1, partition=0, token_number=5, call_number=next(_calls), max_sessions=None
    )
    [answer] = await store.link.run_all([call])
    return Slot(answer)


async def the_life(store: Store) -> Life:
    [life] = await fetch_lives(store.redis)
    return life


async def test_a_registered_life_is_found_with_what_it_offers(real_store: Store) -> None:
    began_ms = await register_life(real_store.redis, WORKER, ENTRY)
    assert await the_life(real_store) == Life(
        worker_id=WORKER,
        stage_id=1,
        stage="voice",
        capacity=2,
        engine="parrot",
        state=LifeState.LIVE,
        beat=1,
        used_slots=0,
        started_ms=began_ms,
    )
    assert abs(began_ms - await real_store.now_ms()) < 60_000
    assert 0 < await real_store.redis.pttl(STATE) <= KEPT_MS


async def test_a_heartbeat_moves_the_counter_and_carries_the_load(real_store: Store) -> None:
    await register_life(real_store.redis, WORKER, ENTRY)
    assert await beat(real_store.link, WORKER, {"running": 3, "utilisation": 0.25, "accepted": 9})
    life = await the_life(real_store)
    assert life.beat == 2
    assert life.load == {"running": 3.0, "utilisation": 0.25}
    assert (await fetch_figures(real_store.redis, WORKER))["accepted"] == "9"


async def test_slots_are_counted_and_taken_at_a_live_worker_only(real_store: Store) -> None:
    await register_life(real_store.redis, WORKER, ENTRY)
    assert await take_slot(real_store) is Slot.DONE
    assert (await the_life(real_store)).used_slots == await count_slots(real_store.redis, WORKER) == 1
    assert await beat(real_store.link, WORKER, {"state": LifeState.DRAINING.value})
    assert await take_slot(real_store, "t") is Slot.DRAINING
    assert (await the_life(real_store)).state is LifeState.DRAINING
    assert await end_life(real_store.redis, WORKER)
    assert await take_slot(real_store, "t") is Slot.GONE


async def test_a_worker_that_is_to_be_emptied_drains_whatever_it_says_until_it_is_not(real_store: Store) -> None:
    await register_life(real_store.redis, WORKER, ENTRY)
    since_ms = await order_drain(real_store.redis, WORKER)
    assert abs(since_ms - await real_store.now_ms()) < 60_000
    assert await order_drain(real_store.redis, WORKER) == since_ms
    assert await beat(real_store.link, WORKER, {"state": LifeState.LIVE.value}) is Beat.DRAIN
    assert (await the_life(real_store)).state is LifeState.DRAINING
    assert await take_slot(real_store) is Slot.DRAINING
    assert await end_drain(real_store.redis, WORKER)
    assert not await end_drain(real_store.redis, WORKER)
    assert await beat(real_store.link, WORKER, {"state": LifeState.LIVE.value}) is Beat.TAKEN
    assert await take_slot(real_store) is Slot.DONE


async def test_s40_a_life_that_is_over_can_not_beat_or_drain_itself_back(real_store: Store) -> None:
    await register_life(real_store.redis, WORKER, ENTRY)
    assert await end_life(real_store.redis, WORKER)
    before = await real_store.dump()
    assert not await beat(real_store.link, WORKER, {"state": LifeState.LIVE.value, "running": 1})
    assert await real_store.dump() == before
    assert (await the_life(real_store)).state is LifeState.DEAD


async def test_s50_a_life_that_the_server_has_lost_is_over(real_store: Store) -> None:
    await register_life(real_store.redis, WORKER, ENTRY)
    await real_store.redis.delete(STATE)
    assert not await beat(real_store.link, WORKER, {"running": 1})
    assert await real_store.redis.exists(STATE) == 0
    assert (await the_life(real_store)).state is LifeState.DEAD
    assert await end_life(real_store.redis, WORKER, 1)


async def test_a_life_whose_heart_has_moved_since_is_not_ended(real_store: Store) -> None:
    await register_life(real_store.redis, WORKER, ENTRY)
    seen = (await the_life(real_store)).beat
    await beat(real_store.link, WORKER, {})
    assert not await end_life(real_store.redis, WORKER, seen)
    assert (await the_life(real_store)).state is LifeState.LIVE
    assert await end_life(real_store.redis, WORKER, seen + 1)
    assert await end_life(real_store.redis, WORKER, seen)


async def test_s76_a_record_that_can_not_be_read_is_neither_live_nor_lost(real_store: Store) -> None:
    await register_life(real_store.redis, WORKER, ENTRY)
    await register_life(real_store.redis, "voice-2", ENTRY)
    await register_life(real_store.redis, "voice-3", ENTRY)
    await real_store.redis.delete(STATE)
    await real_store.redis.set(STATE, "not a hash")
    await real_store.redis.hset(keys.STAGES, "voice-3", b"\xc1 no entry")
    assert [life.worker_id for life in await fetch_lives(real_store.redis)] == ["voice-2"]


async def test_a_goodbye_ends_the_life_and_leaves_the_rest_to_the_control_workers(real_store: Store) -> None:
    await register_life(real_store.redis, WORKER, ENTRY)
    await take_slot(real_store)
    await say_goodbye(real_store.redis, WORKER)
    life = await the_life(real_store)
    assert (life.state, life.has_left, life.used_slots) == (LifeState.DEAD, True, 1)


async def test_who_holds_slots_is_read_with_the_incarnation(real_store: Store) -> None:
    await real_store.redis.hset(keys.worker_slots(WORKER), mapping={"Ada": "3 17", "Bob": "0 5", "odd": "what"})
    assert await fetch_slots(real_store.redis, WORKER) == {"Ada": 3, "Bob": 0}
    assert await fetch_slots(real_store.redis, "nobody") == {}


async def test_a_worker_that_was_struck_off_the_index_is_put_back_if_it_lives(real_store: Store) -> None:
    await register_life(real_store.redis, WORKER, ENTRY)
    await real_store.redis.delete(keys.STAGES)
    assert await put_back(real_store.redis, WORKER)
    life = await the_life(real_store)
    assert (life.stage_id, life.stage, life.capacity, life.engine) == (1, "voice", 2, "parrot")
    await end_life(real_store.redis, WORKER)
    await real_store.redis.delete(keys.STAGES)
    assert await put_back(real_store.redis, WORKER) is False
    assert await put_back(real_store.redis, "nobody") is False
    await real_store.redis.hset(keys.worker_state("half"), mapping={"state": "live", "stage_id": "no number"})
    await real_store.redis.set(keys.worker_state("broken"), "no hash")
    for name in ("half", "broken"):
        assert await put_back(real_store.redis, name) is None, "nobody knows"
    assert await fetch_lives(real_store.redis) == []


async def test_the_queues_of_a_life_are_swept_in_every_partition_and_no_others(real_store: Store) -> None:
    mine = [
        name
        for p in range(3)
        for name in (keys.PartitionKeys(p).submissions(WORKER), keys.PartitionKeys(p).aborts(WORKER))
    ]
    other = keys.PartitionKeys(1).aborts("somebody-else")
    for name in (*mine, other):
        await real_store.redis.xadd(name, {"b": b"x"})
    await sweep_queues(real_store.redis, WORKER, 3)
    assert [await real_store.redis.exists(name) for name in (*mine, other)] == [0] * 6 + [1]


async def test_no_workers_are_no_lives(real_store: Store) -> None:
    assert await fetch_lives(real_store.redis) == []
