"""One partition in memory: who waits, who overtakes, what is due, and that one bad decision stops nobody. No IO."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, field
from typing import Any

import pytest

from control.core import commands as c
from control.core import effects as e
from control.core.fence import Fence
from control.core.scene import Settings
from control.core.session import Phase, Session
from control.store.commits import ACKS_KEY, COMMANDS_KEY, Batch
from control.store.keys import PartitionKeys
from control.wire.commands import Received
from control.wire.events import decode_event
from control.wire.limits import Limits
from control.wire.stage import AbortOrder, SubmissionOrder, decode_abort, decode_submission, pack_config, unpack_config
from workers.entries import Entry
from workers.partition import ANSWERS_A_SESSION, LOOK_AGAIN_MS, Partition

SID = "caller"
EAR = "ear-1"
MODES = ["append_tokens", "turn_commit_only"]
_numbers = itertools.count(1)


def fence(epoch: int = 0, turn: int = 0, response: int = 0, incarnation: int = 0) -> Fence:
    return Fence(incarnation, epoch, turn, response)


def configure(runtime_config: Any) -> tuple[Any, ...]:
    """A policy with moods."""
    mood = runtime_config.get("mood")
    if mood == "wrong":
        raise ValueError("it knows no such mood")
    if mood == "broken":
        raise ZeroDivisionError("a bug in the policy")
    return (runtime_config,)


@dataclass
class Bench:
    """A partition with a clock of its own. `out`: what the batches taken so far hold, in their order."""

    policy: bool = True
    limit: bool = False
    limits: Limits = field(default_factory=Limits)
    now_ms: int = 10_000
    out: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.partition = Partition(PartitionKeys(0), self.settings(), self.limits, self.choose_route)
        self.route: tuple[str, ...] | Exception | None = (EAR,)

    def settings(self) -> Settings:
        return Settings(
            stage_count=1 if self.policy else 0,
            configure=configure if self.policy else None,
            pack_config=pack_config,
            unpack_config=unpack_config,
            limit_sessions=self.limit,
        )

    def choose_route(self) -> tuple[str, ...] | None:
        if isinstance(self.route, Exception):
            raise self.route
        return self.route

    @property
    def session(self) -> Session:
        found = self.partition.find(SID)
        assert found is not None
        return found

    def send(
        self, kind: Any, at: Fence | None = None, *, sid: str = SID, inline: bytes | None = None, **more: Any
    ) -> str:
        """A command enters; its entry id, which is its control id as well unless one is given."""
        entry_id = f"{self.now_ms}-{next(_numbers)}"
        fields = {"control_id": entry_id, "session_id": sid, "fence": at or fence(), **more}
        if not self.partition.is_known(sid):
            self.partition.learn(sid, None, [])
        self.partition.take_command(entry_id, Received(kind(**fields), inline), self.now_ms, self.now_ms)
        return entry_id

    def append(self, at: Fence | None = None, **more: Any) -> str:
        return self.send(c.Append, at, mode="append_tokens", **more)

    def open(self, incarnation: int = 0, **more: Any) -> str:
        capabilities = c.Capabilities(input_modes=MODES if self.policy else None)
        return self.send(c.Open, fence(incarnation=incarnation), capabilities=capabilities, **more)

    def opened(self) -> Bench:
        self.open()
        if self.policy:
            self.partition.tell(SID, c.Placed(0, 1), self.now_ms)
        self.commit()
        self.out.clear()
        return self

    def accept(self) -> None:
        """The stage takes what it was given."""
        under_way = self.session.append
        assert under_way is not None
        self.ack(c.Accepted(0, under_way.number))

    def ack(self, event: c.Event) -> None:
        self.partition.take_word(ACKS_KEY, f"{self.now_ms}-{next(_numbers)}", SID, event, self.now_ms)

    def commit(self) -> Batch:
        """Take the batch as committed, and note what it says."""
        batch = self.partition.take_batch()
        for i in range(0, len(batch._submissions), 4):
            self.out.append((decode_submission(batch._submissions[i + 2]), batch._submissions[i + 1]))
        for i in range(0, len(batch._aborts), 3):
            self.out.append(decode_abort(batch._aborts[i + 2]))
        for i in range(0, len(batch._events), 4):
            self.out.append(decode_event(batch._events[i + 3]))
        for i in range(0, len(batch._strangers), 3):
            self.out.append(decode_event(batch._strangers[i + 2]))
        return batch

    def replies(self) -> list[tuple[str, str | None]]:
        """Control id and code of every reply so far; commits first."""
        self.commit()
        return [(each["control_id"], each["code"]) for each in self.out if isinstance(each, dict) and "code" in each]

    def lifecycle(self) -> list[str]:
        self.commit()
        return [each["event"] for each in self.out if isinstance(each, dict) and "event" in each]

    def submissions(self) -> list[SubmissionOrder]:
        self.commit()
        return [each[0] for each in self.out if isinstance(each, tuple)]

    def aborts(self) -> list[AbortOrder]:
        self.commit()
        return [each for each in self.out if isinstance(each, AbortOrder)]


# ---- who waits, and in which order


def test_i5_appends_wait_for_the_one_under_way_and_go_on_in_order() -> None:
    bench = Bench().opened()
    first, second, third = bench.append(), bench.append(final=True), bench.append()
    assert [order.seq for order in bench.submissions()] == [1]
    assert bench.replies() == []
    assert bench.partition.waiting == 2
    for _ in range(3):
        bench.accept()
    assert bench.replies() == [(first, None), (second, None), (third, None)]
    assert [(order.seq, order.final) for order in bench.submissions()] == [(1, False), (2, True), (3, False)]
    assert bench.partition.waiting == 0


def test_i4_an_input_is_deleted_by_the_commit_that_decides_it_and_not_while_it_waits() -> None:
    bench = Bench().opened()
    first, second = bench.append(), bench.append()
    assert bench.commit()._done[COMMANDS_KEY] == [first]
    bench.accept()
    batch = bench.commit()
    assert batch._done[COMMANDS_KEY] == [second]
    assert len(batch._done[ACKS_KEY]) == 1


def test_i7_a_rejected_append_lets_the_next_one_go_on_with_its_number() -> None:
    bench = Bench().opened()
    first, second = bench.append(), bench.append()
    under_way = bench.session.append
    assert under_way is not None
    bench.ack(c.Rejected(0, under_way.number, "invalid_argument", "not understood"))
    assert bench.replies() == [(first, "invalid_argument")]
    bench.accept()
    assert bench.replies()[1:] == [(second, None)]
    assert [order.seq for order in bench.submissions()] == [1, 1]


def test_an_update_keeps_its_place_behind_the_appends_that_came_before() -> None:
    bench = Bench().opened()
    first = bench.append()
    update = bench.send(c.Update, runtime_config={"mood": "gay"})
    second = bench.append()
    assert bench.replies() == []
    bench.accept()
    assert bench.replies() == [(first, None), (update, None)]
    before, after = bench.submissions()
    assert (before.generation, after.generation) == (0, 1)
    assert unpack_config(after.config)[1] == {"mood": "gay"}
    bench.accept()
    assert bench.replies()[2:] == [(second, None)]


def test_an_update_without_appends_before_it_does_not_wait() -> None:
    bench = Bench().opened()
    update = bench.send(c.Update, session_config={"voice": "low"})
    assert bench.replies() == [(update, None)]


@pytest.mark.parametrize("activity", ["heartbeat", "playback_ack", "detach"])
def test_a_touch_waits_for_nobody(activity: str) -> None:
    bench = Bench().opened()
    bench.append()
    bench.append()
    touch = bench.send(c.Touch, activity=activity)
    assert bench.replies() == [(touch, None)]


def test_a_resume_waits_for_nobody() -> None:
    bench = Bench().opened()
    bench.append()
    bench.append()
    resume = bench.send(c.Resume, expected_lease_generation=0)
    assert bench.replies() == [(resume, None)]


def test_s31_a_cancel_overtakes_appends_and_ends_those_below_its_epoch() -> None:
    bench = Bench().opened()
    first, second, third = bench.append(), bench.append(), bench.append(fence(1))
    cancel = bench.send(c.Cancel, event="barge_in", next_fence=fence(1))
    assert bench.lifecycle() == ["interrupted"]
    assert bench.replies() == [(first, "stale_fence"), (second, "stale_fence")]
    assert [(order.epochs, order.number) for order in bench.aborts()] == [((0,), 2)]
    assert [order.fence.epoch for order in bench.submissions()] == [0, 1], "the one of the new epoch goes on at once"
    bench.ack(c.Cleaned(0, 2, EAR))
    assert bench.replies()[2:] == [(cancel, None)]
    bench.accept()
    assert bench.replies()[3:] == [(third, None)]


def test_s84_an_append_under_way_that_carries_the_new_epoch_stays() -> None:
    bench = Bench().opened()
    early = bench.append(fence(1))
    cancel = bench.send(c.Cancel, event="barge_in", next_fence=fence(1))
    assert bench.replies() == [(cancel, None)]
    bench.accept()
    assert bench.replies()[1:] == [(early, None)]
    assert bench.aborts() == []
    assert [order.seq for order in bench.submissions()] == [1]


def test_a_cancel_may_name_a_fence_that_only_waiting_appends_carry() -> None:
    bench = Bench().opened()
    first, second = bench.append(), bench.append(fence(0, 1, 1))
    ahead = bench.send(c.Cancel, fence(0, 2, 0), event="barge_in", next_fence=fence(1))
    assert bench.replies() == [(ahead, "stale_fence")], "nobody has come with that one yet"
    bench.send(c.Cancel, fence(0, 1, 1), event="barge_in", next_fence=fence(1))
    assert bench.replies()[1:] == [(first, "stale_fence"), (second, "stale_fence")]
    assert bench.session.fence == fence(1)


def test_a_close_overtakes_appends_and_answers_each_of_them() -> None:
    bench = Bench().opened()
    first, second = bench.append(), bench.append()
    close = bench.send(c.Close)
    assert bench.replies() == [(first, "failed_precondition"), (second, "failed_precondition")]
    bench.ack(c.Cleaned(0, bench.session.number, EAR))
    assert bench.replies()[2:] == [(close, None)]
    assert bench.lifecycle() == ["closing", "closed"]
    assert bench.partition.waiting == 0


def test_i11_sessions_do_not_wait_for_each_other() -> None:
    bench = Bench(policy=False).opened()
    bench.open(sid="other")
    other = bench.send(c.Append, sid="other", mode="turn_commit_only")
    assert (other, None) in bench.replies()
    bench = Bench().opened()
    bench.append()
    bench.append()
    stranger = bench.send(c.Touch, sid="nobody", activity="heartbeat")
    assert bench.replies() == [(stranger, "not_found")]


def test_s24_more_appends_than_the_bound_are_refused_and_the_order_of_the_others_stays() -> None:
    bench = Bench(limits=Limits(waiting_appends=2)).opened()
    sent = [bench.append() for _ in range(5)]
    assert bench.replies() == [(sent[3], "resource_exhausted"), (sent[4], "resource_exhausted")]
    refusals = [each for each in bench.out if isinstance(each, dict) and each.get("code")]
    assert all(each["retryable"] for each in refusals)
    bench.accept()
    again = bench.append(control_id=sent[3])
    for _ in range(3):
        bench.accept()
    assert bench.replies()[2:] == [(sent[0], None), (sent[1], None), (sent[2], None), (sent[3], None)]
    assert again != sent[3]
    assert [order.seq for order in bench.submissions()] == [1, 2, 3, 4]


def test_s24_waiting_appends_are_bounded_in_bytes_too() -> None:
    bench = Bench(limits=Limits(waiting_bytes=1_000)).opened()
    bench.append(payload_bytes=5_000)
    fits, heavy, light = (bench.append(payload_bytes=size) for size in (600, 600, 400))
    assert bench.replies() == [(heavy, "resource_exhausted")]
    for _ in range(3):
        bench.accept()
    assert [control_id for control_id, code in bench.replies() if code is None][1:] == [fits, light]
    bench.append()
    bench.append(payload_bytes=900)
    assert bench.replies()[-1][1] is None, "what has gone on counts no more"


def test_i4_a_waiting_command_that_is_sent_again_is_answered_once() -> None:
    bench = Bench().opened()
    bench.append()
    waiting = bench.append()
    again = bench.append(control_id=waiting)
    assert again in bench.commit()._done[COMMANDS_KEY], "the copy goes"
    bench.accept()
    bench.accept()
    assert [control_id for control_id, _ in bench.replies()].count(waiting) == 1
    assert len(bench.submissions()) == 2


def test_i4_a_command_under_way_that_is_sent_again_is_answered_once() -> None:
    bench = Bench().opened()
    first = bench.append()
    bench.append(control_id=first)
    bench.accept()
    assert bench.replies() == [(first, None)]
    bench.append(control_id=first)
    assert bench.replies() == [(first, None), (first, None)], "once answered, it is answered again"
    assert len(bench.submissions()) == 1


def test_a_payload_stays_in_its_entry_unless_it_came_in_the_body() -> None:
    bench = Bench().opened()
    raw = bench.append()
    bench.accept()
    bench.append(inline=b"\x93\x01\x02\x03")
    bench.commit()
    assert [(order.packed, entry) for order, entry in (each for each in bench.out if isinstance(each, tuple))] == [
        (False, raw),
        (True, ""),
    ]


# ---- opening


def test_commands_that_come_before_the_placement_wait_for_it_in_order() -> None:
    bench = Bench()
    opening = bench.open()
    first, second = bench.append(), bench.append()
    touch = bench.send(c.Touch, activity="heartbeat")
    third = bench.append()
    assert bench.replies() == []
    bench.partition.tell(SID, c.Placed(0, 1), bench.now_ms)
    assert bench.replies() == [(opening, None), (touch, None)], "a touch doesn't wait behind an append"
    for _ in range(3):
        bench.accept()
    assert bench.replies()[2:] == [(first, None), (second, None), (third, None)]


def test_s31_a_cancel_that_comes_before_the_placement_does_not_wait_behind_appends_after_it() -> None:
    bench = Bench()
    opening = bench.open()
    first, second = bench.append(), bench.append()
    bench.send(c.Cancel, event="barge_in", next_fence=fence(1))
    later = bench.append(fence(1))
    bench.partition.tell(SID, c.Placed(0, 1), bench.now_ms)
    assert bench.replies() == [(opening, None), (first, "stale_fence"), (second, "stale_fence")]
    assert [order.fence.epoch for order in bench.submissions()] == [0, 1]
    bench.accept()
    assert bench.replies()[3:] == [(later, None)]


def test_s1_a_close_while_opening_gives_the_slot_back_and_leaves_no_ghost() -> None:
    bench = Bench()
    opening, close = bench.open(), bench.send(c.Close)
    batch = bench.commit()
    assert [type(effect) for _, _, effect in batch.after] == [e.Place, e.Pay]
    assert bench.replies() == [(opening, "failed_precondition"), (close, None)]
    assert bench.session.phase is Phase.VACANT
    bench.partition.tell(SID, c.Placed(0, 1), bench.now_ms)
    assert bench.session.phase is Phase.VACANT
    bench.partition.tell(SID, c.DebtPaid(0, EAR), bench.now_ms)
    assert bench.session.debts == ()


def test_s1_a_close_behind_an_open_that_waits_for_a_slot_of_the_last_life_leaves_no_ghost() -> None:
    bench = Bench().opened()
    bench.send(c.Close)
    bench.commit()
    bench.out.clear()
    opening, touch = bench.open(1), bench.send(c.Touch, fence(incarnation=1), activity="attach")
    close = bench.send(c.Close, fence(incarnation=1))
    assert bench.replies() == [], "all wait behind the open"
    bench.partition.tell(SID, c.DebtPaid(0, EAR), bench.now_ms)
    assert bench.replies() == [(opening, "failed_precondition"), (close, None), (touch, "not_found")]
    assert bench.session.phase is Phase.VACANT
    bench.partition.tell(SID, c.Placed(1, 1), bench.now_ms)
    assert bench.session.phase is Phase.VACANT
    assert bench.lifecycle() == []


def test_an_open_behind_a_close_in_one_batch_goes_on_with_the_next_one() -> None:
    bench = Bench(policy=False).opened()
    close, again = bench.send(c.Close), bench.open(1)
    touch = bench.send(c.Touch, fence(incarnation=1), activity="heartbeat")
    bench.ack(c.Cleaned(0, 1, EAR))  # anything that lets the waiting ones be looked at
    batch = bench.commit()
    assert bench.replies() == [(close, None)]
    assert batch.has_ended(SID)
    assert len(batch._begins) == 0
    assert bench.partition.has_more
    bench.partition.reopen(bench.now_ms)
    assert not bench.partition.has_more
    assert bench.replies()[1:] == [(again, None), (touch, None)]
    assert bench.lifecycle() == ["closed", "opened"]


def test_lives_follow_each_other_however_many_are_in_one_batch() -> None:
    bench = Bench(policy=False).opened()
    sent = [(bench.send(c.Close, fence(incarnation=life)), bench.open(life + 1)) for life in range(4)]
    while bench.partition.has_more:
        batch = bench.commit()
        assert len(batch._begins) + len(batch._ends) <= 6
        bench.partition.reopen(bench.now_ms)
    assert bench.replies() == [(control_id, None) for pair in sent for control_id in pair]
    assert bench.lifecycle() == ["closed", "opened"] * 4


def test_s3_an_open_without_a_free_slot_is_refused_and_forgotten() -> None:
    bench = Bench()
    bench.route = None
    opening = bench.open()
    assert bench.replies() == [(opening, "resource_exhausted")]
    assert len(bench.partition) == 0


# ---- time


def test_a_deadline_is_stored_when_it_comes_earlier_and_not_when_it_moves_back() -> None:
    bench = Bench(policy=False)
    bench.open()
    assert bench.commit()._deadlines == {SID: 310_000}
    bench.now_ms += 5_000
    bench.send(c.Touch, activity="heartbeat")
    assert bench.commit()._deadlines == {}, "an idle TTL that moves on costs nothing"
    assert bench.partition.next_due_ms() == 310_000
    bench.send(c.Touch, activity="detach")
    assert bench.commit()._deadlines == {SID: 45_000}
    assert bench.partition.next_due_ms() == 45_000


def test_a_look_that_comes_too_early_arms_the_true_time() -> None:
    bench = Bench(policy=False)
    bench.open()
    bench.now_ms += 100_000
    bench.send(c.Touch, activity="heartbeat")
    bench.now_ms = 310_000
    assert bench.partition.pop_due(bench.now_ms, 10) == [SID]
    bench.partition.look(SID, 0, bench.now_ms, may_expire=True)
    assert bench.partition.next_due_ms() == 410_000
    assert bench.session.phase is Phase.OPEN
    bench.now_ms = 410_000
    assert bench.partition.pop_due(bench.now_ms, 10) == [SID]
    bench.partition.look(SID, 0, bench.now_ms, may_expire=True)
    assert bench.lifecycle() == ["opened", "expired"]


def test_what_may_not_expire_yet_is_looked_at_again_soon() -> None:
    bench = Bench(policy=False)
    bench.open()
    bench.commit()
    bench.now_ms = 400_000
    assert bench.partition.pop_due(bench.now_ms, 10) == [SID]
    bench.partition.look(SID, 0, bench.now_ms, may_expire=False)
    assert bench.partition.next_due_ms() == bench.now_ms + LOOK_AGAIN_MS
    assert bench.commit().is_empty
    bench.now_ms += LOOK_AGAIN_MS
    assert bench.partition.pop_due(bench.now_ms, 10) == [SID]
    bench.partition.look(SID, 0, bench.now_ms, may_expire=True)
    assert "expired" in bench.lifecycle()


def test_an_output_keeps_an_idle_session_alive_and_guards_its_end() -> None:
    bench = Bench(policy=False).opened()
    bench.now_ms = 310_000
    bench.partition.pop_due(bench.now_ms, 10)
    bench.partition.look(SID, 200_000, bench.now_ms, may_expire=True)
    assert bench.session.phase is Phase.OPEN
    assert bench.partition.next_due_ms() == 500_000
    bench.now_ms = 500_000
    bench.partition.pop_due(bench.now_ms, 10)
    bench.partition.look(SID, 200_000, bench.now_ms, may_expire=True)
    assert bench.commit()._guards == [SID, 200_000]


def test_pop_due_gives_the_earliest_first_and_no_more_than_asked_for() -> None:
    bench = Bench()
    bench.partition.index([("c", 3_030), ("a", 3_010), ("b", 3_020), ("late", 3_099)], 0)
    assert bench.partition.pop_due(3_050, 2) == ["a", "b"]
    assert bench.partition.pop_due(3_050, 2) == ["c"]
    assert bench.partition.pop_due(3_050, 2) == []
    assert bench.partition.next_due_ms() == 3_099
    assert bench.partition.pop_due(3_099, 10) == ["late"]
    assert bench.partition.next_due_ms() is None


def test_a_placement_that_a_former_owner_had_under_way_is_asked_for_at_once() -> None:
    bench = Bench()
    bench.open()
    former, due_ms = bench.session, bench.partition.next_due_ms()
    assert due_ms is not None
    heir = Bench(now_ms=bench.now_ms + 50)
    heir.partition.index([(SID, due_ms), ("idle", heir.now_ms + 300_000)], heir.now_ms)
    assert heir.partition.pop_due(heir.now_ms, 10) == [SID], "those that are due much later can't be placing"
    heir.partition.learn(SID, former, [])
    heir.partition.look(SID, 0, heir.now_ms, may_expire=False)
    assert [after[2] for after in heir.commit().after] == [e.Place(1, (EAR,))]
    # Only the first look is anew: the next one waits for the retry time.
    heir.now_ms += 100
    heir.partition.look(SID, 0, heir.now_ms, may_expire=False)
    assert heir.commit().after == []


def test_slots_that_a_former_owner_was_giving_back_are_asked_for_at_once() -> None:
    bench = Bench(policy=False, limit=True)
    bench.open()
    bench.partition.tell(SID, c.Placed(0, 1), bench.now_ms)
    bench.send(c.Close, reason="client_close")
    former, due_ms = bench.session, bench.partition.next_due_ms()
    assert former.debts, "the slot is owed"
    assert due_ms is not None
    heir = Bench(policy=False, limit=True, now_ms=bench.now_ms + 50)
    heir.partition.index([(SID, due_ms)], heir.now_ms)
    assert heir.partition.pop_due(heir.now_ms, 10) == [SID]
    heir.partition.learn(SID, former, [])
    heir.partition.look(SID, 0, heir.now_ms, may_expire=False)
    assert [after[2] for after in heir.commit().after] == [e.Pay(former.debts)]


def test_a_stored_deadline_of_a_session_that_is_gone_is_removed() -> None:
    bench = Bench()
    bench.partition.index([("ghost", 10)], 0)
    assert bench.partition.pop_due(50, 1) == ["ghost"]
    bench.partition.learn("ghost", None, [])
    bench.partition.look("ghost", 0, 50, may_expire=True)
    batch = bench.commit()
    assert batch._deadlines == {"ghost": None}
    assert not batch.is_empty
    assert bench.partition.next_due_ms() is None


def test_s21_an_append_without_a_word_from_its_stage_times_out_and_the_waiting_ones_are_answered() -> None:
    bench = Bench().opened()
    first, second = bench.append(), bench.append()
    bench.commit()
    bench.now_ms += 10_000
    assert bench.partition.pop_due(bench.now_ms, 10) == [SID]
    bench.partition.look(SID, 0, bench.now_ms, may_expire=True)
    assert bench.replies() == [(first, "timeout"), (second, "failed_precondition")]
    assert bench.lifecycle() == ["epoch_lost"]
    assert [order.epochs for order in bench.aborts()] == [(0,)]
    assert len(bench.submissions()) == 1, "never sent again"


def test_a_waiting_command_that_outlives_its_own_deadline_is_refused_when_its_turn_comes() -> None:
    bench = Bench().opened()
    bench.append()
    late, patient = bench.append(deadline_ms=500), bench.append(deadline_ms=5_000)
    bench.now_ms += 1_000
    bench.accept()
    assert bench.replies()[1:] == [(late, "timeout")]
    bench.accept()
    assert bench.replies()[2:] == [(patient, None)]


# ---- trouble


def test_i8_a_policy_that_says_no_is_an_invalid_argument_and_changes_nothing() -> None:
    bench = Bench().opened()
    before = bench.session
    update = bench.send(c.Update, runtime_config={"mood": "wrong"})
    assert bench.replies() == [(update, "invalid_argument")]
    assert bench.session is before


@pytest.mark.parametrize("kind", ["open", "update", "cancel"])
def test_i11_a_policy_that_breaks_is_internal_and_the_rest_goes_on(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench().opened()
    before = bench.session
    broken: dict[str, Any] = {"runtime_config": {"mood": "broken"}}
    sid = SID
    match kind:
        case "open":
            sid = "other"
            sent = bench.open(sid=sid, **broken)
        case "update":
            sent = bench.send(c.Update, **broken)
        case _:
            sent = bench.send(c.Cancel, event="barge_in", next_fence=fence(1), **broken)
    with caplog.at_level(logging.ERROR):
        assert bench.replies() == [(sent, "internal")]
    assert bench.session is before
    assert bench.partition.find("other") is None
    touch = bench.send(c.Touch, activity="heartbeat")
    append = bench.append()
    bench.accept()
    assert bench.replies()[1:] == [(touch, None), (append, None)]


def test_i11_a_choice_of_route_that_breaks_is_internal_and_the_rest_goes_on() -> None:
    bench = Bench().opened()
    bench.route = RuntimeError("no directory")
    sent = bench.open(sid="other")
    touch = bench.send(c.Touch, activity="heartbeat")
    assert sorted(bench.replies()) == sorted([(sent, "internal"), (touch, None)])


def test_an_event_that_breaks_its_rule_changes_nothing() -> None:
    bench = Bench()
    opening = bench.open()
    bench.commit()
    bench.route = RuntimeError("no directory")
    before = bench.session
    bench.partition.tell(SID, c.PlacementRefused(0, 1, EAR), bench.now_ms)
    assert bench.session is before
    bench.route = ("ear-2",)
    bench.partition.tell(SID, c.PlacementRefused(0, 1, EAR), bench.now_ms)
    bench.partition.tell(SID, c.Placed(0, 2), bench.now_ms)
    assert bench.replies() == [(opening, None)]


def test_a_poisoned_session_ends_with_one_terminal_event_and_answers_those_who_wait() -> None:
    bench = Bench().opened()
    first, second = bench.append(), bench.append()
    bench.partition.tell(SID, c.Poisoned("a key was of a wrong type"), bench.now_ms)
    assert bench.replies() == [(first, "failed_precondition"), (second, "failed_precondition")]
    bench.ack(c.Cleaned(0, bench.session.number, EAR))
    assert bench.lifecycle() == ["closing", "closed"]
    assert next(each["reason"] for each in bench.out if isinstance(each, dict) and each.get("event") == "closed") == (
        "command_failed"
    )


def test_a_session_that_cannot_be_read_goes_with_the_next_commit_and_its_id_is_free() -> None:
    bench = Bench(policy=False)
    bench.partition.index([(SID, 5)], 0)
    bench.partition.learn_unreadable(SID)
    touch = bench.send(c.Touch, activity="heartbeat")
    again = bench.open(1)
    batch = bench.commit()
    _, argv = batch.arguments("t", 0, 1)
    assert batch._deadlines == {SID: None}
    assert argv.count(SID) >= 4, "state, fence, cleanups and its streams"
    assert bench.replies() == [(touch, "not_found")]
    assert bench.partition.next_due_ms() is None
    bench.partition.reopen(bench.now_ms)
    assert bench.replies()[1:] == [(again, None)]


# ---- memory


def test_idle_sessions_are_forgotten_beyond_the_bound_and_those_in_use_are_not() -> None:
    bench = Bench().opened()
    bench.append()
    bench.append()
    for number in range(20):
        bench.send(c.Touch, sid=f"nobody-{number}", activity="heartbeat")
        bench.partition.learn(f"asleep-{number}", None, [])
    bench.partition.forget_some(5)
    assert len(bench.partition) == 5
    assert bench.partition.is_known(SID), "somebody waits there"
    assert len(bench.replies()) == 20, "what was decided is still said"
    bench.partition.forget_some(0)
    assert len(bench.partition) == 1


def test_remembered_answers_count_towards_the_bound() -> None:
    bench = Bench(policy=False)
    for sid in ("old", "young"):
        bench.open(sid=sid)
        bench.partition.tell(sid, c.Placed(0, 1), bench.now_ms)
        for _ in range(10 * ANSWERS_A_SESSION - 1):
            bench.send(c.Touch, sid=sid, activity="heartbeat")
    bench.commit()
    assert bench.partition.weight == 2 + 2 * 10
    bench.partition.forget_some(21)
    assert not bench.partition.is_known("old")
    assert bench.partition.is_known("young")
    assert bench.partition.weight == 11
    bench.partition.learn("young", None, [])
    assert bench.partition.weight == 1, "what is loaded again replaces what was known"


def test_an_id_that_was_only_answered_is_not_kept_in_memory() -> None:
    bench = Bench()
    for number in range(10):
        bench.send(c.Touch, sid=f"nobody-{number}", activity="heartbeat")
    assert len(bench.partition) == 10
    bench.commit()
    assert len(bench.partition) == 0


def test_a_dead_letter_and_a_fenced_worker_are_part_of_the_batch() -> None:
    bench = Bench()
    bench.partition.bury(Entry(ACKS_KEY, "5-0", 5), "it makes no sense")
    bench.partition.fence_worker(EAR)
    batch = bench.commit()
    assert batch._dead == [ACKS_KEY, "5-0", "it makes no sense", 0]
    assert batch._fenced == [EAR]
    assert not batch.is_empty


def test_an_append_that_was_answered_needs_no_room_in_a_full_line() -> None:
    bench = Bench(limits=Limits(waiting_appends=2)).opened()
    answered = bench.append(control_id="first")
    bench.accept()
    for number in range(3):
        bench.append(control_id=f"waits-{number}")
    bench.commit()
    bench.out.clear()
    bench.append(control_id="first")
    assert bench.replies() == [("first", None)], answered
    bench.append(control_id="fourth")
    assert bench.replies()[1:] == [("fourth", "resource_exhausted")]
