"""One partition in its owner's memory: sessions, what they have answered, who waits, and what is due.

Responsible for feeding the core in the right order and gathering its decisions into one commit: appends wait their
turn, cancels overtake them (I5, I11), a repeated command has one effect (I4). Leaves reading, loading and committing to
`control.py`. Pure: no IO, no clock of its own. What it knows holds only while its commits succeed; after a refused or
unresolved one the whole object is thrown away and the partition read again.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from control.core import commands as c
from control.core import effects as e
from control.core.answers import Answers
from control.core.rejections import Code
from control.core.rules.answering import is_barred, refused
from control.core.scene import Scene, Settings
from control.core.session import NOBODY, Phase, Session, find_due_ms
from control.core.transitions import step
from control.store.commits import COMMANDS_KEY, Batch, PayloadSource, has_life
from workers.metrics.tally import NOTHING, Arrivals, Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from control.core.answers import Answered
    from control.core.cleanup import Cleanup
    from control.core.fence import Fence
    from control.store.keys import PartitionKeys
    from control.wire.commands import Received
    from control.wire.limits import Limits
    from workers.entries import Entry

log = logging.getLogger("bargein.partition")

# A deadline that may not fire yet is looked at again after this.
LOOK_AGAIN_MS = 250
# An answer in memory takes about 230 bytes, a session without any 2.4 kB.
ANSWERS_A_SESSION = 10
# An enum's members are slow to look up before Python 3.12.
_VACANT, _OPEN = Phase.VACANT, Phase.OPEN


@dataclass(slots=True)
class Waiting:
    """A command that stays in the stream until its session is ready for it."""

    entry_id: str
    command: c.Command
    payload: bytes | None
    entered_ms: int


@dataclass(slots=True)
class Known:
    """A session in memory. `session` is None where nothing lives and nothing is remembered.

    `arrivals`: when the commands came that are decided and not answered yet, if any; for metrics only.
    """

    session: Session | None
    answers: Answers
    waiting: deque[Waiting] = field(default_factory=deque[Waiting])
    waiting_bytes: int = 0
    arrivals: Arrivals = field(default_factory=Arrivals)


class Partition:
    """The decisions of one partition."""

    def __init__(
        self,
        keys: PartitionKeys,
        settings: Settings,
        limits: Limits,
        choose_route: Callable[[], tuple[str, ...] | None],
        *,
        operation_limit: int = 256,
    ) -> None:
        """`choose_route` is asked once for every session that opens."""
        self.keys = keys
        self._settings = settings
        self._limits = limits
        self._choose_route = choose_route
        self._operation_limit = operation_limit
        self._known: dict[str, Known] = {}
        self._remembered = 0
        self._due_ms: dict[str, int] = {}
        self._due: list[tuple[int, str]] = []
        self._anew: set[str] = set()
        self._batch = Batch(keys)
        self._replied: set[str] = set()
        self._reopening: list[str] = []
        self._tally = Tally()
        self.decided = NOTHING
        """What the batch that was taken last counts for, once it is committed."""
        self._telling = log.isEnabledFor(logging.DEBUG)

    # ---- what is known

    def index(self, deadlines: Iterable[tuple[str, int]], now_ms: int) -> None:
        """At a takeover: when each session is due (ms), as stored.

        Placements and debts that were under way stop with their owner. All of them are due within their retry time, so
        the sessions that are due so soon are looked at now instead of then.
        """
        soon_ms = now_ms + self._settings.placement_retry_ms
        for session_id, due_ms in deadlines:
            if due_ms <= soon_ms:
                self._anew.add(session_id)
            self._arm(session_id, min(due_ms, now_ms) if due_ms <= soon_ms else due_ms)

    def is_known(self, session_id: str) -> bool:
        """Whether the session was loaded, be it as nothing."""
        return session_id in self._known

    def learn(self, session_id: str, session: Session | None, answers: list[Answered]) -> None:
        """A session as it is stored."""
        self._drop(session_id)
        self._known[session_id] = Known(session, Answers(answers, operation_limit=self._operation_limit))
        self._remembered += len(answers)

    def learn_unreadable(self, session_id: str) -> None:
        """What is stored of the session can't be read, and goes with the next commit."""
        self.learn(session_id, None, [])
        self._due_ms.pop(session_id, None)
        self._batch.discard(session_id)

    def find(self, session_id: str) -> Session | None:
        """The session in memory, if there is one."""
        known = self._known.get(session_id)
        return None if known is None else known.session

    @property
    def waiting(self) -> int:
        """How many commands wait for their session."""
        return sum(len(known.waiting) for known in self._known.values())

    def __len__(self) -> int:
        """How many sessions are in memory."""
        return len(self._known)

    # ---- inputs

    def take_command(self, entry_id: str, received: Received, entered_ms: int, now_ms: int) -> None:
        """A producer's command. Its session is known."""
        command = received.command
        known = self._known[command.session_id]
        waiting = Waiting(entry_id, command, received.payload, entered_ms)
        # Without its session's token: refused at once. It takes no place in the line, and is not taken for one there.
        if _is_barred(known, command) and self._handle(known, waiting, now_ms):
            return
        if known.waiting:
            if self._is_waiting_twice(known, command):
                # Sent again while it waits: its one answer is still to come.
                self._batch.done(COMMANDS_KEY, entry_id)
                return
            # What was answered before has nothing to wait for, and needs no room.
            in_line = (
                isinstance(command, c.Append | c.Update)
                and known.answers.find(command.control_id, command.token) is None
            )
            # Nothing overtakes an open: a close would find nobody and leave a ghost behind (S1).
            if in_line or any(isinstance(w.command, c.Open) for w in known.waiting):
                self._park(known, waiting, now_ms)
                return
        if self._handle(known, waiting, now_ms):
            self._resume(known, now_ms)
        else:
            self._park(known, waiting, now_ms)

    def take_word(self, stream: int, entry_id: str, session_id: str, event: c.Event, now_ms: int) -> None:
        """What a stage says or an operator orders about a session. Its session is known."""
        self._batch.done(stream, entry_id)
        if isinstance(event, c.Due):
            # Only that somebody should look; what there is to see is loaded first. What is left of nobody goes.
            if self._known[session_id].session is None:
                self._batch.discard(session_id)
            else:
                self._arm(session_id, now_ms)
                self._batch.set_deadline(session_id, now_ms)
        else:
            self.tell(session_id, event, now_ms)

    def tell(self, session_id: str, event: c.Event, now_ms: int) -> None:
        """An event that no stream carries: placement, time, a lost stage. Its session is known."""
        known = self._known[session_id]
        decision = self._decide(known, session_id, event, now_ms)
        if isinstance(event, c.Audited) and decision.effects:
            _tell_audit(session_id, event, decision)
        if isinstance(event, c.CleanupFailed) and known.session is not None and decision.session is not known.session:
            self._tally.note_failure(known.session, event)
        self._apply(known, session_id, decision)
        self._resume(known, now_ms)

    def fail(self, command: c.Command, now_ms: int) -> None:
        """A command that can't be committed is answered all the same. Its session is known, its entry buried."""
        known = self._known[command.session_id]
        message = f"session {command.session_id!r}: the command could not be stored and was set aside"
        self._apply(known, command.session_id, self._refuse(known, command, Code.INTERNAL, message, now_ms))

    def bury(self, entry: Entry, reason: str) -> None:
        """An entry that can't be answered."""
        self._batch.bury(entry.stream, entry.entry_id, reason, is_secret=entry.is_secret)

    def fence_worker(self, worker_id: str) -> None:
        """Nothing that this life of a stage worker says counts from the next commit on."""
        self._batch.fence_worker(worker_id)

    # ---- time

    def next_due_ms(self) -> int | None:
        """When time has something to say, at the earliest."""
        while self._due and self._due_ms.get(self._due[0][1]) != self._due[0][0]:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def pop_due(self, now_ms: int, most: int) -> list[str]:
        """Up to `most` sessions whose time has come. Each must then be given `look`."""
        due: list[str] = []
        while len(due) < most:
            first = self.next_due_ms()
            if first is None or first > now_ms:
                break
            due.append(heapq.heappop(self._due)[1])
            # Not armed any more, but still stored as due: a new owner would look again.
            self._due_ms.pop(due[-1], None)
        return due

    def look(self, session_id: str, output_ms: int, now_ms: int, *, may_expire: bool) -> None:
        """Time has come for a session. `output_ms`: its last delivered output, 0 if none."""
        known = self._known[session_id]
        event = c.Due(output_ms, may_expire, anew=session_id in self._anew)
        self._anew.discard(session_id)
        self._apply(known, session_id, self._decide(known, session_id, event, now_ms), looked=True)
        self._resume(known, now_ms)
        due_ms = self._due_ms.get(session_id)
        if due_ms is not None and due_ms <= now_ms:
            self._arm(session_id, now_ms + LOOK_AGAIN_MS)

    # ---- the batch

    @property
    def has_more(self) -> bool:
        """Whether commands are waiting that need only the next batch."""
        return bool(self._reopening)

    def reopen(self, now_ms: int) -> None:
        """Let the opens go on that had to wait for the commit of their id's former end."""
        again, self._reopening = self._reopening, []
        for session_id in again:
            known = self._known.get(session_id)
            if known is not None:
                self._resume(known, now_ms)

    def take_batch(self) -> Batch:
        """What was decided since the last one; committing it is the caller's duty."""
        for session_id in self._replied:
            known = self._known.get(session_id)
            if known is not None and known.session is None and not known.waiting:
                self._drop(session_id)
        self._replied.clear()
        batch, self._batch = self._batch, Batch(self.keys)
        self.decided = NOTHING
        if not self._tally.is_empty:
            self.decided, self._tally = self._tally, Tally()
        return batch

    @property
    def weight(self) -> int:
        """What is in memory, in sessions of about 2.5 kB."""
        return len(self._known) + self._remembered // ANSWERS_A_SESSION

    def forget_some(self, most: int) -> None:
        """Keep at most the weight of `most` sessions in memory; those in use stay."""
        if self.weight <= most:
            return
        # A tenth more, so that it is not done over and over again.
        enough = most - most // 10
        for session_id in [session_id for session_id, known in self._known.items() if not known.waiting]:
            self._drop(session_id)
            if self.weight <= enough:
                return

    # ---- inside

    def _drop(self, session_id: str) -> None:
        known = self._known.pop(session_id, None)
        if known is not None:
            self._remembered -= len(known.answers)

    def _decide(
        self, known: Known, session_id: str, event: c.Event, now_ms: int, entered_ms: int | None = None
    ) -> e.Decision:
        scene = Scene(
            settings=self._settings,
            session_id=session_id,
            now_ms=now_ms,
            answers=known.answers,
            entered_ms=entered_ms,
            offered=_highest_offer(known) if known.waiting else None,
            choose_route=self._choose_route,
        )
        try:
            decision = step(scene, known.session, event)
        except Exception:
            # A bug in a rule or in the policy must not stop the partition; nothing of the step was kept.
            log.exception("deciding %s for session %s failed", type(event).__name__, session_id)
            if not isinstance(event, c.Command):
                return e.Decision(known.session, row="failed")
            message = f"session {session_id!r}: the control worker could not handle the command; see its log"
            return self._refuse(known, event, Code.INTERNAL, message, now_ms)
        if self._telling:
            effects = ", ".join(type(effect).__name__ for effect in decision.effects) or "nothing"
            what = type(event).__name__
            log.debug("%s: %s, row %s%s: %s", session_id, what, decision.row, " waits" * decision.wait, effects)
        return decision

    def _refuse(self, known: Known, command: c.Command, code: Code, message: str, now_ms: int) -> e.Decision:
        """A refusal that no rule has made."""
        scene = Scene(
            settings=self._settings,
            session_id=command.session_id,
            now_ms=now_ms,
            answers=known.answers,
            choose_route=self._choose_route,
        )
        session = NOBODY if known.session is None or _is_barred(known, command) else known.session
        decision = refused(scene, session, command, code, message)
        return e.Decision(known.session, decision.effects, row="failed")

    def _handle(self, known: Known, waiting: Waiting, now_ms: int) -> bool:
        """Decide a command; False if it has to wait."""
        command = waiting.command
        if isinstance(command, c.Open) and self._batch.has_ended(command.session_id):
            # One commit can't hold the end of a life and the beginning of the next.
            self._reopening.append(command.session_id)
            return False
        decision = self._decide(known, command.session_id, cast("c.Event", command), now_ms, waiting.entered_ms)
        if decision.wait:
            return False
        self._batch.done(COMMANDS_KEY, waiting.entry_id)
        self._apply(known, command.session_id, decision, waiting=waiting)
        return True

    def _apply(
        self,
        known: Known,
        session_id: str,
        decision: e.Decision,
        *,
        waiting: Waiting | None = None,
        looked: bool = False,
    ) -> None:
        before, after = known.session, decision.session
        source = None
        if waiting is not None:
            source = PayloadSource("" if waiting.payload is not None else waiting.entry_id, waiting.payload)
        if decision.effects or after is not before:
            self._batch.add(session_id, before, decision, source)
        arrived = waiting
        for effect in decision.effects:
            if not isinstance(effect, e.Answer):
                continue
            reply = effect.reply
            if arrived is not None and reply.control_id == arrived.command.control_id:
                self._tally.answered.append((reply, arrived.entered_ms))
                arrived = None
            else:
                self._tally.answered.append((reply, known.arrivals.pop(reply.control_id, None)))
            if effect.remember is not None and (has_life(before) or has_life(after)):
                dropped = known.answers.remember(effect.remember)
                self._remembered += 1 - dropped
                if dropped:
                    self._batch.trim_answers(session_id, dropped)
        if arrived is not None:
            # Decided, and its answer is still to come.
            known.arrivals.setdefault(arrived.command.control_id, arrived.entered_ms)
        had = () if before is None else before.cleanups
        has = () if after is None else after.cleanups
        if had is not has or (waiting is not None and type(waiting.command) is c.Cancel):
            self._count(known, decision, waiting, had, has)
        if known.arrivals and (after is None or after.phase is _VACANT):
            known.arrivals.clear()
        known.session = after
        if after is None:
            self._replied.add(session_id)
        if looked or (after is not before and _may_be_due_earlier(before, after, self._due_ms.get(session_id))):
            self._rearm(session_id, after, force=looked)

    def _count(
        self,
        known: Known,
        decision: e.Decision,
        waiting: Waiting | None,
        had: tuple[Cleanup, ...],
        has: tuple[Cleanup, ...],
    ) -> None:
        """For metrics: what a step has done to the session's cleanups, and a cancel to its fence."""
        cancelled_ms = None
        is_open = known.session is not None and known.session.phase is _OPEN
        if waiting is not None and isinstance(waiting.command, c.Cancel):
            cancelled_ms = waiting.entered_ms
            if is_open:
                self._tally.note_cancel(decision.effects, cancelled_ms)
        if had is not has:
            self._tally.note_cleanups(had, has, known.arrivals, is_open=is_open, cancelled_ms=cancelled_ms)

    def _resume(self, known: Known, now_ms: int) -> None:
        """Let those who waited go on: appends and updates in their order, the others past them, nobody past an open."""
        position, held_up = 0, False
        while position < len(known.waiting):
            waiting = known.waiting[position]
            ordered = isinstance(waiting.command, c.Append | c.Update)
            held = ordered and held_up and not _is_barred(known, waiting.command)
            if not held and self._handle(known, waiting, now_ms):
                del known.waiting[position]
                known.waiting_bytes -= _size(waiting)
                if not ordered:
                    # It may have made way for those before it.
                    position, held_up = 0, False
                continue
            if isinstance(waiting.command, c.Open):
                return
            held_up = held_up or ordered
            position += 1

    def _park(self, known: Known, waiting: Waiting, now_ms: int) -> None:
        command, size = waiting.command, _size(waiting)
        full = (
            len(known.waiting) >= self._limits.waiting_appends
            or known.waiting_bytes + size > self._limits.waiting_bytes
        )
        if full:
            message = (
                f"session {command.session_id!r} has {len(known.waiting)} commands of {known.waiting_bytes} bytes "
                "waiting for its stage; slow down and send this one again"
            )
            self._batch.done(COMMANDS_KEY, waiting.entry_id)
            self._apply(
                known, command.session_id, self._refuse(known, command, Code.RESOURCE_EXHAUSTED, message, now_ms)
            )
            return
        known.waiting.append(waiting)
        known.waiting_bytes += size

    def _is_waiting_twice(self, known: Known, command: c.Command) -> bool:
        return any(
            w.command.control_id == command.control_id
            and type(w.command) is type(command)
            and w.command.token == command.token
            for w in known.waiting
        )

    def _rearm(self, session_id: str, session: Session | None, *, force: bool) -> None:
        """Store a due time only where it comes earlier; an idle TTL moves on with every touch, which costs nothing."""
        armed_ms = self._due_ms.get(session_id)
        due_ms = None
        if session is not None:
            due_ms = find_due_ms(
                session,
                idle_ttl_ms=self._settings.idle_ttl_ms,
                disconnect_grace_ms=self._settings.disconnect_grace_ms,
            )
        if due_ms is None:
            if armed_ms is not None or force:
                self._due_ms.pop(session_id, None)
                self._batch.set_deadline(session_id, None)
            return
        if force or armed_ms is None or due_ms < armed_ms:
            self._arm(session_id, due_ms)
            self._batch.set_deadline(session_id, due_ms)

    def _arm(self, session_id: str, due_ms: int) -> None:
        self._due_ms[session_id] = due_ms
        heapq.heappush(self._due, (due_ms, session_id))


