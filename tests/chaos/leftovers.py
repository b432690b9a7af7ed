"""What is left in Redis once every session is closed, and whether a place ever held more than it may.

Responsible for reading it, directly from the server. Leaves judging it to `checker.py`. Talks to Redis.
"""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from control.core.session import Phase
from control.store import keys
from control.store.inspect import fetch_partitions, fetch_sessions, fetch_stage_workers
from tests.chaos.history import Leftovers

LIVING = frozenset({Phase.OPENING, Phase.OPEN, Phase.CLOSING})


async def read_leftovers(redis: Redis, partitions: int, overfull: set[str]) -> Leftovers:
    """One look."""
    left = Leftovers(overfull=sorted(overfull))
    found = await fetch_sessions(redis, partitions, None, 100_000)
    left.sessions = [f"{row.session_id} ({row.phase})" for row in found.rows if row.phase != "vacant"]
    left.debts = [row.session_id for row in found.rows if row.debts]
    for row in await fetch_partitions(redis, partitions):
        left.cleanups += row.cleanups or 0
        left.dead_letters += row.dead_letters or 0
        known = keys.PartitionKeys(row.partition)
        for name in (known.commands, known.acks):
            if length := int(await redis.xlen(name)):
                left.queues[name] = length
        for name in (known.outputs, known.fences, known.marks, known.heard):
            if length := int(await redis.hlen(name)):
                left.queues[name] = length
    places: list[tuple[str, str]] = [("all sessions", keys.ADMISSION_SLOTS)]
    for worker in (await fetch_stage_workers(redis)).rows:
        if worker.state != "live":
            continue
        places.append((f"{worker.stage} {worker.worker_id}", keys.worker_slots(worker.worker_id)))
        for partition in range(partitions):
            known = keys.PartitionKeys(partition)
            for name in (known.submissions(worker.worker_id), known.aborts(worker.worker_id)):
                if length := int(await redis.xlen(name)):
                    left.queues[name] = length
    for place, name in places:
        if held := await redis.hkeys(name):
            left.slots[place] = sorted(session.decode() for session in held)
    return left


async def watch_limits(redis: Redis, max_sessions: int, overfull: set[str], every_s: float = 0.3) -> None:
    """Look at every place's slots again and again, until cancelled (I9)."""
    while True:
        await asyncio.sleep(every_s)
        try:
            held: Any = await redis.hlen(keys.ADMISSION_SLOTS)
            if held > max_sessions:
                overfull.add(f"all sessions ({held} of {max_sessions})")
            for worker in (await fetch_stage_workers(redis)).rows:
                if worker.capacity is not None and (worker.slots_used or 0) > worker.capacity:
                    overfull.add(f"{worker.worker_id} ({worker.slots_used} of {worker.capacity})")
        except (RedisError, OSError):
            continue
