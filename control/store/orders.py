"""Posting orders to the partitions' owners.

Responsible for where an order goes, and for not piling them up where nobody takes them. Leaves their bytes to
`control/wire/orders.py`, what becomes of them to the owners. Talks to Redis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from control.store.inspect import ask
from control.store.keys import PartitionKeys, partition_of
from control.wire.orders import encode_order

if TYPE_CHECKING:
    from collections.abc import Iterable

    from redis.asyncio import Redis

    from control.wire.orders import Order

# A partition with so many has no owner, or one that can't keep up; whoever posts has to come again anyway.
MOST_WAITING = 10_000


async def post_orders(redis: Redis, partitions: int, orders: Iterable[Order]) -> int:
    """How many were posted: those of partitions with too many waiting are not. Raises what Redis says."""
    by_partition: dict[int, list[Order]] = {}
    for order in orders:
        by_partition.setdefault(partition_of(order.session_id, partitions), []).append(order)
    waiting = await ask(redis, [("XLEN", PartitionKeys(partition).orders) for partition in by_partition])
    posted = 0
    async with redis.pipeline(transaction=False) as pipe:
        for (partition, some), count in zip(by_partition.items(), waiting, strict=True):
            for order in some[: max(0, MOST_WAITING - (count or 0))]:
                entry: dict[Any, Any] = {"b": encode_order(order)}
                pipe.xadd(PartitionKeys(partition).orders, entry)
                posted += 1
        if posted:
            await pipe.execute()
    return posted
