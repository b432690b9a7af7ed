"""The owner of partitions: reads what they were told, decides, commits, and does what may only follow.

Responsible for the loop over a group of partitions that one read can cover: all of them on one server, one on a
cluster. One read, one load of what is not known, decisions in memory, one write with a commit a partition; nothing in
it is a round trip a command. Leaves deciding to `partition.py` and the core, loading and committing to `holdings.py`,
the rest of the process to `control.py`. Talks to Redis. Keeps I4, I5, I6, I11.

    read ──► decode ──► load the unknown ──► decide ──► commit ──► place and pay (elsewhere, told back as events)

A refused or unresolved commit, or a lost connection, throws away what is known of the partition; its streams are read
again from the beginning, where whatever is not committed still is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from control.core import commands as c
from control.store.access import example_key
from control.store.commits import ACKS_KEY, COMMANDS_KEY, ORDERS_KEY, Batch
from control.store.keys import PartitionKeys
from control.store.link import LOST
from control.store.reading import ReadSize
from control.store.scripts import script
from workers.caution import CRASHES, Caution, name_of
from workers.entries import Entry, Raw, decode_entry, id_of, in_order
from workers.holdings import Holdings, Owned
from workers.partition import Partition
from workers.wakeable import WakeableReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from control.core import effects as e
    from control.core.scene import Settings
    from control.store.access import Access
    from control.wire.limits import Limits
    from stages.pipeline import Pipeline
    from workers.clock import ServerClock
    from workers.control_stats import ControlStats
    from workers.observer import Observer
    from workers.ownership import Claim, Ownership
    from workers.placement import Directory

log = logging.getLogger("bargein.owner")

BLOCK_MS = 1_000
# Orders are few and not urgent: a read that follows one of so many entries leaves them out, for so long at most.
BUSY = 8
ORDERS_MS = 1_000
# In the memory of one process, in sessions; those that are used stay whatever there are.
KEPT_SESSIONS = 250_000
RETRY_S = 0.2


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the owners of one process have in common. `ask` wants slots taken or freed, after a confirmed commit."""

    access: Access
    pipeline: Pipeline
    settings: Settings
    limits: Limits
    stats: ControlStats
    directory: Directory
    observer: Observer
    ask: Callable[[Claim, str, int, e.Place | e.Pay], None]


