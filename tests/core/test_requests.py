"""The request ledger, and the names that requests have at the stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control.core import requests as ledger
from control.core.fence import MAX_COMPONENT
from control.core.requests import Request, RequestName, RequestPhase, find_request_name, request_id
from tests.core.call import at

NUMBERS = st.integers(0, MAX_COMPONENT)
RESERVED, SUBMITTED, CLEANING = RequestPhase.RESERVED, RequestPhase.SUBMITTED, RequestPhase.CLEANING
SOME = (Request(1, SUBMITTED), Request(2, RESERVED), Request(4, SUBMITTED), Request(5, CLEANING))


def phases(requests: ledger.Ledger) -> dict[int, RequestPhase]:
    return {request.epoch: request.phase for request in requests}


def test_a_request_is_named_after_its_session_life_epoch_and_stage() -> None:
    assert request_id("call-1", 3, 7, 1) == "duplex-s.Y2FsbC0x.i.3.e.7.r.stage1"
    assert request_id("a", 0, 0, 0) == "duplex-s.YQ.i.0.e.0.r.stage0"  # without the padding of "YQ=="


@given(
    session_id=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40),
    incarnation=NUMBERS,
    epoch=NUMBERS,
    stage_id=st.integers(0, 9999),
)
def test_a_name_says_everything_that_it_was_made_of(
    session_id: str, incarnation: int, epoch: int, stage_id: int
) -> None:
    name = request_id(session_id, incarnation, epoch, stage_id)
    assert find_request_name(name) == RequestName(session_id, incarnation, epoch, stage_id)
    assert name.isascii()
    assert not set(name) - set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


@given(st.text(max_size=60) | st.from_regex(r"duplex-s\..*\.i\..*\.e\..*\.r\.stage.*"))
def test_any_other_text_is_no_name_and_no_error(text: str) -> None:
    name = find_request_name(text)
    if name is not None:
        assert find_request_name(request_id(name.session_id, name.incarnation, name.epoch, name.stage_id)) == name


@pytest.mark.parametrize(
    "text",
    [
        "",
        "duplex-s.Y2FsbC0x.i.3.e.7.r.stage1\n",
        "duplex-s..i.3.e.7.r.stage1",
        "duplex-s.Y2FsbC0x=.i.3.e.7.r.stage1",
        "duplex-s.Y2FsbC0x.i.-3.e.7.r.stage1",
        "duplex-s.Y2FsbC0x.i.3.e.7.r.stage",
        "duplex-s._w.i.3.e.7.r.stage1",  # no UTF-8 inside
        "duplex-s.A.i.3.e.7.r.stage1",  # no base64
        "cmpl-1234",
    ],
)
def test_a_name_that_is_nearly_one_is_none(text: str) -> None:
    assert find_request_name(text) is None


def test_a_reserved_request_is_bound_to_the_fence_that_reserved_it() -> None:
    request = ledger.reserve(at(3, 2, 1))
    assert (request.phase, request.key, request.generation) == (RESERVED, (3, 2, 1), -1)


def test_a_request_is_found_by_its_epoch() -> None:
    assert ledger.find(SOME, 4) == Request(4, SUBMITTED)
    assert ledger.find(SOME, 3) is None


def test_putting_replaces_the_request_of_the_same_epoch_and_keeps_the_order() -> None:
    changed = ledger.put(SOME, Request(2, SUBMITTED, generation=7))
    assert phases(changed) == {**phases(SOME), 2: SUBMITTED}
    assert [r.epoch for r in changed] == [1, 2, 4, 5]
    assert [r.epoch for r in ledger.put(SOME, Request(3))] == [1, 2, 4, 5, 3]


def test_only_what_was_submitted_is_cleaned() -> None:
    assert phases(ledger.mark_cleaning(SOME, (1, 2))) == {1: CLEANING, 2: RESERVED, 4: SUBMITTED, 5: CLEANING}


def test_a_release_takes_the_named_requests_and_no_other() -> None:
    assert [r.epoch for r in ledger.release(SOME, (1, 5, 9))] == [2, 4]


def test_epochs_are_listed_by_phase_and_below_a_limit() -> None:
    assert ledger.epochs_in(SOME, SUBMITTED) == (1, 4)
    assert ledger.epochs_in(SOME, SUBMITTED, 4) == (1,)
    assert ledger.epochs_in(SOME, RESERVED, 2) == ()
