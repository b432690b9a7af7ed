"""What a control worker samples for metrics: backlogs, sessions, requests, cleanups, and slots that don't add up.

Responsible for reading a bounded part of what is stored, a page at a time, so that neither the server nor the event
loop is held up. Leaves when to look to `workers/metrics/sampling.py`. Talks to Redis and never writes, but for a probe
that changes nothing. Times are the server's milliseconds, ages as of the sample. What is read is of different moments:
a slot counts as astray only if two samples in a row say so, which is the caller's part.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import msgspec

from control.core.cleanup import CleanupKind
from control.core.requests import RequestPhase
from control.core.scene import ADMISSION
from control.core.session import Phase, Session
from control.store import keys
from control.store.commits import decode_cleanups, decode_session
from control.store.inspect import KEYS_AT_ONCE, ask
from control.store.keys import PartitionKeys, partition_of
from control.store.server import fetch_now_ms
from control.store.slots import read_slot

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Sequence

    from redis.asyncio import Redis

PAGE = 100  # entries that one HSCAN looks at, roughly
UNREADABLE = "unreadable"

SlotName = tuple[str, str, int]
"""Who holds a slot where: the holder (a stage worker, or the limit of sessions), session id, incarnation."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits in a partition. None: the key holds something else. `oldest_ms`: of the commands, 0 if none."""

    partition: int
    commands: int | None
    acks: int | None
    oldest_ms: int | None
    dead_letters: int | None


def _none_of(names: Sequence[str]) -> dict[str, int]:
    return dict.fromkeys(names, 0)


@dataclass(slots=True)
class Census:
    """Counts by the names of the core. `capped`: there was more to look at. `spent_s`: of this thread's time."""

    phases: dict[str, int] = field(default_factory=lambda: _none_of([*(p.name.lower() for p in Phase), UNREADABLE]))
    requests: dict[str, int] = field(default_factory=lambda: _none_of([p.name.lower() for p in RequestPhase]))
    cleanups: dict[str, int] = field(default_factory=lambda: _none_of([k.value for k in CleanupKind]))
    oldest_ms: dict[str, int] = field(default_factory=lambda: _none_of([k.value for k in CleanupKind]))
    missing: set[SlotName] = field(default_factory=set[SlotName])
    seen: int = 0
    capped: bool = False
    spent_s: float = 0.0


@dataclass(slots=True)
class SlotSample:
    """`unowned`: slots that no session holds or owes back. `admitted`: sessions within the limit."""

    unowned: set[SlotName] = field(default_factory=set[SlotName])
    admitted: int = 0
    seen: int = 0
    capped: bool = False
    spent_s: float = 0.0


async def probe_write(redis: Redis, worker_id: str) -> None:
    """A write that changes nothing. Raises what a server says that is full, a replica, or can't save."""
    await cast("Awaitable[Any]", redis.execute_command("ZADD", keys.CONTROLS, "XX", "GT", 0, worker_id))


async def fetch_backlogs(redis: Redis, numbers: Sequence[int]) -> list[Backlog]:
    """What waits in these partitions."""
    now_ms = await fetch_now_ms(redis)
    found: list[Backlog] = []
    for first in range(0, len(numbers), KEYS_AT_ONCE):
        some = [PartitionKeys(number) for number in numbers[first : first + KEYS_AT_ONCE]]
        calls: list[tuple[Any, ...]] = []
        for known in some:
            calls += [
                ("XLEN", known.commands),
                ("XLEN", known.acks),
                ("XRANGE", known.commands, "-", "+", "COUNT", 1),
                ("XLEN", known.dead),
            ]
        answers = iter(await ask(redis, calls))
        for known in some:
            commands, acks, first_entry, dead = next(answers), next(answers), next(answers), next(answers)
            oldest_ms = None
            if first_entry is not None:
                oldest_ms = max(0, now_ms - int(bytes(first_entry[0][0]).partition(b"-")[0])) if first_entry else 0
            found.append(Backlog(known.partition, commands, acks, oldest_ms, dead))
    return found


async def take_census(redis: Redis, numbers: Sequence[int], most: int) -> Census:
    """Look at up to `most` sessions of these partitions, and as many sessions with cleanups."""
    census, now_ms = Census(), await fetch_now_ms(redis)
    async for partition, page in walk_pages(redis, [PartitionKeys(number).cleanups for number in numbers]):
        del partition
        began_s = time.perf_counter()
        for blob in page.values():
            _count_cleanups(census, blob, now_ms)
        census.spent_s += time.perf_counter() - began_s
        census.seen += len(page)
        if census.seen >= most:
            census.capped = True
            break
    census.seen = 0
    async for _, page in walk_pages(redis, [PartitionKeys(number).sessions for number in numbers]):
        began_s = time.perf_counter()
        held: dict[str, list[tuple[str, int]]] = {}
        for name, state in page.items():
            _count_session(census, name, state, held)
        census.spent_s += time.perf_counter() - began_s
        await _find_missing(redis, held, census.missing)
        census.seen += len(page)
        if census.seen >= most:
            census.capped = True
            break
    return census


