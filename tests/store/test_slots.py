"""Slots: never more than there are, and nobody's word but the owner's."""

from __future__ import annotations

import asyncio
import itertools

from control.core.scene import ADMISSION
from control.store import keys
from control.store.slots import Slot, slot_call
from tests.store.desk import Store

EAR = "ear-1"
TAKE, FREE = "take", "free"
_calls = itertools.count(1)


async def say(
    store: Store,
    what: str,
    session_id: str,
    *,
    token: int = 10,
    incarnation: int = 0,
    holder: str = EAR,
    partition: int = 3,
    most: int | None = None,
    number: int | None = None,
) -> Slot:
    call = slot_call(
        what,
        holder,
        session_id,
        incarnation,
        partition=partition,
        token_number=token,
        call_number=next(_calls) if number is None else number,
        max_sessions=most,
    )
    (answer,) = await store.link.try_run_all([call])
    return Slot(answer)


async def live(store: Store, capacity: int, state: str = "live") -> None:
    await store.redis.hset(keys.worker_state(EAR), mapping={"state": state, "capacity": capacity})


async def held(store: Store) -> dict[bytes, bytes]:
    return await store.redis.hgetall(keys.worker_slots(EAR))


async def test_i9_a_worker_takes_as_many_sessions_as_it_has_slots(store: Store) -> None:
    await live(store, 2)
    assert [await say(store, TAKE, name) for name in "abc"] == [Slot.DONE, Slot.DONE, Slot.FULL]
    assert await held(store) == {b"a": b"0 10", b"b": b"0 10"}
    assert await say(store, FREE, "a") is Slot.DONE
    assert await say(store, TAKE, "c") is Slot.DONE


async def test_a_worker_whose_engine_has_no_room_takes_nobody_and_keeps_whom_it_has(store: Store) -> None:
    await live(store, 4)
    assert await say(store, TAKE, "a") is Slot.DONE
    await store.redis.hset(keys.worker_state(EAR), "accepts", "0.0")
    assert await say(store, TAKE, "b") is Slot.FULL
    assert await say(store, TAKE, "a") is Slot.DONE, "it holds a slot already"
    await store.redis.hset(keys.worker_state(EAR), "accepts", "1.0")
    assert await say(store, TAKE, "b") is Slot.DONE


async def test_s70_a_word_that_arrives_after_its_repetition_does_nothing(store: Store) -> None:
    await live(store, 2)
    assert await say(store, TAKE, "a", number=1001) is Slot.DONE
    # Its answer was lost, and it was said again; then the session was refused, left, and came back.
    assert await say(store, FREE, "a", number=1003) is Slot.DONE
    assert await say(store, TAKE, "a", number=1004) is Slot.DONE
    assert await say(store, FREE, "a", number=1002) is Slot.DEPOSED
    assert await held(store) == {b"a": b"0 10"}
    assert await say(store, FREE, "a", token=11, number=1) is Slot.DONE, "the next owner begins to count anew"


async def test_s3_of_many_that_race_for_the_last_slot_one_wins(store: Store) -> None:
    await live(store, 1)
    answers = await asyncio.gather(*(one_taker(store, number) for number in range(8)))
    assert sorted(answers) == [Slot.DONE, *[Slot.FULL] * 7]
    assert len(await held(store)) == 1


async def one_taker(store: Store, number: int) -> Slot:
    _, names, arguments = slot_call(
        TAKE, EAR, f"racer-{number}", 0, partition=number, token_number=10, call_number=1, max_sessions=None
    )
    return Slot(await store.run_apart("slot", names, arguments))


async def test_s75_repeating_a_word_changes_nothing(store: Store) -> None:
    await live(store, 2)
    for _ in range(3):
        assert await say(store, TAKE, "a") is Slot.DONE
        assert await say(store, TAKE, "b") is Slot.DONE
    assert await held(store) == {b"a": b"0 10", b"b": b"0 10"}
    for _ in range(3):
        assert await say(store, FREE, "a") is Slot.DONE
    assert await held(store) == {b"b": b"0 10"}


