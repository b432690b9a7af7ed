"""The table: total, its ids for good, and every row of it reached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest

from control.core import commands as c
from control.core.rejections import Code
from control.core.session import Phase
from control.core.transitions import ROWS, TABLE
from tests.conformance.core_runner import CoreRun
from tests.conformance.traces import DEFAULT_TRACES, load_traces
from tests.core.call import Call, at, opened, settings, talking, without_policy
from tests.core.test_machine import explore

EVENTS: tuple[type[Any], ...] = get_args(c.Event)
CASES = [(phase, event) for phase in Phase for event in EVENTS]

# One example of every event, said to a call.
EXAMPLES: dict[type[Any], Callable[[Call], Any]] = {
    c.Open: lambda call: call.make(c.Open),
    c.Append: lambda call: call.make(c.Append, mode="append_tokens"),
    c.Cancel: lambda call: call.make(c.Cancel, event="barge_in", next_fence=at(call.fence.epoch + 1)),
    c.Update: lambda call: call.make(c.Update),
    c.UnknownSignal: lambda call: call.make(c.UnknownSignal, event="sneeze"),
    c.Malformed: lambda call: call.make(c.Malformed, op="open", code=Code.INVALID_ARGUMENT, message="no"),
    c.Close: lambda call: call.make(c.Close),
    c.Touch: lambda call: call.make(c.Touch, activity="heartbeat"),
    c.Resume: lambda call: call.make(c.Resume, expected_lease_generation=0),
    c.Accepted: lambda call: c.Accepted(1, 1),
    c.Rejected: lambda call: c.Rejected(1, 1, "invalid_argument", "no"),
    c.Cleaned: lambda call: c.Cleaned(1, 1, "ear"),
    c.CleanupFailed: lambda call: c.CleanupFailed(1, 1, 1, "ear", True, "no"),
    c.RequestFailed: lambda call: c.RequestFailed(1, 0, "ear", "no"),
    c.StageLost: lambda call: c.StageLost("ear"),
    c.Audited: lambda call: c.Audited("ear", 0, 1, (0,), True),
    c.Placed: lambda call: c.Placed(1, 1),
    c.PlacementRefused: lambda call: c.PlacementRefused(1, 1, "ear"),
    c.DebtPaid: lambda call: c.DebtPaid(1, "ear"),
    c.Due: lambda call: c.Due(),
    c.RetryNow: lambda call: c.RetryNow(),
    c.Dismissed: lambda call: c.Dismissed(1, "operator_close"),
    c.Poisoned: lambda call: c.Poisoned("no"),
}


def in_phase(phase: Phase) -> Call:
    if phase is Phase.VACANT:
        return Call()
    if phase is Phase.OPENING:
        call = Call()
        call.open()
        return call
    call = talking()
    if phase is Phase.CLOSING:
        call.close()
    assert call.phase is phase
    return call


def reached_by_a_pair(phase: Phase, event: type[Any]) -> tuple[str, Phase]:
    call = in_phase(phase)
    word = call.feed(EXAMPLES[event](call))
    after = word.decision.session
    return word.row, Phase.VACANT if after is None else after.phase


def reached_seldom() -> set[tuple[str, Phase]]:
    """The steps that chance finds too seldom to rely on."""
    calls: list[Call] = []

    def dial(**changes: Any) -> Call:
        calls.append(Call(settings(**changes)))
        calls[-1].open()
        return calls[-1]

    calls.append(Call(without_policy()))
    calls[-1].open(input_modes=[])
    dial().close(at(0, incarnation=7))
    dial().feed(c.Placed(1, 2))
    lonely = dial()
    lonely.route = None
    lonely.feed(c.StageLost("ear"))
    refused = dial()
    refused.refuse_placement("ear")
    refused.route = None
    refused.refuse_placement("ear")
    lost = opened()
    lost.feed(c.StageLost("mouth"))
    calls.append(lost)
    stranger = opened()
    stranger.feed(c.StageLost("nose"))
    calls.append(stranger)
    again = talking(route=("ear",))
    again.close()
    again.cancel(at(1))
    (_, cancel) = again.cleanups
    again.feed(c.Cleaned(1, cancel.number, "ear"))
    again.close()
    calls.append(again)
    for end in (c.Poisoned("no"), c.RequestFailed(1, 0, "ear", "no"), c.Dismissed(1, "no"), c.Dismissed(2, "no")):
        short = opened()
        short.feed(end)
        calls.append(short)
    ears = talking(route=("ear",))
    ears.close()
    ears.feed(c.StageLost("ear"))
    calls.append(ears)
    return {
        (word.row, Phase.VACANT if word.decision.session is None else word.decision.session.phase)
        for call in calls
        for word in call.words
    }


def test_every_phase_has_exactly_one_row_for_every_event() -> None:
    assert sorted((row.phase, row.event.__name__) for row in TABLE) == sorted((p, e.__name__) for p, e in CASES)
    assert set(ROWS) == set(CASES)


def test_every_row_has_an_id_of_its_own_and_t00_is_no_row() -> None:
    ids = [row.id for row in TABLE]
    assert len(set(ids)) == len(ids)
    assert "T00" not in ids  # a command that was answered before, or is too old, whatever the phase


def test_every_row_says_where_it_leads_to() -> None:
    for row in TABLE:
        assert row.leads_to, row.id
        assert len(set(row.leads_to)) == len(row.leads_to), row.id


def test_only_an_open_leaves_vacant_and_only_an_outcome_or_an_end_leaves_opening() -> None:
    assert [row.id for row in TABLE if row.phase is Phase.VACANT and set(row.leads_to) != {Phase.VACANT}] == ["T01"]
    opening = {row.event for row in TABLE if row.phase is Phase.OPENING and set(row.leads_to) != {Phase.OPENING}}
    assert opening == {c.Close, c.StageLost, c.Placed, c.PlacementRefused, c.Poisoned}


def test_nothing_opens_a_closing_session_again() -> None:
    ways_back = {Phase.OPENING, Phase.OPEN}
    assert not [row.id for row in TABLE if row.phase is Phase.CLOSING and ways_back & set(row.leads_to)]


@pytest.mark.parametrize(("phase", "event"), CASES, ids=lambda case: getattr(case, "__name__", str(case)))
def test_every_pair_is_decided_by_its_row(phase: Phase, event: type[Any]) -> None:
    row, after = reached_by_a_pair(phase, event)
    assert row == ROWS[phase, event].id
    assert after in ROWS[phase, event].leads_to


@pytest.mark.parametrize("phase", Phase)
def test_a_command_that_was_answered_before_never_gets_to_its_row(phase: Phase) -> None:
    call = in_phase(phase)
    command = call.make(c.Touch, activity="wave")
    first = call.feed(command)
    again = call.feed(command)
    remembered = phase in {Phase.OPEN, Phase.CLOSING}
    assert (again.row == "T00") is remembered
    if remembered:
        assert again.code == first.code


def test_every_row_and_every_phase_that_it_leads_to_is_reached() -> None:
    reached = set(explore()) | reached_seldom() | {reached_by_a_pair(phase, event) for phase, event in CASES}
    missing = [(row.id, phase.name) for row in TABLE for phase in row.leads_to if (row.id, phase) not in reached]
    assert missing == []


def test_the_recorded_traces_reach_no_row_that_is_not_there() -> None:
    rows: set[str] = set()
    for trace in load_traces(DEFAULT_TRACES)[:50]:
        run = CoreRun(trace["config"])
        for recorded in trace["steps"]:
            run.run(recorded)
        rows |= run.rows
    assert rows <= {"T00", *(row.id for row in TABLE)}
    assert len(rows) > 30
