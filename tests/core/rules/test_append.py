"""Appends: in order, each counted once, and only when their stage has taken them."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from control.core import commands as c
from control.core import effects as e
from control.core.requests import RequestPhase
from control.core.session import Phase
from tests.core.call import Call, at, opened, talking, unpack, without_policy


def numbers(call: Call) -> list[tuple[int, int]]:
    """`(seq, turn_seq)` of every accepted append, in the order of their replies."""
    return [(r.detail.seq, r.detail.turn_seq) for r in call.replies if r.op == "append" and r.ok]


def test_an_append_is_answered_when_its_stage_has_accepted_it() -> None:
    call = opened()
    word = call.append(traceparent="00-1-2-03")
    assert word.replies == []
    (submit,) = word.all(e.Submit)
    assert (submit.worker_id, submit.fence, submit.seq, submit.turn_seq, submit.resumed) == ("ear", at(0), 1, 1, False)
    assert (submit.route, submit.traceparent) == (("ear", "mouth"), "00-1-2-03")
    assert call.requests == {0: RequestPhase.SUBMITTED}
    assert call.open_session.input_seq == 0
    reply = call.accept().reply
    assert (reply.detail.seq, reply.detail.response_stage_id, reply.detail.resumable) == (1, 1, True)
    assert call.open_session.input_seq == 1


def test_seq_counts_in_the_epoch_and_turn_seq_in_the_turn() -> None:
    call = opened()
    for fence in (at(0), at(0), at(0, 1, 0), at(0, 1, 0), at(0, 1, 1), at(1), at(1)):
        call.append(fence)
        call.accept()
    assert numbers(call) == [(1, 1), (2, 2), (3, 1), (4, 2), (5, 1), (1, 1), (2, 2)]
    assert [(s.seq, s.turn_seq) for s in call.submits] == numbers(call)


def test_the_configuration_travels_only_to_a_stage_that_does_not_have_it() -> None:
    call = opened()
    for _ in range(2):
        call.append()
        call.accept()
    call.update(runtime_config={"temperature": 2})
    call.append()
    call.accept()
    assert [(s.resumed, s.generation, bool(s.config)) for s in call.submits] == [
        (False, 0, True),
        (True, 0, False),
        (True, 1, True),
    ]
    assert unpack(call.submits[2].config)[1] == {"temperature": 2}


def test_a_configuration_that_a_refused_append_carried_travels_again() -> None:
    call = talking()
    call.update(session_config={"voice": "b"})
    call.append()
    call.reject()
    call.append()
    assert [bool(s.config) for s in call.submits] == [True, True, True]


def test_without_a_policy_an_append_is_counted_and_answered_at_once() -> None:
    call = Call(without_policy())
    call.open(input_modes=[])
    word = call.append(mode="turn_commit_only")
    assert (word.reply.detail.data_plane_append, word.reply.detail.seq, word.all(e.Submit)) == (False, 1, [])
    word = call.append(at(2), mode="turn_commit_only")
    assert (word.events, word.reply.detail.seq, call.fence) == (["interrupted"], 1, at(2))


# --- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "code", "path"),
    [
        ({"expected_epoch": 1}, "invalid_argument", "$.expected_epoch: 1"),
        ({"mode": "telepathy"}, "invalid_argument", "$.mode: 'telepathy'"),
        ({"mode": "append_audio_chunk"}, "invalid_argument", "$.mode: session 'call-1' was opened with"),
        ({"fence": at(0, 1, 0)}, "stale_fence", ""),
        ({"fence": at(1, 9, 9, incarnation=2)}, "stale_fence", ""),
    ],
)
def test_a_bad_append_changes_nothing(fields: dict[str, Any], code: str, path: str) -> None:
    call = talking()
    call.append(at(0, 2, 2))
    call.accept()
    word = call.append(**fields)
    assert (word.code, word.changed_nothing) == (code, True)
    assert word.reply.message.startswith(path)
    assert word.reply.accepted_fence == at(0, 2, 2)


def test_an_append_that_is_older_than_its_own_deadline_is_refused_as_timeout() -> None:
    call = talking()
    command = call.make(c.Append, mode="append_tokens", deadline_ms=500)
    word = call.feed(command, entered_ms=call.now_ms - 501)
    assert (word.row, word.code, word.reply.retryable, word.changed_nothing) == ("T00", "timeout", True, True)
    assert call.feed(command, entered_ms=call.now_ms - 500).all(e.Submit)


def test_a_cancel_and_a_close_are_never_too_old() -> None:
    call = talking()
    cancel = call.make(c.Cancel, event="barge_in", next_fence=at(1), deadline_ms=0)
    assert call.feed(cancel, entered_ms=call.now_ms - 9_999).events == ["interrupted"]
    close = call.make(c.Close, deadline_ms=0)
    assert call.feed(close, entered_ms=call.now_ms - 9_999).events == ["closing"]


# --- I7: a refusal by the stage ----------------------------------------------------------------------------------


def test_a_first_append_that_its_stage_refuses_leaves_the_request_reserved() -> None:
    call = opened()
    before = call.open_session
    call.append()
    call.pass_ms(50)
    word = call.reject("invalid_argument", "the prompt is too long")
    assert (word.code, word.reply.message) == ("invalid_argument", "the prompt is too long")
    after = call.open_session
    assert after == replace(before, number=after.number, lease=after.lease)
    assert after.lease.last_activity_ms == call.now_ms


def test_a_later_append_that_its_stage_refuses_leaves_the_request_running() -> None:
    call = talking()
    before = call.open_session
    call.append(at(0, 1, 1))
    call.reject()
    after = call.open_session
    assert after == replace(before, number=after.number, lease=after.lease)
    assert call.requests == {0: RequestPhase.SUBMITTED}


def test_an_append_of_a_new_epoch_that_its_stage_refuses_brings_nothing_in() -> None:
    call = talking()
    before = call.open_session
    for epoch in range(1, 30):
        call.append(at(epoch))
        word = call.reject()
        assert (word.events, word.released) == ([], (epoch,))
    after = call.open_session
    assert after == replace(before, number=after.number, lease=after.lease)


def test_a_refusal_with_a_code_of_the_engines_own_becomes_failed_precondition() -> None:
    call = opened()
    call.append()
    word = call.reject("cuda_oom", "out of memory")
    assert (word.code, word.reply.message) == ("failed_precondition", "out of memory")


@pytest.mark.parametrize("verdict", ["accepted", "rejected"])
def test_the_stages_word_counts_once(verdict: str) -> None:
    call = opened()
    call.append()
    number = call.append_number
    word = c.Accepted(1, number) if verdict == "accepted" else c.Rejected(1, number, "internal", "no")
    call.feed(word)
    for late in (word, c.Accepted(1, number), c.Rejected(1, number, "internal", "no")):
        assert call.feed(late).changed_nothing
    call.append()
    assert call.feed(word).changed_nothing  # of the append before
    assert call.open_session.append is not None


# --- S20, S21, S72: no word from the stage -----------------------------------------------------------------------


def test_s20_an_acceptance_that_arrives_after_a_recovery_counts_the_append_once() -> None:
    call = talking()
    call.append()
    number = call.append_number
    call.pass_ms(3_000)  # an owner dies, the next one reads the same state
    assert call.feed(c.Accepted(1, number)).reply.detail.seq == 2
    assert call.feed(c.Accepted(1, number)).changed_nothing
    assert call.open_session.input_seq == 2
    assert call.cleanups == ()


def test_s20_an_acceptance_that_never_arrives_ends_in_an_abort_and_counts_for_nothing() -> None:
    call = talking()
    call.append()
    number = call.append_number
    call.wait_ms(10_000)
    assert call.feed(c.Accepted(1, number)).changed_nothing
    assert call.open_session.input_seq == 1
    call.clean()
    assert call.released == [0]


def test_s21_an_append_without_an_outcome_is_told_so_cleaned_up_and_never_sent_again() -> None:
    call = opened()
    call.append()
    call.wait_ms(9_999)
    assert call.open_session.append is not None
    (word,) = call.wait_ms(1)
    assert (word.code, word.reply.retryable, word.events) == ("timeout", True, ["epoch_lost"])
    assert word.aborts == [("ear", (0,)), ("mouth", (0,))]
    assert "go on with a cancel" in word.reply.message
    call.wait_ms(30_000)
    assert len(call.submits) == 1


def test_s72_after_a_timeout_its_epoch_takes_no_more_and_the_next_one_does() -> None:
    call = talking()
    call.append()
    call.wait_ms(10_000)
    word = call.append()
    assert (word.code, word.changed_nothing) == ("failed_precondition", True)
    assert "epoch_lost" in word.reply.message
    call.cancel(at(1))
    call.append()
    assert call.accept().reply.ok
    assert [s.fence.epoch for s in call.submits] == [0, 0, 1]


@pytest.mark.parametrize("cleanup", ["pending", "failed", "done"])
def test_s72_a_late_word_about_a_lost_append_changes_nothing(cleanup: str) -> None:
    call = talking()
    call.append()
    number = call.append_number
    call.wait_ms(10_000)
    if cleanup == "failed":
        call.fail_cleanup("ear")
    elif cleanup == "done":
        call.clean()
    for word in (
        c.Accepted(1, number),
        c.Rejected(1, number, "internal", "late"),
        c.RequestFailed(1, 0, "ear", "late"),
        c.RequestFailed(1, 0, "mouth", "late"),
    ):
        assert call.feed(word).changed_nothing
    assert call.phase is Phase.OPEN


def test_s72_an_append_of_the_next_epoch_that_is_lost_takes_the_older_request_along() -> None:
    call = talking()
    call.append(at(3))
    (word,) = call.wait_ms(10_000)
    assert word.aborts == [("ear", (0, 3)), ("mouth", (0, 3))]
    assert call.fence == at(0)  # never accepted
    assert call.open_session.floor == 4
    assert call.append().code == "failed_precondition"
    assert call.append(at(3)).code == "failed_precondition"
    call.append(at(4))
    assert call.accept().reply.ok


# --- S23: too long for the model ---------------------------------------------------------------------------------


def test_s23_input_that_outgrows_the_first_stage_is_refused_and_the_session_goes_on() -> None:
    call = talking()
    call.append()
    assert call.reject("invalid_argument", "4097 tokens, 4096 fit").code == "invalid_argument"
    call.append()
    assert call.accept().reply.ok


def test_s23_a_request_that_outgrows_a_later_stage_ends_its_own_session_only() -> None:
    one, other = talking(), talking()
    word = one.feed(c.RequestFailed(1, 0, "mouth", "2049 frames, 2048 fit"))
    assert word.events == ["closing"]
    assert one.lifecycle[-1].reason == "request_failed"
    assert other.phase is Phase.OPEN


# --- S24, S25, S84, D7: order ------------------------------------------------------------------------------------


def test_s24_waiting_appends_keep_their_order_whatever_becomes_of_those_before_them() -> None:
    call = opened()
    names = [f"say{n}" for n in range(6)]
    for name in names:
        call.append(control_id=name)
    for name in names:
        under_way = call.open_session.append
        assert under_way is not None
        assert under_way.control_id == name
        if name in {"say2", "say3"}:
            call.reject()
        else:
            call.accept()
    assert [r.control_id for r in call.replies if r.op == "append"] == names
    assert numbers(call) == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_s24_an_update_keeps_its_place_behind_the_appends_before_it() -> None:
    call = opened()
    call.append()
    call.update(session_config={"voice": "b"})
    call.append()
    assert call.open_session.config_generation == 0
    call.accept()
    assert call.open_session.config_generation == 1
    call.accept()
    assert [s.generation for s in call.submits] == [0, 1]


def test_touch_and_resume_do_not_wait_behind_an_append() -> None:
    call = opened()
    call.append()
    assert call.touch().reply.ok
    assert call.resume().reply.ok


def test_d07_a_cancel_overtakes_the_append_under_way_and_those_that_wait() -> None:
    call = talking()
    call.append(control_id="under-way")
    call.append(control_id="waits")
    word = call.cancel(at(1))
    assert [(reply.control_id, reply.code) for reply in word.replies] == [("under-way", "stale_fence")]
    assert word.events == ["interrupted"]
    assert call.answers_to("waits")[0].code == "stale_fence"
    assert [s.seq for s in call.submits] == [1, 2]
    call.clean()
    assert call.replies[-1].ok


def test_d07_a_close_and_an_expiry_overtake_an_append_too() -> None:
    closed = talking()
    closed.append(control_id="under-way")
    closed.append(control_id="waits")
    closed.close()
    gone = talking()
    gone.touch("detach")
    gone.wait_ms(15_000)
    gone.append(control_id="under-way")
    gone.append(control_id="waits")
    gone.wait_ms(5_000)
    for call in (closed, gone):
        assert call.phase is Phase.CLOSING
        assert call.answers_to("under-way")[0].code == "failed_precondition"
        assert call.answers_to("waits")[0].code == "failed_precondition"


def test_s25_input_with_the_new_epoch_that_comes_while_the_cancel_runs_belongs_to_it() -> None:
    call = talking()
    call.cancel(at(1, 1, 1))
    call.append(at(1, 1, 1), final=True)  # the audio that interrupted
    reply = call.accept().reply
    assert (reply.ok, reply.detail.seq, reply.detail.request_id.split(".")[5]) == (True, 1, "1")
    assert call.requests == {0: RequestPhase.CLEANING, 1: RequestPhase.SUBMITTED}
    call.clean()
    assert (call.released, call.requests) == ([0], {1: RequestPhase.SUBMITTED})


def test_s25_input_of_the_new_epoch_that_came_before_its_cancel_and_waits_is_not_lost() -> None:
    call = talking()
    call.append(control_id="old")
    call.append(at(1), control_id="new")
    call.cancel(at(1))
    assert call.answers_to("old")[0].code == "stale_fence"
    call.accept()
    assert call.answers_to("new")[0].detail.seq == 1


def test_s84_an_append_that_already_carries_the_new_epoch_stays_under_way_when_its_cancel_arrives() -> None:
    call = talking()
    call.append(at(1))
    number = call.append_number
    word = call.cancel(at(1))
    assert (word.replies, word.aborts) == ([], [("ear", (0,)), ("mouth", (0,))])
    assert call.append_number == number
    assert call.accept().reply.detail.seq == 1
    assert (call.fence, call.requests[1]) == (at(1), RequestPhase.SUBMITTED)


def test_s84_a_cancel_that_goes_further_within_that_epoch_is_not_taken_back_by_the_append() -> None:
    call = talking()
    call.append(at(1, 0, 0))
    call.cancel(at(1, 3, 3))
    assert call.accept().reply.ok
    assert call.fence == at(1, 3, 3)


def test_s84_a_cancel_may_name_a_fence_that_only_a_waiting_append_carries() -> None:
    call = talking()
    call.append()
    call.append(at(1), control_id="waits")
    assert call.cancel(at(2), at(1)).events == ["interrupted"]
    assert call.fence == at(2)
    assert call.answers_to("waits")[0].code == "stale_fence"
    assert call.cancel(at(9), at(5)).code == "stale_fence"  # nobody has come with that


def test_an_append_whose_session_ends_is_told_so() -> None:
    call = talking()
    call.append(control_id="last")
    word = call.feed(c.RequestFailed(1, 0, "ear", "out of memory"))
    assert [(reply.control_id, reply.code) for reply in word.replies] == [("last", "failed_precondition")]
    assert "request_failed" in word.replies[0].message
