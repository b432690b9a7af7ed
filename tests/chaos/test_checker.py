"""The judge of the chaos run: good histories pass, and each broken rule is found. Words are in test_check_words.py."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.checker import GRACE_S, check
from tests.chaos.history import Leftovers, Span, Violation
from tests.chaos.losses import CALM_S, EVERYBODY, MOST_S
from tests.chaos.telling import find_waits, tell, waits_by_kind
from tests.chaos.told import SESSION, Told, broken, conversation


def test_a_good_history_passes() -> None:
    assert check([conversation().close()], Leftovers()) == []


# --- I1: the fence


def test_a_stale_output_after_the_interruption_is_found() -> None:
    told = conversation()
    told.say(3)
    assert "I1" in broken(told.close())


def test_an_output_of_an_older_turn_after_the_next_was_accepted_is_found() -> None:
    told = Told().open()
    told.append(1, 2, seq=1)
    told.say(1)
    told.append(3, seq=2, turn_seq=1, turn=(1, 0))
    assert broken(told) == {"I10"}  # only its end is missing
    told.say(2)
    assert "I1" in broken(told.close())


def test_an_output_of_the_next_turn_may_come_before_its_append_is_answered() -> None:
    told = Told().open()
    told.append(1, 2, seq=1)
    told.say(1)
    following = told.send("append", tokens=(3,), turn=(1, 0))
    told.say(3, turn=(1, 0), skip=1)
    told.reply(following, seq=2, turn_seq=1)
    assert broken(told.close()) == set()


# --- I10: lives


def test_each_life_is_counted_for_itself() -> None:
    told = conversation().close().open(2)
    told.append(7, seq=1)
    told.say(7)
    told.settled[2] = 0
    assert broken(told.close()) == set()


def test_a_second_terminal_is_found() -> None:
    told = conversation().close()
    told.event("closed", reason="client_close")
    assert broken(told) == {"I10"}


def test_a_session_without_a_terminal_is_found() -> None:
    assert broken(conversation()) == {"I10"}


def test_a_life_without_a_terminal_before_the_next_is_found() -> None:
    assert "I10" in broken(conversation().open(2).close())


def test_a_life_that_is_opened_twice_is_found() -> None:
    told = Told().open()
    told.event("opened")
    assert "I10" in broken(told.close())


def test_a_life_that_comes_back_is_found() -> None:
    assert broken(Told().open(2).close().open(1).close()) == {"D4"}


def test_a_session_that_is_closing_twice_is_found() -> None:
    told = Told().open()
    told.event("closing", reason="client_close")
    assert broken(told.close()) == {"I10"}


@pytest.mark.parametrize("what", ["output", "interrupted"])
def test_what_comes_after_the_terminal_is_found(what: str) -> None:
    told = Told().open()
    told.append(1, seq=1)
    told.close()
    if what == "output":
        told.say(1)
    else:
        told.event(what, 1)
    assert broken(told) == {"I10"}


def test_an_end_without_a_close_is_found() -> None:
    told = Told().open()
    told.event("closed", reason="client_close")
    assert broken(told) == {"I10"}


@pytest.mark.parametrize("reason", ["request_failed", "command_failed", "idle_ttl_expired"])
def test_an_end_for_a_reason_that_no_fault_gives_is_found(reason: str) -> None:
    told = Told().open()
    told.event("closed", reason=reason)
    assert broken(told) == {"I10"}


def expired_after(gone_s: float) -> Told:
    told = Told().open()
    told.detach()
    told.event("expired", reason="disconnect_grace_expired").at_s = told.sent["touch1"].at_s + gone_s
    return told


def test_a_session_expires_a_grace_after_its_detach_and_not_before() -> None:
    assert broken(expired_after(GRACE_S)) == set()
    assert broken(expired_after(GRACE_S - 0.1)) == {"I10"}


def test_a_session_that_was_resumed_does_not_expire() -> None:
    told = Told().open()
    told.detach()
    told.resume()
    told.event("expired", reason="disconnect_grace_expired").at_s += 60
    assert broken(told) == {"I10"}


def lost(**more: Any) -> tuple[Told, float]:
    told = Told().open()
    for number in range(1, 20):  # some time goes by
        told.append(number, seq=number)
    entry = told.event("closed", reason="stage_lost", **more)
    return told, entry.at_s


def test_a_loss_without_a_fault_at_a_stage_is_found() -> None:
    told, at_s = lost()
    assert broken(told, Span("kill stage", "thinker-1", at_s - 2, at_s - 1)) == set()
    assert broken(told, Span("stop stage", "thinker-1", at_s - 2)) == set()
    assert broken(told, Span("server crash", EVERYBODY, at_s - 2, at_s - 1)) == set()
    assert broken(told) == {"I10"}
    assert broken(told, Span("kill stage", "thinker-1", at_s + 1, at_s + 2)) == {"I10"}
    assert broken(told, Span("kill control", "control-1", at_s - 2, at_s - 1)) == {"I10"}
    assert broken(told, Span("script flush", EVERYBODY, at_s - 2, at_s - 1)) == {"I10"}


def test_a_loss_is_told_soon_unless_those_who_tell_were_hindered() -> None:
    told, at_s = lost()
    fault = Span("kill stage", "thinker-1", at_s - CALM_S - 4, at_s - CALM_S - 3)
    assert broken(told, fault) == {"I10"}
    hindrance = Span("stall all", "control-1", at_s - CALM_S - 3, at_s - 2)
    assert broken(told, fault, hindrance) == set()
    ages_ago = Span("kill stage", "thinker-1", at_s - MOST_S - 2, at_s - MOST_S - 1)
    hindrance = Span("stall control", "control-1", at_s - MOST_S - 2, at_s)
    assert broken(told, ages_ago, hindrance) == {"I10"}


def test_a_loss_is_judged_by_the_time_when_the_end_began() -> None:
    told = Told().open()
    began_s = told.event("closing", reason="stage_lost").at_s
    told.event("closed", reason="stage_lost").at_s += 60
    assert broken(told, Span("kill stage", "thinker-1", began_s - 2, began_s - 1)) == set()
    assert broken(told, Span("kill stage", "thinker-1", began_s + 50, began_s + 51)) == {"I10"}


def test_a_loss_that_names_its_worker_is_held_to_that_workers_faults() -> None:
    told, at_s = lost(worker_id="voice-ab")
    fault = Span("kill stage", "thinker-1", at_s - 2, at_s - 1)
    homes = {"voice-ab": "voice-3", "thinker-ab": "thinker-1"}
    assert broken(told, fault, homes=homes) == {"I10"}
    told.seen[-1].body["worker_id"] = "thinker-ab"
    assert broken(told, fault, homes=homes) == set()


# --- numbers of events


@pytest.mark.parametrize("n", [9, 3, 0], ids=["gap", "repeat", "restart"])
def test_a_wrong_n_is_found(n: int) -> None:
    told = conversation()
    told.seen[3].n = n
    assert "n" in broken(told.close())


def test_a_life_that_goes_on_counting_is_found() -> None:
    told = Told().open().close().open(2).close()
    for entry in told.seen[5:]:
        entry.n += 5
    assert broken(told) == {"n"}


def test_what_was_cut_before_it_was_read_proves_nothing_of_that_life() -> None:
    told = conversation()
    told.close()
    del told.seen[3:9]
    assert "n" in broken(told)
    told.trimmed.add(1)
    assert broken(told) == set()
    told.open(2).append(7, seq=2)
    assert broken(told.close()) == {"I5"}


# --- what is left


@pytest.mark.parametrize(
    ("left", "rule"),
    [
        (Leftovers(sessions=["s1 (closing)"]), "I3"),
        (Leftovers(debts=["s1"]), "I3"),
        (Leftovers(cleanups=1), "I3"),
        (Leftovers(slots={"voice": ["s1"]}), "I3"),
        (Leftovers(queues={"acks": 2}), "I3"),
        (Leftovers(dead_letters=1), "I4"),
        (Leftovers(overfull=["voice"]), "I9"),
    ],
    ids=["session", "debt", "cleanup", "slot", "queue", "dead letter", "overfull"],
)
def test_a_leak_is_found(left: Leftovers, rule: str) -> None:
    assert [violation.rule for violation in check([], left)] == [rule]


# --- for people


def test_the_history_is_told_a_line_an_entry_with_outputs_joined() -> None:
    lines = tell(conversation().close())
    assert any("output at 1/1/0/0 seq 0: 5..6" in line for line in lines)
    assert any("interrupted at 1/1" in line for line in lines)
    assert str(Violation("I1", SESSION, "stale")) == "I1 s1: stale"


def test_the_longest_wait_is_told_for_each_kind_of_fault() -> None:
    told = Told().open()
    told.send("touch")
    told.event("interrupted", 1)
    told.reply("touch1")
    waits = find_waits([told])
    assert [(wait.control_id, wait.seconds) for wait in waits] == [("open0", 1.0), ("touch1", 1.0)]
    alone, both = Span("kill control", "control-1", 2.5, 3.0), Span("script flush", EVERYBODY, 0.5, 0.9)
    lines = waits_by_kind(waits, [alone, both])
    assert any("kill control" in line and "1.00 s alone" in line for line in lines)
    assert any("script flush" in line and "1.00 s alone" in line and "1.00 s with" in line for line in lines)
