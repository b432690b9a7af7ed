"""Audits, from end to end: what runs and what holds a slot without anybody knowing of it is found (S43, S44, S80)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from bargein_client import AsyncBargein
from control.core.requests import request_id
from control.store import keys
from control.store.keys import PartitionKeys, partition_of
from stages.pipeline import Pipeline, parse_pipeline
from tests.system import RunningSystem
from tests.workers.control_bed import until
from tests.workers.scripted import ScriptedEngine

OPEN: dict[str, Any] = {"input_modes": ["append_tokens"], "incarnation": 3}


def pipeline(audit_s: float = 0.1) -> Pipeline:
    content = {
        "partitions": 2,
        "max_sessions": 20,
        "control": {"lease_s": 1.0, "heartbeat_s": 2.0, "heartbeat_interval_s": 0.2, "audit_s": audit_s},
        "stages": [{"name": "ear", "engine": "tests.workers.scripted:ScriptedEngine", "capacity": 16}],
    }
    return parse_pipeline(content, "test")


@pytest.fixture
async def redis(redis_url: str) -> Any:
    async with Redis.from_url(redis_url) as client:
        yield client


def engine_of(system: RunningSystem) -> ScriptedEngine:
    engine = system.stages[0]._engine
    assert isinstance(engine, ScriptedEngine)
    return engine


async def forget(redis: Any, session_id: str) -> None:
    """As if the server had lost all that it knew of the session."""
    known = PartitionKeys(partition_of(session_id, 2))
    for name in (known.sessions, known.fences, known.cleanups, known.marks, known.heard):
        await redis.hdel(name, session_id)
    await redis.zrem(known.deadlines, session_id)
    await redis.delete(known.events(session_id), known.answers(session_id))


async def test_s44_a_silent_request_of_a_session_that_is_forgotten_is_aborted_and_its_slots_come_back(
    redis: Any, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with RunningSystem(redis_url, pipeline()) as system, AsyncBargein(redis_url) as client:
        lost = await client.open("lost", **OPEN)
        kept = await client.open("kept", **OPEN)
        for session in (lost, kept):
            await session.append([1], mode="append_tokens", final=True)
        engine = engine_of(system)
        # Both caches: what the owner has in memory is as good as what is stored.
        await forget(redis, "lost")
        for owner in system.controls[0].owners:
            for owned in owner.owned.values():
                owned.sure = False
        system.controls[0].wake()
        await until(lambda: request_id("lost", 3, 0, 0) in engine.aborted)
        for holder in (keys.worker_slots(system.stages[0].worker_id or ""), keys.ADMISSION_SLOTS):
            await until(lambda holder=holder: _holds(redis, holder, [b"kept"]))
        assert request_id("kept", 3, 0, 0) in engine.running
        assert any("nobody owns the requests" in record.message for record in caplog.records)
        assert (await kept.append([2], mode="append_tokens", final=True)).ok


async def test_s43_a_slot_that_nobody_holds_comes_back_and_a_lost_one_is_taken_again(
    redis: Any, redis_url: str
) -> None:
    async with RunningSystem(redis_url, pipeline()) as system, AsyncBargein(redis_url) as client:
        session = await client.open("kept", **OPEN)
        await session.append([1], mode="append_tokens", final=True)
        slots = keys.worker_slots(system.stages[0].worker_id or "")
        await redis.hset(slots, "ghost", "4 1")
        await redis.hdel(slots, "kept")
        await redis.hset(keys.ADMISSION_SLOTS, "phantom", "2 1")
        await until(lambda: _holds(redis, slots, [b"kept"]))
        await until(lambda: _holds(redis, keys.ADMISSION_SLOTS, [b"kept"]))
        assert (await redis.hget(slots, "kept")).startswith(b"3 ")
        await session.close()
        await until(lambda: _holds(redis, slots, []))


async def test_an_audit_of_a_healthy_system_does_nothing(
    redis: Any, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with RunningSystem(redis_url, pipeline(audit_s=0.02)) as system, AsyncBargein(redis_url) as client:
        for round_ in range(5):
            sessions = [await client.open(f"call-{round_}-{number}", **OPEN) for number in range(4)]
            for session in sessions:
                await session.append([1], mode="append_tokens", final=True)
                await session.interrupt()
                await session.append([2], mode="append_tokens", final=True)
            await asyncio.sleep(0.1)  # some audits pass
            for session in sessions:
                await session.close()
        assert system.controls[0].stats.acks > 100
        assert [record.message for record in caplog.records if "nobody owns" in record.message] == []
        await until(lambda: _holds(redis, keys.ADMISSION_SLOTS, []))


async def test_the_queues_of_a_worker_that_has_left_are_gone_with_it(redis: Any, redis_url: str) -> None:
    async with RunningSystem(redis_url, pipeline()) as system, AsyncBargein(redis_url) as client:
        session = await client.open("call", **OPEN)
        await session.append([1], mode="append_tokens", final=True)
        await session.close()
        worker_id = system.stages[0].worker_id or ""
        names = [
            name
            for p in range(2)
            for name in (PartitionKeys(p).submissions(worker_id), PartitionKeys(p).aborts(worker_id))
        ]
        assert await redis.exists(*names) > 0
        await system.stages[0].stop(grace_s=0)

        async def is_swept() -> bool:
            return not await redis.exists(*names) and not await redis.hexists(keys.STAGES, worker_id)

        await until(is_swept)


async def _holds(redis: Any, holder: str, names: list[bytes]) -> bool:
    return sorted(await redis.hkeys(holder)) == names
