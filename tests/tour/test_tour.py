"""Read this first: one call, from the first word to the last, told to the pure core by hand.

A producer sends commands; `step(scene, session, event)` decides each one; the decision says what the session is from
now on and what has to be done with it. Here nothing is done: `Call` keeps the session, and the test says what the
stages answer. Two stages are on the route, "ear" and "mouth". Read on in `control/core/commands.py` (what can be
said), `effects.py` (what can be asked for) and `transitions.py` (the table of both).
"""

from __future__ import annotations

from control.core import effects as e
from control.core.commands import Accepted, Cleaned, RequestFailed, StageLost
from control.core.fence import Fence
from control.core.requests import RequestPhase
from control.core.session import Phase
from tests.core.call import Call, talking


def at(epoch: int) -> Fence:
    """Life 1, turn 0, response 0. The epoch is what an interruption raises."""
    return Fence(incarnation=1, epoch=epoch, turn_id=0, response_seq=0)


def test_1_a_call_from_open_to_close() -> None:
    call = Call()

    # An open is answered only when a slot is taken at every stage; taking them is the owner's job, after its commit.
    word = call.open(at(0))
    assert word.decision.effects == (e.Place(attempt=1, holders=("ear", "mouth")),)
    assert call.phase is Phase.OPENING
    assert call.place().events == ["opened"]

    # From here one request of epoch 0 is registered. No stage has heard of it yet: it is reserved.
    assert call.requests == {0: RequestPhase.RESERVED}

    # The first input makes it real. The stage's queue gets a submission in the same commit, and the producer no reply.
    word = call.append(at(0))
    assert [submit.worker_id for submit in word.all(e.Submit)] == ["ear"]
    assert (word.replies, call.requests) == ([], {0: RequestPhase.SUBMITTED})

    # The reply comes when the stage has accepted; only now the input counts.
    reply = call.accept().reply
    assert (reply.ok, reply.detail.seq) == (True, 1)

    # The user hangs up. Nothing of this session is accepted or delivered from here, yet it isn't over:
    # both stages hold its request, and only they can say that it is gone.
    word = call.close()
    assert (word.events, word.aborts) == (["closing"], [("ear", (0,)), ("mouth", (0,))])
    call.clean("ear")
    assert call.phase is Phase.CLOSING
    call.clean("mouth")

    # Released, answered, one last event; and the slots are owed back.
    assert (call.released, call.replies[-1].ok) == ([0], True)
    assert call.events == ["opened", "closing", "closed"]
    assert {debt.holder for debt in call.open_session.debts} == {"ear", "mouth"}


def test_2_a_barge_in() -> None:
    call = talking()  # open, and one accepted append: a request runs at both stages

    # The user talks over the model. The fence moves at once, and the listener is told to stop playing.
    word = call.cancel(to=at(1), fence=at(0))
    assert (word.events, call.fence) == (["interrupted"], at(1))

    # The floor moves with it: whatever the stages still say in epoch 0, scripts drop it.
    assert call.open_session.floor == 1

    # The words that interrupted belong to the new epoch. They don't wait for the old one to be torn down.
    call.append(at(1))
    assert call.accept().reply.ok
    assert call.requests == {0: RequestPhase.CLEANING, 1: RequestPhase.SUBMITTED}

    # The cancel itself is answered when both stages have let go of epoch 0.
    assert [reply.op for reply in call.replies] == ["open", "append", "append"]
    call.clean("mouth", "ear")
    assert (call.replies[-1].op, call.replies[-1].ok) == ("signal", True)
    assert (call.released, call.requests) == ([0], {1: RequestPhase.SUBMITTED})


def test_3_a_cleanup_that_fails_is_a_debt_not_an_error() -> None:
    call = talking()
    call.cancel(to=at(1), fence=at(0), control_id="cancel-1")

    # The second stage can't stop the request. The producer learns that it may ask again ...
    call.clean("ear")
    reply = call.fail_cleanup("mouth").reply
    assert (reply.code, reply.retryable) == ("cleanup_failed", True)

    # ... and meanwhile nothing is forgotten. The request stays registered, and that worker alone is asked again,
    # later and later, for as long as it takes.
    assert call.requests == {0: RequestPhase.CLEANING}
    again = [abort for word in call.wait_ms(20_000) for abort in word.aborts]
    assert len(again) >= 3
    assert set(again) == {("mouth", (0,))}

    # The same cancel, sent again, has no second effect: it joins the cleanup that is pending.
    word = call.cancel(to=at(1), fence=at(0), control_id="cancel-1")
    assert (word.events, word.replies) == ([], [])
    call.clean("mouth")
    assert call.released == [0]
    assert [reply.ok for reply in call.answers_to("cancel-1")] == [False, True]


def test_4_a_late_word_changes_nothing() -> None:
    call = talking()
    call.append(at(0))
    submission = call.append_number
    call.cancel(to=at(1), fence=at(0))
    cleanup = call.cleanups[0].number
    call.clean()

    # Everything below is true, or was; all of it is too late. Each has a row in the table, and the session that
    # comes out is the very object that went in.
    for late in (
        Accepted(1, submission),  # the append was overtaken by the cancel
        RequestFailed(1, 0, "ear", "torn down"),  # of course: it was aborted
        Cleaned(1, cleanup, "ear"),  # heard before
    ):
        assert call.feed(late).changed_nothing

    # A command from before the interruption is told where the session is now.
    word = call.append(at(0))
    assert (word.code, word.reply.accepted_fence, word.changed_nothing) == ("stale_fence", at(1), True)


def test_5_a_client_that_is_gone() -> None:
    call = talking()

    # The gateway's socket died: the session lives on for its grace, and a resume within it takes it up again.
    call.touch("detach")
    call.wait_ms(19_999)
    assert call.resume(generation=0).reply.detail.lease_generation == 1

    # Another gateway notices the same dead socket late. It speaks for an attachment that is over.
    assert call.touch("detach", expected_lease_generation=0).code == "failed_precondition"

    # This time nobody comes back. An expiry is an end like any other: first the cleanup, then the one terminal event.
    call.touch("detach", expected_lease_generation=1)
    call.wait_ms(20_000)
    assert (call.phase, call.events[-1]) == (Phase.CLOSING, "closing")
    call.clean()
    assert (call.events[-1], call.lifecycle[-1].reason) == ("expired", "disconnect_grace_expired")


def test_6_the_same_command_twice() -> None:
    call = talking()

    # A connection broke before the reply came, so the producer sends its command again, under the same control id.
    first = call.touch("heartbeat", control_id="beat-1").reply
    call.pass_ms(1_000)
    word = call.touch("heartbeat", control_id="beat-1")
    assert (word.reply, word.changed_nothing) == (first, True)

    # While a command is still under way there is nothing to say yet; its one reply will do for both.
    call.append(control_id="say-1")
    assert call.append(control_id="say-1").decision.effects == ()
    call.accept()
    assert [reply.ok for reply in call.answers_to("say-1")] == [True]
    assert call.open_session.input_seq == 2  # one before, and this one once


def test_7_a_stage_worker_dies() -> None:
    call = talking()

    # Its life was ended for everyone before any session hears of it, so it holds nothing and can say nothing more.
    # The model's context died with it: the session ends. The other stage still has to clean up.
    word = call.feed(StageLost("ear"))
    assert (word.events, word.aborts) == (["closing"], [("mouth", (0,))])
    call.clean("mouth")
    assert (call.events[-1], call.lifecycle[-1].reason) == ("closed", "stage_lost")
    assert call.released == [0]
