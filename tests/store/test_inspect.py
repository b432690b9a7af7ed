"""The operator's questions: right on what is stored, useful on what is broken, and harmless."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from redis.asyncio import Redis

from control.core.cleanup import Cleanup, CleanupKind
from control.core.fence import Fence
from control.core.lease import Lease
from control.core.requests import Request, RequestPhase
from control.core.session import LAYOUT, Debt, Ended, Phase, Session, vacant
from control.store import inspect, keys
from control.store.inspect import CleanupRow, SessionRow, StageRow, StoredConfig
from control.store.keys import PartitionKeys, partition_of
from control.store.link import Link, make_pool
from control.store.lives import Entry, beat, end_life, register_life
from control.store.server import agree_on_config
from control.wire.stage import encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.servers import RealServer

PARTITIONS = 8


@pytest.fixture
async def redis(any_server: RealServer) -> AsyncIterator[Redis]:
    async with Redis.from_url(any_server.url) as client:
        yield client


@pytest.fixture
async def link(any_server: RealServer) -> AsyncIterator[Link]:
    pool = make_pool(any_server.url)
    link = Link(pool)
    yield link
    await link.close()
    await pool.disconnect()


def open_session(now_ms: int, **changes: object) -> Session:
    return msgspec.structs.replace(
        Session(LAYOUT, Phase.OPEN, Fence(3, 2, 1, 0), Lease(4, now_ms - 5_000), route=("a", "b")), **changes
    )


def cleanup(number: int, created_ms: int, *waiting: str) -> Cleanup:
    return Cleanup(number, CleanupKind.CANCEL, (0, 1), waiting, 3, created_ms, created_ms + 60_000)


async def put(redis: Redis, name: str, field: str, value: Any) -> None:
    await redis.hset(name, field, value)


async def store(redis: Redis, session_id: str, session: Session | bytes, *owed: Cleanup) -> None:
    known = PartitionKeys(partition_of(session_id, PARTITIONS))
    await put(redis, known.sessions, session_id, session if isinstance(session, bytes) else encode(session))
    if owed:
        await put(redis, known.cleanups, session_id, encode(owed))


async def fetch_sessions(redis: Redis, *phases: Phase, limit: int = 100) -> list[SessionRow]:
    return (await inspect.fetch_sessions(redis, PARTITIONS, frozenset(phases) or None, limit)).rows


async def test_an_empty_server_has_nothing_to_say(redis: Redis) -> None:
    assert await inspect.fetch_config(redis) is None
    assert await fetch_sessions(redis) == []
    assert (await inspect.fetch_cleanups(redis, PARTITIONS)).rows == []
    assert await inspect.fetch_controls(redis, PARTITIONS) == []
    assert (await inspect.fetch_stage_workers(redis)).rows == []
    rows = await inspect.fetch_partitions(redis, PARTITIONS)
    assert [row.partition for row in rows] == list(range(PARTITIONS))
    assert {(row.owner, row.lease_left_ms, row.commands, row.oldest_ms) for row in rows} == {(None, None, 0, None)}


async def test_the_config_is_what_the_first_process_wrote(redis: Redis) -> None:
    await agree_on_config(redis, 12)
    assert await inspect.fetch_config(redis) == StoredConfig(protocol=1, partitions=12, layout=1)
    await redis.hset(keys.CONFIG, "partitions", "a dozen")
    assert await inspect.fetch_config(redis) is None


async def test_a_partition_shows_its_owner_its_lease_and_what_waits(redis: Redis, link: Link) -> None:
    known = PartitionKeys(5)
    token = (await link.run("acquire", [known.owner], ["control-1", 60_000, "beef"]))[1].decode()
    await put(redis, known.owner, "revision", 9)
    now_ms = await inspect.fetch_now_ms(redis)
    await redis.xadd(known.commands, {"b": "x"}, id=f"{now_ms - 2_000}-0")
    await redis.xadd(known.acks, {"b": "x"}, id=f"{now_ms - 7_000}-0")
    await redis.xadd(known.acks, {"b": "x"})
    await redis.xadd(known.dead, {"reason": "x"})
    await redis.hset(known.fences, "s", "0 0 0 0 0 0 0 0")
    row = (await inspect.fetch_partitions(redis, PARTITIONS))[5]
    assert (row.owner, row.token, row.revision) == ("control-1", token, 9)
    assert row.lease_left_ms is not None
    assert 0 < row.lease_left_ms <= 60_000
    assert (row.commands, row.acks, row.dead_letters, row.sessions, row.cleanups) == (1, 2, 1, 1, 0)
    assert row.oldest_ms is not None
    assert row.oldest_ms >= 7_000
    await link.run("renew", [known.owner], [token, 0])
    row = (await inspect.fetch_partitions(redis, PARTITIONS))[5]
    assert (row.owner, row.token, row.lease_left_ms) == (None, None, None)


async def test_a_broken_key_hides_only_itself(redis: Redis) -> None:
    now_ms = await inspect.fetch_now_ms(redis)
    broken = PartitionKeys(0)
    for name in (broken.commands, broken.owner, broken.cleanups, broken.sessions, keys.CONTROLS, keys.STAGES):
        await redis.set(name, "not what it should be")
    await store(redis, "fine", open_session(now_ms), cleanup(1, now_ms, "a"))
    assert partition_of("fine", PARTITIONS) != 0
    rows = await inspect.fetch_partitions(redis, PARTITIONS)
    assert (rows[0].commands, rows[0].cleanups, rows[0].acks, rows[0].owner) == (None, None, 0, None)
    assert [row.session_id for row in await fetch_sessions(redis)] == ["fine"]
    assert [row.session_id for row in (await inspect.fetch_cleanups(redis, PARTITIONS)).rows] == ["fine"]
    assert await inspect.fetch_controls(redis, PARTITIONS) == []
    assert (await inspect.fetch_stage_workers(redis)).rows == []


async def test_a_session_shows_what_it_is_doing(redis: Redis) -> None:
    now_ms = await inspect.fetch_now_ms(redis)
    requests = (
        Request(0, RequestPhase.CLEANING),
        Request(1, RequestPhase.CLEANING),
        Request(2, RequestPhase.SUBMITTED),
    )
    session = open_session(now_ms, requests=requests, lease=Lease(4, now_ms - 9_000, now_ms - 6_000))
    await store(redis, "s", session, cleanup(7, now_ms - 3_000, "a"), cleanup(8, now_ms - 1_000, "a"))
    (row,) = await fetch_sessions(redis)
    assert (row.session_id, row.partition, row.phase) == ("s", partition_of("s", PARTITIONS), "open")
    assert (row.fence, row.lease_generation, row.route) == (Fence(3, 2, 1, 0), 4, ("a", "b"))
    assert (row.reserved, row.submitted, row.cleaning, row.cleanups) == (0, 1, 2, 2)
    assert row.idle_ms is not None
    assert row.idle_ms >= 9_000
    assert row.detached_ms is not None
    assert 6_000 <= row.detached_ms < 9_000
    assert row.oldest_cleanup_ms is not None
    assert row.oldest_cleanup_ms >= 3_000


async def test_an_output_counts_as_activity(redis: Redis) -> None:
    now_ms = await inspect.fetch_now_ms(redis)
    await store(redis, "s", open_session(now_ms))
    await put(redis, PartitionKeys(partition_of("s", PARTITIONS)).heard, "s", now_ms)
    (row,) = await fetch_sessions(redis)
    assert row.idle_ms is not None
    assert row.idle_ms < 4_000


async def test_sessions_are_told_apart_by_phase_and_one_that_cannot_be_read_is_shown(redis: Redis) -> None:
    now_ms = await inspect.fetch_now_ms(redis)
    await store(redis, "b", open_session(now_ms))
    await store(redis, "a", open_session(now_ms, phase=Phase.CLOSING))
    await store(redis, "c", vacant(ended=Ended(3, now_ms), debts=(Debt("w", 3, now_ms),)))
    await store(redis, "d", b"\xff no session")
    assert [(row.session_id, row.phase) for row in await fetch_sessions(redis)] == [
        ("a", "closing"),
        ("b", "open"),
        ("c", "vacant"),
        ("d", "unreadable"),
    ]
    assert [row.session_id for row in await fetch_sessions(redis, Phase.CLOSING)] == ["a", "d"]
    assert [row.debts for row in await fetch_sessions(redis, Phase.VACANT)] == [1, 0]


async def test_the_walk_through_many_sessions_misses_none_and_ends_at_its_limit(redis: Redis) -> None:
    now_ms = await inspect.fetch_now_ms(redis)
    blob = encode(open_session(now_ms))
    names = [f"session-{number:04}" for number in range(3_000)]
    for name in names:
        known = PartitionKeys(partition_of(name, PARTITIONS))
        await put(redis, known.sessions, name, blob)
    found = await inspect.fetch_sessions(redis, PARTITIONS, None, 5_000)
    assert [row.session_id for row in found.rows] == names
    assert not found.more
    found = await inspect.fetch_sessions(redis, PARTITIONS, None, 10)
    assert len(found.rows) == 10
    assert found.more


async def test_the_oldest_cleanups_come_first_whatever_the_limit(redis: Redis) -> None:
    now_ms = await inspect.fetch_now_ms(redis)
    for number in range(20):
        debts = (cleanup(1, now_ms - 1_000 * number, "a"), cleanup(2, now_ms - 1_000 * number - 500, "a", "b"))
        await store(redis, f"s{number:02}", open_session(now_ms), *debts)
    found = await inspect.fetch_cleanups(redis, PARTITIONS, 3)
    assert [(row.session_id, row.number) for row in found.rows] == [("s19", 2), ("s19", 1), ("s18", 2)]
    assert found.more
    first: CleanupRow = found.rows[0]
    assert (first.kind, first.epochs, first.attempts, first.waits_for) == ("cancel", (0, 1), 3, ("a", "b"))
    assert first.age_ms >= 19_500
    assert first.retry_in_ms <= 60_000 - 19_500
    whole = await inspect.fetch_cleanups(redis, PARTITIONS, 40)
    assert len(whole.rows) == 40
    assert not whole.more


async def test_a_control_worker_shows_its_partitions_and_one_that_is_gone_its_leases(redis: Redis, link: Link) -> None:
    await link.run("join", [keys.CONTROLS], ["control-1", 60_000])
    await link.run("join", [keys.CONTROLS], ["control-2", 60_000])
    for partition, holder in ((1, "control-1"), (3, "control-1"), (4, "control-0")):
        await link.run("acquire", [PartitionKeys(partition).owner], [holder, 60_000, "beef"])
    rows = await inspect.fetch_controls(redis, PARTITIONS)
    assert [(row.worker_id, row.partitions) for row in rows] == [
        ("control-0", (4,)),
        ("control-1", (1, 3)),
        ("control-2", ()),
    ]
    assert rows[0].alive_for_ms is None
    assert rows[1].alive_for_ms is not None


async def test_a_stage_worker_shows_its_slots_its_load_and_its_last_heartbeat(redis: Redis, link: Link) -> None:
    entry = Entry(stage_id=1, stage="voice", capacity=64, engine="parrot")
    await register_life(redis, "voice-1", entry)
    await beat(link, "voice-1", {"running": 2, "utilisation": 0.25, "accepted": 7, "abort_log": "[]"})
    await redis.hset(keys.worker_slots("voice-1"), "s", "0 1")
    (row,) = (await inspect.fetch_stage_workers(redis)).rows
    assert isinstance(row, StageRow)
    assert (row.worker_id, row.stage, row.stage_id, row.engine, row.state) == ("voice-1", "voice", 1, "parrot", "live")
    assert (row.slots_used, row.capacity, row.beats) == (1, 64, 2)
    assert row.load == {"running": 2, "utilisation": 0.25}
    assert row.counters == {"accepted": 7}
    assert row.last_beat_ms is not None
    assert row.last_beat_ms < 10_000
    # The record's time to live is what the last heartbeat is read from.
    await redis.pexpire(keys.worker_state("voice-1"), 3_600_000 - 42_000)
    (row,) = (await inspect.fetch_stage_workers(redis)).rows
    assert 42_000 <= row.last_beat_ms < 52_000


async def test_a_dead_stage_worker_is_shown_and_so_is_one_whose_record_is_gone(redis: Redis) -> None:
    entry = Entry(stage_id=0, stage="thinker", capacity=2, engine="parrot")
    for worker_id in ("t-1", "t-2"):
        await register_life(redis, worker_id, entry)
    await end_life(redis, "t-1")
    await redis.delete(keys.worker_state("t-2"))
    await put(redis, keys.STAGES, "t-3", b"\xff nothing that a worker says")
    rows = (await inspect.fetch_stage_workers(redis)).rows
    assert [(row.worker_id, row.stage, row.state) for row in rows] == [
        ("t-1", "thinker", "dead"),
        ("t-2", "thinker", None),
        ("t-3", "?", None),
    ]


async def test_the_questions_need_no_right_to_write_and_none_to_list_keys(any_server: RealServer, redis: Redis) -> None:
    await agree_on_config(redis, PARTITIONS)
    now_ms = await inspect.fetch_now_ms(redis)
    await store(redis, "s", open_session(now_ms), cleanup(1, now_ms, "a"))
    await redis.execute_command(
        *("ACL", "SETUSER", "operator", "on", ">pw", "resetkeys", "%R~bargein:*"),
        *("resetchannels", "-@all", "+@read", "+time", "-keys", "-scan", "-randomkey"),
    )
    try:
        url = any_server.url.replace("redis://", "redis://operator:pw@")
        async with Redis.from_url(url) as reader:
            assert await inspect.fetch_config(reader)
            assert len(await inspect.fetch_partitions(reader, PARTITIONS)) == PARTITIONS
            assert len(await fetch_sessions(reader)) == 1
            assert len((await inspect.fetch_cleanups(reader, PARTITIONS)).rows) == 1
            assert await inspect.fetch_session(reader, "s", partition_of("s", PARTITIONS)) is not None
            assert await inspect.fetch_controls(reader, PARTITIONS) == []
            assert (await inspect.fetch_stage_workers(reader)).rows == []
    finally:
        await redis.execute_command("ACL", "DELUSER", "operator")
