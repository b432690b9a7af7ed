"""What the core can't see, modelled: stages that hold requests, slots, the owner's jobs, and every promise ever made.

Several session ids share workers and an admission limit. Each step is decided twice, the second time from the
session's stored bytes, and checked against what has happened before: I1, I2, I4, I5, I7, I8, I9 and I10, and that
`find_due_ms` is never late. Leaves choosing what happens to `test_machine.py`. An invariant that breaks is an
AssertionError that begins with its number. A stage here never lies: what it confirms it no longer holds.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from control.core import commands as c
from control.core import effects as e
from control.core.answers import Answered, Answers, key_of
from control.core.fence import Fence
from control.core.invariants import find_broken
from control.core.lease import IDLE_TTL_EXPIRED
from control.core.rejections import Code
from control.core.replies import CLOSING, INTERRUPTED, OPENED, TERMINAL_EVENTS, Reply
from control.core.requests import RequestPhase
from control.core.scene import ADMISSION, Scene
from control.core.session import TOMBSTONE_MS, Phase, Session, fence_record, find_due_ms
from control.core.transitions import step
from tests.core.call import ROWS_BY_ID, START_MS, settings

SESSION_IDS = ("left", "right")
STAGES = ("ear", "mouth")
SLOTS_A_WORKER = 1
LATER_MS = 10 * TOMBSTONE_MS


@dataclass
class Life:
    """Everything that happened under one session id."""

    sid: str
    session: Session | None = None
    stored_answers: list[Answered] = field(default_factory=list)
    answers: Answers = field(default_factory=Answers)
    waiting: list[tuple[c.Command, int]] = field(default_factory=list)
    sent: list[c.Command] = field(default_factory=list)
    output_ms: int = 0  # the last output, as the scripts know it
    seen_output_ms: int = 0  # as the owner has read it
    # I4: commands that a reply is still due to, by control id and op; and what was answered for good
    unanswered: set[tuple[str, str]] = field(default_factory=set)
    answered: dict[bytes, tuple[c.Command | None, Reply]] = field(default_factory=dict)
    by_id: dict[tuple[str, str], c.Command] = field(default_factory=dict)
    # I2, I5: keyed by incarnation
    submits: list[tuple[int, e.Submit]] = field(default_factory=list)
    verdicts: dict[tuple[int, int], bool] = field(default_factory=dict)
    accepted: Counter[tuple[int, int]] = field(default_factory=Counter)
    aborts: list[tuple[int, e.Abort]] = field(default_factory=list)
    aborted: set[tuple[int, int]] = field(default_factory=set)
    holds: dict[str, set[tuple[int, int]]] = field(default_factory=lambda: defaultdict(set))
    told_lost: set[str] = field(default_factory=set)
    # I9, I10
    asked: set[tuple[str, int]] = field(default_factory=set)
    told: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    @property
    def phase(self) -> Phase:
        return Phase.VACANT if self.session is None else self.session.phase

    @property
    def incarnation(self) -> int:
        """The life that is, or the last one that was."""
        if self.session is None:
            return 1
        if self.session.phase is Phase.VACANT:
            return 1 if self.session.ended is None else self.session.ended.incarnation
        return self.session.fence.incarnation


class World:
    """The session ids, what runs and waits around them, and one clock."""

    def __init__(self, reached: set[tuple[str, Phase]]) -> None:
        """`reached`: collects the rows that applied and the phases that they ended in."""
        self.reached = reached
        self.settings = settings(limit_sessions=True)
        self.now_ms = START_MS
        self.lives = {sid: Life(sid) for sid in SESSION_IDS}
        self.workers = {stage: [f"{stage}1", f"{stage}2"] for stage in STAGES}
        self.born = 2
        self.dead: set[str] = set()
        self.slots: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self.jobs: deque[tuple[str, int, e.Place | e.Pay]] = deque()
        self.mail: list[tuple[str, c.Event]] = []
        self.untold: list[tuple[str, str]] = []
        self.admitted = len(SESSION_IDS)
        self.chosen = 0
        self.blind = False  # whether a route is chosen without looking at slots, as with stale figures

    # --- a step and its checks ---------------------------------------------------------------------------------

    def deliver(self, sid: str, command: c.Command) -> None:
        """A command as the owner reads it: input keeps its place behind what waits."""
        life = self.lives[sid]
        life.sent.append(command)
        if is_barred(life, command):
            assert self._try(life, command, self.now_ms), "a command without its session's token takes no place"
            return
        behind = isinstance(command, c.Append | c.Update) or life.phase is not Phase.OPEN
        if life.waiting and behind and not isinstance(command, c.Close):
            life.waiting.append((command, self.now_ms))
            return
        if self._try(life, command, self.now_ms):
            self._go_on(life)
        else:
            life.waiting.append((command, self.now_ms))

    def feed(self, sid: str, event: c.Event) -> None:
        """An event that is no command."""
        life = self.lives[sid]
        if self._decide(life, event, None) is not None:
            self._go_on(life)

    def _go_on(self, life: Life) -> None:
        while life.waiting and self._try(life, *life.waiting[0]):
            del life.waiting[0]
        for waiting in [w for w in life.waiting if is_barred(life, w[0])]:
            assert self._try(life, *waiting)
            life.waiting.remove(waiting)

    def _try(self, life: Life, command: c.Command, entered_ms: int) -> bool:
        decision = self._decide(life, cast("c.Event", command), entered_ms)
        return decision is not None and not decision.wait

    def _decide(self, life: Life, event: c.Event, entered_ms: int | None) -> e.Decision | None:
        before = life.session
        decision = self._decide_twice(life, event, entered_ms)
        if decision.wait:
            assert decision.session is before, "a command that waits changes nothing"
            assert decision.effects == ()
            return decision
        heard = next((x.output_ms for x in decision.effects if isinstance(x, e.ExpireUnlessHeard)), None)
        if heard is not None and life.output_ms > heard:
            return None  # the commit is refused: the session was heard after all
        if isinstance(event, c.Command) and is_barred(life, event):
            self._check_barred(life, event, decision)
            return decision
        if isinstance(event, c.Command):
            self._check_command(life, event, decision)
        self._check_step(life, before, event, decision)
        life.session = decision.session
        for effect in decision.effects:
            self._carry_out(life, before, event, effect)
        self._check_session(life)
        if before is not None and life.session is None:
            self._forget(life)
        return decision

    def _forget(self, life: Life) -> None:
        """The record is gone: from here the id may live under the same incarnations again (D4's hour is over)."""
        assert not any(held for worker_id, held in life.holds.items() if worker_id not in self.dead), "I3: a leak"
        for history in (life.submits, life.verdicts, life.accepted, life.aborts, life.aborted, life.told):
            history.clear()
        self.mail = [(sid, event) for sid, event in self.mail if sid != life.sid]

    def _decide_twice(self, life: Life, event: c.Event, entered_ms: int | None) -> e.Decision:
        route = self._choose_route()
        waiting = [command.fence for command, _ in life.waiting if isinstance(command, c.Append)]
        appends = [fence for fence in waiting if fence.incarnation == life.incarnation]
        scene = Scene(
            settings=self.settings,
            session_id=life.sid,
            now_ms=self.now_ms,
            answers=life.answers,
            entered_ms=entered_ms,
            offered=max(appends, key=lambda fence: fence.key, default=None),
            choose_route=lambda: route,
        )
        decision = step(scene, life.session, event)
        stored = None if life.session is None else _through_bytes(life.session)
        assert stored == life.session, "a session survives being stored"
        assert step(scene, stored, event) == decision, "the same scene, session and event decide the same"
        if life.session is None or decision.session is not None:
            after = Phase.VACANT if decision.session is None else decision.session.phase
        else:
            after = Phase.VACANT
        if decision.row != "T00":
            assert after in ROWS_BY_ID[decision.row].leads_to, f"{decision.row} leads to {after.name}"
        self.reached.add((decision.row, after))
        return decision

    def _check_barred(self, life: Life, command: c.Command, decision: e.Decision) -> None:
        assert decision.session is life.session, "I8: a command without its session's token changes the session"
        (effect,) = decision.effects
        assert isinstance(effect, e.Answer)
        assert (effect.reply.control_id, effect.reply.op) == (command.control_id, c.op_of(command))
        expected = command.code if isinstance(command, c.Malformed) else Code.FAILED_PRECONDITION
        assert effect.reply.code == expected, "I4: the reply of another for a command without the token"
        assert effect.reply.accepted_fence is None
        assert effect.remember is None, "I4: a refusal without the token would be another's answer"

    def _check_command(self, life: Life, command: c.Command, decision: e.Decision) -> None:
        op, control_id = c.op_of(command), command.control_id
        replies = [x.reply for x in decision.effects if isinstance(x, e.Answer)]
        own = [r for r in replies if (r.control_id, r.op) == (control_id, op)]
        names = (key_of(control_id, None), key_of(control_id, command.token))
        known = next((life.answered[name] for name in names if name in life.answered), None) if control_id else None
        if known is not None:
            assert len(own) == 1 == len(decision.effects), f"I4: {control_id} sent again has a second effect"
            assert decision.session is life.session, f"I4: {control_id} sent again changes the session"
            first_command, first = known
            if command == first_command:
                assert _plain(own[0]) == _plain(first), f"I4: {control_id} sent again gets another reply"
            elif op != first.op:
                assert own[0].code == Code.INVALID_ARGUMENT, "I4: an id that was used for another op"
        elif control_id:
            life.unanswered.add((control_id, op))
            life.by_id.setdefault((control_id, op), command)
        live = None if life.session is None or life.phase is not Phase.OPEN else life.session
        if live is not None and known is None:
            self._check_acceptance(live, command, decision, ok=any(r.ok for r in own))
        closing_signal = life.phase is Phase.CLOSING and isinstance(command, c.Cancel | c.Update)
        if any(not r.ok for r in own) and not closing_signal:
            assert decision.session is life.session, f"I8: {decision.row} refuses and changes the session"
            assert len(decision.effects) == 1, f"I8: {decision.row} refuses and does something"

    def _check_acceptance(self, live: Session, command: c.Command, decision: e.Decision, *, ok: bool) -> None:
        after = decision.session
        expected = command.expected_lease_generation
        moved = decision.session is not live
        if isinstance(command, c.Cancel):  # compares as a tuple, and may be late
            late = command.fence.epoch < live.fence.epoch
            assert not (late and after is not None and after.fence != live.fence), "D2: a late cancel moves the fence"
        elif ok:
            assert not _is_behind(live.fence, command.fence), f"I1: {decision.row} took a stale fence"
        if expected is not None and expected != live.lease.generation:
            assert not ok, f"D11: {decision.row} heard a former attachment"
            assert not moved, f"D11: {decision.row} obeyed a former attachment"

    def _check_step(self, life: Life, before: Session | None, event: c.Event, decision: e.Decision) -> None:
        after = decision.session
        assert after is None or find_broken(after) == [], (find_broken(after), event)
        same_life = (
            before is not None
            and after is not None
            and Phase.VACANT not in {before.phase, after.phase}
            and before.fence.incarnation == after.fence.incarnation
        )
        if same_life:
            assert before is not None
            assert after is not None
            self._check_fence(before, after, decision)
        gone = _epochs(before) - _epochs(after)
        released = [epoch for x in decision.effects if isinstance(x, e.Release) for epoch in x.epochs]
        assert set(released) >= gone, f"I2: {gone} left the ledger without a release"
        assert len(released) == len(set(released)), "I2: a request is released once"
        assert not set(released) & _epochs(after), "I2: a released request is still registered"
        assert before is None or set(released) <= _epochs(before), "I2: a request that was never registered"
        if isinstance(event, c.Rejected) and before is not None and before.append is not None and after is not before:
            self._check_rejection(before, event, decision)
        if isinstance(event, c.Due):
            self._check_expiry(life, before, decision)

    def _check_fence(self, before: Session, after: Session, decision: e.Decision) -> None:
        assert not _is_behind(before.fence, after.fence), "I1: the fence never goes back"
        assert after.floor >= before.floor, "I1: the floor never sinks"
        assert after.number >= before.number
        if before.phase is not Phase.OPEN or after.fence.epoch == before.fence.epoch:
            return
        assert after.floor >= after.fence.epoch, "I1: the floor moves with the fence"
        told = [x.lifecycle for x in decision.effects if isinstance(x, e.Announce)]
        interrupted = [x for x in told if x.event == INTERRUPTED]
        assert [(x.fence, x.cancelled_fence) for x in interrupted] == [(after.fence, before.fence)], "I1: not announced"
        old = [r.epoch for r in after.requests if r.epoch < after.fence.epoch and r.phase is not RequestPhase.CLEANING]
        assert not old or after.phase is Phase.CLOSING, "I3: an older request is left running (D1)"

    def _check_rejection(self, before: Session, event: c.Rejected, decision: e.Decision) -> None:
        after, under_way = decision.session, before.append
        assert after is not None
        assert under_way is not None
        assert under_way.number == event.number, "I7: another append's rejection applied"
        others = {r.epoch: r for r in before.requests if r.epoch != under_way.fence.epoch}
        assert {r.epoch: r for r in after.requests if r.epoch != under_way.fence.epoch} == others
        kept = next((r for r in after.requests if r.epoch == under_way.fence.epoch), None)
        was = next(r for r in before.requests if r.epoch == under_way.fence.epoch)
        if under_way.first:
            current = under_way.fence.epoch == before.fence.epoch
            assert (kept is not None and kept.phase is RequestPhase.RESERVED) if current else kept is None
        else:
            assert kept == was
        rest = replace(after, append=under_way, lease=before.lease, requests=before.requests)
        assert rest == before, "I7: a rejected append leaves a trace"

    def _check_expiry(self, life: Life, before: Session | None, decision: e.Decision) -> None:
        ends = [x.lifecycle for x in decision.effects if isinstance(x, e.Announce)]
        if not any(x.reason == IDLE_TTL_EXPIRED for x in ends) or before is None or before.phase is not Phase.OPEN:
            return
        assert before.append is None, "S8: it expired under an append"
        assert not any(cleanup.owed for cleanup in before.cleanups), "S8: it expired under a cancel"
        ttl_ms = self.settings.idle_ttl_ms
        assert ttl_ms is not None
        assert max(before.lease.last_activity_ms, life.output_ms) + ttl_ms <= self.now_ms

    def _check_session(self, life: Life) -> None:
        session, sid = life.session, life.sid
        debts = () if session is None else session.debts
        holders = set() if session is None else {(h, session.fence.incarnation) for h in session.holders}
        owed = {(debt.holder, debt.incarnation) for debt in debts}
        assert life.asked <= holders | owed, f"I9: {life.asked - holders - owed} is neither held nor owed back"
        assert not holders & owed, f"I9: {holders & owed} is held and owed back"
        if session is not None and session.phase in {Phase.OPEN, Phase.CLOSING}:
            for holder, incarnation in holders:
                assert holder in self.dead or (sid, incarnation) in self.slots[holder], f"I9: no slot at {holder}"
        running = [x for x in self.lives.values() if x.phase in {Phase.OPEN, Phase.CLOSING}]
        assert len(running) <= self.admitted, "I9: more sessions than the limit"
        record = None if session is None else fence_record(session)
        assert (record is None) == (life.phase in {Phase.VACANT, Phase.OPENING})
        if session is not None:
            self._check_deadline(life, session)

    def _check_deadline(self, life: Life, session: Session) -> None:
        due_ms = self.find_due_ms(session)
        quiet_until_ms = self.now_ms + LATER_MS if due_ms is None else due_ms - 1
        quiet = self._look(life, session, quiet_until_ms)
        assert quiet.session is session, f"time had something to say before {due_ms}: {quiet}"
        assert quiet.effects == ()
        if due_ms is not None:
            now_ms = max(due_ms, self.now_ms)
            after = self._look(life, session, now_ms).session
            next_ms = None if after is None else self.find_due_ms(after)
            assert next_ms is None or next_ms > now_ms, "the owner would look at the clock for ever"

    def _look(self, life: Life, session: Session, now_ms: int) -> e.Decision:
        scene = Scene(
            settings=self.settings,
            session_id=life.sid,
            now_ms=now_ms,
            answers=life.answers,
            choose_route=lambda: None,
        )
        return step(scene, session, c.Due())

    def find_due_ms(self, session: Session) -> int | None:
        """When time has something to say."""
        return find_due_ms(
            session,
            idle_ttl_ms=self.settings.idle_ttl_ms,
            disconnect_grace_ms=self.settings.disconnect_grace_ms,
        )

    # --- effects -----------------------------------------------------------------------------------------------

    def _carry_out(self, life: Life, before: Session | None, event: c.Event, effect: e.Effect) -> None:
        session = life.session
        incarnation = life.incarnation
        match effect:
            case e.Answer(reply, remember):
                self._note_answer(life, event, reply, remember)
            case e.Announce(lifecycle):
                self._note_lifecycle(life, lifecycle.fence.incarnation, lifecycle.event)
            case e.Submit():
                self._note_submit(life, incarnation, effect)
            case e.Abort():
                assert session is not None
                assert effect.worker_id not in life.told_lost, "an abort to a worker that is known to be gone"
                life.aborts.append((incarnation, effect))
                life.aborted.update((incarnation, epoch) for epoch in effect.epochs)
            case e.Release(epochs):
                assert before is not None
                life_of = before.fence.incarnation
                for worker_id, held in life.holds.items():
                    still = held & {(life_of, epoch) for epoch in epochs}
                    assert not still, f"I2: {still} released while {worker_id} holds it"
            case e.Place(_, holders):
                life.asked.update((holder, incarnation) for holder in holders)
                self.jobs.append((life.sid, incarnation, effect))
            case e.Pay():
                self.jobs.append((life.sid, incarnation, effect))
            case e.ExpireUnlessHeard():
                pass

    def _note_answer(self, life: Life, event: c.Event, reply: Reply, remember: Answered | None) -> None:
        if reply.control_id == "":
            assert isinstance(event, c.Malformed)
            assert remember is None, "I4: nothing is remembered for a command without an id"
            return
        if remember is not None:
            life.answers.remember(_through_bytes(remember))
            life.stored_answers.append(remember)
        key = (reply.control_id, reply.op)
        if key not in life.unanswered and self._is_replay(life, event, reply):
            return  # checked already
        assert key in life.unanswered, f"I4: a second reply to {key}"
        life.unanswered.remove(key)
        if remember is not None:
            assert not reply.retryable, "D5: a retryable answer is no answer for good"
            life.answered[remember.key] = (life.by_id.get(key), reply)
        life.by_id.pop(key, None)
        if reply.op == "append" and reply.ok:
            self._note_accepted_append(life, event, reply)

    def _is_replay(self, life: Life, event: c.Event, reply: Reply) -> bool:
        shown = event.token if isinstance(event, c.Command) else None
        return any(key_of(reply.control_id, token) in life.answered for token in (None, shown))

    def _note_accepted_append(self, life: Life, event: c.Event, reply: Reply) -> None:
        assert reply.fence is not None
        key = (reply.fence.incarnation, reply.fence.epoch)
        if isinstance(event, c.Accepted):
            life.accepted[key] += 1
            assert reply.detail.seq == life.accepted[key], "I5: a gap or a repeat"
        else:
            assert reply.detail.seq <= life.accepted[key], "I5: a replay of what was never accepted"

    def _note_lifecycle(self, life: Life, incarnation: int, event: str) -> None:
        told = life.told[incarnation]
        assert not any(told[terminal] for terminal in TERMINAL_EVENTS), f"I10: {event} after the end"
        told[event] += 1
        if event in {OPENED, CLOSING, *TERMINAL_EVENTS}:
            assert told[event] == 1, f"I10: {event} twice"
        assert told[OPENED] == 1, f"I10: {event} of a session that never opened"

    def _note_submit(self, life: Life, incarnation: int, submit: e.Submit) -> None:
        epoch = submit.fence.epoch
        assert (incarnation, epoch) not in life.aborted, "I2: a request id is submitted again after its abort"
        assert submit.seq == life.accepted[incarnation, epoch] + 1, "I5: a gap or a repeat"
        assert submit.worker_id == submit.route[0]
        session = life.session
        assert session is not None
        assert epoch >= session.floor, "I1: submitted below the floor"
        held_before = (incarnation, epoch) in life.holds[submit.worker_id]
        assert submit.resumed == held_before
        life.submits.append((incarnation, submit))
        for worker_id in submit.route:
            life.holds[worker_id].add((incarnation, epoch))

    # --- what the stages, the owner's jobs and time do ---------------------------------------------------------

    def judge(self, sid: str, index: int, *, accept: bool) -> None:
        """The first stage's word on a submission; the same word each time it is heard again."""
        life = self.lives[sid]
        incarnation, submit = life.submits[index]
        key = (incarnation, submit.number)
        fresh = key not in life.verdicts
        accept = life.verdicts.setdefault(key, accept)
        before = life.session
        waited_for = None if before is None or before.append is None else (life.incarnation, before.append.number)
        if fresh and not accept and not submit.resumed:
            # It kept nothing, and what never ran there was never forwarded.
            for held in life.holds.values():
                held.discard((incarnation, submit.fence.epoch))
        if accept:
            self.feed(sid, c.Accepted(incarnation, submit.number))
        else:
            self.feed(sid, c.Rejected(incarnation, submit.number, "invalid_argument", "no"))
        assert waited_for == key or life.session is before, "I5: a word about another append changes something"

    def confirm(self, sid: str, index: int) -> None:
        """A worker has cleaned up; hearing it again is as true as the first time."""
        life = self.lives[sid]
        incarnation, abort = life.aborts[index]
        life.holds[abort.worker_id] -= {(incarnation, epoch) for epoch in abort.epochs}
        self.feed(sid, c.Cleaned(incarnation, abort.number, abort.worker_id))

    def fail(self, sid: str, index: int, *, timed_out: bool) -> None:
        """A worker could not clean up."""
        incarnation, abort = self.lives[sid].aborts[index]
        self.feed(
            sid,
            c.CleanupFailed(
                incarnation, abort.number, abort.attempt, abort.worker_id, timed_out, "the engine is stuck"
            ),
        )

    def lose(self, worker_id: str) -> None:
        """A worker's life is over; a new one takes its place. The sessions hear of it later."""
        self.dead.add(worker_id)
        for stage, workers in self.workers.items():
            if worker_id in workers:
                self.born += 1
                workers[workers.index(worker_id)] = f"{stage}{self.born}"
        self.untold += [(sid, worker_id) for sid in self.lives]

    def tell_lost(self, index: int) -> None:
        """One session hears that a worker is gone."""
        sid, worker_id = self.untold.pop(index)
        life = self.lives[sid]
        life.holds[worker_id].clear()
        life.told_lost.add(worker_id)
        self.feed(sid, c.StageLost(worker_id))

    def run_job(self, *, reachable: bool = True) -> None:
        """The owner's oldest job: take or free slots; the session hears the outcome later, if there is one."""
        sid, incarnation, job = self.jobs.popleft()
        match job:
            case e.Pay() if not reachable:
                pass
            case e.Place(attempt, holders):
                for holder in holders:
                    taken = self.slots[holder]
                    free = len(taken) < (self.admitted if holder == ADMISSION else SLOTS_A_WORKER)
                    if holder in self.dead or (not free and (sid, incarnation) not in taken):
                        self.mail.append((sid, c.PlacementRefused(incarnation, attempt, holder)))
                        return
                    taken.add((sid, incarnation))
                self.mail.append((sid, c.Placed(incarnation, attempt)))
            case e.Pay(debts):
                for debt in debts:
                    self.slots[debt.holder].discard((sid, debt.incarnation))
                    self.mail.append((sid, c.DebtPaid(debt.incarnation, debt.holder)))

    def read_mail(self, index: int, *, keep: bool) -> None:
        """The outcome of a job, possibly not for the last time."""
        sid, event = self.mail[index] if keep else self.mail.pop(index)
        life = self.lives[sid]
        if isinstance(event, c.DebtPaid) and life.session is not None:
            owed = any((d.holder, d.incarnation) == (event.holder, event.incarnation) for d in life.session.debts)
            if owed and (sid, event.incarnation) not in self.slots[event.holder]:
                life.asked.discard((event.holder, event.incarnation))
        self.feed(sid, event)

    def crash(self) -> None:
        """The owner dies: what it was about to do is lost, sessions and answers are read again."""
        self.jobs.clear()
        self.mail.clear()
        for life in self.lives.values():
            life.session = None if life.session is None else _through_bytes(life.session)
            life.answers = Answers(_through_bytes(life.stored_answers, list[Answered]))

    def output(self, sid: str) -> None:
        """The model says something that is delivered."""
        life = self.lives[sid]
        if life.phase is Phase.OPEN:
            life.output_ms = self.now_ms

    def look_at_clock(self, *, may_expire: bool, fresh: bool) -> None:
        """The owner looks at every session that is due, with what it knows of outputs."""
        for life in self.lives.values():
            if fresh:
                life.seen_output_ms = life.output_ms
            due_ms = None if life.session is None else self.find_due_ms(life.session)
            if due_ms is not None and due_ms <= self.now_ms:
                self.feed(life.sid, c.Due(life.seen_output_ms, may_expire))

    def _choose_route(self) -> tuple[str, ...] | None:
        self.chosen += 1
        if self.blind:
            # Old figures: a worker may be full, or even gone.
            known = [
                [*workers, *sorted(w for w in self.dead if w.startswith(s))] for s, workers in self.workers.items()
            ]
            return tuple(workers[self.chosen % len(workers)] for workers in known)
        free = [[w for w in workers if len(self.slots[w]) < SLOTS_A_WORKER] for workers in self.workers.values()]
        return tuple(workers[0] for workers in free) if all(free) else None

    # --- the end -----------------------------------------------------------------------------------------------

    def come_to_rest(self) -> None:
        """Everything answers again: then every promise must be kept (I3, I4, I9, I10)."""
        for _ in range(60):
            if not any(self._settle_one(life) for life in self.lives.values()):
                break
        else:
            raise AssertionError("I3: it doesn't come to rest")
        for life in self.lives.values():
            assert life.waiting == [], "I4: a command waits for ever"
            assert life.unanswered == set(), f"I4: no reply to {life.unanswered}"
            assert not any(held for worker, held in life.holds.items() if worker not in self.dead), "I3: a leak"
            for incarnation, told in life.told.items():
                ends = sum(told[event] for event in TERMINAL_EVENTS)
                assert ends == told[OPENED] == 1, f"I10: life {incarnation} of {life.sid} was told {dict(told)}"
            assert life.asked == set(), "I9: a slot is never given back"
        assert not any(held for holder, held in self.slots.items() if holder not in self.dead), "I9: a slot leaks"
        self.now_ms += TOMBSTONE_MS
        self.look_at_clock(may_expire=True, fresh=True)
        assert all(life.session is None for life in self.lives.values()), "S14: a tombstone stays for ever"

    def _settle_one(self, life: Life) -> bool:
        """Whether anything was left to do for a session."""
        while self.jobs or self.mail or self.untold:
            if self.jobs:
                self.run_job()
            while self.mail:
                self.read_mail(0, keep=False)
            if self.untold:
                self.tell_lost(0)
        session = life.session
        if session is None or (session.phase is Phase.VACANT and not session.debts and not life.waiting):
            return False
        if session.append is not None:
            self.judge(life.sid, len(life.submits) - 1, accept=True)
        elif session.phase is Phase.OPEN and not life.waiting:
            name = f"end{life.incarnation}"
            last = c.Close(control_id=name, session_id=life.sid, fence=session.fence, token=session.token)
            self.deliver(life.sid, last)
        for index in self.pending_aborts(life):
            self.confirm(life.sid, index)
        if life.session is not None and (life.session.debts or life.phase is Phase.OPENING):
            # What the owner lost when it died is asked for again.
            self.now_ms = max(self.now_ms, self.find_due_ms(life.session) or 0)
            self.look_at_clock(may_expire=True, fresh=True)
        return True

    def pending_aborts(self, life: Life) -> list[int]:
        """The aborts that somebody still waits for."""
        return list(self._pending(life))

    def _pending(self, life: Life) -> Iterator[int]:
        cleanups = {} if life.session is None else {x.number: x for x in life.session.cleanups}
        for index, (incarnation, abort) in enumerate(life.aborts):
            cleanup = cleanups.get(abort.number)
            if incarnation == life.incarnation and cleanup is not None and abort.worker_id in cleanup.waiting:
                yield index


def _through_bytes(value: Any, kind: Any = None) -> Any:
    """The value as another process would read it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind or type(value))


def is_barred(life: Life, command: c.Command) -> bool:
    """Whether the life was opened with a token that the command does not show, spelled out once more."""
    return (
        life.phase is not Phase.VACANT and life.session is not None and life.session.token not in {None, command.token}
    )


def _is_behind(accepted: Fence, fence: Fence) -> bool:
    """Stale or foreign, spelled out once more."""
    if fence.incarnation != accepted.incarnation or fence.epoch != accepted.epoch:
        return fence.incarnation != accepted.incarnation or fence.epoch < accepted.epoch
    return fence.turn_id < accepted.turn_id or fence.response_seq < accepted.response_seq


def _epochs(session: Session | None) -> set[int]:
    return set() if session is None else {request.epoch for request in session.requests}


def _plain(reply: Reply) -> Reply:
    """A reply without what a replay may spell differently: the text, and what belongs to the life, not the command."""
    detail = reply.detail
    if detail is not None and reply.op == "append" and hasattr(detail, "implementation_level"):
        detail = replace(detail, implementation_level="")
    return replace(reply, message="", detail=detail)
