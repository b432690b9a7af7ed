"""The commit: one test per status, each section, and what a refusal leaves behind: nothing. On every store alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError

from control.core import commands as c
from control.core import effects as e
from control.core.lease import Lease
from control.core.session import LAYOUT, Phase, Session
from control.store.commits import (
    ACKS_KEY,
    COMMANDS_KEY,
    Batch,
    CommitStatus,
    PayloadSource,
    decode_answer,
    decode_cleanups,
    decode_session,
)
from control.store.keys import PartitionKeys
from control.store.link import Link, make_pool
from control.store.publishing import Outgoing, Published, publish
from control.wire.stage import decode_abort, decode_submission
from tests.servers import RealServer, RedisServer, ValkeyServer
from tests.store.desk import CAPABLE, KEYS, SID, STAGE, Desk, Store, command, fence, settings

APPEND: dict[str, Any] = {"mode": "append_tokens"}
OUT = msgspec.msgpack.encode({"kind": "text", "data": "hello"})


async def opened(store: Store, session_id: str = SID) -> Desk:
    """A partition with one open session."""
    desk = await store.acquire()
    desk.open(session_id)
    await desk.must_commit()
    return desk


async def output(store: Store, number: int, body: bytes = OUT, *, epoch: int = 0, sid: str = SID) -> Published:
    """Publish one output of the session's request."""
    sent = Outgoing(sid, f"request-{sid}", fence(0, epoch), number, body)
    return (await publish(store.link, KEYS, STAGE, [sent], 512 * 1024))[0]


# ---- the statuses


async def test_a_commit_of_the_owner_at_its_revision_is_committed_and_raises_it(store: Store) -> None:
    desk = await store.acquire()
    entry = await desk.producer()
    desk.open()
    desk.done(entry)
    before = await store.now_ms()
    outcome = await desk.commit()
    assert (outcome.status, outcome.revision, outcome.detail) == (CommitStatus.COMMITTED, 1, "")
    assert before <= outcome.now_ms <= await store.now_ms()
    assert int(await store.redis.hget(KEYS.owner, "revision")) == 1
    assert await store.redis.xlen(KEYS.commands) == 0
    state = await store.redis.hget(KEYS.sessions, SID)
    assert decode_session(state, None) == desk.sessions[SID]


async def test_i6_a_commit_without_the_current_token_is_refused_and_writes_nothing(store: Store) -> None:
    old = await store.acquire()
    entry = await old.producer()
    old.open()
    old.done(entry)
    await store.run("renew", [KEYS.owner], [old.token, 0])
    new = await store.acquire(worker="control-b")
    before = await store.dump()
    outcome = await old.commit()
    assert outcome.status is CommitStatus.LOST_OWNERSHIP
    assert outcome.detail == new.token != old.token
    assert await store.dump() == before


async def test_a_commit_to_a_partition_that_nobody_ever_took_is_refused(store: Store) -> None:
    desk = Desk(store, KEYS, "17:nobody", 0)
    desk.open()
    assert (await desk.commit()).status is CommitStatus.LOST_OWNERSHIP
    assert await store.dump() == {}


async def test_i6_a_commit_decided_on_another_revision_is_refused_and_writes_nothing(store: Store) -> None:
    desk = await opened(store)
    desk.decide(command(c.Touch, activity="heartbeat"))
    before = await store.dump()
    for wrong in (desk.revision - 1, desk.revision + 1):
        names, argv = desk.batch.arguments(desk.token, wrong, 1000)
        outcome = await desk.send(names, argv)
        assert (outcome.status, outcome.revision) == (CommitStatus.STALE_REVISION, desk.revision)
        assert await store.dump() == before


