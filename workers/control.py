"""The control worker: reads what its partitions were told, decides, commits, and does what may only follow.

Responsible for the main loop: one read over all owned partitions, one load of what is not known, decisions in memory,
one write with a commit a partition. Nothing in it is a round trip a command. Leaves deciding to `partition.py` and the
core, leases to `ownership.py`, stage workers' lives to `observer.py`. Talks to Redis. Keeps I4, I5, I6, I11.

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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError

from control.core import commands as c
from control.core import effects as e
from control.core.scene import Settings
from control.store.commits import (
    ACKS_KEY,
    COMMANDS_KEY,
    Batch,
    CommitStatus,
    decode_answer,
    decode_session,
    read_outcome,
)
from control.store.keys import PartitionKeys, partition_of
from control.store.link import LOST, Link, make_pool
from control.store.mending import mend
from control.store.scripts import script
from control.store.server import agree_on_config, check_server
from control.store.slots import Slot, slot_call
from control.wire.commands import Received, Unreadable, decode_command
from control.wire.limits import Limits
from control.wire.stage import decode_ack, pack_config, unpack_config
from stages.policy import configured_sampling, load_policy
from workers.clock import ServerClock
from workers.observer import Observer
from workers.ownership import Claim, Ownership
from workers.partition import Partition
from workers.placement import Directory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stages.pipeline import Pipeline

log = logging.getLogger("bargein.control")

BLOCK_MS = 1_000
KEPT_SESSIONS = 50_000
RETRY_S = 0.2


@dataclass(slots=True)
class Entry:
    """One stream entry, decoded, or the reason why it can't be."""

    stream: int
    entry_id: str
    entered_ms: int
    session_id: str = ""
    received: Received | None = None
    event: c.Event | None = None
    unreadable: str | None = None


@dataclass(slots=True)
class Owned:
    """A partition that this worker owns, and how far it has read."""

    claim: Claim
    partition: Partition
    revision: int
    taken_ms: float
    read_to: dict[int, str] = field(default_factory=lambda: {COMMANDS_KEY: "0-0", ACKS_KEY: "0-0"})
    caught_up: bool = False
    inbox: deque[tuple[str, c.Event]] = field(default_factory=deque[tuple[str, c.Event]])
    broken: set[str] = field(default_factory=set)
    one_by_one: int = 0
    fenced: set[str] = field(default_factory=set)
    skip: tuple[int, str] | None = None
    # False once an answer is missing: what is in memory may be ahead of the server, or behind it.
    sure: bool = True


@dataclass(frozen=True, slots=True)
class Chore:
    """Slots to take or free for a session, as the owner that `claim` names."""

    claim: Claim
    session_id: str
    incarnation: int
    effect: e.Place | e.Pay


@dataclass(slots=True)
class ControlStats:
    """What the loop has done so far; read by health checks and tests."""

    commands: int = 0
    acks: int = 0
    commits: int = 0
    refused_commits: int = 0
    dead_letters: int = 0
    reconnects: int = 0
    last_turn_ms: float = 0.0
    rows: dict[str, int] = field(default_factory=dict)


def core_settings(pipeline: Pipeline) -> Settings:
    """What the core needs of a pipeline. Raises ValueError or TypeError for a policy that can't be used."""
    configure = None
    if pipeline.policy is not None:
        defaults = pipeline.sampling_defaults
        policy = load_policy(pipeline.policy, defaults)

        def configure_with_policy(runtime_config: Mapping[str, Any]) -> tuple[Any, ...]:
            return configured_sampling(policy, runtime_config=runtime_config, defaults=defaults)

        configure = configure_with_policy
    session = pipeline.session
    return Settings(
        stage_count=len(pipeline.stages),
        configure=configure,
        pack_config=pack_config,
        unpack_config=unpack_config,
        limit_sessions=pipeline.max_sessions is not None,
        idle_ttl_ms=session.idle_ttl_ms,
        disconnect_grace_ms=session.disconnect_grace_ms,
        append_timeout_ms=session.append_timeout_ms,
        cleanup_timeout_ms=session.cleanup_timeout_ms,
        cleanup_backoff_ms=session.cleanup_backoff_ms,
        cleanup_backoff_max_ms=session.cleanup_backoff_max_ms,
    )


