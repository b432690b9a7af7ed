"""Interruptions and updates: what moves at once, and what is answered when."""

from __future__ import annotations

from typing import Any

import pytest

from control.core import commands as c
from control.core import effects as e
from control.core.fence import Fence
from control.core.requests import RequestPhase
from control.core.session import Phase
from tests.core.call import BAD_CONFIG, Call, at, opened, talking, unpack


def config(call: Call) -> tuple[Any, Any, Any]:
    return unpack(call.open_session.config)


# --- the moment of a cancel ------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", sorted(c.CANCEL_EVENTS))
def test_a_cancel_interrupts_at_once_and_is_answered_when_its_cleanup_is_confirmed(event: str) -> None:
    call = talking()
    word = call.cancel(at(1, 2, 3), event=event)
    (interrupted,) = [effect.lifecycle for effect in word.all(e.Announce)]
    assert (interrupted.event, interrupted.fence, interrupted.cancelled_fence) == ("interrupted", at(1, 2, 3), at(0))
    assert (word.replies, call.fence, call.open_session.floor) == ([], at(1, 2, 3), 1)
    assert call.open_session.input_seq == 0
    call.clean()
    reply = call.replies[-1]
    assert (reply.ok, reply.fence, reply.accepted_fence) == (True, at(0), at(1, 2, 3))
    assert (reply.detail.event, reply.detail.next_fence) == (event, at(1, 2, 3))


def test_whoever_has_read_interrupted_reads_it_before_anything_else_of_that_commit() -> None:
    call = talking()
    call.append()
    word = call.cancel(at(1))
    assert isinstance(word.decision.effects[0], e.Announce)


def test_s31_a_cancel_waits_neither_for_the_append_under_way_nor_for_those_behind_it() -> None:
    call = talking()
    for _ in range(5):
        call.append()
    word = call.cancel(at(1))
    assert word.events == ["interrupted"]
    assert word.aborts == [("ear", (0,)), ("mouth", (0,))]


def test_s33_a_cancel_when_nothing_runs_is_ok_at_once() -> None:
    call = opened()
    assert call.cancel(at(1)).reply.ok  # a request was reserved
    assert call.cancel(at(2)).reply.ok  # not even that
    assert call.events == ["opened", "interrupted", "interrupted"]


def test_s33_a_cancel_of_something_just_finished_is_ok() -> None:
    call = talking()
    call.cancel(at(1))
    call.clean()
    assert call.cancel(at(1), at(0)).reply.ok
    assert call.cancel(at(1), at(0), event="response.cancel").reply.ok


def test_s34_a_submission_that_its_abort_has_overtaken_is_never_asked_for_again() -> None:
    call = talking()
    call.append()
    number = call.append_number
    call.cancel(at(1))
    # The stage has discarded it and says so, or had it accepted first: neither matters any more.
    assert call.feed(c.Rejected(1, number, "stale_fence", "aborted before")).changed_nothing
    assert call.feed(c.Accepted(1, number)).changed_nothing
    call.clean()
    assert len(call.submits) == 2
    assert call.released == [0]


def test_s36_a_later_stage_is_asked_for_what_an_earlier_one_may_have_forwarded() -> None:
    call = talking(route=("ear", "brain", "mouth"))
    call.cancel(at(1))
    call.clean("mouth")
    call.clean("brain")
    # The floor keeps the first stage from forwarding after them; only its own word is still missing.
    assert call.open_session.floor == 1
    assert call.requests == {0: RequestPhase.CLEANING}
    call.clean("ear")
    assert call.released == [0]


def test_s37_the_late_failure_of_an_interrupted_request_is_not_charged_to_the_next_response() -> None:
    call = talking()
    call.cancel(at(1))
    call.append()
    call.accept()
    for worker in ("ear", "mouth"):
        assert call.feed(c.RequestFailed(1, 0, worker, "torn down")).changed_nothing
    call.clean()
    assert call.feed(c.RequestFailed(1, 0, "ear", "torn down")).changed_nothing
    assert (call.phase, call.requests) == (Phase.OPEN, {1: RequestPhase.SUBMITTED})


def test_s37_a_request_that_could_neither_be_stopped_nor_kept_ends_its_session() -> None:
    call = talking()
    call.cancel(at(1))
    call.fail_cleanup("ear")
    word = call.feed(c.RequestFailed(1, 0, "ear", "the engine lost it"))
    assert word.events == ["closing"]


def test_s38_two_interruptions_in_one_millisecond_are_both_answered_and_everything_older_is_cleaned() -> None:
    call = talking()
    call.cancel(at(1), control_id="first")
    call.append()
    call.accept()
    call.cancel(at(2), control_id="second")
    assert [event.fence for event in call.lifecycle[1:]] == [at(1), at(2)]
    assert [cleanup.epochs for cleanup in call.cleanups] == [(0,), (1,)]
    call.clean()
    assert [len(call.answers_to(name)) for name in ("first", "second")] == [1, 1]
    assert all(call.answers_to(name)[0].ok for name in ("first", "second"))
    assert (sorted(call.released), call.requests, call.fence) == ([0, 1], {}, at(2))