async def test_s70_a_first_commit_that_arrives_late_is_refused_by_its_revision(store: Store) -> None:
    desk = await store.acquire()
    entry = await desk.producer()
    desk.open()
    desk.done(entry)
    late = desk.batch.arguments(desk.token, desk.revision, 1000)
    # No answer came in time. The owner has read again, nothing had changed, and it decides the same anew.
    desk.batch, desk.sessions, desk.answers = Batch(KEYS), {}, {}
    desk.open()
    desk.done(entry)
    await desk.must_commit()
    before = await store.dump()
    outcome = await desk.send(*late)
    assert outcome.status is CommitStatus.STALE_REVISION
    assert await store.dump() == before
    assert [kind for kind, _, _ in await store.events()] == ["lifecycle", "reply"]


async def test_the_same_commit_sent_twice_has_one_effect(store: Store) -> None:
    desk = await opened(store)
    desk.decide(command(c.Touch, activity="heartbeat"))
    names, argv = desk.batch.arguments(desk.token, desk.revision, 1000)
    assert (await desk.send(names, argv)).status is CommitStatus.COMMITTED
    before = await store.dump()
    assert (await desk.send(names, argv)).status is CommitStatus.STALE_REVISION
    assert await store.dump() == before


async def test_an_expiry_decided_before_an_output_was_delivered_is_refused_and_writes_nothing(store: Store) -> None:
    desk = await opened(store)
    assert await output(store, 0) is Published.DELIVERED
    heard = int(await store.redis.hget(KEYS.heard, SID))
    session = desk.sessions[SID]
    assert session is not None
    late_ms = heard + 1_000_000
    expiry = desk.decide(c.Due(heard - 1), now_ms=late_ms)
    assert isinstance(expiry.effects[0], e.ExpireUnlessHeard)
    before = await store.dump()
    outcome = await desk.commit()
    assert (outcome.status, outcome.detail) == (CommitStatus.HEARD_SINCE, SID)
    assert await store.dump() == before
    # Decided on the mark as it is now, it goes through.
    desk.sessions[SID] = session
    desk.decide(c.Due(heard), now_ms=late_ms)
    await desk.must_commit()


@pytest.mark.parametrize("which", ["events", "answers"])
async def test_s78_a_session_key_of_a_wrong_type_is_named_and_nothing_is_written(store: Store, which: str) -> None:
    desk = await store.acquire()
    desk.open("innocent")
    desk.open()
    broken = getattr(KEYS, which)(SID)
    await store.redis.set(broken, "not ours")
    before = await store.dump()
    outcome = await desk.commit()
    assert (outcome.status, outcome.detail) == (CommitStatus.WRONG_TYPE, broken)
    assert await store.dump() == before


@pytest.mark.parametrize("which", ["submissions", "aborts"])
async def test_a_queue_of_a_wrong_type_is_named_and_nothing_is_written(store: Store, which: str) -> None:
    desk = await opened(store)
    desk.decide(command(c.Append, **APPEND))
    desk.decide(command(c.Cancel, event="barge_in", next_fence=fence(0, 1)))
    broken = getattr(KEYS, which)(STAGE)
    await store.redis.set(broken, "not ours")
    before = await store.dump()
    outcome = await desk.commit()
    assert (outcome.status, outcome.detail) == (CommitStatus.WRONG_TYPE, broken)
    assert await store.dump() == before


# ---- the sections


