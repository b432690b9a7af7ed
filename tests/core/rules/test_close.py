"""Every way to end: one cleanup, one terminal event, and nothing of it left."""

from __future__ import annotations

from typing import Any

import pytest

from control.core import commands as c
from control.core import effects as e
from control.core.cleanup import CleanupKind
from control.core.requests import RequestPhase
from control.core.session import FLOOR_CLOSED, Phase
from tests.core.call import BAD_CONFIG, Call, at, opened, talking

ENDS: dict[str, tuple[Any, str, str]] = {
    "close": (lambda call: call.close(), "closed", "client_close"),
    "rollback": (lambda call: call.close(reason="open_rollback"), "closed", "open_rollback"),
    "idle": (lambda call: call.wait_ms(60_000), "expired", "idle_ttl_expired"),
    "gone": (lambda call: (call.touch("detach"), call.wait_ms(20_000)), "expired", "disconnect_grace_expired"),
    "failed": (lambda call: call.feed(c.RequestFailed(1, 0, "ear", "no")), "closed", "request_failed"),
    "lost": (lambda call: call.feed(c.StageLost("ear")), "closed", "stage_lost"),
    "dismissed": (lambda call: call.feed(c.Dismissed(1, "worker_drained")), "closed", "worker_drained"),
    "poisoned": (lambda call: call.feed(c.Poisoned("no")), "closed", "command_failed"),
}


def terminals(call: Call) -> list[tuple[str, str | None]]:
    return [(x.event, x.reason) for x in call.lifecycle if x.event in {"closed", "expired"}]


@pytest.mark.parametrize(("end", "event", "reason"), ENDS.values(), ids=ENDS)
def test_every_end_announces_itself_cleans_up_and_has_one_terminal_event(end: Any, event: str, reason: str) -> None:
    call = talking()
    generation = call.open_session.lease.generation
    end(call)
    assert call.phase is Phase.CLOSING
    assert call.lifecycle[-1].event == "closing"
    assert call.lifecycle[-1].reason == reason
    assert call.open_session.floor == FLOOR_CLOSED
    assert call.open_session.lease.generation == generation + 1
    assert terminals(call) == []
    call.clean()
    assert terminals(call) == [(event, reason)]
    assert (call.released, call.phase) == ([0], Phase.VACANT)
    assert call.lifecycle[-1].lease_generation == generation + 1


@pytest.mark.parametrize(("end", "event", "reason"), ENDS.values(), ids=ENDS)
def test_an_end_with_nothing_to_clean_up_is_over_at_once(end: Any, event: str, reason: str) -> None:
    call = opened()
    end(call)
    assert terminals(call) == [(event, reason)]
    assert (call.released, call.phase) == ([0], Phase.VACANT)


def test_a_close_is_answered_when_nothing_runs_any_more() -> None:
    call = talking()
    assert call.close(reason="hung up").replies == []
    call.clean("ear")
    assert call.replies[-1].op == "append"
    (word,) = call.clean("mouth")
    assert (word.reply.op, word.reply.ok, word.reply.detail.reason) == ("close", True, "hung up")
    assert [type(effect) for effect in word.decision.effects] == [e.Release, e.Answer, e.Announce, e.Pay]


def test_a_close_that_raises_the_epoch_interrupts_first() -> None:
    call = talking()
    word = call.close(at(3, 1, 1))
    assert word.events == ["interrupted", "closing"]
    assert call.fence == at(3, 1, 1)


def test_a_stale_or_foreign_close_changes_nothing() -> None:
    call = talking()
    call.update(at(2))
    for fence in (at(1), at(2, incarnation=2)):
        word = call.close(fence)
        assert (word.code, word.changed_nothing) == ("stale_fence", True)
    call.close(at(2))
    assert call.close(at(1)).code == "stale_fence"


# --- S12, S13 --------------------------------------------------------------------------------------------------


def test_s12_a_second_close_joins_the_first_and_both_are_answered() -> None:
    call = talking()
    call.close(control_id="first")
    word = call.close(control_id="second")
    assert (word.replies, word.events) == ([], [])
    assert len(call.cleanups) == 1
    call.clean()
    assert [(r.control_id, r.ok) for r in call.replies[-2:]] == [("first", True), ("second", True)]
    assert terminals(call) == [("closed", "client_close")]


