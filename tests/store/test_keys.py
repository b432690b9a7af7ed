"""The table of keys is the truth: every name has its row, every stored key its type and its end, nothing is left."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from control.core import commands as c
from control.store import keys
from control.store.keys import FIXED_TYPES, PartitionKeys, partition_of
from control.store.publishing import Outgoing, Published, acknowledge, publish
from control.wire.stage import AcceptedAck
from tests.store.desk import KEYS, SID, STAGE, Desk, Store, command, fence, settings
from tests.store.table import LIVES_MS, find_row, find_undocumented, rows


def every_name() -> dict[str, str]:
    """An example of every key that the code can name."""
    known = PartitionKeys(11)
    names = {slot: getattr(known, slot) for slot in FIXED_TYPES}
    names |= {
        "events": known.events("a:session{}"),
        "answers": known.answers("a:session{}"),
        "submissions": known.submissions("ear-1"),
        "aborts": known.aborts("ear-1"),
        "config": keys.CONFIG,
        "controls": keys.CONTROLS,
        "ownership": keys.OWNERSHIP,
        "stages": keys.STAGES,
        "brake": keys.brake("ear"),
        "worker state": keys.worker_state("ear-1"),
        "worker slots": keys.worker_slots("ear-1"),
        "worker owners": keys.worker_owners("ear-1"),
        "worker drain": keys.worker_drain("ear-1"),
        "jobs": keys.JOBS,
        "job": keys.job("drain-ear-1"),
        "job targets": keys.job_targets("close-5ea3"),
        "admission slots": keys.ADMISSION_SLOTS,
        "admission owners": keys.ADMISSION_OWNERS,
    }
    return names


def test_every_name_has_a_row_and_every_row_a_name() -> None:
    described = {name: find_row(name) for name in every_name().values()}
    assert all(described.values()), described
    assert {row.name for row in described.values() if row} == {row.name for row in rows()}


def test_the_types_that_are_looked_at_once_are_those_of_the_table() -> None:
    known = PartitionKeys(4)
    for attribute, kind in FIXED_TYPES.items():
        row = find_row(getattr(known, attribute))
        assert row is not None
        assert row.kind == kind


def test_the_table_uses_only_life_times_that_are_checked() -> None:
    assert {row.lives for row in rows()} == set(LIVES_MS)


def test_a_partitions_keys_are_in_one_slot_of_a_cluster_and_a_workers_in_another() -> None:
    tags = {key: key[key.index("{") : key.index("}") + 1] for key in every_name().values() if "{" in key}
    assert set(tags.values()) == {"{11}", "{w:ear-1}", "{admission}"}
    assert all(tags[key] == "{11}" for name, key in every_name().items() if name in FIXED_TYPES)


@pytest.mark.parametrize(("session_id", "partition"), [("", 0), ("a", 3), ("call-42", 10), ("grüße", 13), ("会话", 5)])
def test_a_session_has_the_partition_that_any_language_computes(session_id: str, partition: int) -> None:
    assert partition_of(session_id, 16) == partition


async def end_all(desk: Desk) -> None:
    """Give back the slots, and let the hour of the tombstones pass."""
    for session_id, session in desk.sessions.items():
        assert session is not None
        for debt in session.debts:
            desk.decide(c.DebtPaid(debt.incarnation, debt.holder), session_id)
        desk.batch.set_deadline(session_id, None)
    await desk.must_commit()
    for session_id in list(desk.sessions):
        assert desk.decide(c.Due(), session_id, now_ms=10_000_000).session is None
    await desk.must_commit()


async def test_a_life_without_stages_leaves_only_what_expires(store: Store) -> None:
    desk = await store.acquire()
    desk.settings = settings(policy=False)
    for number in range(5):
        name = f"caller-{number}"
        desk.decide(command(c.Touch, name, activity="heartbeat"), name)
        desk.decide(command(c.Open, name), name)
        desk.batch.set_deadline(name, 1_000)
        await desk.must_commit()
        desk.decide(command(c.Append, name, mode="turn_commit_only"), name)
        assert await find_undocumented(store.redis) == []
        desk.decide(command(c.Close, name), name)
        await desk.must_commit()
        assert await find_undocumented(store.redis) == []
    await end_all(desk)
    await only_what_expires_is_left(store.redis)


async def test_a_life_with_a_stage_leaves_only_what_expires_and_empty_queues(store: Store) -> None:
    desk = await store.acquire()
    await store.redis.hset(keys.worker_state(STAGE), mapping={"state": "live", "capacity": 8})
    await store.redis.pexpire(keys.worker_state(STAGE), 3_600_000)
    for number in range(3):
        name = f"caller-{number}"
        entry = await desk.producer(b"payload")
        desk.open(name)
        desk.batch.set_deadline(name, 1_000)
        desk.decide(command(c.Append, name, mode="append_tokens"), name)
        desk.done(entry)
        await desk.must_commit()
        await stage_takes(store, desk, name)
        sent = Outgoing(name, f"request-{name}", fence(), 0, b"out")
        assert await publish(store.link, KEYS, STAGE, [sent], 1000) == [Published.DELIVERED]
        desk.decide(command(c.Cancel, name, event="barge_in", next_fence=fence(0, 1)), name)
        desk.decide(command(c.Close, name, fence(0, 1)), name)
        await desk.must_commit()
        assert await find_undocumented(store.redis) == []
        session = desk.sessions[name]
        assert session is not None
        for cleanup in session.cleanups:
            desk.decide(c.Cleaned(0, cleanup.number, STAGE), name)
        await desk.must_commit()
        await store.redis.hdel(KEYS.outputs, f"request-{name}")  # a name of the test's own, which nobody releases
    for queue in (KEYS.aborts(STAGE), KEYS.acks):
        await store.redis.xtrim(queue, maxlen=0)
    await end_all(desk)
    await only_what_expires_is_left(store.redis)


async def stage_takes(store: Store, desk: Desk, name: str) -> None:
    """The stage accepts what is in its queue."""
    ((entry, _),) = await store.redis.xrange(KEYS.submissions(STAGE))
    session = desk.sessions[name]
    assert session is not None
    assert session.append is not None
    ack = AcceptedAck(name, 0, session.append.number)
    assert await acknowledge(store.link, KEYS, STAGE, [ack], KEYS.submissions(STAGE), [entry.decode()])
    desk.decide(c.Accepted(0, session.append.number), name)
    await desk.must_commit()


async def only_what_expires_is_left(redis: Redis) -> None:
    """Every key is documented; what doesn't expire is the owner's record and empty streams."""
    assert await find_undocumented(redis) == []
    lasting = [key.decode() for key in await redis.keys() if await redis.pttl(key) == -1]
    for key in lasting:
        if key != KEYS.owner:
            assert (await redis.type(key)) == b"stream", f"{key} is left"
            assert await redis.xlen(key) == 0, f"{key} is left with entries"
    assert SID not in "".join(lasting)
    assert not [key for key in lasting if "caller-" in key]