async def check_slots(redis: Redis, workers: Sequence[str], partitions: int, most: int) -> SlotSample:
    """Look at up to `most` slots of these stage workers and of the limit of sessions, for some that nobody owns."""
    sample = SlotSample()
    holders = [*workers, ADMISSION]
    sample.admitted = (await ask(redis, [("HLEN", keys.ADMISSION_SLOTS)]))[0] or 0
    async for place, page in walk_pages(redis, [_slots_of(holder) for holder in holders]):
        holder = holders[place]
        slots = [(_text(name), read_slot(value)) for name, value in page.items()]
        by_partition: dict[int, list[tuple[str, int]]] = {}
        for session_id, incarnation in slots:
            if incarnation is not None:
                by_partition.setdefault(partition_of(session_id, partitions), []).append((session_id, incarnation))
        calls = [("HMGET", PartitionKeys(p).sessions, *(s for s, _ in some)) for p, some in by_partition.items()]
        answers = await ask(redis, calls)
        began_s = time.perf_counter()
        for some, states in zip(by_partition.values(), answers, strict=True):
            for (session_id, incarnation), state in zip(some, states or [None] * len(some), strict=True):
                if states is not None and not _is_owned(state, holder, incarnation):
                    sample.unowned.add((holder, session_id, incarnation))
        sample.spent_s += time.perf_counter() - began_s
        sample.seen += len(page)
        if sample.seen >= most:
            sample.capped = True
            break
    return sample


def _count_session(census: Census, name: bytes, state: bytes, held: dict[str, list[tuple[str, int]]]) -> None:
    session = _find_session(state)
    if session is None:
        census.phases[UNREADABLE] += 1
        return
    census.phases[session.phase.name.lower()] += 1
    for request in session.requests:
        census.requests[request.phase.name.lower()] += 1
    # While it opens its slots are still being taken.
    if session.phase is Phase.OPEN or session.phase is Phase.CLOSING:
        for holder in session.holders:
            held.setdefault(holder, []).append((_text(name), session.fence.incarnation))


def _count_cleanups(census: Census, blob: bytes, now_ms: int) -> None:
    try:
        pending = decode_cleanups(blob)
    except msgspec.DecodeError:
        return
    for cleanup in pending:
        kind = cleanup.kind.value
        census.cleanups[kind] += 1
        census.oldest_ms[kind] = max(census.oldest_ms[kind], now_ms - cleanup.created_ms)


async def _find_missing(redis: Redis, held: dict[str, list[tuple[str, int]]], missing: set[SlotName]) -> None:
    answers = await ask(redis, [("HMGET", _slots_of(h), *(s for s, _ in some)) for h, some in held.items()])
    for (holder, some), slots in zip(held.items(), answers, strict=True):
        for (session_id, incarnation), slot in zip(some, slots or [], strict=slots is not None):
            if slot is None or read_slot(slot) != incarnation:
                missing.add((holder, session_id, incarnation))


def _is_owned(state: bytes | None, holder: str, incarnation: int) -> bool:
    if state is None:
        return False
    session = _find_session(state)
    if session is None:
        return True  # nobody can say
    if holder in session.holders and session.fence.incarnation == incarnation:
        return True
    return any(debt.holder == holder and debt.incarnation == incarnation for debt in session.debts)


def _find_session(state: bytes) -> Session | None:
    try:
        return decode_session(state, None)
    except msgspec.DecodeError:
        return None


def _slots_of(holder: str) -> str:
    return keys.ADMISSION_SLOTS if holder == ADMISSION else keys.worker_slots(holder)


async def walk_pages(redis: Redis, names: Sequence[str]) -> AsyncIterator[tuple[int, dict[bytes, bytes]]]:
    """Hashes a page at a time: a hash's place in `names`, and fields that were not there before."""
    for place, name in enumerate(names):
        cursor, seen = 0, set[bytes]()
        while True:
            (answer,) = await ask(redis, [("HSCAN", name, cursor, "COUNT", PAGE)])
            cursor, fields = answer or (0, cast("dict[bytes, bytes]", {}))
            yield place, {field_: value for field_, value in fields.items() if field_ not in seen}
            cursor = int(cursor)
            if not cursor:
                break
            seen.update(fields)


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
