"""Cleanups: who still has to confirm, when they are asked again, and who is told what."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control.core import cleanup as cleanups
from control.core import commands as c
from control.core import effects as e
from control.core.cleanup import Cleanup, CleanupKind, backoff_ms
from control.core.fence import Fence
from control.core.requests import RequestPhase
from control.core.session import Phase
from tests.core.call import START_MS, Call, at, opened, talking

BASE_MS, MAX_MS = 500, 30_000
FIRST = Cleanup(3, CleanupKind.CANCEL, (0,), ("ear", "mouth"), 1, 0, 0)
SECOND = Cleanup(5, CleanupKind.END, (1, 2), ("ear",), 1, 0, 0)


def delay(attempts: int, *, sid: str = "s", number: int = 1) -> int:
    return backoff_ms(sid, number, attempts, base_ms=BASE_MS, max_ms=MAX_MS)


# --- the value -------------------------------------------------------------------------------------------------


@given(attempts=st.integers(1, 10**9), sid=st.text(max_size=20), number=st.integers(0, 10**6))
def test_a_backoff_doubles_up_to_its_cap_and_strays_by_a_quarter(attempts: int, sid: str, number: int) -> None:
    plain = min(MAX_MS, BASE_MS * 2 ** min(attempts - 1, 30))
    assert plain * 3 // 4 <= delay(attempts, sid=sid, number=number) < plain * 5 // 4


def test_a_backoff_is_the_same_in_every_replay() -> None:
    assert [delay(n) for n in range(1, 12)] == [delay(n) for n in range(1, 12)]


def test_a_thousand_cleanups_of_one_lost_worker_do_not_return_in_one_instant() -> None:
    moments = {delay(1, sid=f"call-{n}") for n in range(1000)}
    assert len(moments) > 100


def test_a_worker_confirms_for_itself_only() -> None:
    assert cleanups.confirm(FIRST, "ear").waiting == ("mouth",)
    assert cleanups.confirm(FIRST, "nose") == FIRST


def test_cleanups_are_found_by_number_and_by_the_epochs_that_they_cover() -> None:
    pending = (FIRST, SECOND)
    assert cleanups.find(pending, 5) is SECOND
    assert cleanups.find(pending, 4) is None
    assert cleanups.find_covering(pending, 0) is FIRST
    assert cleanups.find_covering(pending, 3) is None
    changed = cleanups.confirm(FIRST, "ear")
    assert cleanups.put(pending, changed) == (changed, SECOND)
    assert cleanups.put((FIRST,), SECOND) == pending
    assert cleanups.drop(pending, 3) == (SECOND,)


# --- begun, confirmed, released --------------------------------------------------------------------------------


def test_a_cleanup_asks_every_worker_of_the_route() -> None:
    call = talking(route=("ear", "brain", "mouth"))
    word = call.cancel(at(1))
    assert word.aborts == [("ear", (0,)), ("brain", (0,)), ("mouth", (0,))]
    assert [abort.stage_id for abort in word.all(e.Abort)] == [0, 1, 2]


@pytest.mark.parametrize("order", [("ear", "mouth"), ("mouth", "ear")])
def test_a_request_is_released_only_when_the_last_worker_has_confirmed(order: tuple[str, str]) -> None:
    call = talking()
    cancel = call.cancel(at(1))
    first, last = order
    (word,) = call.clean(first)
    assert (word.released, word.replies, call.requests) == ((), [], {0: RequestPhase.CLEANING})
    (word,) = call.clean(last)
    assert word.released == (0,)
    assert word.reply.ok
    assert call.requests == {}
    assert cancel.replies == []


def test_s35_a_confirmation_that_comes_twice_counts_once() -> None:
    call = talking()
    call.cancel(at(1))
    number = call.cleanups[0].number
    call.clean("ear")
    word = call.feed(c.Cleaned(1, number, "ear"))
    assert word.changed_nothing
    call.clean("mouth")
    late = call.feed(c.Cleaned(1, number, "mouth"))
    assert (late.changed_nothing, late.decision.effects) == (True, ())
    assert call.released == [0]


def test_s35_a_request_that_ends_in_the_instant_of_its_abort_is_confirmed_once_and_no_error() -> None:
    call = talking()
    call.cancel(at(1))
    assert call.feed(c.RequestFailed(1, 0, "ear", "finished already")).changed_nothing
    call.clean()
    assert call.feed(c.RequestFailed(1, 0, "ear", "finished already")).changed_nothing
    assert (call.phase, call.released) == (Phase.OPEN, [0])


def test_a_worker_that_was_never_asked_can_confirm_nothing() -> None:
    call = talking()
    call.cancel(at(1))
    number = call.cleanups[0].number
    for word in (c.Cleaned(1, number, "nose"), c.Cleaned(1, number + 1, "ear"), c.Cleaned(2, number, "ear")):
        assert call.feed(word).changed_nothing


# --- D6: failures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("timed_out", "code"), [(True, "timeout"), (False, "cleanup_failed")])
def test_d06_a_cleanup_that_a_stage_could_not_do_is_told_at_once_and_stays(timed_out: bool, code: str) -> None:
    call = talking()
    call.cancel(at(1))
    word = call.fail_cleanup("mouth", timed_out=timed_out)
    assert word.code == code
    assert word.reply.retryable
    assert "mouth" in word.reply.message
    assert "the engine is stuck" in word.reply.message
    assert call.requests == {0: RequestPhase.CLEANING}
    assert call.cleanups[0].waiting == ("ear", "mouth")
    assert call.cleanups[0].failed


def test_d06_an_unconfirmed_cleanup_is_answered_as_timeout_at_its_deadline_and_stays() -> None:
    call = talking()
    call.cancel(at(1))
    call.wait_ms(4_999)
    assert call.replies[-1].op == "append"
    call.wait_ms(1)
    assert call.replies[-1].code == "timeout"
    assert "ear, mouth" in call.replies[-1].message
    assert call.requests == {0: RequestPhase.CLEANING}


def test_d06_a_cleanup_is_tried_again_without_limit() -> None:
    call = talking(idle_ttl_ms=None)
    call.cancel(at(1))
    asked = [START_MS]
    for _ in range(200):
        due_ms = call.find_due_ms()
        assert due_ms is not None
        call.now_ms = due_ms
        if call.feed(c.Due()).aborts:
            asked.append(call.now_ms)
            call.fail_cleanup("ear")
    gaps = [later - earlier for earlier, later in pairwise(asked)]
    assert len(gaps) >= 199
    assert 750 <= gaps[0] <= 1_250
    assert all(6_000 <= gap < 10_000 for gap in gaps[4:])
    assert call.cleanups[0].attempts == len(asked)
    call.clean()
    assert call.released == [0]


def test_d06_only_those_are_asked_again_that_have_not_confirmed() -> None:
    call = talking()
    call.cancel(at(1))
    call.clean("ear")
    call.pass_ms(2_000)
    assert call.feed(c.Due()).aborts == [("mouth", (0,))]


def test_d06_the_failure_of_an_attempt_that_was_overtaken_by_the_next_one_is_not_told() -> None:
    call = talking()
    call.cancel(at(1))
    call.pass_ms(2_000)
    call.feed(c.Due())
    number = call.cleanups[0].number
    word = call.feed(c.CleanupFailed(1, number, 1, "ear", True, "late"))
    assert word.changed_nothing
    assert call.feed(c.CleanupFailed(1, number, 2, "ear", True, "now")).code == "timeout"


def test_d06_those_who_wait_are_told_once_and_later_ones_wait_anew() -> None:
    call = talking()
    call.cancel(at(1), control_id="first")
    call.fail_cleanup("ear")
    call.cancel(at(1), at(0), control_id="second")
    assert call.fail_cleanup("ear").reply.control_id == "second"
    assert [len(call.answers_to(name)) for name in ("first", "second")] == [1, 1]


def test_an_operator_may_have_every_cleanup_tried_at_once() -> None:
    call = talking()
    call.cancel(at(1))
    call.append()
    call.accept()
    call.cancel(at(2))
    word = call.feed(c.RetryNow())
    assert word.aborts == [("ear", (0,)), ("mouth", (0,)), ("ear", (1,)), ("mouth", (1,))]
    assert [cleanup.attempts for cleanup in call.cleanups] == [2, 2]


def test_s46_one_stuck_cleanup_holds_up_nothing_else_of_its_session() -> None:
    call = talking()
    call.cancel(at(1))  # never confirmed
    for epoch in range(1, 6):
        call.append()
        assert call.accept().reply.ok
        call.cancel(at(epoch + 1))
        (stuck, *rest) = call.cleanups
        assert len(rest) == 1
        for worker in ("ear", "mouth"):
            call.feed(c.Cleaned(1, rest[0].number, worker))
        assert call.cleanups == (stuck,)
        assert call.replies[-1].ok


# --- S30, S81, D2: the same requests, asked for by several commands ----------------------------------------------

REPEATS: dict[str, Any] = {
    "the same cancel": lambda call: call.cancel(at(1), at(0)),
    "a close": lambda call: call.close(),
    "the retry": lambda call: call.feed(c.RetryNow()),
    "an expiry": lambda call: call.wait_ms(60_000),
}


@pytest.mark.parametrize("repeat", REPEATS.values(), ids=REPEATS)
def test_s30_a_failed_abort_keeps_the_request_until_a_later_one_succeeds(repeat: Any) -> None:
    call = talking()
    call.cancel(at(1))
    word = call.fail_cleanup("ear")
    assert (word.reply.ok, call.fence, call.requests) == (False, at(1), {0: RequestPhase.CLEANING})
    repeat(call)
    last = [effect for w in call.words for effect in w.all(e.Abort)][-2:]
    assert [(abort.worker_id, abort.epochs) for abort in last] == [("ear", (0,)), ("mouth", (0,))]
    call.clean()
    assert call.released == [0]
    assert call.cleanups == ()


@pytest.mark.parametrize("control_id", ["c-cancel", "c-another"])
def test_s81_a_cancel_that_timed_out_and_comes_again_joins_the_pending_cleanup(control_id: str) -> None:
    call = talking()
    call.cancel(at(1), control_id="c-cancel")
    call.wait_ms(5_000)
    assert call.replies[-1].code == "timeout"
    word = call.cancel(at(1), at(0), control_id=control_id)
    assert (word.replies, word.events, call.fence) == ([], [], at(1))
    assert len(call.cleanups) == 1
    call.clean()
    assert call.replies[-1].ok
    assert call.replies[-1].control_id == control_id
    assert (call.events.count("interrupted"), call.released) == (1, [0])


def test_d02_a_late_cancel_moves_no_fence_and_is_ok_once_its_epoch_is_clean() -> None:
    call = talking()
    call.cancel(at(1))
    call.clean()
    word = call.cancel(at(7, 7, 7), at(0))
    assert word.reply.ok
    assert (word.events, call.fence) == ([], at(1))


def test_d02_a_late_cancel_is_answered_with_the_outcome_of_the_cleanup_that_still_runs() -> None:
    call = talking()
    call.update(at(1))  # brings in the epoch, waits for nothing
    word = call.cancel(at(2), at(0))
    assert (word.replies, word.events, call.fence) == ([], [], at(1))
    assert call.fail_cleanup("ear").code == "cleanup_failed"
    call.cancel(at(2), at(0))
    call.clean()
    assert call.replies[-1].ok


def test_d02_a_cancel_of_a_lost_epoch_joins_the_cleanup_of_its_append() -> None:
    call = talking()
    call.append()
    call.wait_ms(10_000)
    assert call.events[-1] == "epoch_lost"
    word = call.cancel(at(1))
    assert (word.replies, word.events) == ([], ["interrupted"])
    assert len(call.cleanups) == 1
    call.clean()
    assert call.replies[-1].ok
    assert call.released == [0]


def test_d01_any_higher_epoch_has_every_older_request_cleaned_up() -> None:
    def bring_in(call: Call, fence: Fence, how: str) -> list[tuple[str, tuple[int, ...]]]:
        if how == "append":
            call.append(fence)
            return call.accept().aborts
        return (call.update(fence) if how == "update" else call.cancel(fence)).aborts

    for how in ("append", "update", "cancel"):
        call = opened()
        call.append()
        call.accept()
        call.append(at(0, 1, 1))  # another turn, in the same request
        call.accept()
        assert bring_in(call, at(3), how) == [("ear", (0,)), ("mouth", (0,))]
        assert call.requests[0] is RequestPhase.CLEANING


def test_d01_two_epochs_that_run_at_once_are_both_cleaned_up() -> None:
    call = talking()
    call.append(at(1))  # the next epoch, submitted while this one still runs
    assert call.cancel(at(2), at(1)).aborts == [("ear", (0, 1)), ("mouth", (0, 1))]
    call.clean()
    assert call.released == [0, 1]


def test_d10_what_was_only_reserved_is_released_without_asking_a_stage() -> None:
    cancelled = opened()
    assert cancelled.requests == {0: RequestPhase.RESERVED}
    word = cancelled.cancel(at(1))
    assert (word.released, word.aborts, word.reply.ok) == ((0,), [], True)
    closed = opened()
    word = closed.close()
    assert (word.released, word.aborts, word.reply.ok) == ((0,), [], True)
    assert closed.phase is Phase.VACANT