async def test_states_fences_cleanups_and_deadlines_are_written_and_go_again(store: Store) -> None:
    desk = await opened(store)
    desk.batch.set_deadline(SID, 77_000)
    desk.decide(command(c.Append, **APPEND))
    await desk.must_commit()
    assert await store.redis.hget(KEYS.fences, SID) == b"0 0 0 0 0 0 0 0"
    assert await store.redis.zscore(KEYS.deadlines, SID) == 77_000
    desk.decide(command(c.Cancel, event="barge_in", next_fence=fence(0, 1, 2, 3)))
    await desk.must_commit()
    assert await store.redis.hget(KEYS.fences, SID) == b"0 1 1 2 3 1 2 3"
    pending = decode_cleanups(await store.redis.hget(KEYS.cleanups, SID))
    session = desk.sessions[SID]
    assert session is not None
    assert pending == session.cleanups
    assert len(pending) == 1
    stored = decode_session(await store.redis.hget(KEYS.sessions, SID), await store.redis.hget(KEYS.cleanups, SID))
    assert stored == session

    desk.decide(c.Cleaned(0, pending[0].number, STAGE))
    desk.decide(command(c.Close, at=fence(0, 1, 2, 3)))
    desk.batch.set_deadline(SID, None)
    await desk.must_commit()
    assert not await store.redis.hexists(KEYS.cleanups, SID)
    assert not await store.redis.hexists(KEYS.fences, SID)
    assert await store.redis.zscore(KEYS.deadlines, SID) is None
    assert await store.redis.hexists(KEYS.sessions, SID), "the tombstone stays"

    desk.batch.add(SID, desk.sessions[SID], e.Decision(None))
    await desk.must_commit()
    assert not await store.redis.hexists(KEYS.sessions, SID)


async def test_a_payload_is_moved_from_the_command_to_the_submission(store: Store) -> None:
    desk = await opened(store)
    payload = bytes(range(256)) * 40
    entry = await desk.producer(payload)
    desk.done(entry)
    desk.decide(command(c.Append, **APPEND), payload=PayloadSource(entry_id=entry))
    await desk.must_commit()
    ((_, fields),) = await store.redis.xrange(KEYS.submissions(STAGE))
    assert fields[b"p"] == payload
    order = decode_submission(fields[b"b"])
    assert (order.session_id, order.seq, order.packed) == (SID, 1, False)
    assert await store.redis.xlen(KEYS.commands) == 0


async def test_a_payload_that_came_in_the_body_is_sent_with_the_commit(store: Store) -> None:
    desk = await opened(store)
    packed = msgspec.msgpack.encode({"tokens": [1, 2, 3]})
    desk.decide(command(c.Append, **APPEND), payload=PayloadSource(packed=packed))
    await desk.must_commit()
    ((_, fields),) = await store.redis.xrange(KEYS.submissions(STAGE))
    assert fields[b"p"] == packed
    assert decode_submission(fields[b"b"]).packed


async def test_an_abort_names_the_last_submission_that_is_unread_before_it(store: Store) -> None:
    desk = await opened(store)
    desk.decide(command(c.Append, **APPEND))
    desk.decide(command(c.Cancel, event="barge_in", next_fence=fence(0, 1)))
    await desk.must_commit()
    ((submission, _),) = await store.redis.xrange(KEYS.submissions(STAGE))
    ((_, abort),) = await store.redis.xrange(KEYS.aborts(STAGE))
    assert abort[b"a"] == submission
    order = decode_abort(abort[b"b"])
    assert (order.session_id, order.incarnation, order.stage_id, order.epochs) == (SID, 0, 0, (0,))


async def test_an_abort_names_nothing_where_every_submission_was_read(store: Store) -> None:
    desk = await opened(store)
    desk.decide(command(c.Append, **APPEND))
    await desk.must_commit()
    ((submission, _),) = await store.redis.xrange(KEYS.submissions(STAGE))
    await store.redis.xdel(KEYS.submissions(STAGE), submission)
    desk.decide(command(c.Cancel, event="barge_in", next_fence=fence(0, 1)))
    await desk.must_commit()
    ((_, abort),) = await store.redis.xrange(KEYS.aborts(STAGE))
    assert abort[b"a"] == b"0-0"


async def test_answers_are_appended_and_the_oldest_are_trimmed(store: Store) -> None:
    desk = await opened(store)
    for _ in range(3):
        desk.decide(command(c.Touch, activity="heartbeat"))
    await desk.must_commit()
    stored = [decode_answer(blob) for blob in await store.redis.lrange(KEYS.answers(SID), 0, -1)]
    assert [answered.op for answered in stored] == ["open", "touch", "touch", "touch"]
    desk.decide(command(c.Touch, activity="heartbeat"))
    desk.batch.trim_answers(SID, 2)
    desk.batch.trim_answers(SID, 1)
    await desk.must_commit()
    left = [decode_answer(blob) for blob in await store.redis.lrange(KEYS.answers(SID), 0, -1)]
    assert left[0] == stored[3]
    assert len(left) == 2


