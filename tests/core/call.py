"""One session id on the pure core, told everything by hand: the bench of most core tests and of the tour.

`Call` keeps the session, its answers, the commands that wait and a clock that only a test moves. Each word that it is
fed is one `step`; what the step asked for is kept and handed back as a `Word`. Plays the owner just as far as order
goes: a command that waits is asked again, in order, after every word. Plays no stage and no store: a test says what
those say. Checks `invariants.find_broken` and the row's `leads_to` after every step, so that every test does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from control.core import commands as c
from control.core import effects as e
from control.core.answers import Answers
from control.core.fence import Fence
from control.core.invariants import find_broken
from control.core.replies import Lifecycle, Reply
from control.core.requests import RequestPhase
from control.core.scene import Scene, Settings
from control.core.session import Phase, Session, find_due_ms
from control.core.transitions import TABLE, step

START_MS = 1_000_000
ROUTE = ("ear", "mouth")
ROWS_BY_ID = {row.id: row for row in TABLE}
BAD_CONFIG = {"temperature": "hot"}


def at(epoch: int, turn_id: int = 0, response_seq: int = 0, *, incarnation: int = 1) -> Fence:
    """A fence of the first life."""
    return Fence(incarnation, epoch, turn_id, response_seq)


def configure(runtime_config: Mapping[str, Any]) -> tuple[Any, ...]:
    """A policy that refuses one thing, so that a bad configuration is easy to write."""
    if runtime_config.get("temperature") == "hot":
        raise ValueError("temperature is a number")
    return tuple({"temperature": runtime_config.get("temperature", 1)} for _ in ROUTE)


def pack(session_config: Mapping[str, Any], runtime_config: Mapping[str, Any], sampling: tuple[Any, ...]) -> bytes:
    """Any reversible packing will do."""
    return msgspec.msgpack.encode((session_config, runtime_config, sampling))


def unpack(packed: bytes) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """The inverse of `pack`."""
    return msgspec.msgpack.decode(packed, type=tuple[dict[str, Any], dict[str, Any], Any])


def settings(**changes: Any) -> Settings:
    """Two stages behind a policy, durations that add up in the head."""
    known: dict[str, Any] = {
        "stage_count": len(ROUTE),
        "configure": configure,
        "pack_config": pack,
        "unpack_config": unpack,
        "idle_ttl_ms": 60_000,
        "disconnect_grace_ms": 20_000,
        "append_timeout_ms": 10_000,
        "cleanup_timeout_ms": 5_000,
        "cleanup_backoff_ms": 1_000,
        "cleanup_backoff_max_ms": 8_000,
        "placement_retry_ms": 2_000,
    }
    return Settings(**{**known, **changes})


def without_policy() -> Settings:
    """Nothing behind the session: only `turn_commit_only` input, counted and answered at once."""
    return settings(configure=None)


@dataclass
class Word:
    """What one step made of one event."""

    decision: e.Decision
    before: Session | None

    def all(self, kind: type[Any]) -> list[Any]:
        """The effects of one kind, in order."""
        return [effect for effect in self.decision.effects if isinstance(effect, kind)]

    @property
    def row(self) -> str:
        """The table's row that applied."""
        return self.decision.row

    @property
    def waits(self) -> bool:
        """Whether the command has to come again later."""
        return self.decision.wait

    @property
    def replies(self) -> list[Reply]:
        """The replies, in order."""
        return [effect.reply for effect in self.all(e.Answer)]

    @property
    def reply(self) -> Reply:
        """The only reply."""
        (reply,) = self.replies
        return reply

    @property
    def code(self) -> str | None:
        """The only reply's code; None if it is a good one."""
        return self.reply.code

    @property
    def events(self) -> list[str]:
        """The lifecycle events' names, in order."""
        return [effect.lifecycle.event for effect in self.all(e.Announce)]

    @property
    def aborts(self) -> list[tuple[str, tuple[int, ...]]]:
        """Who has to abort the requests of which epochs."""
        return [(effect.worker_id, effect.epochs) for effect in self.all(e.Abort)]

    @property
    def released(self) -> tuple[int, ...]:
        """The epochs whose requests are gone for good."""
        return tuple(epoch for effect in self.all(e.Release) for epoch in effect.epochs)

    @property
    def changed_nothing(self) -> bool:
        """Whether the session is the very object that it was."""
        return self.decision.session is self.before