def test_s12_a_close_of_a_session_that_is_over_is_ok_and_has_no_event() -> None:
    call = opened()
    call.close()
    word = call.close()
    assert (word.reply.ok, word.reply.detail, word.events) == (True, None, [])
    forgotten = Call()
    word = forgotten.close()
    assert (word.reply.ok, word.events, forgotten.session) == (True, [], None)


def test_s13_a_close_and_an_expiry_that_meet_are_one_end() -> None:
    call = talking()
    call.pass_ms(60_000)
    call.close()
    call.feed(c.Due())
    assert len(call.cleanups) == 1
    call.clean()
    assert terminals(call) == [("closed", "client_close")]
    call = talking()
    call.pass_ms(60_000)
    call.feed(c.Due())
    call.close()
    assert len(call.cleanups) == 1
    call.clean()
    assert call.replies[-1].ok
    assert terminals(call) == [("expired", "idle_ttl_expired")]
    assert call.released == [0]


def test_s13_the_first_reason_is_the_one_that_is_told() -> None:
    call = talking()
    call.close()
    call.feed(c.RequestFailed(1, 0, "ear", "no"))
    call.feed(c.Poisoned("no"))
    call.feed(c.StageLost("ear"))
    call.clean()
    assert terminals(call) == [("closed", "client_close")]


# --- one debt: what was pending becomes part of the end ------------------------------------------------------------


def test_a_close_takes_the_pending_cleanups_and_those_who_wait_for_them_along() -> None:
    call = talking()
    call.cancel(at(1), control_id="cancel")
    call.clean("ear")
    call.append()
    call.accept()
    word = call.close(control_id="close")
    assert word.aborts == [("ear", (0, 1)), ("mouth", (0, 1))]
    (only,) = call.cleanups
    assert (only.kind, only.waiting) == (CleanupKind.END, ("ear", "mouth"))
    call.clean()
    assert [(r.control_id, r.ok) for r in call.replies[-2:]] == [("cancel", True), ("close", True)]
    assert call.released == [0, 1]


def test_a_late_word_about_a_cleanup_that_went_into_the_end_confirms_nothing() -> None:
    call = talking()
    call.cancel(at(1))
    number = call.cleanups[0].number
    call.close()
    assert call.feed(c.Cleaned(1, number, "ear")).changed_nothing
    assert call.feed(c.CleanupFailed(1, number, 1, "ear", True, "late")).changed_nothing
    assert call.cleanups[0].waiting == ("ear", "mouth")


def test_a_close_whose_cleanup_fails_is_told_so_and_the_session_goes_on_closing() -> None:
    call = talking()
    call.close()
    word = call.fail_cleanup("mouth")
    assert (word.code, word.reply.retryable) == ("cleanup_failed", True)
    assert (call.phase, terminals(call)) == (Phase.CLOSING, [])
    call.wait_ms(60_000)
    call.clean()
    assert terminals(call) == [("closed", "client_close")]


# --- D8: a stage is lost -----------------------------------------------------------------------------------------


def test_d08_a_lost_worker_ends_its_sessions_and_need_not_confirm() -> None:
    call = talking()
    word = call.feed(c.StageLost("ear"))
    assert word.events == ["closing"]
    assert word.aborts == [("mouth", (0,))]  # the other stage still cleans up
    call.clean("mouth")
    assert terminals(call) == [("closed", "stage_lost")]


def test_d08_a_session_whose_only_worker_is_lost_is_over_at_once() -> None:
    call = talking(route=("ear",))
    word = call.feed(c.StageLost("ear"))
    assert (word.events, word.released, word.aborts) == (["closed"], (0,), [])


def test_d08_a_worker_that_is_lost_while_the_session_closes_counts_as_clean() -> None:
    call = talking()
    call.close()
    call.clean("ear")
    word = call.feed(c.StageLost("mouth"))
    assert (word.released, word.reply.ok, word.events) == ((0,), True, ["closed"])


def test_d08_a_worker_of_another_route_is_none_of_its_business() -> None:
    call = talking()
    assert call.feed(c.StageLost("nose")).changed_nothing
    call.close()
    assert call.feed(c.StageLost("nose")).changed_nothing