async def test_a_fenced_worker_can_say_nothing_more_in_this_partition(store: Store) -> None:
    desk = await opened(store)
    desk.batch.fence_worker(STAGE)
    await desk.must_commit()
    assert await store.redis.smembers(KEYS.fenced) == {STAGE.encode()}
    assert 0 < await store.redis.pttl(KEYS.fenced) <= 86_400_000
    assert await output(store, 0) is Published.STOP
    assert await store.run("acknowledge", [KEYS.acks, KEYS.fenced, KEYS.submissions(STAGE)], [STAGE, 1, b"ack"]) == 0
    assert await store.redis.xlen(KEYS.acks) == 0


async def test_released_requests_are_no_longer_counted(store: Store) -> None:
    desk = await opened(store)
    desk.decide(command(c.Append, **APPEND))
    desk.decide(c.Accepted(0, 1))
    await desk.must_commit()
    request = "duplex-s.Y2FsbGVy.i.0.e.0.r.stage0"
    sent = Outgoing(SID, request, fence(), 0, b"out")
    assert await publish(store.link, KEYS, STAGE, [sent], 1000) == [Published.DELIVERED]
    assert await store.redis.hget(KEYS.outputs, request) == b"0"
    desk.decide(command(c.Close))
    await desk.must_commit()
    assert await store.redis.hexists(KEYS.outputs, request), "not before the stage has confirmed (I2)"
    session = desk.sessions[SID]
    assert session is not None
    desk.decide(c.Cleaned(0, session.cleanups[0].number, STAGE))
    await desk.must_commit()
    assert not await store.redis.exists(KEYS.outputs)


async def test_both_input_streams_are_emptied_of_what_was_applied(store: Store) -> None:
    desk = await opened(store)
    first, second = await desk.producer(), await desk.producer()
    ack = (await store.redis.xadd(KEYS.acks, {"b": b"ack"})).decode()
    desk.done(first)
    desk.batch.done(ACKS_KEY, ack)
    await desk.must_commit()
    assert [entry.decode() for entry, _ in await store.redis.xrange(KEYS.commands)] == [second]
    assert await store.redis.xlen(KEYS.acks) == 0


@pytest.mark.parametrize(("stream", "name"), [(COMMANDS_KEY, "commands"), (ACKS_KEY, "acks")])
async def test_a_dead_letter_keeps_four_kib_of_the_body_and_says_why(store: Store, stream: int, name: str) -> None:
    desk = await store.acquire()
    body = bytes(range(256)) * 32
    entry = (await store.redis.xadd(getattr(KEYS, name), {"b": body, "x": b"y"})).decode()
    gone = "1-1"
    desk.batch.bury(stream, entry, "it makes no sense")
    desk.batch.bury(stream, gone, "somebody has deleted it")
    await desk.must_commit()
    (_, letter), (_, other) = await store.redis.xrange(KEYS.dead)
    assert letter == {
        b"reason": b"it makes no sense",
        b"stream": name.encode(),
        b"entry": entry.encode(),
        b"b": body[:4096],
    }
    assert other[b"b"] == b""
    assert await store.redis.xlen(getattr(KEYS, name)) == 0


async def test_a_dead_letter_that_may_hold_a_token_keeps_nothing_of_the_body(store: Store) -> None:
    desk = await store.acquire()
    entry = (await store.redis.xadd(KEYS.commands, {"b": b"my token"})).decode()
    desk.batch.bury(COMMANDS_KEY, entry, "it makes no sense", is_secret=True)
    await desk.must_commit()
    ((_, letter),) = await store.redis.xrange(KEYS.dead)
    assert (letter[b"entry"], letter[b"b"]) == (entry.encode(), b"")
    assert await store.redis.xlen(KEYS.commands) == 0


