"""Fences: how two stand to each other, and what scripts are told to check."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from control.core import commands as c
from control.core.fence import MAX_COMPONENT, Fence, Relation, is_acceptable, relate
from control.core.session import FLOOR_CLOSED, fence_record
from tests.core.call import Call, at, opened, talking

FENCES = st.builds(Fence, *(st.integers(0, 3) for _ in range(4)))
ACCEPTED = at(5, 3, 2)


@pytest.mark.parametrize(
    ("fence", "relation"),
    [
        (ACCEPTED, Relation.CURRENT),
        (at(5, 4, 2), Relation.AHEAD),
        (at(5, 3, 3), Relation.AHEAD),
        (at(6), Relation.AHEAD),  # a higher epoch makes lower turns and responses acceptable again
        (at(4, 9, 9), Relation.STALE),
        (at(5, 2, 2), Relation.STALE),
        (at(5, 3, 1), Relation.STALE),
        (at(5, 2, 9), Relation.STALE),  # by component, not as a tuple
        (at(5, 9, 1), Relation.STALE),
        (at(5, 3, 2, incarnation=2), Relation.FOREIGN),
        (at(9, 9, 9, incarnation=0), Relation.FOREIGN),
    ],
)
def test_a_fence_is_compared_component_by_component(fence: Fence, relation: Relation) -> None:
    assert relate(ACCEPTED, fence) is relation


@given(accepted=FENCES, fence=FENCES)
def test_a_command_may_act_at_the_current_fence_or_ahead_of_it(accepted: Fence, fence: Fence) -> None:
    assert is_acceptable(accepted, fence) is (relate(accepted, fence) in {Relation.CURRENT, Relation.AHEAD})


@given(first=FENCES, second=FENCES, third=FENCES)
def test_what_is_acceptable_after_a_step_was_acceptable_before_it(first: Fence, second: Fence, third: Fence) -> None:
    if is_acceptable(first, second) and is_acceptable(second, third):
        assert is_acceptable(first, third)


@given(first=FENCES, second=FENCES)
def test_two_fences_are_acceptable_to_each_other_only_if_they_are_the_same(first: Fence, second: Fence) -> None:
    if is_acceptable(first, second) and is_acceptable(second, first):
        assert first == second


def test_a_fence_reads_the_same_on_the_wire_and_at_rest() -> None:
    fence = Fence(1, 2, 3, MAX_COMPONENT)
    assert msgspec.to_builtins(fence) == {"incarnation": 1, "epoch": 2, "turn_id": 3, "response_seq": MAX_COMPONENT}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(fence), type=Fence) == fence


@pytest.mark.parametrize("component", [-1, MAX_COMPONENT + 1, 1.5, "1", None, True])
def test_a_component_that_a_script_could_not_compare_is_refused(component: object) -> None:
    plain = {"incarnation": 1, "epoch": component, "turn_id": 0, "response_seq": 0}
    with pytest.raises(msgspec.ValidationError, match=r"\$\.epoch"):
        msgspec.convert(plain, Fence)


# What scripts check: incarnation, floor, accepted epoch, turn, response, offered epoch, turn, response.


def test_there_is_no_fence_record_before_the_session_is_open_and_after_its_end() -> None:
    call = Call()
    call.open()
    assert fence_record(call.open_session) is None
    call.place()
    assert fence_record(call.open_session) == "1 0 0 0 0 0 0 0"
    call.close()
    assert fence_record(call.open_session) is None


def test_s74_the_first_output_of_a_turn_is_within_the_fence_that_is_offered_for_it() -> None:
    call = talking()
    call.append(at(0, 2, 1))
    # Turn 2 runs at the stage and isn't confirmed yet: its output is above the accepted fence, not above the offered.
    assert fence_record(call.open_session) == "1 0 0 0 0 0 2 1"
    call.accept()
    # From here the last output of turn 0 is stale, though its request runs on: it is not below the floor.
    assert fence_record(call.open_session) == "1 0 0 2 1 0 2 1"
    assert relate(call.fence, at(0)) is Relation.STALE
    assert call.open_session.floor == 0


def test_s74_a_turn_that_its_stage_refuses_is_no_longer_offered() -> None:
    call = talking()
    call.append(at(0, 2, 1))
    call.reject()
    assert fence_record(call.open_session) == "1 0 0 0 0 0 0 0"


def test_a_cancel_raises_the_floor_with_the_fence() -> None:
    call = talking()
    call.cancel(at(3, 1, 1))
    assert fence_record(call.open_session) == "1 3 3 1 1 3 1 1"


def test_s32_what_was_queued_before_a_cancel_is_below_the_floor_after_it() -> None:
    call = talking()
    call.append(at(1))  # the next epoch, under way, not accepted
    call.cancel(at(2))
    assert call.open_session.floor == 2
    assert fence_record(call.open_session) == "1 2 2 0 0 2 0 0"


def test_a_closing_session_lets_nothing_through_at_all() -> None:
    call = talking()
    call.close()
    assert fence_record(call.open_session) == f"1 {FLOOR_CLOSED} 0 0 0 0 0 0"
    assert FLOOR_CLOSED > MAX_COMPONENT


def test_another_command_that_brings_in_a_higher_epoch_interrupts_too() -> None:
    for kind in (c.Update, c.Append):
        call = talking()
        if kind is c.Update:
            word = call.update(at(2))
        else:
            call.append(at(2))
            word = call.accept()
        assert word.events == ["interrupted"]
        assert call.lifecycle[-1].cancelled_fence == at(0)
        assert call.open_session.floor == 2


def test_touch_and_resume_move_no_fence() -> None:
    call = opened()
    call.touch(fence=at(4, 4, 4))
    call.resume(fence=at(4, 4, 4))
    assert call.fence == at(0)
