"""The commit: what a batch of decisions becomes in Redis, as one script call.

Responsible for the arguments of `lua/commit.lua`, section by section, and for what it answers. Leaves deciding to the
core and sending to the owner. `Batch` is pure; nothing here waits. Keeps I6: every commit carries the owner's token and
the revision that it was decided on.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from control.core import effects as e
from control.core.answers import Answered
from control.core.cleanup import Cleanup
from control.core.requests import request_id
from control.core.session import NOBODY, Phase, Session, fence_record
from control.wire.events import LIFECYCLE, REPLY, encode_event
from control.wire.stage import AbortOrder, SubmissionOrder, encode

if TYPE_CHECKING:
    from control.store.keys import PartitionKeys

FIXED_KEYS = 14
# The input streams, by their places among the keys.
COMMANDS_KEY, ACKS_KEY, ORDERS_KEY = 2, 3, 14

_session = msgspec.msgpack.Decoder(Session)
_cleanups = msgspec.msgpack.Decoder(tuple[Cleanup, ...])
_answered = msgspec.msgpack.Decoder(Answered)


class CommitStatus(IntEnum):
    """What `lua/commit.lua` answers; the script has the same numbers."""

    COMMITTED = 0
    LOST_OWNERSHIP = 1
    STALE_REVISION = 2
    HEARD_SINCE = 3
    WRONG_TYPE = 4
    MISSING = 5


class CommitOutcome(Struct, frozen=True, gc=False):
    """`now_ms`: the server's clock. `detail`: the session that was heard, the key of a wrong type, the entry gone."""

    status: CommitStatus
    revision: int
    now_ms: int
    detail: str


def read_outcome(answer: list[Any]) -> CommitOutcome:
    """The script's answer as a value."""
    detail = answer[3]
    return CommitOutcome(
        CommitStatus(answer[0]), answer[1], answer[2], detail.decode() if isinstance(detail, bytes) else detail
    )


def decode_session(state: bytes, cleanups: bytes | None) -> Session:
    """A stored session with its cleanups. Raises `msgspec.DecodeError` where the bytes are no session."""
    session = _session.decode(state)
    return session if cleanups is None else replace(session, cleanups=_cleanups.decode(cleanups))


def decode_cleanups(blob: bytes) -> tuple[Cleanup, ...]:
    """A field of the cleanups hash. Raises `msgspec.DecodeError`."""
    return _cleanups.decode(blob)


def decode_answer(blob: bytes) -> Answered:
    """An element of the answers list. Raises `msgspec.DecodeError`."""
    return _answered.decode(blob)


class PayloadSource(Struct, frozen=True, gc=False):
    """Where an append's payload is: inside the command entry (`entry_id`), or packed here."""

    entry_id: str = ""
    packed: bytes | None = None