# ---- a session's events


async def test_i5_events_are_numbered_from_one_in_each_life_without_gaps(store: Store) -> None:
    desk = await opened(store)
    for number in range(3):
        desk.decide(command(c.Touch, activity="heartbeat"))
        await desk.must_commit()
        assert await output(store, number) is Published.DELIVERED
    desk.decide(command(c.Touch, activity="heartbeat"))
    desk.decide(command(c.Touch, activity="heartbeat"))
    desk.decide(command(c.Close))
    await desk.must_commit()
    events = await store.events()
    assert [n for _, n, _ in events] == list(range(1, len(events) + 1))
    assert [kind for kind, _, _ in events][2:8] == ["reply", "output"] * 3
    assert events[-1][2]["event"] == "closed"
    desk.open(incarnation=1)
    await desk.must_commit()
    assert [n for _, n, _ in (await store.events())[len(events) :]] == [1, 2]


async def test_a_stream_of_events_holds_what_is_allowed_and_at_least_half_of_it(store: Store) -> None:
    desk = await opened(store)
    half, size = 10_000, 900
    for number in range(100):
        sent = Outgoing(SID, "request", fence(), number, bytes(size))
        assert await publish(store.link, KEYS, STAGE, [sent], half) == [Published.DELIVERED]
        if number % 3 == 0:
            desk.decide(command(c.Touch, activity="heartbeat"))
            await desk.must_commit(half=half)
        held = await store.redis.xrange(KEYS.events(SID))
        held_bytes = sum(len(fields[b"b"]) + 48 for _, fields in held)
        assert held_bytes <= 2 * half
        if number > 30:
            assert held_bytes >= half - 2 * size
        numbers = [int(fields[b"n"]) for _, fields in held]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


async def test_events_bigger_than_what_is_allowed_still_pass_one_by_one(store: Store) -> None:
    desk = await opened(store)
    for number in range(5):
        assert await output(store, number, bytes(600_000)) is Published.DELIVERED
    assert await store.redis.xlen(KEYS.events(SID)) <= 3
    desk.decide(command(c.Touch, activity="heartbeat"))
    await desk.must_commit()
    assert (await store.redis.xrevrange(KEYS.events(SID), count=1))[0][1][b"n"] == b"8"


async def test_the_end_of_a_life_cuts_its_events_short_and_keeps_them_five_minutes(store: Store) -> None:
    desk = await opened(store)
    for _ in range(100):
        desk.decide(command(c.Touch, activity="heartbeat"))
    await desk.must_commit()
    assert await store.redis.pttl(KEYS.events(SID)) == -1
    assert await store.redis.pttl(KEYS.answers(SID)) == -1
    desk.decide(command(c.Close))
    await desk.must_commit()
    events = await store.events()
    assert len(events) == 64
    assert events[-1][2]["event"] == "closed"
    for key in (KEYS.events(SID), KEYS.answers(SID)):
        assert 290_000 < await store.redis.pttl(key) <= 300_000
    assert not await store.redis.exists(KEYS.marks, KEYS.heard, KEYS.fences)


async def test_s85_an_id_reopened_while_its_old_events_are_about_to_expire_keeps_its_stream(store: Store) -> None:
    desk = await opened(store)
    desk.decide(command(c.Close))
    await desk.must_commit()
    for key in (KEYS.events(SID), KEYS.answers(SID)):
        await store.redis.pexpire(key, 5_000)
    desk.open(incarnation=1)
    await desk.must_commit()
    for key in (KEYS.events(SID), KEYS.answers(SID)):
        assert await store.redis.pttl(key) == -1


async def test_s85_a_reply_to_an_id_just_before_it_opens_does_not_let_its_stream_expire(store: Store) -> None:
    desk = await store.acquire()
    desk.settings = settings(policy=False)
    desk.decide(command(c.Touch, activity="heartbeat"))
    desk.decide(command(c.Open))
    await desk.must_commit()
    assert await store.redis.pttl(KEYS.events(SID)) == -1
    assert not await store.redis.exists(KEYS.strangers)
    assert [(kind, n) for kind, n, _ in await store.events()] == [("reply", 1), ("lifecycle", 2), ("reply", 3)]