def _may_be_due_earlier(before: Session | None, after: Session | None, armed_ms: int | None) -> bool:
    """Whether a step may have brought something forward; most only touch the lease, which moves its end on."""
    if before is None or after is None:
        return True
    append = after.append
    if append is not None and append is not before.append and (armed_ms is None or append.deadline_ms < armed_ms):
        return True
    return (
        before.phase is not after.phase
        or before.cleanups is not after.cleanups
        or before.debts is not after.debts
        or before.lease.detached_at_ms != after.lease.detached_at_ms
    )


def _tell_audit(session_id: str, event: c.Audited, decision: e.Decision) -> None:
    """A request that nobody owns is news. A slot may just have been given back while the audit was on its way."""
    if any(isinstance(effect, e.Abort) for effect in decision.effects):
        text = "session %s: nobody owns the requests of life %d, epochs %s, that run at %s; they are aborted"
        log.warning(text, session_id, event.incarnation, event.epochs, event.holder)
    else:
        what = "has a slot for nobody" if event.has_slot else "lacks a slot"
        log.info("session %s: %s %s of life %d; put right", session_id, event.holder, what, event.incarnation)


def _is_barred(known: Known, command: c.Command) -> bool:
    return known.session is not None and known.session.token is not None and is_barred(known.session, command)


def _size(waiting: Waiting) -> int:
    return waiting.command.payload_bytes if isinstance(waiting.command, c.Append) else 0


def _highest_offer(known: Known) -> Fence | None:
    """The highest fence among waiting appends of the session's life: a cancel may name what only they carry."""
    if known.session is None or known.session.phase is not Phase.OPEN:
        return None
    incarnation = known.session.fence.incarnation
    fences = [
        w.command.fence
        for w in known.waiting
        if isinstance(w.command, c.Append) and w.command.fence.incarnation == incarnation
    ]
    return max(fences, key=lambda fence: fence.key, default=None)
