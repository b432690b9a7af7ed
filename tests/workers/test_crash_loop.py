"""Commands that end their worker: set aside after three, and nothing else with them (S83)."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
from redis.asyncio import Redis

from bargein_client import AsyncBargein, Lifecycle
from control.store.keys import PartitionKeys
from control.wire.commands import Received
from stages.pipeline import Pipeline
from tests.workers.control_bed import until
from workers.control import ControlWorker
from workers.owner import Owner
from workers.ownership import Claim
from workers.partition import Partition

LEASE_S = 0.2
PATIENCE_S = 20.0
KEYS = PartitionKeys(0)


class Died(Exception):
    """The process is gone."""


class Deadly(Partition):
    """A partition in which handling one command ends the process."""

    dies_of: str | None = None

    def take_command(self, entry_id: str, received: Received, entered_ms: int, now_ms: int) -> None:
        if received.command.control_id == self.dies_of:
            raise Died(self.dies_of)
        super().take_command(entry_id, received, entered_ms, now_ms)


class Mortal(Owner):
    """An owner that some command ends."""

    dies_of: str | None = None

    def _begin(self, claim: Claim) -> Partition:
        partition = super()._begin(claim)
        partition.__class__ = Deadly
        assert isinstance(partition, Deadly)
        partition.dies_of = self.dies_of
        return partition


class Still(Owner):
    """An owner that ends right after it has taken its partition, before it has looked at anything."""

    async def _turn(self) -> None:
        await super()._change_partitions()
        if self.owned:
            raise Died("at once")
        await super()._turn()


def pipeline() -> Pipeline:
    control = {"lease_s": LEASE_S, "heartbeat_s": 1.0, "heartbeat_interval_s": 0.1}
    return Pipeline.model_validate({"partitions": 1, "policy": None, "control": control})


async def run_until_dead(worker: ControlWorker) -> None:
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(Died):
            await worker.run()


def mortal(url: str, dies_of: str | None) -> ControlWorker:
    worker = ControlWorker(url, pipeline(), owner=Mortal)
    for owner in worker.owners:
        assert isinstance(owner, Mortal)
        owner.dies_of = dies_of
    return worker


def body(session_id: str, control_id: str, op: str, **fields: Any) -> dict[str, Any]:
    fence = {"incarnation": 0, "epoch": 0, "turn_id": 0, "response_seq": 0}
    return {"v": 1, "op": op, "session_id": session_id, "control_id": control_id, "fence": fence, **fields}


async def send(redis: Any, session_id: str, control_id: str, op: str, **fields: Any) -> str:
    entry = {"b": msgspec.msgpack.encode(body(session_id, control_id, op, **fields))}
    return (await redis.xadd(KEYS.commands, entry)).decode()


async def events(redis: Any, session_id: str) -> list[Any]:
    found = await redis.xrange(KEYS.events(session_id))
    return [msgspec.msgpack.decode(fields[b"b"]) for _, fields in found]


async def replied(redis: Any, session_id: str) -> dict[str, Any]:
    """The codes of a session's replies, by control id."""
    return {e["control_id"]: e["code"] for e in await events(redis, session_id) if "control_id" in e}


async def until_replied(redis: Any, session_id: str, control_id: str) -> None:
    async def has_reply() -> bool:
        return control_id in await replied(redis, session_id)

    await until(has_reply)


async def test_a_command_that_ends_its_workers_is_set_aside_and_its_session_is_told(redis_url: str) -> None:
    async with Redis.from_url(redis_url) as redis:
        opener = mortal(redis_url, None)
        running = asyncio.create_task(opener.run())
        await send(redis, "bad", "o", "open")
        await send(redis, "good", "o", "open")
        await until_replied(redis, "good", "o")
        opener.stop()
        await running
        await send(redis, "good", "before", "touch", activity="heartbeat")
        poison = await send(redis, "bad", "poison", "touch", activity="heartbeat")
        await send(redis, "good", "after", "touch", activity="heartbeat")
        # The first dies of it among others; the next three handle it alone.
        for _ in range(4):
            await run_until_dead(mortal(redis_url, "poison"))
            assert await redis.xlen(KEYS.dead) == 0
        last = mortal(redis_url, "poison")
        running = asyncio.create_task(last.run())
        await until_replied(redis, "good", "after")
        assert await replied(redis, "good") == {"o": None, "before": None, "after": None}

        async def ends() -> list[Any]:
            return [e for e in await events(redis, "bad") if e.get("event") == "closed"]

        await until(ends)
        (closed,) = await ends()
        assert closed["reason"] == "command_failed"
        ((_, letter),) = await redis.xrange(KEYS.dead)
        assert letter[b"entry"].decode() == poison
        assert b"control workers ended" in letter[b"reason"]
        last.stop()
        await running
        assert await redis.hexists(KEYS.owner, "handling") == 0


async def test_what_was_before_it_in_the_backlog_is_answered_before_it_kills_again(redis_url: str) -> None:
    async with Redis.from_url(redis_url) as redis:
        await send(redis, "good", "o", "open")
        await send(redis, "bad", "poison", "open")
        await run_until_dead(mortal(redis_url, "poison"))
        assert await replied(redis, "good") == {}
        await run_until_dead(mortal(redis_url, "poison"))
        assert await replied(redis, "good") == {"o": None}


async def test_s83_owners_that_die_of_something_else_condemn_nothing(redis_url: str) -> None:
    async with Redis.from_url(redis_url) as redis:
        await send(redis, "good", "o", "open")
        for _ in range(5):
            await run_until_dead(ControlWorker(redis_url, pipeline(), owner=Still))
        worker = mortal(redis_url, None)
        running = asyncio.create_task(worker.run())
        await until_replied(redis, "good", "o")
        assert await redis.xlen(KEYS.dead) == 0
        worker.stop()
        await running


async def test_a_clean_handover_begins_the_count_anew(redis_url: str) -> None:
    async with Redis.from_url(redis_url) as redis:
        await send(redis, "bad", "poison", "open")
        for _ in range(3):
            await run_until_dead(mortal(redis_url, "poison"))
        assert int(await redis.hget(KEYS.owner, "crashes") or 0) == 1
        worker = mortal(redis_url, None)
        running = asyncio.create_task(worker.run())
        await until_replied(redis, "bad", "poison")
        worker.stop()
        await running
        worker = mortal(redis_url, None)
        running = asyncio.create_task(worker.run())
        await send(redis, "bad", "t", "touch", activity="heartbeat")
        await until_replied(redis, "bad", "t")
        assert await redis.hexists(KEYS.owner, "crashes") == 0
        worker.stop()
        await running


async def test_nothing_of_it_is_seen_by_a_client_that_waits(redis_url: str) -> None:
    async with Redis.from_url(redis_url) as redis:
        await send(redis, "bad", "poison", "touch", activity="heartbeat")
        await run_until_dead(mortal(redis_url, "poison"))
        worker = mortal(redis_url, None)
        running = asyncio.create_task(worker.run())
        async with AsyncBargein(redis_url) as client, await client.open("Ada", input_modes=["turn_commit_only"]) as ada:
            await ada.append(None, mode="turn_commit_only")
            assert [e.event async for e in _first(ada)] == ["opened"]
        worker.stop()
        await running


async def _first(session: Any) -> Any:
    async for event in session.events():
        if isinstance(event, Lifecycle):
            yield event
            return