def wire_limits(pipeline: Pipeline) -> Limits:
    """What the wire needs of a pipeline."""
    limits, session = pipeline.limits, pipeline.session
    return Limits(
        session_id_bytes=limits.session_id_bytes,
        control_id_bytes=limits.control_id_bytes,
        body_bytes=limits.body_bytes,
        payload_bytes=limits.payload_bytes,
        waiting_appends=session.max_waiting_appends,
        waiting_bytes=session.max_waiting_bytes,
        events_bytes=limits.events_bytes,
    )


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
        self._half_events_bytes = max(1, self._limits.events_bytes // 2)
        self._clock = clock or ServerClock()
        self._batch_max = pipeline.control.batch_max
        self._pool = make_pool(redis_url, name=self.worker_id)
        self._redis = Redis(connection_pool=self._pool)
        self._reader = Link(self._pool)
        self._writer = Link(self._pool)
        self._slots = Link(self._pool)
        self._waker = Link(self._pool)
        self._reader_id: int | None = None
        self._owned: dict[int, Owned] = {}
        self._blocked = False
        self._woken = asyncio.Event()
        self._wake_task: asyncio.Task[None] | None = None
        self._stopping = False
        self._chores: asyncio.Queue[Chore] = asyncio.Queue()
        stage_count = len(pipeline.stages)
        self._directory = Directory(stage_count)
        control = pipeline.control
        self._ownership = Ownership(
            self._pool, self.worker_id, pipeline.partitions, control.lease_ms, self._clock, self._wake
        )
        self._observer = Observer(self._redis, self._directory, stage_count, control.heartbeat_ms, self._wake)

    @property
    def owned(self) -> list[int]:
        """The partitions that this worker owns now."""
        return sorted(self._owned)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is decided or under way here beyond what the streams hold."""
        return self._chores.empty() and not any(o.inbox or o.partition.has_more for o in self._owned.values())

    async def run(self) -> None:
        """Work until `stop`, then hand over. Raises `Unusable` for a server that can't be trusted."""
        await check_server(self._redis, self._url)
        await agree_on_config(self._redis, self._pipeline.partitions)
        await self._observer.look()
        tasks = [
            asyncio.create_task(self._ownership.run(), name="ownership"),
            asyncio.create_task(self._observer.run(), name="observer"),
            asyncio.create_task(self._do_chores(), name="placement"),
        ]
        try:
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
            await self._hand_over_all()
        finally:
            await _end(tasks if self._wake_task is None else [*tasks, self._wake_task])
            for link in (self._reader, self._writer, self._slots, self._waker):
                await link.close()
            await self._ownership.close()
            await self._redis.aclose()
            await self._pool.disconnect()

    def stop(self) -> None:
        """Hand over and return from `run`. Safe to call more than once."""
        self._stopping = True
        self._wake()

    # ---- one turn

    async def _turn(self) -> None:
        await self._change_partitions()
        for owned in list(self._owned.values()):
            if not owned.sure:
                await self._reload(owned)
        self._note_losses()
        if not self._owned:
            await self._idle()
            return
        read = await self._read()
        entries = {p: _decode_all(p, raw, self._pipeline.partitions, self._limits) for p, raw in read.items()}
        await self._decide_and_commit(entries)
        self.stats.last_turn_ms = self._clock.monotonic_ms()

    async def _idle(self) -> None:
        self._woken.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), BLOCK_MS / 1000)
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
        if self._reader_id is None:
            self._reader_id = await self._reader.call("CLIENT", "ID")
        block = self._block_ms()
        blocking = ("BLOCK", block) if block > 0 else ()
        self._blocked = block > 0
        try:
            answer = await self._reader.call(
                "XREAD", "COUNT", self._batch_max, *blocking, "STREAMS", *names, *positions
            )
        finally:
            self._blocked = False
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

    async def _decide_and_commit(self, entries: dict[int, list[Entry]]) -> None:
        pending = {number: deque(found) for number, found in entries.items()}
        readers = dict(self._owned)
        while True:
            portions: dict[int, list[Entry]] = {}
            for number, waiting in pending.items():
                owned = self._owned.get(number)
                if owned is None or owned is not readers[number]:
                    # Lost, or read again from the beginning: in its order, with those before that were refused (I5).
                    waiting.clear()
                    continue
                most = 1 if owned.one_by_one else self._batch_max
                portions[number] = [waiting.popleft() for _ in range(min(most, len(waiting)))]
            await self._commit_portions(portions)
            if not any(pending.values()):
                return

    async def _commit_portions(self, portions: dict[int, list[Entry]]) -> None:
        now_ms = self._clock.now_ms()
        due: dict[int, list[str]] = {}
        told: dict[int, list[tuple[str, c.Event]]] = {}
        for number, owned in self._owned.items():
            most = self._batch_max
            if owned.one_by_one:
                most = 0 if portions.get(number) else 1
            due[number] = self._due_sessions(owned, now_ms, most)
            told[number] = _pop_some(owned.inbox, most)
        heard = await self._load(portions, due, told)
        batches: dict[int, Batch] = {}
        for number, owned in self._owned.items():
            self._decide(owned, portions.get(number, []), due[number], told[number], heard.get(number, {}), now_ms)
            batch = owned.partition.take_batch()
            if not batch.is_empty:
                batches[number] = batch
        others = {n: [*due[n], *(session_id for session_id, _ in told[n])] for n in batches}
        await self._commit(batches, portions, others)

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
        for session_id in list(owned.broken):
            if partition.is_known(session_id):
                owned.broken.discard(session_id)
                partition.tell(session_id, c.Poisoned("a key of the session was of a wrong type"), now_ms)
        for session_id, event in told:
            partition.tell(session_id, event, now_ms)
        for entry in entries:
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

    def _may_expire(self, owned: Owned) -> bool:
        """Deadlines fire only once the backlog is read and the clock has been steady for a heartbeat time."""
        heartbeat_ms = self._pipeline.control.heartbeat_ms
        held_ms = self._clock.elapsed_ms(owned.taken_ms)
        return owned.caught_up and held_ms >= heartbeat_ms and self._clock.is_settled(heartbeat_ms)

    async def _load(
        self,
        portions: dict[int, list[Entry]],
        due: dict[int, list[str]],
        told: dict[int, list[tuple[str, c.Event]]],
    ) -> dict[int, dict[str, int]]:
        """Load the sessions that are not in memory, and when those that are due were last heard; one round trip."""
        calls: list[tuple[Any, ...]] = []
        plans: list[tuple[Owned, list[str], list[str]]] = []
        for number, owned in self._owned.items():
            keys, known = owned.partition.keys, owned.partition
            wanted = {x.session_id for x in portions.get(number, ()) if x.session_id}
            wanted.update(due[number])
            wanted.update(session_id for session_id, _ in told[number])
            wanted.update(owned.broken)
            missing = [session_id for session_id in wanted if not known.is_known(session_id)]
            if not missing and not due[number]:
                continue
            plans.append((owned, missing, due[number]))
            if missing:
                calls.append(("HMGET", keys.sessions, *missing))
                calls.append(("HMGET", keys.cleanups, *missing))
                calls += [("LRANGE", keys.answers(session_id), 0, -1) for session_id in missing]
            if due[number]:
                calls.append(("HMGET", keys.heard, *due[number]))
        if not calls:
            return {}
        answers = iter(await self._writer.try_all(calls))
        heard: dict[int, dict[str, int]] = {}
        for owned, missing, looked in plans:
            if missing:
                states, cleanups = _list(next(answers)), _list(next(answers))
                for session_id, state, cleanup in zip(missing, states, cleanups, strict=True):
                    stored = next(answers)
                    if not self._learn(owned, session_id, state, cleanup, stored):
                        owned.broken.add(session_id)
                        await self._drop_key(owned.partition.keys.answers(session_id), "unreadable answers")
            if looked:
                values = _list(next(answers))
                number = owned.claim.partition
                heard[number] = {s: int(v) for s, v in zip(looked, values, strict=True) if v is not None}
        return heard

    def _learn(self, owned: Owned, session_id: str, state: bytes | None, cleanup: bytes | None, stored: Any) -> bool:
        """Take a session into memory; False if its answers can't be read, and the session must end."""
        try:
            session = None if state is None else decode_session(state, cleanup)
        except msgspec.DecodeError:
            # Not ours to guess at. The session is gone, and what runs of it is stopped by its next output's check.
            log.exception("the stored state of session %s can't be read; the session is dropped", session_id)
            owned.partition.learn_unreadable(session_id)
            return True
        try:
            answers = [decode_answer(blob) for blob in _list(stored)]
        except (msgspec.DecodeError, RedisError) as error:
            log.warning("the answers of session %s can't be read (%s); the session ends", session_id, error)
            owned.partition.learn(session_id, session, [])
            return False
        owned.partition.learn(session_id, session, answers)
        return True

    async def _commit(
        self, batches: dict[int, Batch], portions: dict[int, list[Entry]], others: dict[int, list[str]]
    ) -> None:
        if not batches:
            return
        commit = script("commit")
        calls: list[Any] = []
        for number, batch in batches.items():
            owned = self._owned[number]
            names, argv = batch.arguments(owned.claim.token, owned.revision, self._half_events_bytes)
            calls.append(("EVALSHA", commit.sha, len(names), *names, *argv))
        answers = await self._writer.try_all(calls)
        for (number, batch), answer in zip(batches.items(), answers, strict=True):
            owned = self._owned[number]
            if isinstance(answer, RedisError):
                await self._note_error(owned, answer, portions.get(number, []), others[number])
                continue
            outcome = read_outcome(answer)
            self._clock.learn(outcome.now_ms)
            if outcome.status is CommitStatus.COMMITTED:
                self.stats.commits += 1
                owned.revision = outcome.revision
                owned.one_by_one = max(0, owned.one_by_one - 1)
                for session_id, incarnation, effect in batch.after:
                    self._chores.put_nowait(Chore(owned.claim, session_id, incarnation, effect))
                continue
            self.stats.refused_commits += 1
            log.info("partition %d: commit refused: %s %s", number, outcome.status.name, outcome.detail)
            match outcome.status:
                case CommitStatus.LOST_OWNERSHIP:
                    self._ownership.drop(number, owned.claim.token)
                    self._owned.pop(number)
                case CommitStatus.WRONG_TYPE:
                    await self._drop_key(outcome.detail, "wrong type")
                    _, _, kind, session_id = outcome.detail.split(":", 3)
                    fresh = await self._reload(owned)
                    if fresh is not None and kind in {"events", "answers"}:
                        fresh.broken.add(session_id)
                case _:
                    await self._reload(owned)

    async def _note_error(self, owned: Owned, error: RedisError, entries: list[Entry], others: list[str]) -> None:
        """The script itself failed. What it had written stays, so the partition is read again, one entry at a time.

        `others`: the sessions of which something but an entry was decided.
        """
        number = owned.claim.partition
        if isinstance(error, NoScriptError):
            await self._writer.call("SCRIPT", "LOAD", script("commit").text)
            await self._reload(owned)
            return
        if "script:" not in str(error):
            # The server runs no script at all now: it is a replica, is loading, can't save. Not this batch's fault.
            raise error
        log.error("partition %d: the commit failed: %s", number, error)
        mended = await mend(self._writer, owned.partition.keys)
        again = owned.one_by_one > 0 and not mended
        fresh = await self._reload(owned)
        if fresh is None:
            return
        if not mended:
            fresh.one_by_one = 2 * self._batch_max
        if again and entries:
            culprit = entries[0]
            log.error("partition %d: entry %s can't be committed; it is set aside", number, culprit.entry_id)
            fresh.partition.bury(culprit.stream, culprit.entry_id, f"it could not be committed: {error}")
            fresh.skip = (culprit.stream, culprit.entry_id)
            if culprit.session_id:
                fresh.broken.add(culprit.session_id)
        elif again:
            fresh.broken.update(others)
        await asyncio.sleep(RETRY_S)

    async def _drop_key(self, name: str, why: str) -> None:
        log.error("the key %s is not what it should be (%s); it is removed, its session ends", name, why)
        await self._writer.call("UNLINK", name)

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
            self._owned[claim.partition] = self._begin(claim)

    def _begin(self, claim: Claim) -> Owned:
        partition = Partition(
            PartitionKeys(claim.partition),
            self._settings,
            self._limits,
            self._directory.choose_route,
            operation_limit=self._pipeline.session.completed_append_limit,
        )
        partition.index(claim.deadlines)
        return Owned(claim, partition, claim.revision, self._clock.monotonic_ms())

    async def _reload(self, owned: Owned) -> Owned | None:
        """Forget what is known and read the partition again from the beginning; None if it isn't ours any more."""
        number, claim, keys = owned.claim.partition, owned.claim, owned.partition.keys
        await mend(self._writer, keys)
        held, stored = await self._writer.call_all(
            [("HMGET", keys.owner, "token", "revision"), ("ZRANGE", keys.deadlines, 0, -1, "WITHSCORES")]
        )
        if held[0] is None or held[0].decode() != claim.token:
            log.warning("partition %d belongs to somebody else by now", number)
            self._ownership.drop(number, claim.token)
            self._owned.pop(number, None)
            return None
        deadlines = tuple((stored[i].decode(), int(float(stored[i + 1]))) for i in range(0, len(stored), 2))
        fresh = self._begin(Claim(number, claim.token, int(held[1] or 0), claim.unclean, deadlines))
        fresh.inbox, fresh.broken, fresh.one_by_one = owned.inbox, owned.broken, owned.one_by_one
        self._owned[number] = fresh
        return fresh

    async def _start_over(self) -> None:
        """The connection was lost: nothing that is known can be relied on. The next turn reads it all again."""
        self.stats.reconnects += 1
        self._reader_id = None
        self._clock.unsettle()
        for owned in self._owned.values():
            owned.sure = False
        for link in (self._reader, self._writer):
            await link.close()
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

    # ---- placement, after the commit

    async def _do_chores(self) -> None:
        """Take and free slots, many in one write, and tell the sessions."""
        while True:
            chores = [await self._chores.get()]
            while not self._chores.empty() and len(chores) < self._batch_max:
                chores.append(self._chores.get_nowait())
            try:
                await self._do_some(chores)
            except (*LOST, RedisError) as error:
                # Each is asked for again at its session's next deadline.
                log.warning("placement: %s; trying again", error)
                await asyncio.sleep(RETRY_S)

    async def _do_some(self, chores: list[Chore]) -> None:
        calls: list[Any] = []
        asked: list[Chore] = []
        for chore in chores:
            owned = self._owned.get(chore.claim.partition)
            if owned is None or owned.claim.token != chore.claim.token:
                # Its new owner does it, as far as it is still to be done.
                continue
            asked.append(chore)
            effect = chore.effect
            if isinstance(effect, e.Place):
                wanted = [("take", holder, chore.incarnation) for holder in effect.holders]
            else:
                wanted = [("free", debt.holder, debt.incarnation) for debt in effect.debts]
            calls += [
                slot_call(
                    what,
                    holder,
                    chore.session_id,
                    incarnation,
                    partition=chore.claim.partition,
                    token_number=chore.claim.token_number,
                    max_sessions=self._pipeline.max_sessions,
                )
                for what, holder, incarnation in wanted
            ]
        if not calls:
            return
        codes = iter([_slot(answer) for answer in await self._slots.try_run_all(calls)])
        for chore in asked:
            effect = chore.effect
            events: list[c.Event] = []
            if isinstance(effect, e.Place):
                events += _placement_events(effect, chore.incarnation, [next(codes) for _ in effect.holders])
                for event in events:
                    if isinstance(event, c.PlacementRefused):
                        self._directory.note_full(event.holder)
            else:
                paid = [debt for debt in effect.debts if next(codes) not in {None, Slot.DEPOSED}]
                events += [c.DebtPaid(debt.incarnation, debt.holder) for debt in paid]
            owned = self._owned.get(chore.claim.partition)
            if owned is not None:
                owned.inbox.extend((chore.session_id, event) for event in events)
        self._wake()

    # ---- waking the blocked read

    def _wake(self) -> None:
        self._woken.set()
        if self._blocked and (self._wake_task is None or self._wake_task.done()):
            self._wake_task = asyncio.create_task(self._unblock())

    async def _unblock(self) -> None:
        try:
            while self._blocked and self._reader_id is not None:
                if await self._waker.call("CLIENT", "UNBLOCK", self._reader_id):
                    return
                # The read was on its way but had not arrived: it is blocked in a moment.
                await asyncio.sleep(0.001)
        except (*LOST, RedisError):
            return


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel until they have ended: before Python 3.12 redis-py's client may lose a cancellation."""
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=0.2)
    await asyncio.gather(*tasks, return_exceptions=True)


