"""The control worker: reads what its partitions were told, decides, commits, and does what may only follow.

Responsible for the main loop: one read over all owned partitions, one load of what is not known, decisions in memory,
one write with a commit a partition. Nothing in it is a round trip a command. Leaves deciding to `partition.py` and the
core, loading and committing to `holdings.py`, leases to `ownership.py`, stage workers' lives to `observer.py`, slots to
`slot_desk.py`. Talks to Redis. Keeps I4, I5, I6, I11.

    read ──► decode ──► load the unknown ──► decide ──► commit ──► place and pay (elsewhere, told back as events)

A refused or unresolved commit, or a lost connection, throws away what is known of the partition; its streams are read
again from the beginning, where whatever is not committed still is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from typing import TYPE_CHECKING, Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from control.core import commands as c
from control.store.commits import ACKS_KEY, COMMANDS_KEY, Batch
from control.store.keys import PartitionKeys, partition_of
from control.store.link import LOST, Link, make_pool
from control.store.scripts import script
from control.store.server import agree_on_config, check_server
from workers.caution import CRASHES, Caution, name_of
from workers.clock import ServerClock
from workers.control_setup import core_settings, wire_limits
from workers.control_stats import ControlStats
from workers.entries import Entry, Raw, decode_entry, id_of, in_order
from workers.holdings import Holdings, Owned
from workers.observer import Observer
from workers.ownership import Claim, Ownership
from workers.partition import Partition
from workers.placement import Directory
from workers.slot_desk import SlotDesk
from workers.wakeable import WakeableReader

if TYPE_CHECKING:
    from collections.abc import Iterable

    from control.core.scene import Settings
    from stages.pipeline import Pipeline

log = logging.getLogger("bargein.control")

BLOCK_MS = 1_000
KEPT_SESSIONS = 50_000
RETRY_S = 0.2


class ControlWorker:
    """One control worker process, or one task in a test."""

    def __init__(
        self,
        redis_url: str,
        pipeline: Pipeline,
        *,
        worker_id: str | None = None,
        clock: ServerClock | None = None,
        settings: Settings | None = None,
    ) -> None:
        """`clock` and `settings` are for tests that need their own time or policy."""
        self.worker_id = worker_id or f"control-{secrets.token_hex(4)}"
        self.stats = ControlStats()
        self._url = redis_url
        self._pipeline = pipeline
        self._settings = settings or core_settings(pipeline)
        self._limits = wire_limits(pipeline)
        self._clock = clock or ServerClock()
        self._batch_max = pipeline.control.batch_max
        self._pool = make_pool(redis_url, name=self.worker_id)
        self._redis = Redis(connection_pool=self._pool)
        self._reader = WakeableReader(self._pool)
        self._writer, self._slots = Link(self._pool), Link(self._pool)
        self._woken = asyncio.Event()
        self._stopping = False
        stage_count, control = len(pipeline.stages), pipeline.control
        self._directory = Directory(stage_count)
        self._ownership = Ownership(
            self._pool, self.worker_id, pipeline.partitions, control.lease_ms, self._clock, self._wake
        )
        self._observer = Observer(
            self._redis, self._directory, stage_count, control.heartbeat_ms, self._wake, control.brake_ms
        )
        self._desk = SlotDesk(
            self._slots, self._directory, pipeline.max_sessions, self._batch_max, self._is_ours, self._tell
        )
        self._holdings = Holdings(
            self._writer,
            self._clock,
            self._begin,
            self._ownership.drop,
            self._desk.ask,
            self.stats,
            half_events_bytes=max(1, self._limits.events_bytes // 2),
            batch_max=self._batch_max,
        )
        self._owned = self._holdings.owned

    @property
    def owned(self) -> list[int]:
        """The partitions that this worker owns now."""
        return sorted(self._owned)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is decided or under way here beyond what the streams hold."""
        return self._desk.is_idle and not any(o.inbox or o.partition.has_more for o in self._owned.values())

    async def run(self) -> None:
        """Work until `stop`, then hand over. Raises `Unusable` for a server that can't be trusted."""
        tasks: list[asyncio.Task[None]] = []
        try:
            await check_server(self._redis, self._url)
            await agree_on_config(self._redis, self._pipeline.partitions)
            # Else the first commits would be decided twice, and would choose a route twice.
            for name in ("commit", "slot"):
                await self._redis.script_load(script(name).text)
            await self._observer.look()
            tasks += [
                asyncio.create_task(self._ownership.run(), name="ownership"),
                asyncio.create_task(self._observer.run(), name="observer"),
                asyncio.create_task(self._desk.run(), name="slots"),
            ]
            await self._work(tasks)
            await self._hand_over_all()
        finally:
            # Whoever cancels us may do so again and again; what was opened is closed all the same.
            closing = asyncio.ensure_future(self._close(tasks))
            while not closing.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.shield(closing)
            closing.result()

    async def _close(self, tasks: list[asyncio.Task[None]]) -> None:
        await _end([*tasks, *self._reader.tasks])
        for connection in (self._reader, self._writer, self._slots):
            await connection.close()
        await self._ownership.close()
        await self._redis.aclose()
        await self._pool.disconnect()

    async def _work(self, tasks: list[asyncio.Task[None]]) -> None:
        while not self._stopping:
            for task in tasks:
                if task.done():
                    task.result()
            try:
                await self._turn()
            except LOST as error:
                log.warning("no connection to Redis (%s); trying again", error)
                await self._start_over()
            except RedisError as error:
                log.warning("Redis answers: %s; trying again", error)
                await self._start_over()

    def stop(self) -> None:
        """Hand over and return from `run`. Safe to call more than once."""
        self._stopping = True
        self._wake()

    # ---- one turn

    async def _turn(self) -> None:
        await self._change_partitions()
        for owned in list(self._owned.values()):
            if not owned.sure:
                await self._holdings.reload(owned)
        self._note_losses()
        if not self._owned:
            await self._idle()
            return
        read = await self._read()
        await self._decide_and_commit({number: in_order(raw) for number, raw in read.items()})
        self.stats.last_turn_ms = self._clock.monotonic_ms()

    async def _idle(self) -> None:
        self._woken.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BLOCK_MS / 1000):
                await self._woken.wait()
        self.stats.last_turn_ms = self._clock.monotonic_ms()

    async def _read(self) -> dict[int, dict[int, list[Any]]]:
        """New entries by partition and stream. Waits for some, for a deadline or for a wake-up."""
        names: list[str] = []
        positions: list[str] = []
        places: dict[bytes, tuple[int, int]] = {}
        for number, owned in self._owned.items():
            keys = owned.partition.keys
            for stream, name in ((ACKS_KEY, keys.acks), (COMMANDS_KEY, keys.commands)):
                names.append(name)
                positions.append(owned.read_to[stream])
                places[name.encode()] = (number, stream)
        answer = await self._reader.read(names, positions, count=self._batch_max, block_ms=self._block_ms())
        read: dict[int, dict[int, list[Any]]] = {}
        for name, raw in answer or ():
            number, stream = places[name]
            read.setdefault(number, {})[stream] = raw
        for number, owned in self._owned.items():
            got = read.get(number, {})
            if all(len(got.get(stream, ())) < self._batch_max for stream in (COMMANDS_KEY, ACKS_KEY)):
                owned.caught_up = True
            for stream, raw in got.items():
                owned.read_to[stream] = raw[-1][0].decode()
        return read

    def _block_ms(self) -> int:
        """How long the read may wait."""
        if self._stopping or self._ownership.gained or self._ownership.unwanted or self._ownership.lost:
            return 0
        block = BLOCK_MS
        for owned in self._owned.values():
            if owned.inbox or owned.partition.has_more or owned.broken:
                return 0
            due_ms = self._next_due_ms(owned)
            if due_ms is not None:
                block = min(block, due_ms - self._clock.now_ms())
        return max(0, block)

    async def _decide_and_commit(self, pending: dict[int, deque[Raw]]) -> None:
        readers = dict(self._owned)
        while True:
            raws: dict[int, list[Raw]] = {}
            for number, waiting in pending.items():
                owned = self._owned.get(number)
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
                    number: [decode_entry(number, raw, self._pipeline.partitions, self._limits) for raw in found]
                    for number, found in raws.items()
                }
            )
            if not any(pending.values()):
                return

    async def _name_those_alone(self, raws: dict[int, list[Raw]], pending: dict[int, deque[Raw]]) -> None:
        """After a crash, the backlog's entries are handled alone, each named before it is looked at."""
        named: dict[int, str] = {}
        for number, owned in self._owned.items():
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
        now_ms = self._clock.now_ms()
        due: dict[int, list[str]] = {}
        told: dict[int, list[tuple[str, c.Event]]] = {}
        for number, owned in self._owned.items():
            most = self._batch_max
            if owned.one_by_one or not owned.caution.is_over:
                most = 0 if portions.get(number) else 1
            due[number] = self._due_sessions(owned, now_ms, most)
            told[number] = _pop_some(owned.inbox, most)
        heard = await self._holdings.load(portions, due, told)
        batches: dict[int, Batch] = {}
        for number, owned in self._owned.items():
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
                partition.bury(entry.stream, entry.entry_id, entry.unreadable)
            elif entry.received is not None:
                self.stats.commands += 1
                partition.take_command(entry.entry_id, entry.received, entry.entered_ms, now_ms)
            elif entry.event is not None:
                self.stats.acks += 1
                partition.take_ack(entry.stream, entry.entry_id, entry.session_id, entry.event, now_ms)
        may_expire = self._may_expire(owned)
        for session_id in due:
            partition.look(session_id, heard.get(session_id, 0), now_ms, may_expire=may_expire)
        partition.forget_some(KEPT_SESSIONS)

    def _set_aside(self, owned: Owned, entry: Entry) -> None:
        """An entry that has ended its worker again and again; its session ends, everything else goes on."""
        partition, reason = owned.partition, f"{CRASHES} control workers ended while they handled it alone"
        log.error("partition %d: entry %s is set aside: %s", partition.keys.partition, entry.entry_id, reason)
        self.stats.dead_letters += 1
        partition.bury(entry.stream, entry.entry_id, reason)
        if entry.session_id:
            owned.broken.add(entry.session_id)

    def _may_expire(self, owned: Owned) -> bool:
        """Deadlines fire only once the backlog is read and the clock has been steady for a heartbeat time."""
        heartbeat_ms = self._pipeline.control.heartbeat_ms
        held_ms = self._clock.elapsed_ms(owned.taken_ms)
        return owned.caught_up and held_ms >= heartbeat_ms and self._clock.is_settled(heartbeat_ms)

    # ---- partitions come and go

    async def _change_partitions(self) -> None:
        ownership = self._ownership
        for number in ownership.lost:
            self._owned.pop(number, None)
        ownership.lost.clear()
        if ownership.unwanted:
            await self._hand_over(sorted(ownership.unwanted))
            ownership.unwanted.clear()
        gained, ownership.gained = ownership.gained, []
        for claim in gained:
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
            owned = self._owned.pop(number, None)
            if owned is not None and self._ownership.drop(number, owned.claim.token):
                calls.append((renew, [owned.partition.keys.owner], [owned.claim.token, 0]))
        if calls:
            await self._writer.run_all(calls)
            self._ownership.handovers += len(calls)
            await self._ownership.hint(self._writer)

    async def _hand_over_all(self) -> None:
        try:
            await self._ownership.leave()
            await self._change_partitions()
            await self._hand_over(sorted(self._owned))
        except (*LOST, RedisError) as error:
            log.warning("could not hand over (%s); the leases run out by themselves", error)

    # ---- stage workers that are gone

    def _note_losses(self) -> None:
        partitions = self._pipeline.partitions
        for worker_id, sessions in self._observer.lost.items():
            for owned in self._owned.values():
                if worker_id not in owned.fenced:
                    owned.fenced.add(worker_id)
                    owned.partition.fence_worker(worker_id)
            for session_id in sessions:
                owned = self._owned.get(partition_of(session_id, partitions))
                if owned is not None:
                    owned.inbox.append((session_id, c.StageLost(worker_id)))
        if self._observer.lost:
            # Looked at again until no session holds a slot there any more.
            for worker_id in self._observer.lost:
                self._observer.lost[worker_id] = ()

    # ---- what the parts ask of each other

    def _begin(self, claim: Claim) -> Partition:
        return Partition(
            PartitionKeys(claim.partition),
            self._settings,
            self._limits,
            self._directory.choose_route,
            operation_limit=self._pipeline.session.completed_append_limit,
        )

    def _is_ours(self, claim: Claim) -> bool:
        owned = self._owned.get(claim.partition)
        return owned is not None and owned.claim.token == claim.token

    def _tell(self, claim: Claim, session_id: str, events: Iterable[c.Event]) -> None:
        owned = self._owned.get(claim.partition)
        if owned is not None:
            owned.inbox.extend((session_id, event) for event in events)
            self._wake()

    def _wake(self) -> None:
        self._woken.set()
        self._reader.wake()


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel until they have ended: before Python 3.12 redis-py's client may lose a cancellation."""
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=0.05)
    await asyncio.gather(*tasks, return_exceptions=True)


def _pop_some(inbox: deque[tuple[str, c.Event]], most: int) -> list[tuple[str, c.Event]]:
    return [inbox.popleft() for _ in range(min(most, len(inbox)))]
