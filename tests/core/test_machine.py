"""Anything may happen in any order, and every invariant holds after every step.

The rules say what may happen: commands near the accepted fence and far from it, sent twice, late; stages that answer
late, twice, for a former life; slots that are gone; an owner that dies; a clock that jumps. `world.py` checks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from control.core import commands as c
from control.core.fence import Fence
from control.core.session import Phase
from control.core.tokens import digest_token
from tests.core.call import BAD_CONFIG
from tests.core.world import SESSION_IDS, STAGES, Life, World

EXAMPLES, STEPS = 400, 50

SIDS = st.sampled_from(SESSION_IDS)
PICK = st.integers(0, 10_000)
OFTEN = st.sampled_from([True, True, True, False])
SELDOM = st.sampled_from([False, False, False, True])
# What a command shows; RIGHT stands for what its session asks for.
RIGHT = "right"
TOKENS: list[Any] = [None, digest_token(b"a token of left's"), digest_token(b"a token of right's")]
# How far a command's fence lies from the accepted one: incarnation, epoch, turn, response.
NEAR = st.tuples(
    st.sampled_from([0] * 14 + [1, -1]),
    st.sampled_from([0] * 8 + [1, 1, 2, -1, -2]),
    st.sampled_from([0] * 6 + [1, 1, -1]),
    st.sampled_from([0] * 6 + [1, 1, -1]),
)
CONFIGS = st.sampled_from([None, None, None, {}, {"voice": "b"}, {"temperature": 2}, BAD_CONFIG])
COMMON = st.fixed_dictionaries(
    {},
    optional={
        "control_id": st.sampled_from(["", "", "", "again1", "again2"]),
        "expected_lease_generation": st.sampled_from([None, None, None, 0, 1, 2]),
        "deadline_ms": st.sampled_from([None, None, None, 0, 500, 60_000]),
        "token": st.sampled_from([RIGHT] * 8 + TOKENS),
    },
)
MODES = st.sampled_from([["append_tokens"]] * 6 + [None, [], ["telepathy"], [3]])


def near(fence: Fence, by: tuple[int, int, int, int]) -> Fence:
    parts = (fence.incarnation, fence.epoch, fence.turn_id, fence.response_seq)
    return Fence(*(max(0, part + step) for part, step in zip(parts, by, strict=True)))


def if_any(condition: Callable[[Life], Any]) -> Any:
    """A rule only for when some life fulfils a condition."""
    return precondition(lambda self: any(condition(life) for life in self.world.lives.values()))


def lives(life: Life) -> bool:
    return life.phase is not Phase.VACANT


class Machine(RuleBasedStateMachine):
    """The world, and everything that may happen to it."""

    reached: set[tuple[str, Phase]] = set()  # noqa: RUF012  shared by every run on purpose

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.reached)
        self.last_id = 0

    def base(self, life: Life) -> Fence:
        """What a client would take for the current fence."""
        session = life.session
        if session is None or session.phase is Phase.VACANT:
            return Fence(life.incarnation, 2, 2, 2)
        if session.append is None:
            return session.fence
        return max(session.fence, session.append.fence, key=lambda fence: fence.key)

    def send(self, sid: str, kind: type[Any], by: tuple[int, int, int, int], common: Any, **fields: Any) -> None:
        self.last_id += 1
        known: dict[str, Any] = {"session_id": sid, "fence": near(self.base(self.world.lives[sid]), by), **common}
        if not known.get("control_id") and kind is not c.Malformed:
            known["control_id"] = f"c{self.last_id}"
        if known.get("token", RIGHT) == RIGHT:
            session = self.world.lives[sid].session
            # Every other life of an id has a token.
            fresh = TOKENS[1 + SESSION_IDS.index(sid)] if self.last_id % 2 else None
            known["token"] = fresh if session is None or session.phase is Phase.VACANT else session.token
        self.world.deliver(sid, kind(**{**known, **fields}))

    def dial(self, sid: str) -> None:
        """Open as it goes when nothing is in the way."""
        lived = self.world.lives[sid].session is not None
        modes = c.Capabilities(input_modes=["append_tokens"])
        self.send(sid, c.Open, (int(lived), 0, 0, 0), {}, capabilities=modes)
        while self.world.jobs:
            self.owner_does_a_job(read=True, reachable=self.last_id % 2 == 0)

    def say(self, sid: str, raised: int, *, accept: bool | None) -> None:
        """An append as most are, and its stage's word; None: not yet."""
        life = self.world.lives[sid]
        self.send(sid, c.Append, (0, raised, 0, 0), {}, mode="append_tokens")
        if accept is not None and life.session is not None and life.session.append is not None:
            self.world.judge(sid, len(life.submits) - 1, accept=accept)

    @initialize(
        admitted=st.sampled_from([1, 2, 2]),
        dialled=st.sampled_from([0, 1, 2, 2]),
        said=st.booleans(),
        blind=st.booleans(),
    )
    def begin(self, admitted: int, dialled: int, said: bool, blind: bool) -> None:
        self.world.admitted = admitted
        self.world.blind = blind
        for sid in SESSION_IDS[:dialled]:
            self.dial(sid)
            if said:
                self.say(sid, 0, accept=True)

    # --- commands ----------------------------------------------------------------------------------------------

    @rule(
        sid=SIDS,
        by=NEAR,
        common=COMMON,
        session_config=CONFIGS,
        runtime_config=CONFIGS,
        sees=OFTEN,
        modes=MODES,
        later=OFTEN,
        session_mode=st.sampled_from(["duplex"] * 6 + ["turn", "mime"]),
    )
    def opens(self, sid: str, by: Any, common: Any, modes: Any, sees: bool, later: bool, **fields: Any) -> None:
        life = self.world.lives[sid]
        self.world.blind = not sees
        if life.phase is Phase.VACANT:
            by = (by[0] + (later and life.session is not None), 0, 0, 0)
        self.send(sid, c.Open, by, common, capabilities=c.Capabilities(input_modes=modes), **fields)

    @precondition(lambda self: not all(lives(life) for life in self.world.lives.values()))
    @rule(sid=SIDS)
    def opens_as_usual(self, sid: str) -> None:
        if not lives(self.world.lives[sid]):
            self.dial(sid)

    @rule(
        sid=SIDS,
        by=NEAR,
        common=COMMON,
        final=st.booleans(),
        digest=st.sampled_from([b"x", b"x", b"y"]),
        operation_id=st.sampled_from([None, None, "say1", "say2"]),
        expected_epoch=st.sampled_from([None] * 6 + [0, 1]),
        mode=st.sampled_from(["append_tokens"] * 8 + ["append_audio_chunk", "telepathy"]),
    )
    def appends(self, sid: str, by: Any, common: Any, digest: bytes, operation_id: Any, **fields: Any) -> None:
        known = None if operation_id is None else digest
        self.send(sid, c.Append, by, common, operation_id=operation_id, payload_digest=known, **fields)

    @if_any(lambda life: life.phase is Phase.OPEN)
    @rule(sid=SIDS, raised=st.sampled_from([0, 0, 1]), accept=st.sampled_from([True, True, False, None, None]))
    def talks(self, sid: str, raised: int, accept: bool | None) -> None:
        self.say(sid, raised, accept=accept)

    @if_any(lambda life: life.phase is Phase.OPEN)
    @rule(sid=SIDS, ago=st.sampled_from([0, 0, 0, 1]), up=st.sampled_from([1, 1, 2]))
    def interrupts(self, sid: str, ago: int, up: int) -> None:
        """A cancel as most are, or one that comes late."""
        fence = near(self.base(self.world.lives[sid]), (0, -ago, 0, 0))
        self.send(sid, c.Cancel, (0, -ago, 0, 0), {}, event="barge_in", next_fence=near(fence, (0, up, 0, 0)))

    @if_any(lives)
    @rule(
        sid=SIDS,
        by=NEAR,
        common=COMMON,
        up=st.sampled_from([1] * 8 + [2, 0, -1, None]),
        turn=st.sampled_from([0, 0, 1]),
        session_config=CONFIGS,
        runtime_config=CONFIGS,
        event=st.sampled_from(sorted(c.CANCEL_EVENTS)),
    )
    def cancels(self, sid: str, by: Any, up: int | None, turn: int, common: Any, **fields: Any) -> None:
        fence = near(self.base(self.world.lives[sid]), by)
        goal = None if up is None else near(fence, (0, up, turn, turn))
        self.send(sid, c.Cancel, by, common, next_fence=goal, **fields)

    @rule(sid=SIDS, by=NEAR, common=COMMON, session_config=CONFIGS, runtime_config=CONFIGS)
    def updates(self, sid: str, by: Any, common: Any, **fields: Any) -> None:
        self.send(sid, c.Update, by, common, **fields)

    @rule(
        sid=SIDS, by=NEAR, common=COMMON, op=st.sampled_from([None, "open", "append", "nonsense"]), named=st.booleans()
    )
    def sends_nonsense(self, sid: str, by: Any, common: Any, op: str | None, named: bool) -> None:
        if op is None:
            self.send(sid, c.UnknownSignal, by, common, event="sneeze")
            return
        self.last_id += 1
        name = {"control_id": f"c{self.last_id}"} if named else {"control_id": "", "fence": None}
        self.send(sid, c.Malformed, by, {}, op=op, code="invalid_argument", message="no", **name)

    @if_any(lives)
    @rule(sid=SIDS, by=NEAR, common=COMMON, reason=st.sampled_from(["client_close", "open_rollback"]))
    def closes(self, sid: str, by: Any, common: Any, reason: str) -> None:
        self.send(sid, c.Close, by, common, reason=reason)

    @rule(
        sid=SIDS,
        by=NEAR,
        common=COMMON,
        activity=st.sampled_from(["heartbeat", "attach", "detach", "detach", "wave", None, None]),
    )
    def attaches(self, sid: str, by: Any, common: Any, activity: str | None) -> None:
        if activity is None:
            self.send(sid, c.Resume, by, common)
        else:
            self.send(sid, c.Touch, by, common, activity=activity)

    @if_any(lambda life: life.sent)
    @rule(sid=SIDS, pick=PICK, latest=st.booleans())
    def sends_again(self, sid: str, pick: int, latest: bool) -> None:
        sent = self.world.lives[sid].sent
        if sent:
            self.world.deliver(sid, sent[-1 - pick % min(4, len(sent))] if latest else sent[pick % len(sent)])

    # --- stages ------------------------------------------------------------------------------------------------

    @if_any(lambda life: life.submits)
    @rule(sid=SIDS, pick=PICK, accept=OFTEN, latest=OFTEN)
    def stage_answers(self, sid: str, pick: int, accept: bool, latest: bool) -> None:
        submits = self.world.lives[sid].submits
        if submits:
            self.world.judge(sid, len(submits) - 1 if latest else pick % len(submits), accept=accept)

    @if_any(lambda life: life.aborts)
    @rule(sid=SIDS, pick=PICK, needed=OFTEN, fails=st.booleans(), timed_out=st.booleans())
    def stage_cleans(self, sid: str, pick: int, needed: bool, fails: bool, timed_out: bool) -> None:
        life = self.world.lives[sid]
        choice = self.world.pending_aborts(life) if needed else list(range(len(life.aborts)))
        if choice and fails:
            self.world.fail(sid, choice[-1 - pick % len(choice)], timed_out=timed_out)
        elif choice:
            self.world.confirm(sid, choice[pick % len(choice)])

    @if_any(lives)
    @rule(sid=SIDS, pick=PICK, epochs_ago=st.sampled_from([0, 0, 1, 2]), stranger=SELDOM)
    def request_fails(self, sid: str, pick: int, epochs_ago: int, stranger: bool) -> None:
        life = self.world.lives[sid]
        fence = near(self.base(life), (0, -epochs_ago, 0, 0))
        route = () if life.session is None else life.session.route
        worker = "stranger" if stranger or not route else route[pick % len(route)]
        self.world.feed(sid, c.RequestFailed(fence.incarnation, fence.epoch, worker, "out of memory"))

    @precondition(lambda self: self.world.untold)
    @rule(pick=PICK)
    def session_hears_of_a_death(self, pick: int) -> None:
        self.world.tell_lost(pick % len(self.world.untold))

    @rule(sid=SIDS, number=st.sampled_from([0, 1, 2, 3, 99]), former=st.sampled_from([1, 5]), pick=PICK)
    def word_for_another_life(self, sid: str, number: int, former: int, pick: int) -> None:
        life = self.world.lives[sid]
        incarnation = life.incarnation + former
        worker = "ear1" if life.session is None or not life.session.route else life.session.route[0]
        words: list[c.Event] = [
            c.Accepted(incarnation, number),
            c.Rejected(incarnation, number, "invalid_argument", "no"),
            c.Cleaned(incarnation, number, worker),
            c.CleanupFailed(incarnation, number, 1, worker, True, "no"),
            c.RequestFailed(incarnation, number, worker, "no"),
        ]
        before = life.session
        self.world.feed(sid, words[pick % len(words)])
        assert life.session is before, "a word for another life changes nothing"

    # --- the owner and time ------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.jobs)
    @rule(read=OFTEN, reachable=OFTEN)
    def owner_does_a_job(self, read: bool, reachable: bool) -> None:
        self.world.run_job(reachable=reachable)
        while read and self.world.mail:
            self.world.read_mail(0, keep=False)

    @precondition(lambda self: self.world.mail)
    @rule(pick=PICK, keep=st.booleans())
    def owner_reads_an_outcome(self, pick: int, keep: bool) -> None:
        self.world.read_mail(pick % len(self.world.mail), keep=keep)

    @rule(
        pick=PICK, what=st.sampled_from(["crash", "worker", "worker", "poison", "dismiss", "retry", "retry", "output"])
    )
    def something_rare_happens(self, what: str, pick: int) -> None:
        sid = SESSION_IDS[pick % len(SESSION_IDS)]
        match what:
            case "crash":
                self.world.crash()
            case "worker":
                workers = self.world.workers[STAGES[pick % len(STAGES)]]
                self.world.lose(workers[pick // 2 % len(workers)])
            case "poison":
                self.world.feed(sid, c.Poisoned("it crashed three times"))
            case "dismiss":
                session = self.world.lives[sid].session
                incarnation = 1 if session is None else session.fence.incarnation
                self.world.feed(sid, c.Dismissed(max(0, incarnation - (pick % 3 == 0)), "operator_close"))
            case "retry":
                self.world.feed(sid, c.RetryNow())
            case _:
                self.world.output(sid)

    @rule(passed_ms=st.sampled_from([0, 1, 400, 3_000, 9_000]), may_expire=OFTEN, fresh=st.booleans())
    def time_passes(self, passed_ms: int, may_expire: bool, fresh: bool) -> None:
        self.world.now_ms += passed_ms
        self.world.look_at_clock(may_expire=may_expire, fresh=fresh)

    @if_any(lambda life: life.session is not None)
    @rule(sid=SIDS, late_ms=st.sampled_from([0, 0, 1, 700, 70_000]), may_expire=OFTEN, fresh=st.booleans())
    def something_is_due(self, sid: str, late_ms: int, may_expire: bool, fresh: bool) -> None:
        session = self.world.lives[sid].session
        due_ms = None if session is None else self.world.find_due_ms(session)
        if due_ms is not None:
            self.world.now_ms = max(self.world.now_ms, due_ms) + late_ms
            self.world.look_at_clock(may_expire=may_expire, fresh=fresh)

    def teardown(self) -> None:
        self.world.come_to_rest()


@cache
def explore() -> frozenset[tuple[str, Phase]]:
    """Run the machine once; the rows that applied, and the phases that they ended in. The same every time."""
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        ),
    )
    return frozenset(Machine.reached)


def test_every_invariant_holds_after_every_step() -> None:
    assert explore()