class Owner:
    """Owns some of `numbers`, as far as `ownership` gives them to it."""

    def __init__(self, numbers: Sequence[int], common: Surroundings, ownership: Ownership, clock: ServerClock) -> None:
        """`clock`: of the server that these partitions are on."""
        self.numbers = frozenset(numbers)
        self.stats = common.stats
        self.last_turn_ms = clock.monotonic_ms()
        self._common = common
        self._pipeline = common.pipeline
        self._ownership = ownership
        self._observer = common.observer
        self._clock = clock
        self._batch_max = common.pipeline.control.batch_max
        key = example_key(numbers)
        self._reader = WakeableReader(common.access.link(key), common.access.link(key))
        self._writer = common.access.link(key)
        self._size = ReadSize(self._batch_max)
        self._orders_ms = 0.0
        self._is_busy = False
        self._woken = asyncio.Event()
        self._stopping = False
        self._holdings = Holdings(
            self._writer,
            clock,
            self._begin,
            ownership.drop,
            common.ask,
            common.stats,
            half_events_bytes=max(1, common.limits.events_bytes // 2),
            batch_max=self._batch_max,
        )
        self.owned = self._holdings.owned

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is decided or under way here beyond what the streams hold."""
        return not any(o.inbox or o.partition.has_more for o in self.owned.values())

    async def run(self) -> None:
        """Work until `stop`."""
        while not self._stopping:
            try:
                await self._turn()
            except LOST as error:
                log.warning("%s: no connection to Redis (%s); trying again", self._name, error)
                self.stats.note_trouble("owner", lost=True)
                await self._start_over()
            except RedisError as error:
                log.warning("%s: Redis answers: %s; trying again", self._name, error)
                self.stats.note_trouble("owner", lost=False)
                await self._start_over()

    @property
    def is_stopping(self) -> bool:
        """Whether it was told to."""
        return self._stopping

    def stop(self) -> None:
        """Return from `run` between two commits."""
        self._stopping = True
        self.wake()

    async def close(self) -> None:
        """Close the connections."""
        await self._reader.close()
        await self._writer.close()

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """What has to be ended with the loop."""
        return self._reader.tasks

    @property
    def _name(self) -> str:
        return f"partition {next(iter(self.numbers))}" if len(self.numbers) == 1 else f"{len(self.numbers)} partitions"

    # ---- one turn

    async def _turn(self) -> None:
        await self._change_partitions()
        for owned in list(self.owned.values()):
            if not owned.sure:
                await self._holdings.reload(owned)
        if not self.owned:
            await self._idle()
            return
        read = await self._read()
        await self._decide_and_commit({number: in_order(raw) for number, raw in read.items()})
        self.last_turn_ms = self._clock.monotonic_ms()

    async def _idle(self) -> None:
        self._woken.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BLOCK_MS / 1000):
                await self._woken.wait()
        self.last_turn_ms = self._clock.monotonic_ms()

    async def _read(self) -> dict[int, dict[int, list[Any]]]:
        """New entries by partition and stream. Waits for some, for a deadline or for a wake-up."""
        names: list[str] = []
        positions: list[str] = []
        places: dict[bytes, tuple[int, int]] = {}
        now_ms = self._clock.monotonic_ms()
        with_orders = not self._is_busy or now_ms - self._orders_ms >= ORDERS_MS
        if with_orders:
            self._orders_ms = now_ms
        for number, owned in self.owned.items():
            keys = owned.partition.keys
            streams = [(ACKS_KEY, keys.acks), (COMMANDS_KEY, keys.commands)]
            if with_orders and owned.caution.is_over:
                streams.append((ORDERS_KEY, keys.orders))
            for stream, name in streams:
                names.append(name)
                positions.append(owned.read_to[stream])
                places[name.encode()] = (number, stream)
        count = self._size.count
        answer = await self._reader.read(names, positions, count=count, block_ms=self._block_ms()) or ()
        self._size.note(raw for _, raw in answer)
        self._is_busy = sum(len(raw) for _, raw in answer) >= BUSY
        read: dict[int, dict[int, list[Any]]] = {}
        for name, raw in answer:
            number, stream = places[name]
            read.setdefault(number, {})[stream] = raw
        for number, owned in self.owned.items():
            got = read.get(number, {})
            if all(len(got.get(stream, ())) < count for stream in (COMMANDS_KEY, ACKS_KEY)):
                owned.caught_up = True
            for stream, raw in got.items():
                owned.read_to[stream] = raw[-1][0].decode()
        return read

    def _block_ms(self) -> int:
        """How long the read may wait."""
        if self._stopping or self._ownership.has_news(self.numbers):
            return 0
        block = BLOCK_MS
        for owned in self.owned.values():
            if owned.inbox or owned.partition.has_more or owned.broken:
                return 0
            due_ms = self._next_due_ms(owned)
            if due_ms is not None:
                block = min(block, due_ms - self._clock.now_ms())
        return max(0, block)

    async def _decide_and_commit(self, pending: dict[int, deque[Raw]]) -> None:
        readers = dict(self.owned)
        while True:
            raws: dict[int, list[Raw]] = {}
            for number, waiting in pending.items():
                owned = self.owned.get(number)
                if owned is None or owned is not readers[number]:
                    # Lost, or read again from the beginning: in its order, with those before that were refused (I5).
                    waiting.clear()
                    continue
                most = 1 if owned.one_by_one else self._batch_max
                if not owned.caution.is_over:
                    # What else there is to decide comes between two entries, never beside one that is named.
                    most = 0 if owned.inbox else 1
                raws[number] = [waiting.popleft() for _ in range(min(most, len(waiting)))]
            await self._name_those_alone(raws, pending)
            await self._commit_portions(
                {
                    number: [decode_entry(number, raw, self._pipeline.partitions, self._common.limits) for raw in found]
                    for number, found in raws.items()
                }
            )
            if not any(pending.values()):
                return

    async def _name_those_alone(self, raws: dict[int, list[Raw]], pending: dict[int, deque[Raw]]) -> None:
        """After a crash, the backlog's entries are handled alone, each named before it is looked at."""
        named: dict[int, str] = {}
        for number, owned in self.owned.items():
            found = raws.get(number, [])
            if owned.caution.is_over:
                continue
            if found and owned.caution.covers(found[0][0], id_of(found[0])):
                named[number] = name_of(found[0][0], id_of(found[0]))
                continue
            named[number] = ""
            if found or (owned.caught_up and not pending.get(number)):
                owned.caution = Caution()
        await self._holdings.name(named)

    async def _commit_portions(self, portions: dict[int, list[Entry]]) -> None:
        # Before a session is told of a loss: whoever wakes up again must find itself fenced by then.
        self._fence_the_lost()
        now_ms = self._clock.now_ms()
        due: dict[int, list[str]] = {}
        told: dict[int, list[tuple[str, c.Event]]] = {}
        for number, owned in self.owned.items():
            alone = owned.one_by_one > 0 or not owned.caution.is_over
            most = self._batch_max
            if alone:
                most = 0 if portions.get(number) else 1
            due[number] = self._due_sessions(owned, now_ms, most)
            told[number] = _pop_some(owned.inbox, most - len(due[number]) if alone else most)
        heard = await self._holdings.load(portions, due, told)
        batches: dict[int, Batch] = {}
        for number, owned in self.owned.items():
            self._decide(owned, portions.get(number, []), due[number], told[number], heard.get(number, {}), now_ms)
            batch = owned.partition.take_batch()
            if not batch.is_empty:
                batches[number] = batch
        others = {n: [*due[n], *(session_id for session_id, _ in told[n])] for n in batches}
        await self._commit(batches, portions, others)

    async def _commit(
        self, batches: dict[int, Batch], portions: dict[int, list[Entry]], others: dict[int, list[str]]
    ) -> None:
        await self._holdings.commit(batches, portions, others)

    def _due_sessions(self, owned: Owned, now_ms: int, most: int) -> list[str]:
        """Up to `most` sessions whose time has come."""
        return owned.partition.pop_due(now_ms, most)

    def _next_due_ms(self, owned: Owned) -> int | None:
        """When the next one's time comes, or None."""
        return owned.partition.next_due_ms()

    def _decide(
        self,
        owned: Owned,
        entries: list[Entry],
        due: list[str],
        told: list[tuple[str, c.Event]],
        heard: dict[str, int],
        now_ms: int,
    ) -> None:
        partition = owned.partition
        partition.reopen(now_ms)
        for command in owned.failed:
            if partition.is_known(command.session_id):
                partition.fail(command, now_ms)
        owned.failed.clear()
        for session_id in list(owned.broken):
            if partition.is_known(session_id):
                owned.broken.discard(session_id)
                partition.tell(session_id, c.Poisoned("a key of the session was of a wrong type"), now_ms)
        for session_id, event in told:
            partition.tell(session_id, event, now_ms)
        for entry in entries:
            if owned.caution.is_condemned(entry.stream, entry.entry_id):
                self._set_aside(owned, entry)
                continue
            if owned.skip == (entry.stream, entry.entry_id):
                owned.skip = None
                continue
            if entry.unreadable is not None:
                self.stats.dead_letters += 1
                log.info("partition %d: dead letter %s: %s", partition.keys.partition, entry.entry_id, entry.unreadable)
                partition.bury(entry, entry.unreadable)
            elif entry.received is not None:
                self.stats.commands += 1
                partition.take_command(entry.entry_id, entry.received, entry.entered_ms, now_ms)
            elif entry.event is not None:
                if entry.stream == ACKS_KEY:
                    self.stats.acks += 1
                else:
                    self.stats.orders += 1
                partition.take_word(entry.stream, entry.entry_id, entry.session_id, entry.event, now_ms)
        may_expire = self._may_expire(owned)
        for session_id in due:
            if may_expire:
                self._end_at_the_gone(owned, session_id, now_ms)
            partition.look(session_id, heard.get(session_id, 0), now_ms, may_expire=may_expire)
        partition.forget_some(KEPT_SESSIONS // self._pipeline.partitions)

    def _set_aside(self, owned: Owned, entry: Entry) -> None:
        """An entry that has ended its worker again and again; its session ends, everything else goes on."""
        partition, reason = owned.partition, f"{CRASHES} control workers ended while they handled it alone"
        log.error("partition %d: entry %s is set aside: %s", partition.keys.partition, entry.entry_id, reason)
        self.stats.dead_letters += 1
        partition.bury(entry, reason)
        if entry.session_id:
            owned.broken.add(entry.session_id)

    def _may_expire(self, owned: Owned) -> bool:
        """Deadlines fire only once the backlog is read and the clock has been steady for a heartbeat time."""
        heartbeat_ms = self._pipeline.control.heartbeat_ms
        held_ms = self._clock.elapsed_ms(owned.taken_ms)
        return owned.caught_up and held_ms >= heartbeat_ms and self._clock.is_settled(heartbeat_ms)

    def _end_at_the_gone(self, owned: Owned, session_id: str, now_ms: int) -> None:
        """A worker of its route that is in no index may be gone, and nobody may have told the session.

        That takes a server that has lost what it had acknowledged: it brought the session back, and not the loss.
        """
        observer, session = self._observer, owned.partition.find(session_id)
        for worker_id in () if session is None else session.route:
            if worker_id in observer.indexed:
                continue
            if worker_id not in observer.gone:
                observer.suspects.add(worker_id)
                continue
            if worker_id not in owned.fenced:
                owned.fenced.add(worker_id)
                owned.partition.fence_worker(worker_id)
            owned.partition.tell(session_id, c.StageLost(worker_id), now_ms)

    # ---- partitions come and go

    async def _change_partitions(self) -> None:
        ownership = self._ownership
        for number in ownership.take_lost(self.numbers):
            self.owned.pop(number, None)
        unwanted = ownership.unwanted & self.numbers
        if unwanted:
            await self._hand_over(sorted(unwanted))
            ownership.unwanted -= unwanted
        for claim in ownership.take_gained(self.numbers):
            self._holdings.take(claim)

    async def _start_over(self) -> None:
        """The connection was lost: nothing that is known can be relied on. The next turn reads it all again."""
        self.stats.reconnects += 1
        self._clock.unsettle()
        self._holdings.doubt()
        await self._reader.reset()
        await self._writer.close()
        await asyncio.sleep(RETRY_S)

    async def _hand_over(self, numbers: list[int]) -> None:
        renew = script("renew")
        calls: list[Any] = []
        for number in numbers:
            owned = self.owned.pop(number, None)
            if owned is not None and self._ownership.drop(number, owned.claim.token):
                calls.append((renew, [owned.partition.keys.owner], [owned.claim.token, 0]))
        if calls:
            await self._writer.run_all(calls)
            self._ownership.handovers += len(calls)
            await self._ownership.hint()

    async def hand_over_all(self) -> None:
        """After `run` has returned: give up whatever is held."""
        try:
            await self._change_partitions()
            await self._hand_over(sorted(self.owned))
        except (*LOST, RedisError) as error:
            log.warning("%s: could not hand over (%s); the leases run out by themselves", self._name, error)

    # ---- stage workers that are gone

    def _fence_the_lost(self) -> None:
        for worker_id in self._observer.lost:
            for owned in self.owned.values():
                if worker_id not in owned.fenced:
                    owned.fenced.add(worker_id)
                    owned.partition.fence_worker(worker_id)

    # ---- what the others tell

    def is_ours(self, claim: Claim) -> bool:
        """Whether a claim is still this owner's."""
        owned = self.owned.get(claim.partition)
        return owned is not None and owned.claim.token == claim.token

    def tell(self, number: int, session_id: str, events: Iterable[c.Event]) -> None:
        """Events that no stream carries, for a session of partition `number`."""
        owned = self.owned.get(number)
        if owned is not None:
            owned.inbox.extend((session_id, event) for event in events)
            self.wake()

    def wake(self) -> None:
        """Look around now."""
        self._woken.set()
        self._reader.wake()

    def _begin(self, claim: Claim) -> Partition:
        return Partition(
            PartitionKeys(claim.partition),
            self._common.settings,
            self._common.limits,
            self._common.directory.choose_route,
            operation_limit=self._pipeline.session.completed_append_limit,
        )


def _pop_some(inbox: deque[tuple[str, c.Event]], most: int) -> list[tuple[str, c.Event]]:
    return [inbox.popleft() for _ in range(min(most, len(inbox)))]
