"""Orders of operators and upkeep, as an owner takes them: a stream of their own, decided like everything else."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest

from control.store.keys import PartitionKeys, partition_of
from control.store.orders import MOST_WAITING, post_orders
from control.wire.orders import DismissOrder, LookOrder, Order, RetryOrder, SlotOrder
from tests.workers.control_bed import Bed, fence, local, make_pipeline, until, until_free
from workers.control import ControlWorker


async def order(bed: Bed, *orders: Order) -> None:
    assert await post_orders(bed.redis, bed.pipeline.partitions, orders) == len(orders)


async def until_taken(bed: Bed) -> None:
    async def is_taken() -> bool:
        names = [PartitionKeys(p).orders for p in range(bed.pipeline.partitions)]
        return not any([await bed.redis.xlen(name) for name in names])

    await until(is_taken)


async def test_s62_a_session_that_an_operator_ends_lets_go_of_everything_and_its_listener_hears_why(
    redis_url: str,
) -> None:
    async with Bed(redis_url) as bed:
        await bed.control("c1")
        stage = await bed.stage()
        caller = bed.caller("call")
        await caller.open()
        await caller.reply(await caller.append())
        await order(bed, DismissOrder("call", 0, "worker_drained"), DismissOrder("call", 0, "worker_drained"))
        assert (await caller.heard("closed"))["reason"] == "worker_drained"
        assert [abort.session_id for abort in stage.aborted] == ["call"]
        await until_free(bed)
        await until_taken(bed)
        assert caller.lifecycle() == ["opened", "closing", "closed"]


async def test_an_order_asks_for_no_token(redis_url: str) -> None:
    async with Bed(redis_url, local()) as bed:
        await bed.control("c1")
        caller = bed.caller("call")
        await caller.open(token=hashlib.sha256(b"secret").hexdigest())
        assert (await caller.call("touch", activity="heartbeat"))["code"] == "failed_precondition"
        await order(bed, DismissOrder("call", 0, "operator_close"))
        assert (await caller.heard("closed"))["reason"] == "operator_close"


async def test_an_order_for_another_life_or_for_nobody_is_taken_and_does_nothing(redis_url: str) -> None:
    async with Bed(redis_url, local()) as bed:
        await bed.control("c1")
        caller = bed.caller("call")
        await caller.open(3)
        await order(
            bed, DismissOrder("call", 2, "operator_close"), RetryOrder("nobody"), SlotOrder("no", 1, "ear-1", False)
        )
        await until_taken(bed)
        assert (await caller.call("touch", activity="heartbeat"))["ok"]


async def test_what_is_no_order_is_a_dead_letter(redis_url: str) -> None:
    async with Bed(redis_url, local()) as bed:
        await bed.control("c1")
        known = PartitionKeys(1)
        await bed.redis.xadd(known.orders, {"b": b"\xc1"})
        await until(lambda: bed.redis.xlen(known.dead))
        ((_, fields),) = await bed.redis.xrange(known.dead)
        assert fields[b"stream"] == b"orders"
        assert fields[b"reason"].startswith(b"no order")
        await until_taken(bed)


async def test_an_owner_that_is_busy_takes_orders_all_the_same(redis_url: str) -> None:
    async with Bed(redis_url, local(partitions=1)) as bed:
        await bed.control("c1")
        victim, caller = bed.caller("victim"), bed.caller("call")
        await victim.open()
        await caller.open()
        flowing = True

        async def flow() -> None:
            while flowing:
                async with bed.redis.pipeline(transaction=False) as pipe:
                    for _ in range(50):
                        pipe.xadd(
                            caller.keys.commands, {"b": b'{"v":1,"op":"touch","session_id":"x","control_id":"y"}'}
                        )
                    await pipe.execute()

        task = asyncio.create_task(flow())
        await order(bed, DismissOrder("victim", 0, "operator_close"))
        await victim.heard("closed")
        flowing = False
        await task


async def test_an_order_that_a_former_owner_has_not_taken_is_its_heir_s(redis_url: str) -> None:
    async with Bed(redis_url, local()) as bed:
        first = await bed.control("c1")
        caller = bed.caller("call")
        await caller.open()
        await bed.crash(first)
        await order(bed, DismissOrder("call", 0, "operator_close"))
        await bed.control("c2")
        assert (await caller.heard("closed"))["reason"] == "operator_close"


async def test_a_cleanup_that_waits_for_its_backoff_is_tried_again_at_once(redis_url: str) -> None:
    patient = make_pipeline(session={"cleanup_backoff_s": 600.0, "cleanup_backoff_max_s": 600.0})
    async with Bed(redis_url, patient) as bed:
        await bed.control("c1")
        stage = await bed.stage()
        caller = bed.caller("call")
        await caller.open()
        await caller.reply(await caller.append())
        stage.confirms = False
        cancel = await caller.cancel(fence(), fence(1))
        await until(lambda: stage.seen_aborts)
        for entry_id, _ in await bed.redis.xrange(caller.keys.aborts("ear-1")):
            await bed.redis.xdel(caller.keys.aborts("ear-1"), entry_id)  # lost by the stage
        stage.confirms = True
        await order(bed, RetryOrder("call"))
        assert (await caller.reply(cancel))["ok"]


async def test_s62_a_session_without_its_deadline_is_looked_at(redis_url: str) -> None:
    async with Bed(redis_url, local(session={"idle_ttl_s": 1.0, "append_timeout_s": 0.5})) as bed:
        worker: ControlWorker = await bed.control("c1")
        caller = bed.caller("call")
        await caller.open()
        partition = partition_of("call", bed.pipeline.partitions)
        # As after a bug, or an owner that began without it.
        (owner,) = worker.owners
        owner.owned[partition].partition._due_ms.clear()
        await bed.redis.zrem(PartitionKeys(partition).deadlines, "call")
        await asyncio.sleep(1.5)
        assert "expired" not in caller.lifecycle()
        await order(bed, LookOrder("call"))
        await caller.heard("expired")


async def test_what_is_left_of_a_session_that_is_gone_goes(redis_url: str) -> None:
    async with Bed(redis_url, local()) as bed:
        await bed.control("c1")
        known = bed.keys("ghost")
        await bed.redis.hset(known.marks, "ghost", "1 0 0-0")
        await bed.redis.hset(known.heard, "ghost", "5")
        await bed.redis.xadd(known.events("ghost"), {"t": "reply", "n": 1, "b": b"\x80"})
        await order(bed, LookOrder("ghost"))
        await until_taken(bed)
        assert await bed.redis.hget(known.marks, "ghost") is None
        assert await bed.redis.hget(known.heard, "ghost") is None
        assert 0 < await bed.redis.pttl(known.events("ghost")) <= 300_000


async def test_orders_are_not_piled_up_where_nobody_takes_them(redis: Any) -> None:
    known = PartitionKeys(partition_of("call", 4))
    async with redis.pipeline(transaction=False) as pipe:
        for _ in range(MOST_WAITING - 1):
            pipe.xadd(known.orders, {"b": b"x"})
        await pipe.execute()
    assert await post_orders(redis, 4, [LookOrder("call"), LookOrder("call")]) == 1
    assert await post_orders(redis, 4, [LookOrder("call")]) == 0
    assert await post_orders(redis, 4, []) == 0


@pytest.fixture
async def redis(redis_url: str) -> Any:
    async with Bed(redis_url, local()) as bed:
        yield bed.redis