async def test_what_is_said_after_the_end_in_one_batch_stays_in_order_and_in_number(store: Store) -> None:
    desk = await store.acquire()
    desk.settings = settings(policy=False)
    desk.decide(command(c.Open))
    desk.decide(command(c.Close))
    desk.decide(command(c.Touch, activity="heartbeat"))
    await desk.must_commit()
    events = await store.events()
    assert [n for _, n, _ in events] == [1, 2, 3, 4, 5]
    assert [body.get("event") or body["code"] for _, _, body in events] == ["opened", None, None, "closed", "not_found"]
    assert 290_000 < await store.redis.pttl(KEYS.events(SID)) <= 300_000


# ---- strangers


async def test_s14_a_flood_of_ids_leaves_at_most_a_thousand_keys_for_a_minute(store: Store) -> None:
    desk = await store.acquire()
    for start in range(0, 1_200, 400):
        for number in range(start, start + 400):
            name = f"stranger-{number}"
            desk.decide(command(c.Touch, name, activity="heartbeat"), name)
        await desk.must_commit()
    assert await store.redis.zcard(KEYS.strangers) == 1_000
    assert len(await store.redis.keys(KEYS.events("*"))) == 1_000
    assert int(await store.redis.hget(KEYS.owner, "unheard")) == 200
    for key in (KEYS.events("stranger-0"), KEYS.events("stranger-999"), KEYS.strangers):
        assert 50_000 < await store.redis.pttl(key) <= 60_000
    assert not await store.redis.exists(KEYS.sessions, KEYS.marks, KEYS.answers("stranger-0"))
    # One of the known ones is still answered; once their minute is over there is room again.
    desk.decide(command(c.Touch, "stranger-7", activity="heartbeat"), "stranger-7")
    await desk.must_commit()
    assert await store.redis.xlen(KEYS.events("stranger-7")) == 2
    await store.redis.zadd(KEYS.strangers, {f"stranger-{n}": 1 for n in range(500)})
    desk.decide(command(c.Touch, "late", activity="heartbeat"), "late")
    await desk.must_commit()
    assert await store.redis.xlen(KEYS.events("late")) == 1
    assert await store.redis.zcard(KEYS.strangers) == 501


async def test_a_stranger_that_keeps_asking_is_told_the_last_64_answers(store: Store) -> None:
    desk = await store.acquire()
    for _ in range(100):
        desk.decide(command(c.Touch, activity="heartbeat"))
    await desk.must_commit()
    events = await store.events()
    assert len(events) == 64
    assert {n for _, n, _ in events} == {0}


async def test_a_strangers_reply_does_not_shorten_the_five_minutes_of_a_session_that_was(store: Store) -> None:
    desk = await opened(store)
    desk.decide(command(c.Close))
    await desk.must_commit()
    desk.decide(command(c.Touch, activity="heartbeat"))
    await desk.must_commit()
    assert 290_000 < await store.redis.pttl(KEYS.events(SID)) <= 300_000
    await store.redis.pexpire(KEYS.events(SID), 1_000)
    desk.decide(command(c.Touch, activity="heartbeat"))
    await desk.must_commit()
    assert 50_000 < await store.redis.pttl(KEYS.events(SID)) <= 60_000


# ---- what can't be read


async def test_a_state_that_cannot_be_read_is_removed_with_everything_that_scripts_look_at(store: Store) -> None:
    desk = await opened(store)
    desk.decide(command(c.Append, **APPEND))
    desk.decide(command(c.Cancel, event="barge_in", next_fence=fence(0, 1)))
    desk.batch.set_deadline(SID, 5)
    await desk.must_commit()
    desk.batch.discard(SID)
    await desk.must_commit()
    assert not await store.redis.exists(KEYS.sessions, KEYS.fences, KEYS.cleanups, KEYS.deadlines, KEYS.marks)
    assert 0 < await store.redis.pttl(KEYS.events(SID)) <= 300_000
    assert await output(store, 0) is Published.STOP


