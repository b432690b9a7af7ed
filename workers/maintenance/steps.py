"""What the operators' jobs do, a step at a time: empty a stage worker, end the sessions that an operator means.

Responsible for one step: it looks, gives some orders, and says how far the job is. Leaves running it again and again to
`arq_jobs.py`, what becomes of an order to the owners. Talks to Redis. Nothing is remembered but the job's record and
its list of targets, so a step may be done twice, late, or by another process than the last one (S62, S63).
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from msgspec.structs import replace

from control.core.session import Phase
from control.store import keys, lives
from control.store.inspect import fetch_some_sessions, walk_sessions
from control.store.keys import partition_of
from control.store.lives import LifeState
from control.store.orders import post_orders
from control.store.server import fetch_now_ms
from control.wire.orders import DismissOrder
from workers.maintenance.record import Job, JobState
from workers.maintenance.where import is_meant, parse_where

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from control.core.session import Session
    from workers.maintenance.record import JobStore

# Sessions that one step sees to. A closed session is a cleanup at every stage, which shouldn't all come at once.
PORTION = 200
# After its last order, how long a session may take to be gone before the job gives up waiting. Nothing is undone then.
PATIENCE_MS = 600_000

COLLECT_S = 1.0

DRAINED = "worker_drained"
CLOSED = "operator_close"


@dataclass(frozen=True, slots=True)
class Site:
    """Where a job works: `redis` holds the sessions, `jobs` the jobs."""

    redis: Redis
    partitions: int
    jobs: JobStore


Step = Callable[[Site, Job], Awaitable[Job]]


async def drain(site: Site, job: Job) -> Job:
    """Arguments: `worker`, `grace_ms`. The worker takes nothing new; what it has may end by itself for the grace time.

    Then its sessions are ended. Done when none is left; the worker stays, and takes nothing until it is told otherwise.
    """
    worker_id, grace_ms = job.arguments["worker"], int(job.arguments["grace_ms"])
    life = next((life for life in await lives.fetch_lives(site.redis) if life.worker_id == worker_id), None)
    if life is None or life.state is LifeState.DEAD:
        return _over(job, JobState.DONE, f"{worker_id} is gone; its sessions have been told")
    since_ms = await lives.find_drain(site.redis, worker_id)
    if since_ms is None:
        if job.state is not JobState.QUEUED:
            # Undone while a step was on its way, which must not undo that.
            return _over(job, JobState.CANCELLED, f"{worker_id} was told to take sessions again")
        since_ms = await lives.order_drain(site.redis, worker_id)
    slots = await lives.fetch_slots(site.redis, worker_id)
    job = replace(job, state=JobState.RUNNING, total=max(job.total, len(slots)))
    job = replace(job, done=job.total - len(slots))
    if life.state is not LifeState.DRAINING:
        return replace(job, message=f"{worker_id} has still to notice that it takes no more sessions")
    if not slots:
        return _over(job, JobState.DONE, f"{worker_id} is empty and takes no more sessions")
    left_ms = since_ms + grace_ms - await fetch_now_ms(site.redis)
    if left_ms > 0:
        message = f"sessions left: {len(slots)}; they may end by themselves for another {left_ms / 1000:.0f} s"
        return replace(job, message=message)
    if left_ms < -PATIENCE_MS:
        message = (
            f"sessions still there {PATIENCE_MS // 1000} s after they were ended: {len(slots)}; see `bargein cleanups`"
        )
        return _over(job, JobState.FAILED, message)
    # Any of them: those whose cleanup is stuck must not keep the others from being told.
    some = random.sample(sorted(slots), min(PORTION, len(slots)))
    orders = [DismissOrder(session_id, slots[session_id], DRAINED) for session_id in some]
    ended = await post_orders(site.redis, site.partitions, orders)
    message = f"sessions left, and being ended: {len(slots)}"
    return replace(_count(job, "orders", ended), message=message)


async def close(site: Site, job: Job) -> Job:
    """Arguments: `where`, conditions as `where.py` reads them; `reason`. Ends the sessions that are meant now.

    First the partitions are looked through for targets, some a step; then each target is told to end, and waited for.
    """
    job = replace(job, state=JobState.RUNNING)
    if job.at < site.partitions:
        return await _collect(site, job)
    targets = keys.job_targets(job.job_id)
    # Any of them, as above.
    flat = await cast("Awaitable[list[bytes]]", site.jobs.redis.hrandfield(targets, PORTION, withvalues=True))
    chosen = {flat[i].decode(): int(flat[i + 1]) for i in range(0, len(flat or ()), 2)}
    if not chosen:
        return _over(job, JobState.DONE, f"sessions ended: {job.total}")
    sessions = await _find_sessions(site, list(chosen))
    gone = [name for name, incarnation in chosen.items() if not _lives(sessions[name], incarnation)]
    orders = [
        DismissOrder(name, chosen[name], job.arguments["reason"])
        for name in chosen.keys() - set(gone)
        if (session := sessions[name]) is not None and session.phase is Phase.OPEN
    ]
    posted = await post_orders(site.redis, site.partitions, orders)
    if gone:
        await cast("Awaitable[int]", site.jobs.redis.hdel(targets, *gone))
    left = await cast("Awaitable[int]", site.jobs.redis.hlen(targets))
    job = replace(_count(job, "orders", posted), done=job.total - left)
    if gone or posted:
        # `at` beyond the partitions: when something last happened, by the server's clock.
        job = replace(job, at=await fetch_now_ms(site.redis))
    elif await fetch_now_ms(site.redis) - job.at > PATIENCE_MS:
        message = f"sessions closing for more than {PATIENCE_MS // 1000} s: {left}; see `bargein cleanups`"
        return _over(job, JobState.FAILED, message)
    return replace(job, message=f"sessions left: {left}")


STEPS: dict[str, Step] = {"drain": drain, "close": close}


async def _collect(site: Site, job: Job) -> Job:
    conditions = parse_where(job.arguments["where"])
    targets, at, until_s = keys.job_targets(job.job_id), job.at, time.monotonic() + COLLECT_S
    while at < site.partitions and time.monotonic() < until_s:
        async for rows in walk_sessions(site.redis, at):
            meant = {
                row.session_id: row.fence.incarnation
                for row in rows
                if row.fence is not None and row.phase in {"open", "closing"} and is_meant(row, conditions)
            }
            if meant:
                await cast("Awaitable[int]", site.jobs.redis.hset(targets, mapping=cast("Any", meant)))
        at += 1
    total = await cast("Awaitable[int]", site.jobs.redis.hlen(targets))
    message = f"looked through {at} of {site.partitions} partitions"
    return replace(job, at=at if at < site.partitions else await fetch_now_ms(site.redis), total=total, message=message)


async def _find_sessions(site: Site, session_ids: list[str]) -> dict[str, Session | None]:
    by_partition: dict[int, list[str]] = {}
    for session_id in session_ids:
        by_partition.setdefault(partition_of(session_id, site.partitions), []).append(session_id)
    found: dict[str, Session | None] = {}
    for partition, some in by_partition.items():
        found.update(zip(some, await fetch_some_sessions(site.redis, partition, some), strict=True))
    return found


def _lives(session: Session | None, incarnation: int) -> bool:
    return session is not None and session.phase is not Phase.VACANT and session.fence.incarnation == incarnation


def _count(job: Job, name: str, more: int) -> Job:
    return replace(job, counts={**job.counts, name: job.counts.get(name, 0) + more})


def _over(job: Job, state: JobState, message: str) -> Job:
    return replace(job, state=state, message=message, done=job.total if state is JobState.DONE else job.done)