def test_d08_an_append_under_way_at_a_lost_stage_is_answered() -> None:
    call = talking()
    call.append(control_id="last")
    call.feed(c.StageLost("mouth"))
    assert call.answers_to("last")[0].code == "failed_precondition"


def test_d08_both_workers_lost_one_after_the_other_leave_nothing() -> None:
    call = talking()
    call.cancel(at(1), control_id="cancel")
    call.feed(c.StageLost("ear"))
    word = call.feed(c.StageLost("mouth"))
    assert (word.released, word.events) == ((0,), ["closed"])
    assert call.answers_to("cancel")[0].ok


# --- a request that failed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        c.RequestFailed(2, 0, "ear", "another life"),
        c.RequestFailed(1, 7, "ear", "an epoch that never was"),
        c.RequestFailed(1, 0, "nose", "a worker of another route"),
    ],
)
def test_a_failure_that_is_not_this_sessions_changes_nothing(event: c.RequestFailed) -> None:
    assert talking().feed(event).changed_nothing


def test_a_failure_while_closing_has_the_cleanup_tried_at_once() -> None:
    call = talking()
    call.close()
    call.fail_cleanup("ear")
    word = call.feed(c.RequestFailed(1, 0, "ear", "no"))
    assert (word.events, word.aborts) == ([], [("ear", (0,)), ("mouth", (0,))])
    assert len(call.cleanups) == 1
    assert call.feed(c.RequestFailed(2, 0, "ear", "no")).changed_nothing


# --- commands to a closing session ---------------------------------------------------------------------------------


def test_a_closing_session_takes_no_input() -> None:
    call = talking()
    call.close()
    for word, code in (
        (call.append(), "failed_precondition"),
        (call.append(mode="telepathy"), "invalid_argument"),
        (call.append(at(0, incarnation=2)), "stale_fence"),
    ):
        assert (word.code, word.changed_nothing) == (code, True)


def test_an_update_of_a_closing_session_is_refused_though_its_fence_is_heard() -> None:
    call = talking()
    call.close()
    word = call.update(at(2), session_config={"voice": "b"})
    assert (word.code, word.events) == ("failed_precondition", [])
    assert (call.fence, call.open_session.floor) == (at(2), FLOOR_CLOSED)
    word = call.update(at(2), runtime_config=BAD_CONFIG)
    assert (word.code, word.changed_nothing) == ("invalid_argument", True)
    word = call.update(at(1))
    assert (word.code, word.changed_nothing) == ("stale_fence", True)


def test_a_cancel_of_a_closing_session_asks_again_and_is_never_ok() -> None:
    call = talking()
    call.close(control_id="close")
    word = call.cancel(at(1), control_id="cancel")
    assert word.replies == []
    assert word.aborts == [("ear", (0,)), ("mouth", (0,))]
    end, cancel = call.cleanups
    call.feed(c.Cleaned(1, cancel.number, "ear"))
    word = call.feed(c.Cleaned(1, cancel.number, "mouth"))
    assert (word.released, word.reply.control_id, word.code) == ((0,), "cancel", "failed_precondition")
    assert call.requests == {}
    call.feed(c.Cleaned(1, end.number, "ear"))
    word = call.feed(c.Cleaned(1, end.number, "mouth"))
    assert (word.released, word.reply.control_id, word.reply.ok) == ((), "close", True)


def test_a_cancel_of_a_closing_session_is_not_ok_either_if_the_end_is_confirmed_first() -> None:
    call = talking()
    call.close(control_id="close")
    call.cancel(at(1), control_id="cancel")
    end = call.cleanups[0].number
    call.feed(c.Cleaned(1, end, "ear"))
    word = call.feed(c.Cleaned(1, end, "mouth"))
    assert [(r.control_id, r.code) for r in word.replies] == [("cancel", "failed_precondition"), ("close", None)]
    assert (word.released, call.phase) == ((0,), Phase.VACANT)


