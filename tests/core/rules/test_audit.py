"""An audit: what a holder of slots has of a session, against what the session says."""

from __future__ import annotations

from typing import Any

import pytest

from control.core import commands as c
from control.core import effects as e
from control.core.scene import ADMISSION
from control.core.session import Debt, Phase
from tests.core.call import Call, Word, at, settings, talking


def audit(call: Call, *epochs: int, holder: str = "ear", incarnation: int = 1, has_slot: bool = True) -> Word:
    return call.feed(c.Audited(holder, 0, incarnation, epochs, has_slot))


def aborted(word: Word) -> list[tuple[str, int | None, tuple[int, ...]]]:
    return [(each.worker_id, each.incarnation, each.epochs) for each in word.all(e.Abort)]


def closing() -> Call:
    call = talking()
    call.close()
    assert call.phase is Phase.CLOSING
    return call


def dialled() -> Call:
    call = Call()
    call.open()
    return call


def test_what_a_session_owns_is_left_alone() -> None:
    call = talking()
    assert audit(call, 0).changed_nothing
    assert audit(call, 0, holder="mouth").changed_nothing


def test_what_is_being_cleaned_up_is_owned_until_it_is_confirmed() -> None:
    call = talking()
    call.cancel(at(1))
    assert audit(call, 0).changed_nothing
    call.clean()
    assert aborted(audit(call, 0)) == [("ear", 1, (0,))]


@pytest.mark.parametrize("make", [Call, dialled, talking, closing])
def test_s44_a_request_of_an_epoch_or_a_life_that_nobody_owns_is_aborted(make: Any) -> None:
    call = make()
    before = call.session
    word = audit(call, 7, 9, incarnation=5, has_slot=False)
    assert aborted(word) == [("ear", 5, (7, 9))]
    assert call.session == before, "the next audit asks again; nothing is remembered of it"


def test_s44_a_request_at_a_worker_that_the_session_was_never_placed_on_is_aborted() -> None:
    assert aborted(audit(talking(), 0, holder="nose", has_slot=False)) == [("nose", 1, (0,))]


def test_s80_a_request_that_is_only_reserved_can_run_nowhere_and_one_that_is_submitted_is_owned() -> None:
    call = talking()
    call.cancel(at(1))
    call.clean()
    # The new epoch's request is reserved with its first append, in the commit that submits it.
    call.append(at(1))
    assert audit(call, 1).changed_nothing


@pytest.mark.parametrize("make", [Call, talking, closing])
def test_s43_a_slot_that_no_life_holds_is_owed_back(make: Any) -> None:
    call = make()
    word = audit(call, incarnation=5)
    assert word.all(e.Pay) == [e.Pay((Debt("ear", 5, call.now_ms + 2_000),))]
    assert audit(call, incarnation=5).changed_nothing, "it is owed already"
    call.feed(c.DebtPaid(5, "ear"))
    assert call.session is None or call.open_session.debts == ()


def test_s43_a_slot_at_a_worker_that_the_session_is_not_placed_on_is_owed_back() -> None:
    word = audit(talking(), holder="nose")
    assert [debt.holder for pay in word.all(e.Pay) for debt in pay.debts] == ["nose"]


@pytest.mark.parametrize("make", [talking, closing])
def test_s43_a_slot_that_a_live_session_should_hold_is_taken_again(make: Any) -> None:
    call = make()
    word = audit(call, 0, has_slot=False)
    assert word.decision.effects == (e.Place(0, ("ear",)),)
    for answer in (c.Placed(1, 0), c.PlacementRefused(1, 0, "ear")):
        assert call.feed(answer).changed_nothing


def test_a_session_that_is_being_placed_holds_its_slots_or_will() -> None:
    call = dialled()
    assert audit(call).changed_nothing
    assert audit(call, has_slot=False).changed_nothing


def test_the_limit_of_sessions_is_audited_like_a_worker() -> None:
    call = Call(settings(limit_sessions=True))
    call.open()
    call.place()
    assert audit(call, holder=ADMISSION).changed_nothing
    assert [debt.holder for pay in audit(call, holder=ADMISSION, incarnation=3).all(e.Pay) for debt in pay.debts] == [
        ADMISSION
    ]
