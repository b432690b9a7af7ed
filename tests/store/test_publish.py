"""Publishing: the check against the fence and the delivery in one step, one test for each thing that it promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from redis.exceptions import OutOfMemoryError, ResponseError

from control.core.fence import Fence
from control.core.session import FLOOR_CLOSED
from control.store.keys import PartitionKeys
from control.store.publishing import MAX_OUTPUTS, Outgoing, Published, publish, publish_all
from tests.store.desk import HALF_EVENTS_BYTES, KEYS, SID, STAGE, fence

if TYPE_CHECKING:
    from tests.store.desk import Store

D, DUP, DROP, STOP = Published.DELIVERED, Published.DUPLICATE, Published.DROPPED, Published.STOP


def record(accepted: Fence, offered: Fence | None = None, floor: int = 0) -> str:
    ahead = offered or accepted
    return " ".join(str(part) for part in (accepted.incarnation, floor, *accepted.key, *ahead.key))


async def set_fence(store: Store, text: str, session_id: str = SID) -> None:
    await store.redis.hset(KEYS.fences, session_id, text)


def output(number: int = 0, at: Fence | None = None, session_id: str = SID, **more: Any) -> Outgoing:
    at = at or fence()
    fields: dict[str, Any] = {"request_id": f"{session_id}/{at.incarnation}/{at.epoch}", "body": b"body%d" % number}
    return Outgoing(session_id=session_id, fence=at, number=number, **{**fields, **more})


async def say(store: Store, *outputs: Outgoing, half: int = HALF_EVENTS_BYTES, worker: str = STAGE) -> list[Published]:
    return await publish(store.link, KEYS, worker, outputs, half)


async def bodies(store: Store, session_id: str = SID) -> list[bytes]:
    return [fields[b"b"] for _, fields in await store.redis.xrange(KEYS.events(session_id))]


@pytest.mark.parametrize(
    ("text", "at", "code"),
    [
        pytest.param(record(fence(1, 2, 3, 4)), fence(1, 2, 3, 4), D, id="current"),
        pytest.param(None, fence(1, 2, 3, 4), STOP, id="no record"),
        pytest.param(record(fence(2, 2, 3, 4)), fence(1, 2, 3, 4), STOP, id="an older life"),
        pytest.param(record(fence(1, 2, 3, 4)), fence(2, 2, 3, 4), STOP, id="a newer life"),
        pytest.param(record(fence(1, 3, 0, 0), floor=3), fence(1, 2, 9, 9), STOP, id="an epoch that was cancelled"),
        pytest.param(record(fence(1, 2, 3, 4), floor=3), fence(1, 2, 3, 4), STOP, id="an epoch that is lost"),
        pytest.param(record(fence(1, 2, 3, 4), floor=FLOOR_CLOSED), fence(1, 2, 3, 4), STOP, id="closing"),
        pytest.param(record(fence(1, 3, 0, 0), floor=2), fence(1, 2, 9, 9), DROP, id="an older epoch above the floor"),
        pytest.param(record(fence(1, 2, 3, 4)), fence(1, 2, 2, 4), DROP, id="an older turn"),
        pytest.param(record(fence(1, 2, 3, 4)), fence(1, 2, 3, 3), DROP, id="an older response"),
        pytest.param(record(fence(1, 2, 3, 4)), fence(1, 2, 4, 3), DROP, id="older in one component only"),
        pytest.param(record(fence(1, 2, 3, 4)), fence(1, 2, 4, 4), DROP, id="a turn that nobody offered"),
        pytest.param(record(fence(1, 2, 3, 4)), fence(1, 3, 0, 0), DROP, id="an epoch that nobody offered"),
        pytest.param(record(fence(1, 2, 3, 4), fence(1, 2, 4, 5)), fence(1, 2, 4, 5), D, id="the turn offered"),
        pytest.param(record(fence(1, 2, 3, 4), fence(1, 2, 4, 5)), fence(1, 2, 3, 4), D, id="the one before it"),
        pytest.param(record(fence(1, 2, 3, 4), fence(1, 2, 4, 5)), fence(1, 2, 4, 6), DROP, id="above the offered"),
        pytest.param(record(fence(1, 2, 3, 4), fence(1, 3, 0, 0)), fence(1, 3, 0, 0), D, id="the epoch offered"),
        pytest.param(record(fence(1, 2, 3, 4), fence(1, 4, 0, 0)), fence(1, 3, 0, 0), DROP, id="between the two"),
        pytest.param(record(fence(1, 2, 3, 4), fence(1, 3, 0, 0)), fence(1, 2, 9, 9), DROP, id="above the accepted"),
    ],
)
async def test_i1_the_fence_decides_what_becomes_of_an_output(
    store: Store, text: str | None, at: Fence, code: Published
) -> None:
    if text is not None:
        await set_fence(store, text)
    before = await store.dump()
    assert await say(store, output(0, at)) == [code]
    if code is D:
        assert await bodies(store) == [b"body0"]
    else:
        assert await store.dump() == before


async def test_an_output_tells_its_kind_and_marks_the_session_as_heard(store: Store) -> None:
    await set_fence(store, record(fence()))
    assert await say(store, output(0)) == [D]
    [(_, fields)] = await store.redis.xrange(KEYS.events(SID))
    assert fields == {b"t": b"output", b"n": b"1", b"b": b"body0"}
    heard_ms = int(await store.redis.hget(KEYS.heard, SID))
    assert abs(heard_ms - await store.now_ms()) < 60_000


async def test_a_number_is_taken_once_for_each_request(store: Store) -> None:
    await set_fence(store, record(fence()))
    await set_fence(store, record(fence()), "other")
    first = [output(0), output(1), output(0, session_id="other")]
    assert await say(store, *first) == [D, D, D]
    again = [*first, output(2), output(2), output(5), output(4)]
    assert await say(store, *again) == [DUP, DUP, DUP, D, DUP, D, DUP]
    assert await bodies(store) == [b"body0", b"body1", b"body2", b"body5"]
    assert await bodies(store, "other") == [b"body0"]


async def test_a_dropped_output_takes_no_number_from_its_turn(store: Store) -> None:
    await set_fence(store, record(fence(0, 0, 1, 1)))
    old, new = output(0, fence(), request_id="r"), output(1, fence(0, 0, 1, 1), request_id="r")
    assert await say(store, old, new) == [DROP, D]
    assert await bodies(store) == [b"body1"]


async def test_n_counts_replies_and_outputs_together_and_without_a_gap(store: Store) -> None:
    desk = await store.acquire()
    desk.open()
    await desk.must_commit()
    told = len(await store.events())
    await say(store, output(0), output(1))
    desk.open("second")
    await desk.must_commit()
    await say(store, output(2), output(0, session_id="second"))
    for session_id, outputs in ((SID, 3), ("second", 1)):
        entries = await store.redis.xrange(KEYS.events(session_id))
        assert [int(fields[b"n"]) for _, fields in entries] == list(range(1, told + outputs + 1))


async def test_s36_what_is_forwarded_passes_the_same_check(store: Store) -> None:
    await set_fence(store, record(fence(0, 1, 0, 0), floor=1))
    old = output(0, fence(), next_worker="voice-1", payload=b"\0pcm")
    new = output(0, fence(0, 1), next_worker="voice-1", payload=b"\0pcm")
    assert await say(store, old, new) == [STOP, D]
    [(_, fields)] = await store.redis.xrange(KEYS.submissions("voice-1"))
    assert fields == {b"b": b"body0", b"p": b"\0pcm"}
    assert await store.redis.exists(KEYS.events(SID)) == 0
    assert await store.redis.hexists(KEYS.heard, SID)
    assert await say(store, new) == [DUP]


async def test_s40_a_fenced_life_publishes_nothing(store: Store) -> None:
    await set_fence(store, record(fence()))
    await store.redis.sadd(KEYS.fenced, STAGE)
    before = await store.dump()
    assert await say(store, output(0), output(0, next_worker="voice-1")) == [STOP, STOP]
    assert await store.dump() == before
    assert await say(store, output(0), worker="ear-2") == [D]


async def test_the_stream_is_cut_by_bytes_and_keeps_the_newest(store: Store) -> None:
    await set_fence(store, record(fence()))
    limit, size = 20_000, 500
    most = 0
    for number in range(200):
        assert await say(store, output(number, body=b"x" * size), half=limit // 2) == [D]
        most = max(most, await store.redis.xlen(KEYS.events(SID)))
    entry = size + 48
    assert limit / 2 - entry < most * entry <= limit
    kept = await store.redis.xrange(KEYS.events(SID))
    numbers = [int(fields[b"n"]) for _, fields in kept]
    assert numbers == list(range(201 - len(kept), 201))


async def test_s78_a_stream_of_another_type_costs_its_own_outputs_alone(store: Store) -> None:
    for session_id in (SID, "broken", "third"):
        await set_fence(store, record(fence()), session_id)
    await store.redis.set(KEYS.events("broken"), "not a stream")
    await store.redis.set(KEYS.submissions("voice-1"), "neither")
    outputs = [
        output(0),
        output(0, session_id="broken"),
        output(0, session_id="third", next_worker="voice-1"),
        output(1),
        output(1, session_id="third"),
    ]
    bad = Published.UNDELIVERABLE
    assert await say(store, *outputs) == [D, bad, bad, D, D]
    assert await bodies(store) == [b"body0", b"body1"]
    assert await bodies(store, "third") == [b"body1"]
    assert not await store.redis.hexists(KEYS.heard, "broken")
    assert [int(fields[b"n"]) for _, fields in await store.redis.xrange(KEYS.events(SID))] == [1, 2]


async def test_a_full_batch_fits(store: Store) -> None:
    outputs = [output(0, session_id=f"s{number}") for number in range(MAX_OUTPUTS)]
    for each in outputs:
        await set_fence(store, record(fence()), each.session_id)
    assert await say(store, *outputs) == [D] * MAX_OUTPUTS
    with pytest.raises(ValueError, match="1 to 1000"):
        await say(store, *outputs, output(1))
    with pytest.raises(ValueError, match="0 outputs"):
        await say(store)


async def test_one_partitions_error_stands_beside_the_others_answers(real_store: Store) -> None:
    store = real_store
    other = PartitionKeys(4)
    for keys in (KEYS, other):
        await store.redis.hset(keys.fences, SID, record(fence()))
    await store.redis.set(KEYS.outputs, "not a hash")
    answers = await publish_all(store.link, STAGE, HALF_EVENTS_BYTES, [(KEYS, [output(0)]), (other, [output(0)])])
    assert isinstance(answers[0], ResponseError)
    assert answers[1] == [D]
    assert await store.redis.exists(KEYS.events(SID)) == 0


async def test_s53_a_full_server_refuses_and_nothing_is_done(real_store: Store) -> None:
    store = real_store
    await set_fence(store, record(fence()))
    before = await store.dump()
    try:
        await store.redis.config_set("maxmemory", "1")
        with pytest.raises(OutOfMemoryError):
            await say(store, output(0))
    finally:
        await store.redis.config_set("maxmemory", "0")
    assert await store.dump() == before
    assert await say(store, output(0)) == [D]


async def test_a_server_that_has_lost_the_script_gets_it_again(real_store: Store) -> None:
    await set_fence(real_store, record(fence()))
    assert await say(real_store, output(0)) == [D]
    await real_store.redis.script_flush()
    assert await say(real_store, output(0), output(1)) == [DUP, D]
