"""What upkeep does now and then: what nobody else would ever put right is found, and told to whoever decides.

Responsible for looking, slowly, a page at a time. Leaves deciding to the owners: they are given orders, and none of
this writes a session. What is live looks after itself (stage workers tell what they run and who holds a slot with them,
see `stage_audit.py`); here is what is left where something has died, been deleted, or come back from an older state.
Each duty may run twice, late or not at all (S62). Talks to Redis.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from control.core.session import Phase
from control.store import keys, lives
from control.store.census import check_slots, take_census, walk_pages
from control.store.inspect import ask, fetch_some_sessions
from control.store.keys import PartitionKeys
from control.store.lives import LifeState
from control.store.orders import post_orders
from control.store.server import fetch_now_ms
from control.wire.orders import LookOrder, SlotOrder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from redis.asyncio import Redis

    from control.store.census import SlotName
    from control.wire.orders import Order
    from workers.maintenance.steps import Site

MOST = 100_000
DEAD_LETTERS_KEPT_MS = 7 * 86_400_000
# What is on its way between two looks is not astray.
LOOK_AGAIN_S = 5.0
# A tombstone that the owner was going to forget by itself is left to it for so long.
OVERDUE_MS = 600_000


@dataclass(frozen=True, slots=True)
class Duty:
    """`when`: the minutes and seconds at which arq begins it. `says`: what was found, with the number in it."""

    name: str
    work: Callable[[Site], Awaitable[int]]
    when: dict[str, Any]
    says: str


async def prune_dead_letters(site: Site) -> int:
    """Dead letters older than a week go; how many."""
    oldest = f"{await fetch_now_ms(site.redis) - DEAD_LETTERS_KEPT_MS}-0"
    return sum(
        [
            int(await site.redis.xtrim(PartitionKeys(p).dead, minid=oldest, approximate=False))
            for p in range(site.partitions)
        ]
    )


async def reconcile_slots(site: Site) -> int:
    """Slots that nobody owns, and sessions without theirs, twice in a row: their owners are asked; how many (S43)."""
    first = await _find_astray(site)
    if not first:
        return 0
    await asyncio.sleep(LOOK_AGAIN_S)
    astray = first & await _find_astray(site)
    orders: list[Order] = [
        SlotOrder(session_id, incarnation, holder, has_slot) for (holder, session_id, incarnation), has_slot in astray
    ]
    return await post_orders(site.redis, site.partitions, orders)


async def sweep_queues(site: Site) -> int:
    """Queues of lives that are over and in no index any more; how many lives had some."""
    indexed = (await lives.fetch_index(site.redis))[1]
    swept = 0
    for worker_id in sorted(await _find_fenced(site) - indexed):
        state, slots = await ask(
            site.redis, [("HGET", keys.worker_state(worker_id), "state"), ("HLEN", keys.worker_slots(worker_id))]
        )
        if slots != 0 or (state is not None and state != LifeState.DEAD.value.encode()):
            continue
        names = [
            name
            for partition in range(site.partitions)
            for name in (PartitionKeys(partition).submissions(worker_id), PartitionKeys(partition).aborts(worker_id))
        ]
        lengths = await ask(site.redis, [("XLEN", name) for name in names])
        if any(lengths):
            await lives.sweep_queues(site.redis, worker_id, site.partitions)
            swept += 1
    return swept


async def wake_forgotten(site: Site) -> int:
    """Sessions that no deadline would ever bring back, and what is left of sessions that are gone; how many (S62).

    The owner is asked to look at each.
    """
    found = 0
    for partition in range(site.partitions):
        known = PartitionKeys(partition)
        async for names in _names_in(site.redis, known.sessions):
            found += await _wake(site, await _find_undue(site.redis, known, names))
        async for names in _names_in(site.redis, known.marks):
            (states,) = await ask(site.redis, [("HMGET", known.sessions, *names)])
            # None in place of the list: the key holds something else, which is its owner's to find.
            missing = [name for name, state in zip(names, states or (), strict=states is not None) if state is None]
            found += await _wake(site, missing)
    return found


UPKEEP = (
    Duty("reconcile_slots", reconcile_slots, {"minute": set(range(0, 60, 5)), "second": 20}, "{} slots were astray"),
    Duty("sweep_queues", sweep_queues, {"minute": set(range(3, 60, 10)), "second": 40}, "queues of {} lives swept"),
    Duty("wake_forgotten", wake_forgotten, {"minute": 37, "second": 10}, "{} sessions were forgotten"),
    Duty("prune_dead_letters", prune_dead_letters, {"minute": 47, "second": 10}, "{} dead letters are gone"),
)


async def _find_astray(site: Site) -> set[tuple[SlotName, bool]]:
    """Slots, and whether they are held; of every worker that anything is known of, and of the limit of sessions."""
    indexed = (await lives.fetch_index(site.redis))[1]
    workers = sorted(indexed | await _find_fenced(site))
    sample = await check_slots(site.redis, workers, site.partitions, MOST)
    census = await take_census(site.redis, range(site.partitions), MOST)
    return {(slot, True) for slot in sample.unowned} | {(slot, False) for slot in census.missing}


async def _find_fenced(site: Site) -> set[str]:
    answers = await ask(site.redis, [("SMEMBERS", PartitionKeys(p).fenced) for p in range(site.partitions)])
    return {name.decode(errors="replace") for names in answers for name in names or ()}


async def _find_undue(redis: Redis, known: PartitionKeys, names: list[str]) -> list[str]:
    """Those of the sessions that have something to wait for and no deadline, and tombstones that should be gone."""
    (dues,) = await ask(redis, [("ZMSCORE", known.deadlines, *names)])
    if dues is None:
        return []
    sessions, now_ms = await fetch_some_sessions(redis, known.partition, names), await fetch_now_ms(redis)
    undue: list[str] = []
    for name, session, due in zip(names, sessions, dues, strict=True):
        if session is None:
            continue
        waits = session.phase is not Phase.OPEN or bool(session.debts) or session.append is not None
        late = session.phase is Phase.VACANT and session.is_forgettable(now_ms - OVERDUE_MS)
        if late or (due is None and waits):
            undue.append(name)
    return undue


async def _wake(site: Site, names: list[str]) -> int:
    return await post_orders(site.redis, site.partitions, [LookOrder(name) for name in names]) if names else 0


async def _names_in(redis: Redis, name: str) -> AsyncIterator[list[str]]:
    """The names of a hash's fields, some at a time."""
    async for _, page in walk_pages(redis, [name]):
        if page:
            yield [field.decode(errors="replace") for field in page]