def _slot(answer: Any) -> Slot | None:
    """A slot script's answer; None where one holder's keys can't be used, which is no matter of the others (I11)."""
    if isinstance(answer, RedisError):
        log.error("a slot could not be asked for: %s", answer)
        return None
    return Slot(answer)


def _placement_events(effect: e.Place, incarnation: int, codes: list[Slot | None]) -> list[c.Event]:
    for holder, code in zip(effect.holders, codes, strict=True):
        if code is Slot.DEPOSED:
            return []
        if code is not Slot.DONE:
            return [c.PlacementRefused(incarnation, effect.attempt, holder)]
    return [c.Placed(incarnation, effect.attempt)]


def _decode_all(number: int, read: dict[int, list[Any]], partitions: int, limits: Limits) -> list[Entry]:
    """Acks first: they make room."""
    entries = [_decode_ack(raw) for raw in read.get(ACKS_KEY, ())]
    entries += [_decode_command(number, raw, partitions, limits) for raw in read.get(COMMANDS_KEY, ())]
    return entries


def _decode_command(number: int, raw: list[Any], partitions: int, limits: Limits) -> Entry:
    entry_id = raw[0].decode()
    entry = Entry(COMMANDS_KEY, entry_id, int(entry_id.partition("-")[0]))
    fields: list[bytes] = raw[1] or []
    names = fields[0::2]
    try:
        if names.count(b"b") != 1 or names.count(b"p") > 1:
            raise Unreadable("an entry needs one field b, and at most one p")
        values = dict(zip(names, fields[1::2], strict=True))
        received = decode_command(values[b"b"], values.get(b"p"), limits)
        session_id = received.command.session_id
        home = partition_of(session_id, partitions)
        if home != number:
            raise Unreadable(f"session {session_id!r} belongs to partition {home}, not to {number}")
    except Unreadable as reason:
        entry.unreadable = str(reason)
        return entry
    entry.session_id, entry.received = session_id, received
    return entry


def _decode_ack(raw: list[Any]) -> Entry:
    entry_id = raw[0].decode()
    entry = Entry(ACKS_KEY, entry_id, int(entry_id.partition("-")[0]))
    fields: list[bytes] = raw[1] or []
    try:
        values = dict(zip(fields[0::2], fields[1::2], strict=True))
        entry.session_id, entry.event = decode_ack(values.get(b"b", b""))
    except Unreadable as reason:
        entry.unreadable = str(reason)
    return entry


def _pop_some(inbox: deque[tuple[str, c.Event]], most: int) -> list[tuple[str, c.Event]]:
    return [inbox.popleft() for _ in range(min(most, len(inbox)))]


def _list(answer: Any) -> list[Any]:
    if isinstance(answer, RedisError):
        raise answer
    return answer