async def test_a_discarded_id_may_be_opened_in_the_same_batch_up_to_its_placement(store: Store) -> None:
    desk = await opened(store)
    desk.batch.discard(SID)
    desk.sessions[SID] = None
    desk.decide(command(c.Open, at=fence(5), capabilities=CAPABLE))
    await desk.must_commit()
    session = desk.sessions[SID]
    assert session is not None
    assert session.phase is Phase.OPENING
    assert decode_session(await store.redis.hget(KEYS.sessions, SID), None) == session
    assert not await store.redis.exists(KEYS.fences)


# ---- size


async def test_a_commit_of_far_more_than_eight_thousand_values_is_whole(store: Store) -> None:
    desk = await store.acquire()
    count = 5_000
    batch = desk.batch
    entries = [(await store.redis.xadd(KEYS.commands, {"b": b"x"})).decode() for _ in range(200)]
    session = Session(LAYOUT, Phase.OPEN, fence(), Lease(0, 1))
    for number in range(count):
        name = f"s{number}"
        touch = command(c.Touch, name, activity="heartbeat")
        desk.sessions[name] = session
        batch.add(name, None, e.Decision(session))
        desk.decide(touch, name)
        batch.set_deadline(name, number)
    for _ in range(50):
        for entry in entries:
            batch.done(COMMANDS_KEY, entry)
    names, argv = batch.arguments(desk.token, desk.revision, 1000)
    assert len(argv) > 8 * 8_000
    assert (await desk.send(names, argv)).status is CommitStatus.COMMITTED
    assert await store.redis.hlen(KEYS.sessions) == count
    assert await store.redis.hlen(KEYS.fences) == count
    assert await store.redis.zcard(KEYS.deadlines) == count
    assert await store.redis.hlen(KEYS.marks) == count
    assert await store.redis.xlen(KEYS.commands) == 0
    for name in ("s0", f"s{count - 1}"):
        assert await store.redis.xlen(KEYS.events(name)) == 1


async def test_an_empty_batch_knows_that_it_is_empty() -> None:
    batch = Batch(PartitionKeys(0))
    assert batch.is_empty
    batch.set_deadline("later", 5_000)
    assert batch.is_empty, "a due time that only moves back need not be stored"
    batch.set_deadline("never", None)
    assert not batch.is_empty


# ---- servers in trouble


@pytest.mark.parametrize("kind", [ValkeyServer, pytest.param(RedisServer, marks=pytest.mark.redis7)])
async def test_s77_a_server_full_of_unread_commands_is_drained_by_commits(kind: Callable[[], RealServer]) -> None:
    with kind() as server:
        pool = make_pool(server.url)
        link = Link(pool)
        async with Redis(connection_pool=pool) as redis:
            store = Store(redis, link, is_fake=False, server=server)
            desk = await opened(store)
            entries = [await desk.producer(bytes(50_000)) for _ in range(100)]
            await redis.config_set("maxmemory", 2_000_000)
            with pytest.raises(OutOfMemoryError):
                await desk.producer()
            with pytest.raises(OutOfMemoryError):
                await output(store, 0)
            desk.decide(command(c.Append, **APPEND), payload=PayloadSource(entry_id=entries[0]))
            for entry in entries:
                desk.done(entry)
            await desk.must_commit()
            assert await redis.xlen(KEYS.commands) == 0
            assert await redis.xlen(KEYS.submissions(STAGE)) == 1
            taken = await store.run(
                "acknowledge", [KEYS.acks, KEYS.fenced, KEYS.submissions(STAGE)], [STAGE, 1, b"ack"]
            )
            assert taken == 1
            assert await output(store, 0) is Published.DELIVERED, "there is room again"
            await link.close()
        await pool.disconnect()