def test_a_cancel_of_a_closing_session_waits_for_nobody_that_is_gone_or_has_confirmed() -> None:
    lost = talking()
    lost.feed(c.StageLost("ear"))
    assert lost.cancel(at(1)).aborts == [("mouth", (0,))]
    confirmed = talking()
    confirmed.close()
    confirmed.clean("mouth")
    assert confirmed.cancel(at(1)).aborts == [("ear", (0,))]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"to": at(1), "runtime_config": BAD_CONFIG}, "invalid_argument"),
        ({"to": at(0)}, "stale_fence"),
        ({"to": at(9), "fence": at(8)}, "stale_fence"),
    ],
)
def test_a_bad_cancel_of_a_closing_session_changes_nothing(fields: dict[str, Any], code: str) -> None:
    call = talking()
    call.close()
    word = call.cancel(**fields)
    assert (word.code, word.changed_nothing) == (code, True)


def test_a_late_cancel_of_a_closing_session_changes_nothing() -> None:
    call = talking()
    call.close(at(2))
    word = call.cancel(at(3), at(1))
    assert (word.code, word.changed_nothing) == ("failed_precondition", True)


def test_a_cancel_of_a_closing_session_without_a_fence_to_go_to_is_refused() -> None:
    call = talking()
    call.close()
    word = call.feed(call.make(c.Cancel, event="barge_in"))
    assert (word.code, word.changed_nothing) == ("invalid_argument", True)


def test_a_close_again_with_nothing_left_to_clean_ends_the_session() -> None:
    call = talking(route=("ear",))
    call.close(control_id="first")
    call.cancel(at(1))
    call.feed(c.Cleaned(1, call.cleanups[1].number, "ear"))
    assert call.requests == {}
    word = call.close(control_id="second")
    assert [(r.control_id, r.ok) for r in word.replies] == [("first", True), ("second", True)]
    assert terminals(call) == [("closed", "client_close")]


def test_a_reserved_request_goes_with_the_others() -> None:
    call = talking()
    call.cancel(at(1))
    call.append()
    call.reject()
    assert call.requests == {0: RequestPhase.CLEANING, 1: RequestPhase.RESERVED}
    call.close()
    call.clean()
    assert call.released == [0, 1]


# --- whatever there is not -----------------------------------------------------------------------------------------


def test_every_command_but_open_and_close_needs_a_session() -> None:
    call = Call()
    for word in (call.append(), call.cancel(at(1)), call.update(), call.touch(), call.feed(call.make(c.Resume))):
        assert word.code == "not_found"
        assert (word.reply.accepted_fence, word.reply.lease_generation) == (None, None)
        assert "'call-1'" in word.reply.message
        assert call.session is None


def test_a_body_that_is_no_command_is_answered_with_what_is_wrong_in_every_phase() -> None:
    vacant, opening, live, closing = Call(), Call(), talking(), talking()
    opening.open()
    closing.close()
    for call in (vacant, opening, live, closing):
        bad = call.make(c.Malformed, op="append", code="payload_too_large", message="$.payload: too much")
        word = call.feed(bad)
        assert (word.code, word.reply.op, word.reply.message) == ("payload_too_large", "append", "$.payload: too much")
        assert word.changed_nothing


@pytest.mark.parametrize("make", [opened, talking])
def test_the_first_word_of_a_stages_loss_names_the_worker(make: Any) -> None:
    call = make()
    word = call.feed(c.StageLost("ear"))
    told = [effect.lifecycle for effect in word.all(e.Announce)]
    assert [(event.reason, event.worker_id) for event in told] == [("stage_lost", "ear")]
    ordinary = make().close()
    assert [effect.lifecycle.worker_id for effect in ordinary.all(e.Announce)] == [None]


@pytest.mark.parametrize("incarnation", [0, 2])
def test_s62_an_order_to_end_another_life_ends_nothing(incarnation: int) -> None:
    call = talking()
    before = call.session
    call.feed(c.Dismissed(incarnation, "worker_drained"))
    assert call.session is before
    assert call.words[-1].decision.effects == ()


def test_s62_an_order_to_end_that_comes_twice_has_one_effect() -> None:
    call = talking()
    for _ in range(2):
        call.feed(c.Dismissed(1, "worker_drained"))
    assert call.words[-1].decision.effects == ()
    assert [x.event for x in call.lifecycle].count("closing") == 1