class Batch:
    """Decisions gathered for one commit of one partition."""

    def __init__(self, keys: PartitionKeys) -> None:
        """`keys`: those of the partition."""
        self._keys = keys
        self._dynamic: list[str] = []
        self._types: list[str] = []
        self._positions: dict[str, int] = {}
        self._first: dict[str, Session | None] = {}
        self._last: dict[str, Session | None] = {}
        self._guards: list[Any] = []
        self._sources: list[Any] = []
        self._fenced: list[Any] = []
        self._begins: list[Any] = []
        self._submissions: list[Any] = []
        self._aborts: list[Any] = []
        self._answers: list[Any] = []
        self._trims: list[Any] = []
        self._events: list[Any] = []
        self._strangers: list[Any] = []
        self._ends: list[Any] = []
        self._ended: set[str] = set()
        self._discarded: set[str] = set()
        self._released: list[Any] = []
        self._dead: list[Any] = []
        self._done: dict[int, list[str]] = {COMMANDS_KEY: [], ACKS_KEY: [], ORDERS_KEY: []}
        self._deadlines: dict[str, int | None] = {}
        self.after: list[tuple[str, int, e.Place | e.Pay]] = []

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to commit."""
        return not (
            self._last
            or any(self._done.values())
            or self._dead
            or self._fenced
            or self._strangers
            or self._events
            or None in self._deadlines.values()
        )

    @property
    def sessions(self) -> list[str]:
        """The session ids that the batch is about."""
        return list(self._last)

    def has_ended(self, session_id: str) -> bool:
        """Whether a life of the session ends in this batch."""
        return session_id in self._ended

    def done(self, stream: int, entry_id: str) -> None:
        """An input is applied by this batch: it goes with the commit."""
        self._done[stream].append(entry_id)

    def bury(self, stream: int, entry_id: str, reason: str, *, is_secret: bool = False) -> None:
        """An input that nobody can be answered for becomes a dead letter."""
        self._dead += (stream, entry_id, reason, int(is_secret))

    def fence_worker(self, worker_id: str) -> None:
        """Nothing of this life of a stage worker counts any more in this partition."""
        self._fenced.append(worker_id)

    def discard(self, session_id: str) -> None:
        """What is stored of a session can't be read: all of it goes, so that nothing of it is delivered any more."""
        self._discarded.add(session_id)
        self._first.setdefault(session_id, None)
        self._last.setdefault(session_id, None)
        self._deadlines[session_id] = None
        self._end(session_id)

    def set_deadline(self, session_id: str, due_ms: int | None) -> None:
        """When to look at the session again; None: never."""
        self._deadlines[session_id] = due_ms

    def add(
        self,
        session_id: str,
        before: Session | None,
        decision: e.Decision,
        payload: PayloadSource | None = None,
    ) -> None:
        """A decision about a session, in the order in which they were made."""
        after = decision.session
        lives, lived = has_life(after), has_life(before)
        if after is not before:
            self._first.setdefault(session_id, before)
            self._last[session_id] = after
            if lives and not lived:
                self._begin(session_id)
        # A session that ends in this batch still has its listener, for what is said after its end, too.
        listened = lives or lived or session_id in self._ended
        incarnation = ((after if lives else None) or before or after or NOBODY).fence.incarnation
        for effect in decision.effects:
            match effect:
                case e.Answer(reply, remember):
                    self._say(session_id, REPLY, encode_event(reply), listened=listened)
                    if remember is not None and (lives or lived):
                        self._answers += (self._position(self._keys.answers(session_id), "l"), encode(remember))
                case e.Announce(lifecycle):
                    self._say(session_id, LIFECYCLE, encode_event(lifecycle), listened=listened)
                case e.Submit():
                    self._submit(session_id, effect, payload)
                case e.Abort():
                    life = incarnation if effect.incarnation is None else effect.incarnation
                    self._abort(session_id, life, effect)
                case e.Release(epochs):
                    stages = len((before or after or NOBODY).route)
                    self._released += (
                        request_id(session_id, incarnation, epoch, stage) for epoch in epochs for stage in range(stages)
                    )
                case e.Place() | e.Pay():
                    number = (after or NOBODY).fence.incarnation
                    self.after.append((session_id, number, effect))
                case e.ExpireUnlessHeard(output_ms):
                    self._guards += (session_id, output_ms)
        if lived and not lives:
            self._end(session_id)

    def trim_answers(self, session_id: str, dropped: int) -> None:
        """The oldest `dropped` answers of a session are forgotten."""
        self._trims += (self._position(self._keys.answers(session_id), "l"), dropped)

    def arguments(self, token: str, revision: int, half_events_bytes: int) -> tuple[list[str], list[Any]]:
        """KEYS and ARGV of the script."""
        states: list[Any] = []
        forgets: list[Any] = []
        fences: list[Any] = []
        unfences: list[Any] = []
        cleanups: list[Any] = []
        cleaned: list[Any] = []
        for session_id, after in self._last.items():
            before = self._first[session_id]
            if after is None:
                forgets.append(session_id)
            else:
                states += (session_id, encode(after if not after.cleanups else replace(after, cleanups=())))
            unsure = session_id in self._discarded
            if unsure or not _has_same_fence(before, after):
                record = None if after is None else fence_record(after)
                if record is None:
                    unfences.append(session_id)
                else:
                    fences += (session_id, record)
            pending = () if after is None else after.cleanups
            if unsure or pending != (() if before is None else before.cleanups):
                if pending:
                    cleanups += (session_id, encode(pending))
                else:
                    cleaned.append(session_id)
        deadlines: list[Any] = []
        undue: list[Any] = []
        for session_id, due_ms in self._deadlines.items():
            if due_ms is None:
                undue.append(session_id)
            else:
                deadlines += (due_ms, session_id)
        argv: list[Any] = [token, revision, half_events_bytes, "".join(self._types)]
        for width, values in (
            (2, self._guards),
            (1, self._sources),
            (1, self._fenced),
            (2, states),
            (1, forgets),
            (2, fences),
            (1, unfences),
            (2, cleanups),
            (1, cleaned),
            (2, deadlines),
            (1, undue),
            (3, self._begins),
            (4, self._submissions),
            (3, self._aborts),
            (2, self._answers),
            (2, self._trims),
            (4, self._events),
            (3, self._strangers),
            (3, self._ends),
            (1, self._released),
            (4, self._dead),
            *((1, entries) for entries in self._done.values()),
        ):
            argv.append(len(values) // width)
            argv += values
        return [*fixed_keys(self._keys), *self._dynamic], argv

    def _say(self, session_id: str, kind: str, body: bytes, *, listened: bool) -> None:
        stream = self._position(self._keys.events(session_id), "s")
        if listened:
            self._events += (session_id, stream, kind, body)
        else:
            self._strangers += (session_id, stream, body)

    def _submit(self, session_id: str, effect: e.Submit, payload: PayloadSource | None) -> None:
        source = payload or PayloadSource()
        order = SubmissionOrder(
            session_id=session_id,
            stage_id=0,
            fence=effect.fence,
            number=effect.number,
            seq=effect.seq,
            turn_seq=effect.turn_seq,
            mode=effect.mode,
            final=effect.final,
            resumed=effect.resumed,
            generation=effect.generation,
            config=effect.config,
            route=effect.route,
            packed=source.packed is not None,
            traceparent=effect.traceparent,
        )
        queue = self._position(self._keys.submissions(effect.worker_id), "s")
        if source.entry_id:
            self._sources.append(source.entry_id)
        self._submissions += (queue, source.entry_id, encode(order), source.packed or b"")

    def _abort(self, session_id: str, incarnation: int, effect: e.Abort) -> None:
        order = AbortOrder(
            session_id=session_id,
            incarnation=incarnation,
            stage_id=effect.stage_id,
            number=effect.number,
            attempt=effect.attempt,
            epochs=effect.epochs,
            restart=effect.restart,
        )
        self._aborts += (
            self._position(self._keys.aborts(effect.worker_id), "s"),
            self._position(self._keys.submissions(effect.worker_id), "s"),
            encode(order),
        )

    def _begin(self, session_id: str) -> None:
        events, answers = self._streams(session_id)
        self._begins += (session_id, events, answers)
        # What was said to the id before it lived goes in front, in the same stream: it must not end with a stranger's.
        strangers, self._strangers = self._strangers, []
        for i in range(0, len(strangers), 3):
            name, stream, body = strangers[i : i + 3]
            if name == session_id:
                self._events += (name, stream, REPLY, body)
            else:
                self._strangers += (name, stream, body)

    def _end(self, session_id: str) -> None:
        events, answers = self._streams(session_id)
        self._ends += (session_id, events, answers)
        self._ended.add(session_id)

    def _streams(self, session_id: str) -> tuple[int, int]:
        return (
            self._position(self._keys.events(session_id), "s"),
            self._position(self._keys.answers(session_id), "l"),
        )

    def _position(self, key: str, kind: str) -> int:
        position = self._positions.get(key)
        if position is None:
            self._dynamic.append(key)
            self._types.append(kind)
            position = self._positions[key] = FIXED_KEYS + len(self._dynamic)
        return position


def fixed_keys(keys: PartitionKeys) -> tuple[str, ...]:
    """KEYS 1 to 14 of the commit."""
    return (
        keys.owner,
        keys.commands,
        keys.acks,
        keys.dead,
        keys.sessions,
        keys.fences,
        keys.cleanups,
        keys.deadlines,
        keys.marks,
        keys.heard,
        keys.outputs,
        keys.strangers,
        keys.fenced,
        keys.orders,
    )


def _has_same_fence(before: Session | None, after: Session | None) -> bool:
    """Whether scripts would check the same; most steps change something else."""
    if before is None or after is None:
        return (None if before is None else fence_record(before)) == (None if after is None else fence_record(after))
    if before.phase is after.phase and before.append is after.append and before.fence is after.fence:
        return before.floor == after.floor
    return fence_record(before) == fence_record(after)


def has_life(session: Session | None) -> bool:
    """Whether the session has a listener, a fence and a memory: it is open or closing."""
    return session is not None and (session.phase is Phase.OPEN or session.phase is Phase.CLOSING)