async def test_s75_a_deposed_owner_frees_nothing(store: Store) -> None:
    await live(store, 1)
    assert await say(store, TAKE, "a", token=11) is Slot.DONE
    assert await say(store, FREE, "a", token=10) is Slot.DEPOSED
    assert await held(store) == {b"a": b"0 11"}


async def test_s75_a_deposed_owner_takes_nothing_not_even_what_its_successor_gave_back(store: Store) -> None:
    await live(store, 1)
    assert await say(store, TAKE, "a", token=10) is Slot.DONE
    assert await say(store, TAKE, "a", token=11) is Slot.DONE
    assert await say(store, TAKE, "a", token=10) is Slot.DEPOSED
    assert await say(store, FREE, "a", token=11) is Slot.DONE
    assert await say(store, TAKE, "a", token=10) is Slot.DEPOSED, "a ghost would hold the slot for ever"
    assert await held(store) == {}
    assert await say(store, TAKE, "b", token=10) is Slot.DEPOSED, "nor for another session of the partition"
    assert await say(store, TAKE, "b", token=10, partition=4) is Slot.DONE, "another partition has its own owners"


async def test_a_late_word_about_an_earlier_life_frees_nothing_of_the_next(store: Store) -> None:
    await live(store, 1)
    assert await say(store, TAKE, "a", incarnation=1) is Slot.DONE
    assert await say(store, FREE, "a", incarnation=0) is Slot.DONE
    assert await held(store) == {b"a": b"1 10"}


async def test_a_worker_that_drains_is_gone_or_dead_takes_nobody_and_still_gives_back(store: Store) -> None:
    await live(store, 4)
    assert await say(store, TAKE, "a") is Slot.DONE
    await live(store, 4, state="draining")
    assert await say(store, TAKE, "b") is Slot.DRAINING
    await live(store, 4, state="dead")
    assert await say(store, TAKE, "b") is Slot.GONE
    assert await say(store, FREE, "a") is Slot.DONE
    await store.redis.delete(keys.worker_state(EAR))
    assert await say(store, TAKE, "b") is Slot.GONE
    assert await say(store, FREE, "b") is Slot.DONE
    assert not await store.redis.exists(keys.worker_state(EAR), keys.worker_slots(EAR)), "nothing is left of it"
    assert 0 < await store.redis.pttl(keys.worker_owners(EAR)) <= 86_400_000


async def test_a_refusal_leaves_no_trace(store: Store) -> None:
    await live(store, 0)
    before = await store.dump()
    assert await say(store, TAKE, "a") is Slot.FULL
    await live(store, 0, state="draining")
    assert await say(store, TAKE, "a") is Slot.DRAINING
    await live(store, 0)
    assert await store.dump() == before


async def test_i9_the_limit_of_sessions_is_one_more_holder(store: Store) -> None:
    answers = [await say(store, TAKE, name, holder=ADMISSION, most=2) for name in "abc"]
    assert answers == [Slot.DONE, Slot.DONE, Slot.FULL]
    assert await say(store, FREE, "b", holder=ADMISSION, most=2) is Slot.DONE
    assert await say(store, TAKE, "c", holder=ADMISSION, most=2) is Slot.DONE
    assert set(await store.redis.hgetall(keys.ADMISSION_SLOTS)) == {b"a", b"c"}
    assert await say(store, FREE, "a", holder=ADMISSION, most=None) is Slot.DONE, "also once there is no limit any more"
    assert not await store.redis.exists(keys.ADMISSION_STATE)


async def test_s3_a_limit_that_was_lowered_takes_nobody_new_and_keeps_those_it_has(store: Store) -> None:
    for name in "abc":
        assert await say(store, TAKE, name, holder=ADMISSION, most=3) is Slot.DONE
    assert await say(store, TAKE, "d", holder=ADMISSION, most=1) is Slot.FULL
    assert await say(store, TAKE, "a", holder=ADMISSION, most=1) is Slot.DONE
    assert len(await store.redis.hgetall(keys.ADMISSION_SLOTS)) == 3