def test_s38_the_same_interruption_from_two_sides_has_one_effect_and_two_replies() -> None:
    call = talking()
    call.cancel(at(1), control_id="microphone")
    call.cancel(at(1), at(0), event="response.cancel", control_id="button")
    assert call.events == ["opened", "interrupted"]
    assert len(call.cleanups) == 1
    call.clean()
    assert [r.control_id for r in call.replies[-2:]] == ["microphone", "button"]
    assert call.released == [0]


# --- what a cancel may name --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fence", "to", "code"),
    [
        (at(2, 1, 1), at(2, 2, 2), "stale_fence"),  # no higher epoch
        (at(2, 1, 1), at(1), "stale_fence"),
        (at(3), at(4), "stale_fence"),  # nobody has come with that epoch
        (at(2, 2, 0), at(3), "stale_fence"),
        (at(2, 1, 1, incarnation=2), at(3), "stale_fence"),
        (at(2, 1, 1), at(3, incarnation=2), "stale_fence"),
        (at(2, 0, 9), at(3), None),  # cancels compare as tuples
        (at(2, 1, 1), at(9, 0, 0), None),
    ],
)
def test_a_cancel_goes_from_a_known_fence_to_a_higher_epoch(fence: Fence, to: Fence, code: str | None) -> None:
    call = opened()
    call.append(at(2, 1, 1))
    call.accept()
    word = call.cancel(to, fence)
    if code is None:
        assert word.events == ["interrupted"]
    else:
        assert (word.code, word.changed_nothing) == (code, True)
        assert word.reply.accepted_fence == at(2, 1, 1)


def test_a_cancel_without_a_fence_to_go_to_is_refused() -> None:
    call = talking()
    word = call.feed(call.make(c.Cancel, event="barge_in"))
    assert (word.code, word.changed_nothing) == ("invalid_argument", True)
    assert word.reply.message.startswith("$.next_fence: ")


def test_a_signal_that_is_none_is_refused_in_every_phase() -> None:
    vacant, opening, live, closing = Call(), Call(), talking(), talking()
    opening.open()
    closing.close()
    for call in (vacant, opening, live, closing):
        word = call.feed(call.make(c.UnknownSignal, event="sneeze"))
        assert (word.code, word.changed_nothing) == ("invalid_argument", True)
        assert word.reply.message.startswith("$.event: 'sneeze' is none of barge_in, ")


# --- D3, S11: configurations -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cancel", "update"])
def test_d03_a_bad_configuration_is_refused_before_anything_changes(kind: str) -> None:
    call = talking()
    both: dict[str, Any] = {"session_config": {"voice": "b"}, "runtime_config": BAD_CONFIG}
    word = call.cancel(at(1), **both) if kind == "cancel" else call.update(at(1), **both)
    assert (word.code, word.changed_nothing) == ("invalid_argument", True)
    assert word.reply.message == "$.runtime_config: temperature is a number"
    assert (call.fence, call.events) == (at(0), ["opened"])


def test_d03_the_configuration_of_a_late_cancel_is_checked_too() -> None:
    call = talking()
    call.cancel(at(1))
    word = call.cancel(at(1), at(0), runtime_config=BAD_CONFIG)
    assert (word.code, word.changed_nothing) == ("invalid_argument", True)


def test_s11_both_configurations_in_one_update_are_one_generation() -> None:
    call = opened()
    word = call.update(session_config={"voice": "b"}, runtime_config={"temperature": 2})
    assert word.reply.ok
    assert call.open_session.config_generation == 1
    assert config(call)[:2] == ({"voice": "b"}, {"temperature": 2})
    assert config(call)[2] == [{"temperature": 2}, {"temperature": 2}]


def test_s11_what_is_not_given_stays() -> None:
    call = opened()
    call.update(session_config={"voice": "b"})
    call.update(runtime_config={"temperature": 2})
    assert config(call)[:2] == ({"voice": "b"}, {"temperature": 2})
    call.update(session_config={})
    assert config(call)[:2] == ({}, {"temperature": 2})
    assert call.open_session.config_generation == 3
    call.update()
    assert call.open_session.config_generation == 3


def test_a_cancel_that_configures_does_so_with_its_ok() -> None:
    call = talking()
    call.cancel(at(1), session_config={"voice": "b"})
    assert call.open_session.config_generation == 0
    call.clean()
    assert (call.open_session.config_generation, config(call)[0]) == (1, {"voice": "b"})
    at_once = opened()
    at_once.cancel(at(1), session_config={"voice": "b"})
    assert at_once.open_session.config_generation == 1


def test_an_update_may_bring_in_a_further_fence_and_does_not_wait_for_the_cleanup() -> None:
    call = talking()
    word = call.update(at(2, 1, 1))
    assert (word.reply.ok, word.reply.accepted_fence, word.events) == (True, at(2, 1, 1), ["interrupted"])
    assert word.aborts == [("ear", (0,)), ("mouth", (0,))]
    turn = opened()
    assert turn.update(at(0, 3, 3)).events == []
    assert turn.fence == at(0, 3, 3)
