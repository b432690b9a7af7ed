"""The partitions that a control worker holds: loading their sessions, committing their batches, starting them over.

Responsible for everything that a partition's decisions need of Redis, for all partitions in one write each, and for
what a refused, failed or unresolved commit means. Leaves deciding to `partition.py`, when to do what to `control.py`.
Talks to Redis. Keeps I6 and I11: a partition whose commit fails is read again, one entry at a time, and the entry that
can't be committed is set aside; the others go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from redis.exceptions import NoScriptError, RedisError

from control.core import commands as c
from control.store.commits import (
    ACKS_KEY,
    COMMANDS_KEY,
    ORDERS_KEY,
    Batch,
    CommitStatus,
    decode_answer,
    decode_session,
    read_outcome,
)
from control.store.link import is_of_the_script
from control.store.mending import load_deadlines, mend
from control.store.scripts import script
from workers.caution import Caution
from workers.ownership import Claim

if TYPE_CHECKING:
    from collections.abc import Callable

    from control.core import effects as e
    from control.store.link import Link
    from workers.clock import ServerClock
    from workers.control_stats import ControlStats
    from workers.entries import Entry
    from workers.partition import Partition

log = logging.getLogger("bargein.holdings")

RETRY_S = 0.2


@dataclass(slots=True)
class Owned:
    """A partition that this worker owns, and how far it has read."""

    claim: Claim
    partition: Partition
    revision: int
    taken_ms: float
    read_to: dict[int, str] = field(default_factory=lambda: dict.fromkeys((COMMANDS_KEY, ACKS_KEY, ORDERS_KEY), "0-0"))
    caught_up: bool = False
    inbox: deque[tuple[str, c.Event]] = field(default_factory=deque[tuple[str, c.Event]])
    # Sessions that have to end, and commands that can't be carried out.
    broken: set[str] = field(default_factory=set)
    failed: list[c.Command] = field(default_factory=list[c.Command])
    one_by_one: int = 0
    fenced: set[str] = field(default_factory=set)
    caution: Caution = field(default_factory=Caution)
    skip: tuple[int, str] | None = None
    # False once an answer is missing: what is in memory may be ahead of the server, or behind it.
    sure: bool = True


@dataclass(slots=True)
class Holdings:
    """`begin` makes an empty partition, `drop_lease` forgets a lease that is somebody else's.

    `committed` is told what may only follow a confirmed commit: slots to take and to free.
    """

    writer: Link
    clock: ServerClock
    begin: Callable[[Claim], Partition]
    drop_lease: Callable[[int, str], bool]
    committed: Callable[[Claim, str, int, e.Place | e.Pay], None]
    stats: ControlStats
    half_events_bytes: int
    batch_max: int
    owned: dict[int, Owned] = field(default_factory=dict[int, Owned])

    def take(self, claim: Claim) -> Owned:
        """Hold a partition, knowing nothing of it but when its sessions are due."""
        partition = self.begin(claim)
        partition.index(claim.deadlines, self.clock.now_ms())
        owned = self.owned[claim.partition] = Owned(claim, partition, claim.revision, self.clock.monotonic_ms())
        owned.caution = claim.caution
        return owned

    async def name(self, handled: dict[int, str]) -> None:
        """Before entries are handled alone: say which, by partition; '' where that is over."""
        if not handled:
            return
        handling = script("handling")
        calls = [
            (handling, [self.owned[number].partition.keys.owner], [self.owned[number].claim.token, name])
            for number, name in handled.items()
        ]
        await self.writer.run_all(calls)

    def doubt(self) -> None:
        """The connection was lost: nothing that is known can be relied on. The next turn reads it all again."""
        for owned in self.owned.values():
            owned.sure = False

    async def load(
        self,
        portions: dict[int, list[Entry]],
        due: dict[int, list[str]],
        told: dict[int, list[tuple[str, c.Event]]],
    ) -> dict[int, dict[str, int]]:
        """Load the sessions that are not in memory, and when those that are due were last heard; one round trip."""
        calls: list[tuple[Any, ...]] = []
        plans: list[tuple[Owned, list[str], list[str]]] = []
        for number, owned in self.owned.items():
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
        answers = iter(await self.writer.try_all(calls))
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

    async def commit(
        self, batches: dict[int, Batch], portions: dict[int, list[Entry]], others: dict[int, list[str]]
    ) -> None:
        """Commit the batches. `portions` and `others`: the entries and other sessions that each decided about."""
        if not batches:
            return
        commit = script("commit")
        calls: list[Any] = []
        for number, batch in batches.items():
            owned = self.owned[number]
            names, argv = batch.arguments(owned.claim.token, owned.revision, self.half_events_bytes)
            calls.append(("EVALSHA", commit.sha, len(names), *names, *argv))
        answers = await self.writer.try_all(calls)
        for (number, batch), answer in zip(batches.items(), answers, strict=True):
            owned = self.owned[number]
            if isinstance(answer, RedisError):
                await self._note_error(owned, answer, portions.get(number, []), others[number])
                continue
            outcome = read_outcome(answer)
            self.clock.learn(outcome.now_ms)
            if outcome.status is CommitStatus.COMMITTED:
                self.stats.commits += 1
                self.stats.count(owned.partition.decided, outcome.now_ms)
                owned.revision = outcome.revision
                owned.one_by_one = max(0, owned.one_by_one - 1)
                for session_id, incarnation, effect in batch.after:
                    self.committed(owned.claim, session_id, incarnation, effect)
                continue
            self.stats.refused_commits += 1
            log.info("partition %d: commit refused: %s %s", number, outcome.status.name, outcome.detail)
            match outcome.status:
                case CommitStatus.LOST_OWNERSHIP:
                    self.drop_lease(number, owned.claim.token)
                    self.owned.pop(number)
                case CommitStatus.MISSING:
                    self.stats.missing_entries += 1
                    log.warning(
                        "partition %d: entry %s was deleted by somebody before its turn", number, outcome.detail
                    )
                    await self.reload(owned)
                case CommitStatus.WRONG_TYPE:
                    await self._drop_key(outcome.detail, "wrong type")
                    _, _, kind, session_id = outcome.detail.split(":", 3)
                    fresh = await self.reload(owned)
                    if fresh is not None and kind in {"events", "answers"}:
                        fresh.broken.add(session_id)
                case _:
                    await self.reload(owned)

    async def _note_error(self, owned: Owned, error: RedisError, entries: list[Entry], others: list[str]) -> None:
        """The script itself failed. What it had written stays, so the partition is read again, one entry at a time.

        `others`: the sessions of which something but an entry was decided.
        """
        number = owned.claim.partition
        if isinstance(error, NoScriptError):
            await self.writer.call("SCRIPT", "LOAD", script("commit").text)
            await self.reload(owned)
            return
        if not is_of_the_script(error):
            raise error
        log.error("partition %d: the commit failed: %s", number, error)
        mended = await mend(self.writer, owned.partition.keys)
        again = owned.one_by_one > 0 and not mended
        fresh = await self.reload(owned)
        if fresh is None:
            return
        if not mended:
            fresh.one_by_one = 2 * self.batch_max
        if again and entries:
            culprit = entries[0]
            log.error("partition %d: entry %s can't be committed; it is set aside", number, culprit.entry_id)
            self.stats.dead_letters += 1
            fresh.partition.bury(culprit, f"it could not be committed: {error}")
            fresh.skip = (culprit.stream, culprit.entry_id)
            if culprit.session_id:
                fresh.broken.add(culprit.session_id)
            if culprit.received is not None:
                fresh.failed.append(culprit.received.command)
        elif again:
            fresh.broken.update(others)
        await asyncio.sleep(RETRY_S)

    async def _drop_key(self, name: str, why: str) -> None:
        log.error("the key %s is not what it should be (%s); it is removed, its session ends", name, why)
        await self.writer.call("UNLINK", name)

    async def reload(self, owned: Owned) -> Owned | None:
        """Forget what is known and read the partition again from the beginning; None if it isn't ours any more."""
        number, claim, keys = owned.claim.partition, owned.claim, owned.partition.keys
        deadlines = await load_deadlines(self.writer, keys)
        held = await self.writer.call("HMGET", keys.owner, "token", "revision")
        if held[0] is None or held[0].decode() != claim.token:
            log.warning("partition %d belongs to somebody else by now", number)
            self.drop_lease(number, claim.token)
            self.owned.pop(number, None)
            return None
        fresh = self.take(Claim(number, claim.token, int(held[1] or 0), claim.unclean, deadlines, owned.caution))
        fresh.inbox, fresh.broken, fresh.one_by_one = owned.inbox, owned.broken, owned.one_by_one
        return fresh


def _list(answer: Any) -> list[Any]:
    if isinstance(answer, RedisError):
        raise answer
    return answer
