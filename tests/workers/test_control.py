"""The control worker on a real server: whole lives of sessions, and several workers that share them out."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from control.core.requests import request_id
from control.store import keys
from control.store.publishing import Published
from control.store.server import Unusable
from tests.servers import RealServer, ValkeyServer
from tests.store.table import find_undocumented
from tests.workers.control_bed import Bed, Caller, fence, local, make_pipeline, numbers, until, until_free
from tests.workers.control_stalls import Stalled
from workers.control import ControlWorker
from workers.owner import Owner

# ---- whole lives


async def test_a_whole_life_of_a_session(any_server: RealServer) -> None:
    async with Bed(any_server.url, make_pipeline(max_sessions=10)) as bed:
        worker = await bed.control("control-a")
        ear = await bed.stage()
        caller = bed.caller("Ada")
        opened = await caller.open(session_config={"voice": "low"})
        request = request_id("Ada", 0, 0, 0)
        assert opened["detail"]["request_id"] == request
        assert await bed.redis.hkeys(keys.worker_slots("ear-1")) == [b"Ada"]
        assert await bed.redis.hkeys(keys.ADMISSION_SLOTS) == [b"Ada"]
        first = await caller.append(payload=b"\x00 any bytes \xff")
        second = await caller.append(final=True)
        assert (await caller.reply(second))["detail"]["seq"] == 2
        assert [(order.seq, payload) for order, payload in ear.submitted] == [
            (1, b"\x00 any bytes \xff"),
            (2, b"tokens"),
        ]
        assert await ear.say("Ada", request, fence()) is Published.DELIVERED
        ear.confirms = False
        cancel = await caller.cancel(fence(), fence(1))
        interrupted = await caller.heard("interrupted")
        assert interrupted["cancelled_fence"]["epoch"] == 0
        assert await ear.say("Ada", request, fence()) is Published.STOP
        assert await bed.redis.hexists(caller.keys.outputs, request), "I2: not released before its stage has confirmed"
        ear.confirms = True
        assert (await caller.reply(cancel))["ok"]
        third = await caller.append(fence(1))
        assert (await caller.reply(third))["detail"]["request_id"] == request_id("Ada", 0, 1, 0)
        assert (await caller.call("close", at=fence(1)))["ok"]
        await caller.heard("closed")
        assert numbers(caller) == list(range(1, len(caller.events) + 1))
        said = [body.get("event") or body.get("op") or body["kind"] for _, _, body in caller.events]
        assert said == [
            *("opened", "open", "append", "append", "text", "interrupted", "signal"),
            *("append", "closing", "close", "closed"),
        ]
        assert caller.replies() == dict.fromkeys((opened["control_id"], first, second, cancel, third), 1) | {
            caller.events[-2][2]["control_id"]: 1
        }
        assert [order.epochs for order in ear.aborted] == [(0,), (1,)]

        async def is_given_back() -> bool:
            return not await bed.redis.exists(keys.worker_slots("ear-1"), keys.ADMISSION_SLOTS, caller.keys.outputs)

        await until(is_given_back)
        assert await find_undocumented(bed.redis) == []
        await bed.leave(worker)
        assert not await bed.redis.exists(keys.CONTROLS)
        assert await find_undocumented(bed.redis) == []


async def test_an_id_lives_again_and_again(redis_url: str) -> None:
    async with Bed(redis_url) as bed:
        await bed.control("control-a")
        await bed.stage()
        caller = bed.caller("Ada")
        for life in range(4):
            closing = await caller.send("close", at=fence(incarnation=life - 1)) if life else None
            assert (await caller.open(life))["ok"]
            assert closing is None or (await caller.reply(closing))["ok"]
            append = await caller.reply(await caller.append(fence(incarnation=life)))
            assert append["detail"]["seq"] == 1
        assert caller.lifecycle() == ["opened", *["closing", "closed", "opened"] * 3]
        again = await caller.call("open", at=fence(incarnation=2))
        assert again["code"] == "invalid_argument", "it exists"
        assert (await caller.call("close", at=fence(incarnation=3)))["ok"]
        again = await caller.call("open", at=fence(incarnation=3))
        assert again["code"] == "stale_fence", "D4: it has lived"


async def test_i10_every_life_ends_with_one_terminal_event(redis_url: str) -> None:
    pipeline = local(session={"idle_ttl_s": 0.5, "append_timeout_s": 0.3})
    async with Bed(redis_url, pipeline) as bed:
        await bed.control("control-a")
        closed, idle = bed.caller("closed"), bed.caller("idle")
        for caller in (closed, idle):
            await caller.open()
        for _ in range(3):
            assert (await closed.call("close"))["ok"]
        await idle.heard("expired")
        assert (await idle.call("close"))["ok"]
        assert closed.lifecycle() == ["opened", "closed"]
        assert idle.lifecycle() == ["opened", "expired"]


async def test_i4_a_command_sent_again_has_one_effect_and_the_same_reply(redis_url: str) -> None:
    async with Bed(redis_url) as bed:
        first = await bed.control("control-a")
        ear = await bed.stage()
        caller = bed.caller("Ada")
        await caller.open()
        control_id = await caller.append()
        reply = await caller.reply(control_id)
        for _ in range(3):
            await caller.append(control_id=control_id)
        await until_replied(caller, control_id, 4)
        assert [b for kind, _, b in caller.events if kind == "reply" and b["control_id"] == control_id] == [reply] * 4
        assert ear.seqs("Ada") == [1]
        await bed.leave(first)
        await bed.control("control-b")
        await caller.append(control_id=control_id)
        await until_replied(caller, control_id, 5)
        assert caller.events[-1][2] == reply, "a new owner remembers"
        assert ear.seqs("Ada") == [1]
        assert (await caller.reply(await caller.append()))["detail"]["seq"] == 2


async def until_replied(caller: Caller, control_id: str, count: int) -> None:
    async def is_replied() -> bool:
        await caller.listen()
        return caller.replies()[control_id] >= count

    await until(is_replied)


async def test_two_thousand_waiting_commands_are_worked_off(redis_url: str) -> None:
    pipeline = local(partitions=4)
    async with Bed(redis_url, pipeline) as bed:
        callers = [bed.caller(f"caller-{number}") for number in range(50)]
        async with bed.redis.pipeline(transaction=False) as pipe:
            for caller in callers:
                for number in range(40):
                    body: dict[str, Any] = {"v": 1, "session_id": caller.session_id, "fence": fence()}
                    body |= {"op": "append", "mode": "turn_commit_only"} if number else {"op": "open"}
                    body["control_id"] = f"{caller.session_id}-{number}"
                    pipe.xadd(caller.keys.commands, {"b": msgspec.msgpack.encode(body)})
            await pipe.execute()
        worker = await bed.control("control-a")
        await bed.until_drained()
        for caller in callers:
            await caller.listen()
            assert caller.replies().total() == 40
            assert [body["detail"]["seq"] for _, _, body in caller.events[2:]] == list(range(1, 40))
        assert worker.stats.commits < 200, "in batches"


async def test_a_server_that_cannot_be_trusted_stops_the_worker() -> None:
    with ValkeyServer(args=("--maxmemory-policy", "allkeys-lru")) as server:
        worker = ControlWorker(server.url, local())
        with pytest.raises(Unusable, match="may evict"):
            await worker.run()
    worker = ControlWorker("redis://127.0.0.1:1", local())
    with pytest.raises(Unusable, match="can't be reached"):
        await worker.run()


async def test_a_worker_set_to_other_partitions_stops(redis_url: str) -> None:
    async with Bed(redis_url, local()) as bed:
        await bed.control("control-a")
        with pytest.raises(Unusable, match="partitions = 4"):
            await ControlWorker(redis_url, local(partitions=8)).run()


# ---- several workers


async def test_two_workers_share_sixteen_partitions_and_one_that_leaves_hands_over_at_once(redis_url: str) -> None:
    # The lease is long: what goes on within the patience of this test was handed over, not waited for.
    pipeline = local(partitions=16, control={"lease_s": 120.0, "heartbeat_s": 0.6, "heartbeat_interval_s": 0.1})
    async with Bed(redis_url, pipeline) as bed:
        first = await bed.control("control-a")
        second = await bed.control("control-b", whole=False)
        await bed.until_owned(first, second)
        assert first.owned
        assert second.owned
        callers = [bed.caller(f"caller-{number}") for number in range(32)]
        for caller in callers:
            await caller.send("open")
        sent: dict[Caller, list[str]] = {caller: [] for caller in callers}

        async def talk() -> None:
            for _ in range(10):
                for caller in callers:
                    sent[caller].append(await caller.append())
                await asyncio.sleep(0.01)

        talking = asyncio.create_task(talk())
        await until(lambda: len(sent[callers[0]]) > 3)
        await bed.leave(first)
        await bed.until_owned(second)
        third = await bed.control("control-c", whole=False)
        await bed.until_owned(second, third)
        await talking
        for caller in callers:
            await caller.reply(sent[caller][-1])
            details = [caller.find_reply(control_id)["detail"]["seq"] for control_id in sent[caller]]
            assert details == list(range(1, 11))
            assert set(caller.replies().values()) == {1}
            assert numbers(caller) == list(range(1, len(caller.events) + 1))


async def test_a_killed_worker_is_replaced_within_its_lease_and_nothing_is_lost(redis_url: str) -> None:
    async with Bed(redis_url) as bed:
        first = await bed.control("control-a")
        ear = await bed.stage()
        callers = [bed.caller(f"caller-{number}") for number in range(12)]
        for caller in callers:
            await caller.open()
        ear.accepts = False
        under_way = [await caller.append() for caller in callers]
        waiting = [await caller.append() for caller in callers]
        await until(
            lambda: all(first.owners[0].owned[p].partition.waiting for p in {c.keys.partition for c in callers})
        )
        second = await bed.control("control-b", whole=False)
        await bed.until_owned(first, second)
        killed_at = time.monotonic()
        await bed.crash(first)
        late = [await caller.append() for caller in callers]
        ear.accepts = True
        for caller, control_id in zip(callers, late, strict=True):
            await caller.reply(control_id)
        lease_s = bed.pipeline.control.lease_s
        assert time.monotonic() - killed_at < lease_s + 5, "generous: the machine may be busy"
        for caller, *sent in zip(callers, under_way, waiting, late, strict=True):
            assert [caller.find_reply(control_id)["detail"]["seq"] for control_id in sent] == [1, 2, 3]
            assert caller.replies().total() == 4
            assert ear.seqs(caller.session_id) == [1, 2, 3]
        assert second.owned == list(range(4))


async def test_i6_a_deposed_worker_that_wakes_up_with_a_decision_changes_nothing(redis_url: str) -> None:
    pipeline = local(partitions=1)
    async with Bed(redis_url, pipeline) as bed:
        old = await bed.control("control-old", Stalled)
        caller = bed.caller("Ada")
        await caller.open()
        old.gate.clear()
        sent = await caller.append()
        await until(lambda: old.held == ["commit"])
        new = await bed.control("control-new", whole=False)
        assert (await caller.reply(sent))["detail"]["seq"] == 1, "its successor has answered"
        assert new.owned == [0]
        async with Redis.from_url(redis_url) as redis:
            before = await redis.hgetall(caller.keys.owner), await redis.xlen(caller.keys.events("Ada"))
            old.gate.set()
            await until(lambda: old.stats.refused_commits > 0 and old.owned == [])
            assert (await redis.hget(caller.keys.owner, "token"), await redis.xlen(caller.keys.events("Ada"))) == (
                before[0][b"token"],
                before[1],
            )
        assert (await caller.reply(await caller.append()))["detail"]["seq"] == 2
        assert set(caller.replies().values()) == {1}


async def test_s75_a_deposed_worker_that_wakes_up_before_a_placement_takes_no_slot(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(partitions=1)) as bed:
        old = await bed.control("control-old", Stalled)
        await bed.stage()
        caller = bed.caller("Ada")
        owner = old.owners[0]
        gated = owner._commit

        async def commit_and_stall(*args: Any) -> None:
            await Owner._commit(owner, *args)
            if not old.desk.is_idle:
                old.gate.clear()

        owner._commit = commit_and_stall
        opening = await caller.send("open", capabilities={"input_modes": ["append_tokens"]})
        await until(lambda: "slots" in old.held)
        owner._commit = gated
        new = await bed.control("control-new", whole=False)
        await until(lambda: new.owned == [0])
        assert (await caller.reply(opening))["ok"]
        assert (await caller.call("close"))["ok"]
        await until_free(bed)
        old.gate.set()
        await until(lambda: old.owned == [])
        await caller.call("touch", activity="heartbeat")
        assert not await bed.redis.exists(keys.worker_slots("ear-1"))