@dataclass
class Call:
    """One session id. `route` is what the next open or the next try at a route gets; None: no free slot."""

    settings: Settings = field(default_factory=settings)
    session_id: str = "call-1"
    route: tuple[str, ...] | None = ROUTE
    session: Session | None = None
    now_ms: int = START_MS
    answers: Answers = field(default_factory=Answers)
    waiting: list[c.Command] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    _last_id: int = 0

    # --- being told something ---------------------------------------------------------------------------------

    def feed(self, event: c.Event | c.Command, *, entered_ms: int | None = None) -> Word:
        """One event, and then whatever waited for it. Returns the event's own word."""
        if isinstance(event, c.Append | c.Update) and self.waiting:
            # Input keeps its order: behind what waits already, without being looked at.
            self.waiting.append(event)
            return Word(e.Decision(self.session, wait=True), self.session)
        word = self._step(event, entered_ms)
        if word.waits:
            assert isinstance(event, c.Command)
            self.waiting.append(event)
            return word
        while self.waiting:
            again = self._step(self.waiting[0], None)
            if again.waits:
                break
            del self.waiting[0]
        return word

    def _step(self, event: Any, entered_ms: int | None) -> Word:
        scene = Scene(
            settings=self.settings,
            session_id=self.session_id,
            now_ms=self.now_ms,
            answers=self.answers,
            entered_ms=entered_ms,
            offered=self._find_offered(),
            choose_route=lambda: self.route,
        )
        word = Word(step(scene, self.session, event), self.session)
        after = word.decision.session
        phase = Phase.VACANT if after is None else after.phase
        assert after is None or find_broken(after) == [], (event, after)
        assert word.row == "T00" or phase in ROWS_BY_ID[word.row].leads_to, (word.row, phase)
        self.session = after
        for effect in word.decision.effects:
            if isinstance(effect, e.Answer) and effect.remember is not None:
                self.answers.remember(effect.remember)
        if not word.waits:
            self.words.append(word)
        return word

    def _find_offered(self) -> Fence | None:
        appends = [w.fence for w in self.waiting if isinstance(w, c.Append)]
        mine = [fence for fence in appends if fence.incarnation == self.fence.incarnation]
        return max(mine, key=lambda fence: fence.key, default=None)

    # --- commands ----------------------------------------------------------------------------------------------

    def open(self, fence: Fence | None = None, *, input_modes: list[Any] | None = None, **fields: Any) -> Word:
        """An open that lets every word through unless told otherwise; `place` comes next."""
        modes = ["append_tokens", "turn_commit_only"] if input_modes is None else input_modes
        fields.setdefault("capabilities", c.Capabilities(input_modes=modes))
        return self.feed(self.make(c.Open, fence or at(0), **fields))

    def append(self, fence: Fence | None = None, mode: str = "append_tokens", **fields: Any) -> Word:
        """Input, at the accepted fence unless told otherwise."""
        return self.feed(self.make(c.Append, fence, mode=mode, **fields))

    def cancel(self, to: Fence, fence: Fence | None = None, event: str = "barge_in", **fields: Any) -> Word:
        """An interruption of the accepted fence, unless told otherwise."""
        return self.feed(self.make(c.Cancel, fence, event=event, next_fence=to, **fields))

    def update(self, fence: Fence | None = None, **fields: Any) -> Word:
        """A `session.update`."""
        return self.feed(self.make(c.Update, fence, **fields))

    def close(self, fence: Fence | None = None, **fields: Any) -> Word:
        """The end, as the client wants it."""
        return self.feed(self.make(c.Close, fence, **fields))

    def touch(self, activity: str = "heartbeat", fence: Fence | None = None, **fields: Any) -> Word:
        """Activity; a detach too."""
        return self.feed(self.make(c.Touch, fence, activity=activity, **fields))

    def resume(self, generation: int | None = None, fence: Fence | None = None, **fields: Any) -> Word:
        """Take the session up at the generation that it has, unless told otherwise."""
        expected = self.open_session.lease.generation if generation is None else generation
        return self.feed(self.make(c.Resume, fence, expected_lease_generation=expected, **fields))

    def make(self, kind: type[Any], fence: Fence | None = None, **fields: Any) -> Any:
        """A command with an id of its own, at the accepted fence unless told otherwise."""
        fields.setdefault("control_id", self.new_id())
        fields.setdefault("session_id", self.session_id)
        return kind(fence=fence or self.fence, **fields)

    def new_id(self) -> str:
        """A control id that was never used."""
        self._last_id += 1
        return f"c{self._last_id}"

    # --- what stages, placement and time say ------------------------------------------------------------------

    def place(self) -> Word:
        """Every slot that was asked for is taken."""
        opening = self.open_session.opening
        assert opening is not None
        return self.feed(c.Placed(self.fence.incarnation, opening.attempt))

    def refuse_placement(self, holder: str) -> Word:
        """`holder` has no slot after all."""
        opening = self.open_session.opening
        assert opening is not None
        return self.feed(c.PlacementRefused(self.fence.incarnation, opening.attempt, holder))

    def pay_debts(self) -> None:
        """Every slot that is owed comes back."""
        for debt in () if self.session is None else self.session.debts:
            self.feed(c.DebtPaid(debt.incarnation, debt.holder))

    def accept(self) -> Word:
        """The first stage takes the append under way."""
        return self.feed(c.Accepted(self.fence.incarnation, self.append_number))

    def reject(self, code: str = "invalid_argument", message: str = "the prompt is too long") -> Word:
        """The first stage refuses the append under way."""
        return self.feed(c.Rejected(self.fence.incarnation, self.append_number, code, message))

    def clean(self, *workers: str) -> list[Word]:
        """These workers confirm everything they were asked to clean up; without names, all of the route do."""
        words: list[Word] = []
        for worker_id in workers or self.open_session.route:
            asked = [cleanup.number for cleanup in self.cleanups if worker_id in cleanup.waiting]
            words += [self.feed(c.Cleaned(self.fence.incarnation, number, worker_id)) for number in asked]
        return words

    def fail_cleanup(self, worker_id: str, *, timed_out: bool = False) -> Word:
        """`worker_id` can't do its part of the oldest cleanup."""
        cleanup = self.cleanups[0]
        return self.feed(
            c.CleanupFailed(
                self.fence.incarnation, cleanup.number, cleanup.attempts, worker_id, timed_out, "the engine is stuck"
            )
        )

    def pass_ms(self, duration_ms: int) -> None:
        """Time goes by, and nobody looks."""
        self.now_ms += duration_ms

    def wait_ms(self, duration_ms: int, *, output_ms: int = 0) -> list[Word]:
        """Time goes by, and the owner looks whenever something is due."""
        until_ms, words = self.now_ms + duration_ms, []
        while (due_ms := self.find_due_ms()) is not None and due_ms <= until_ms:
            self.now_ms = max(self.now_ms, due_ms)
            words.append(self.feed(c.Due(output_ms)))
            again_ms = self.find_due_ms()
            assert again_ms is None or again_ms > self.now_ms, "the owner would look at the clock for ever"
        self.now_ms = until_ms
        return words

    def find_due_ms(self) -> int | None:
        """When time has something to say, at the earliest."""
        if self.session is None:
            return None
        return find_due_ms(
            self.session,
            idle_ttl_ms=self.settings.idle_ttl_ms,
            disconnect_grace_ms=self.settings.disconnect_grace_ms,
        )

    # --- looking -----------------------------------------------------------------------------------------------

    @property
    def open_session(self) -> Session:
        """The session, which has to be there."""
        assert self.session is not None
        return self.session

    @property
    def phase(self) -> Phase:
        """What the session is doing; vacant if there is none."""
        return Phase.VACANT if self.session is None else self.session.phase

    @property
    def fence(self) -> Fence:
        """The accepted fence; where there is none, the first one."""
        vacant = self.session is None or self.session.phase is Phase.VACANT
        return at(0) if vacant else self.open_session.fence

    @property
    def append_number(self) -> int:
        """The number of the append under way."""
        under_way = self.open_session.append
        assert under_way is not None
        return under_way.number

    @property
    def cleanups(self) -> tuple[Any, ...]:
        """The debts that are pending."""
        return () if self.session is None else self.session.cleanups

    @property
    def requests(self) -> dict[int, RequestPhase]:
        """The phase of every registered request, by epoch."""
        return {} if self.session is None else {r.epoch: r.phase for r in self.session.requests}

    @property
    def replies(self) -> list[Reply]:
        """Every reply so far."""
        return [reply for word in self.words for reply in word.replies]

    @property
    def events(self) -> list[str]:
        """Every lifecycle event so far, by name."""
        return [event.event for event in self.lifecycle]

    @property
    def lifecycle(self) -> list[Lifecycle]:
        """Every lifecycle event so far."""
        return [effect.lifecycle for word in self.words for effect in word.all(e.Announce)]

    @property
    def submits(self) -> list[e.Submit]:
        """Every submission so far."""
        return [effect for word in self.words for effect in word.all(e.Submit)]

    @property
    def released(self) -> list[int]:
        """The epochs of every released request so far."""
        return [epoch for word in self.words for epoch in word.released]

    def answers_to(self, control_id: str) -> list[Reply]:
        """Every reply that a command has had."""
        return [reply for reply in self.replies if reply.control_id == control_id]


def opened(route: tuple[str, ...] = ROUTE, **changes: Any) -> Call:
    """A call that is open, with nothing said yet; `changes` to the settings."""
    call = Call(settings(stage_count=len(route), **changes), route=route)
    call.open()
    call.place()
    assert call.phase is Phase.OPEN
    return call


def talking(route: tuple[str, ...] = ROUTE, **changes: Any) -> Call:
    """A call with one accepted append, so that a request runs at every stage of the route."""
    call = opened(route, **changes)
    call.append()
    call.accept()
    assert call.requests == {0: RequestPhase.SUBMITTED}
    return call
