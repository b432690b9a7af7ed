"""The judge of replies: one to each command, the same again, and each with its cause."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.told import Told, broken, conversation

ABOUT: dict[str, dict[str, Any]] = {
    "append": {"tokens": (1,)},
    "signal": {"next_epoch": 1},
    "resume": {"generation": 0},
}


def test_a_missing_reply_is_found() -> None:
    told = conversation()
    told.send("touch", 1)
    assert broken(told.close()) == {"liveness"}


def test_a_reply_to_nothing_is_found() -> None:
    told = Told().open()
    told.reply("nobody's")
    assert broken(told.close()) == {"I4"}


def test_two_replies_to_one_delivery_are_found() -> None:
    told = Told().open()
    told.reply(told.append(1, seq=1), seq=1, turn_seq=1)
    assert broken(told.close()) == {"I4"}


def test_a_second_reply_to_a_second_delivery_may_only_repeat_the_first() -> None:
    told = Told().open()
    told.reply(told.append(1, seq=1, deliveries=2), seq=1, turn_seq=1)
    assert broken(told.close()) == set()
    told = Told().open()
    told.reply(told.append(1, seq=1, deliveries=2), "not_found")
    assert broken(told.close()) == {"I4"}


def test_an_answer_is_the_same_again_in_a_later_life() -> None:
    told = Told().open()
    first = told.append(1, seq=1, deliveries=3)
    told.close().open(2)
    told.reply(first, seq=1, turn_seq=1)
    assert broken(told) == {"I10"}  # only its end is missing
    told.reply(first, "stale_fence")
    assert broken(told.close()) == {"I4"}


def test_what_nobody_was_there_to_remember_may_be_answered_otherwise_later() -> None:
    told = Told().open().close()
    late = told.send("touch", deliveries=2)
    told.reply(late, "not_found", n=0)
    told.open(2)
    told.reply(late, "stale_fence")
    assert broken(told.close()) == set()


def test_what_is_answered_right_behind_the_end_is_not_remembered_either() -> None:
    told = Told().open()
    late = told.send("touch", deliveries=2)
    told.close()
    told.reply(late, "not_found")  # in the same commit: the life's count goes on
    told.open(2)
    told.reply(late, "stale_fence")
    assert broken(told.close()) == set()


def test_a_retryable_reply_may_be_followed_by_another() -> None:
    told = Told()
    opening = told.send("open", deliveries=2)
    told.reply(opening, "resource_exhausted", retryable=True, n=0)
    told.event("opened")
    told.reply(opening)
    assert broken(told.close()) == set()


# --- good answers without their cause


@pytest.mark.parametrize("op", ["append", "touch", "signal", "resume"])
def test_what_is_accepted_where_nobody_lives_is_found(op: str) -> None:
    told = Told().open()
    about = ABOUT.get(op, {})
    late = told.close().send(op, **about)
    told.reply(late, n=0, seq=1, turn_seq=1, lease_generation=1)
    assert broken(told) == {"answer"}


@pytest.mark.parametrize("op", ["append", "touch", "signal", "resume", "close"])
def test_what_is_accepted_for_a_former_life_is_found(op: str) -> None:
    told = Told().open().close().open(2)
    about = ABOUT.get(op, {})
    told.interrupt(1)
    late = told.send(op, incarnation=1, **about)
    told.reply(late, seq=1, turn_seq=1, lease_generation=1)
    assert broken(told.close()) == {"answer"}


def test_what_a_closing_session_accepts_is_found() -> None:
    told = Told().open()
    touch, closing = told.send("touch"), told.send("close")
    told.event("closing", reason="client_close")
    told.reply(touch)
    told.reply(closing)
    told.event("closed", reason="client_close")
    assert broken(told) == {"answer"}


@pytest.mark.parametrize("before", [True, False])
def test_a_cancel_may_be_answered_by_the_end_only_if_it_came_before_it(*, before: bool) -> None:
    told = Told().open()
    cancel, closing = told.send("signal", next_epoch=1), told.send("close")
    for event in ("interrupted", "closing") if before else ("closing", "interrupted"):
        told.event(event, 1)
    told.reply(cancel)
    told.reply(closing)
    told.event("closed", reason="client_close")
    assert broken(told) == (set() if before else {"answer"})


def test_an_append_that_is_accepted_after_its_epoch_was_interrupted_is_found() -> None:
    told = Told().open()
    overtaken = told.send("append", tokens=(1,))
    told.interrupt(1)
    told.reply(overtaken, seq=1, turn_seq=1)
    assert broken(told.close()) == {"answer"}


def test_an_append_that_is_accepted_after_its_epoch_was_lost_is_found() -> None:
    told = Told().open()
    append = told.send("append", tokens=(1,))
    told.event("epoch_lost")
    told.reply(append, seq=1, turn_seq=1)
    assert broken(told.close()) == {"answer"}


def test_a_cancel_that_is_answered_before_its_interruption_is_told_is_found() -> None:
    told = Told().open()
    cancel = told.send("signal", next_epoch=1)
    told.reply(cancel)
    told.event("interrupted", 1)
    assert broken(told.close()) == {"answer"}


def test_a_session_that_goes_on_after_its_close_was_answered_is_found() -> None:
    told = Told().open()
    told.reply(told.send("close"))
    told.event("interrupted", 1)
    assert broken(told.close()) == {"I10"}


# --- who is attached (S82)


def test_a_takeover_and_a_late_detach_pass() -> None:
    told = Told().open()
    told.detach()
    told.resume()
    told.reply(told.send("touch", activity="detach", generation=0), "failed_precondition")
    told.reply(told.send("resume", generation=0), "invalid_argument")
    told.resume(1)
    assert broken(told.close()) == set()


def test_a_late_detach_that_is_accepted_is_found() -> None:
    told = Told().open()
    told.resume()
    told.detach(0)
    assert broken(told.close()) == {"answer"}


def test_a_second_resume_of_the_same_generation_is_found() -> None:
    told = Told().open()
    told.resume(0)
    told.resume(0)
    assert broken(told.close()) == {"answer"}


def test_a_resume_that_skips_a_generation_is_found() -> None:
    told = Told().open()
    told.reply(told.send("resume", generation=0), lease_generation=2)
    assert broken(told.close()) == {"answer"}


def test_a_resume_that_is_refused_at_its_own_generation_is_found() -> None:
    told = Told().open()
    told.reply(told.send("resume", generation=0), "invalid_argument")
    assert broken(told.close()) == {"answer"}


# --- refusals without their cause


@pytest.mark.parametrize(
    ("op", "code"),
    [
        ("touch", "not_found"),
        ("append", "stale_fence"),
        ("signal", "stale_fence"),
        ("touch", "failed_precondition"),
        ("append", "failed_precondition"),
        ("append", "invalid_argument"),
        ("append", "resource_exhausted"),
        ("append", "timeout"),
        ("touch", "timeout"),
        ("append", "cleanup_failed"),
        ("touch", "internal"),
        ("close", "payload_too_large"),
    ],
)
def test_a_refusal_in_the_midst_of_a_healthy_life_is_found(op: str, code: str) -> None:
    told = Told().open()
    told.reply(told.send(op, next_epoch=1 if op == "signal" else None), code)
    told.interrupt(1)
    assert broken(told.close()) == {"answer"}


@pytest.mark.parametrize("code", ["stale_fence", "invalid_argument", "failed_precondition", "timeout"])
def test_an_open_that_is_refused_without_a_life_in_its_way_is_found(code: str) -> None:
    told = Told()
    told.reply(told.send("open"), code, n=0)
    assert broken(told) == {"answer"}


def test_opens_that_are_refused_with_a_life_in_their_way_pass() -> None:
    told = Told().open()
    told.reply(told.send("open"), "invalid_argument")
    told.close()
    told.reply(told.send("open"), "stale_fence", n=0)
    assert broken(told) == set()


def test_an_open_that_its_own_close_overtook_passes() -> None:
    told = Told()
    opening, closing = told.send("open"), told.send("close")
    told.reply(opening, "failed_precondition", n=0)
    told.reply(closing, n=0)
    assert broken(told) == set()


def test_refusals_of_what_comes_too_late_pass() -> None:
    told = Told().open()
    overtaken = told.send("append", tokens=(1,))
    told.interrupt(1)
    told.reply(overtaken, "stale_fence")
    timed_out, behind = told.send("append", 1, tokens=(2,)), told.send("append", 1, tokens=(3,))
    told.reply(timed_out, "timeout", retryable=True)
    told.event("epoch_lost", 1)
    told.reply(behind, "failed_precondition")
    told.interrupt(2)
    under_way, touch, closing = told.send("append", 2, tokens=(4,)), told.send("touch", 2), told.send("close", 2)
    told.reply(under_way, "failed_precondition")
    told.event("closing", 2, reason="client_close")
    told.reply(touch, "failed_precondition")
    told.reply(closing)
    told.event("closed", 2, reason="client_close")
    told.reply(told.send("touch", 2), "not_found", n=0)
    assert broken(told) == set()


def test_a_cancel_may_time_out_and_be_answered_later() -> None:
    told = Told().open()
    cancel = told.send("signal", next_epoch=1, deliveries=3)
    told.event("interrupted", 1)
    told.reply(cancel, "timeout", retryable=True)
    told.reply(cancel, "cleanup_failed", retryable=True)
    told.reply(cancel)
    assert broken(told.close()) == set()
