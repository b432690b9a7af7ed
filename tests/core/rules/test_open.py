"""Opening: what is checked, where it is placed, and how every slot that was asked for comes back."""

from __future__ import annotations

from typing import Any

import pytest

from control.core import commands as c
from control.core import effects as e
from control.core.requests import RequestPhase
from control.core.rules.open import INPUT_MODES
from control.core.scene import ADMISSION
from control.core.session import TOMBSTONE_MS, Debt, Phase
from tests.core.call import BAD_CONFIG, START_MS, Call, at, opened, settings, talking, without_policy


def dialled(**changes: Any) -> Call:
    """A call whose open waits for its slots."""
    call = Call(settings(**changes))
    call.open()
    assert call.phase is Phase.OPENING
    return call


def holders_and_debts(call: Call) -> tuple[set[str], set[str]]:
    session = call.open_session
    return set(session.holders), {debt.holder for debt in session.debts}


# --- as it should go -------------------------------------------------------------------------------------------


def test_an_open_takes_a_slot_at_every_stage_before_it_is_answered() -> None:
    call = Call()
    word = call.open()
    assert word.decision.effects == (e.Place(1, ("ear", "mouth")),)
    word = call.place()
    assert word.events == ["opened"]
    assert word.reply.detail.request_id == "duplex-s.Y2FsbC0x.i.1.e.0.r.stage0"
    assert (call.fence, call.requests) == (at(0), {0: RequestPhase.RESERVED})


def test_the_limit_of_sessions_is_one_more_holder() -> None:
    call = dialled(limit_sessions=True)
    assert call.open_session.holders == ("ear", "mouth", ADMISSION)


def test_without_a_policy_a_session_opens_at_once_and_needs_no_stage() -> None:
    call = Call(without_policy())
    word = call.open(input_modes=[])
    assert (word.events, word.reply.detail.request_id) == (["opened"], None)
    assert not word.reply.detail.scheduler_request_context
    assert call.requests == {}


def test_an_open_may_begin_at_any_fence() -> None:
    call = Call()
    call.open(at(4, 3, 2, incarnation=7))
    call.place()
    assert call.fence == at(4, 3, 2, incarnation=7)
    assert call.open_session.floor == 4


def test_input_modes_are_kept_in_order_without_repeats_and_default_to_whole_turns() -> None:
    call = Call()
    call.open(input_modes=["append_tokens", "turn_commit_only", "append_tokens"])
    assert call.open_session.input_modes == ("append_tokens", "turn_commit_only")
    call = Call()
    call.open(input_modes=[])
    assert call.open_session.input_modes == ("turn_commit_only",)


def test_commands_that_come_while_the_session_opens_wait_and_are_done_in_order() -> None:
    call = dialled()
    assert call.append().waits
    assert call.update(session_config={"voice": "b"}).waits
    assert call.append().waits
    call.place()
    assert call.open_session.append is not None
    call.accept()
    assert call.open_session.config_generation == 1
    assert call.accept().reply.detail.seq == 2
    assert call.waiting == []


# --- D3: checked before anything changes -------------------------------------------------------------------------

BAD_OPENS: list[tuple[dict[str, Any], str, str]] = [
    ({"session_mode": "mime"}, "invalid_argument", "$.session_mode: 'mime' is none of duplex, turn"),
    (
        {"input_modes": ["append_tokens", "telepathy"]},
        "invalid_capability",
        "$.capabilities.input_modes[1]: 'telepathy'",
    ),
    ({"input_modes": [["append_tokens"]]}, "invalid_capability", "$.capabilities.input_modes[0]: ['append_tokens']"),
    ({"input_modes": [None]}, "invalid_capability", "$.capabilities.input_modes[0]: None"),
    ({"runtime_config": BAD_CONFIG}, "invalid_argument", "$.runtime_config: temperature is a number"),
]


@pytest.mark.parametrize(("fields", "code", "message"), BAD_OPENS)
def test_d03_a_bad_open_is_refused_before_any_slot_is_asked_for(
    fields: dict[str, Any], code: str, message: str
) -> None:
    call = Call()
    word = call.open(**fields)
    assert word.code == code
    assert word.reply.message.startswith(message)
    assert (call.session, word.all(e.Place)) == (None, [])


def test_d03_without_a_policy_only_whole_turns_are_possible() -> None:
    call = Call(without_policy())
    word = call.open(input_modes=["append_tokens"])
    assert word.code == "failed_precondition"
    assert call.session is None


@pytest.mark.parametrize("mode", INPUT_MODES)
def test_every_input_mode_of_the_wire_is_one(mode: str) -> None:
    call = Call()
    assert call.open(input_modes=[mode]).replies == []


# --- S1 to S5 --------------------------------------------------------------------------------------------------


def test_s01_a_close_while_placement_is_under_way_gives_every_slot_back_and_leaves_no_ghost() -> None:
    call = dialled(limit_sessions=True)
    (opening,) = (c for c in [call.open_session.opening] if c is not None)
    word = call.close()
    assert [(reply.op, reply.code) for reply in word.replies] == [("open", "failed_precondition"), ("close", None)]
    assert word.events == []  # it never opened, so it doesn't end
    assert word.all(e.Pay) == [e.Pay(call.open_session.debts)]
    assert holders_and_debts(call) == (set(), {"ear", "mouth", ADMISSION})
    assert call.feed(c.Placed(1, opening.attempt)).changed_nothing
    call.pay_debts()
    assert call.open_session.debts == ()
    call.wait_ms(TOMBSTONE_MS)
    assert call.session is None


def test_s01_a_close_for_another_life_leaves_the_opening_alone() -> None:
    call = dialled()
    assert call.close(at(0, incarnation=2)).code == "stale_fence"
    assert call.phase is Phase.OPENING


def test_s02_a_slot_whose_rollback_fails_stays_owed_and_is_asked_for_again() -> None:
    call = dialled()
    call.route = None
    word = call.refuse_placement("mouth")
    assert word.code == "resource_exhausted"
    assert {debt.holder for debt in call.open_session.debts} == {"ear", "mouth"}
    for _ in range(5):  # nobody answers
        (word,) = call.wait_ms(2_000)
        (pay,) = word.all(e.Pay)
        assert {debt.holder for debt in pay.debts} == {"ear", "mouth"}
    assert call.phase is Phase.VACANT


def test_s02_another_open_of_the_id_waits_until_the_slot_is_back() -> None:
    call = dialled()
    call.route = None
    call.refuse_placement("mouth")
    call.route = ("ear", "mouth")
    assert call.open().waits
    call.feed(c.DebtPaid(1, "ear"))
    assert call.phase is Phase.VACANT
    call.feed(c.DebtPaid(1, "mouth"))
    assert call.phase is Phase.OPENING
    assert call.place().reply.ok


def test_s03_the_one_that_finds_no_slot_is_refused_and_may_try_again() -> None:
    late = dialled(limit_sessions=True)
    late.route = None
    word = late.refuse_placement("ear")
    assert (word.code, word.reply.retryable, word.events) == ("resource_exhausted", True, [])
    full = dialled(limit_sessions=True)
    word = full.refuse_placement(ADMISSION)
    assert (word.code, word.reply.retryable) == ("resource_exhausted", True)
    assert "limit of sessions" in word.reply.message
    none = Call(route=None)
    word = none.open()
    assert (word.code, word.reply.retryable, none.session) == ("resource_exhausted", True, None)


@pytest.mark.parametrize("phase", ["opening", "open"])
def test_s04_a_second_open_is_refused_and_the_first_keeps_its_slots(phase: str) -> None:
    call = dialled()
    if phase == "open":
        call.place()
    word = call.open(at(0, incarnation=9))
    assert (word.code, word.changed_nothing) == ("invalid_argument", True)
    assert f"({phase})" in word.reply.message
    assert holders_and_debts(call) == ({"ear", "mouth"}, set())


def test_s05_a_reopening_is_refused_until_the_close_is_confirmed_and_waits_for_its_slots() -> None:
    call = talking()
    call.close()
    call.fail_cleanup("ear")
    word = call.open(at(0, incarnation=2))
    assert (word.code, word.changed_nothing) == ("invalid_argument", True)
    assert "(closing)" in word.reply.message
    call.clean()
    assert call.open(at(0, incarnation=2)).waits
    call.pay_debts()
    call.place()
    assert call.fence == at(0, incarnation=2)


# --- D4: the same id again ---------------------------------------------------------------------------------------


def test_d04_an_id_is_opened_again_only_under_a_higher_incarnation() -> None:
    call = opened()
    call.close()
    call.pay_debts()
    for incarnation in (0, 1):
        word = call.open(at(0, incarnation=incarnation))
        assert (word.code, word.changed_nothing) == ("stale_fence", True)
        assert "incarnation 1" in word.reply.message
    call.open(at(0, incarnation=2))
    assert call.place().reply.ok


def test_d04_the_last_life_is_remembered_for_an_hour() -> None:
    call = opened()
    call.close()
    call.pay_debts()
    call.wait_ms(TOMBSTONE_MS - 1)
    assert call.open(at(0)).code == "stale_fence"
    call.wait_ms(1)
    assert call.session is None
    call.open(at(0))
    assert call.place().reply.ok


def test_d04_an_open_that_found_no_slot_has_not_lived() -> None:
    call = dialled()
    call.route = None
    call.refuse_placement("ear")
    call.pay_debts()
    assert call.session is None
    call.route = ("ear", "mouth")
    call.open(at(0))
    assert call.place().reply.ok


def test_d04_a_failed_reopening_keeps_the_memory_of_the_last_life() -> None:
    call = opened()
    call.close()
    call.pay_debts()
    call.open(at(0, incarnation=2))
    call.route = None
    call.refuse_placement("ear")
    call.pay_debts()
    assert call.open(at(0)).code == "stale_fence"


def test_words_for_a_former_life_change_nothing_in_the_next() -> None:
    call = talking()
    call.close()
    call.clean()
    call.pay_debts()
    call.open(at(0, incarnation=2))
    call.place()
    call.append()
    number = call.append_number
    for word in (
        c.Accepted(1, number),
        c.Rejected(1, number, "internal", "late"),
        c.Cleaned(1, number, "ear"),
        c.RequestFailed(1, 0, "ear", "late"),
        c.DebtPaid(1, "ear"),
        c.Placed(1, 1),
    ):
        assert call.feed(word).changed_nothing


# --- placement that doesn't go at once ---------------------------------------------------------------------------


def test_a_placement_that_nobody_answers_is_asked_for_again() -> None:
    call = dialled()
    call.wait_ms(1_999)
    (word,) = call.wait_ms(1)
    assert word.all(e.Place) == [e.Place(1, ("ear", "mouth"))]
    assert call.find_due_ms() == START_MS + 4_000


def test_a_refused_placement_tries_another_route_and_owes_back_what_it_leaves() -> None:
    call = dialled()
    call.route = ("ear2", "mouth")
    word = call.refuse_placement("ear")
    assert word.decision.effects == (
        e.Pay((Debt("ear", 1, call.now_ms + 2_000),)),
        e.Place(2, ("ear2", "mouth")),
    )
    assert holders_and_debts(call) == ({"ear2", "mouth"}, {"ear"})
    assert call.feed(c.Placed(1, 1)).changed_nothing  # of the try before
    assert call.place().reply.ok


def test_a_slot_that_is_owed_is_asked_for_whatever_the_session_does_meanwhile() -> None:
    call = dialled()
    call.route = ("ear2", "mouth")
    call.refuse_placement("ear")
    (word,) = call.wait_ms(2_000)
    assert [debt.holder for pay in word.all(e.Pay) for debt in pay.debts] == ["ear"]
    call.place()
    (word,) = call.wait_ms(2_000)
    assert [debt.holder for pay in word.all(e.Pay) for debt in pay.debts] == ["ear"]
    call.append()
    call.accept()
    call.close()
    words = call.wait_ms(2_000)
    assert [debt.holder for word in words for pay in word.all(e.Pay) for debt in pay.debts] == ["ear"]
    call.feed(c.DebtPaid(1, "ear"))
    assert call.open_session.debts == ()


def test_a_holder_that_is_chosen_again_holds_and_no_longer_owes() -> None:
    call = dialled()
    call.route = ("ear2", "mouth")
    call.refuse_placement("ear")
    call.route = ("ear", "mouth")
    word = call.refuse_placement("ear2")
    assert holders_and_debts(call) == ({"ear", "mouth"}, {"ear2"})
    assert [debt.holder for pay in word.all(e.Pay) for debt in pay.debts] == ["ear2"]
    call.place()
    assert [debt.holder for word in call.wait_ms(10_000) for pay in word.all(e.Pay) for debt in pay.debts] == [
        "ear2"
    ] * 5


def test_after_three_tries_an_open_gives_up() -> None:
    call = dialled()
    assert call.refuse_placement("ear").replies == []
    assert call.refuse_placement("ear").replies == []
    assert call.refuse_placement("ear").code == "resource_exhausted"
    assert holders_and_debts(call) == (set(), {"ear", "mouth"})


def test_an_opening_whose_worker_dies_is_placed_elsewhere() -> None:
    call = dialled()
    call.route = ("ear", "mouth2")
    assert call.feed(c.StageLost("nose")).changed_nothing
    word = call.feed(c.StageLost("mouth"))
    assert word.all(e.Place) == [e.Place(2, ("ear", "mouth2"))]
    assert holders_and_debts(call) == ({"ear", "mouth2"}, {"mouth"})


def test_an_open_that_cannot_be_carried_out_is_answered_internal_and_owes_everything_back() -> None:
    call = dialled()
    word = call.feed(c.Poisoned("it crashed three times"))
    assert (word.code, word.events) == ("internal", [])
    assert holders_and_debts(call) == (set(), {"ear", "mouth"})


# --- I9, S14 ---------------------------------------------------------------------------------------------------


def test_a_session_holds_its_slots_until_its_cleanup_is_confirmed() -> None:
    call = talking(limit_sessions=True)
    call.close()
    assert holders_and_debts(call) == ({"ear", "mouth", ADMISSION}, set())
    call.clean("ear")
    assert holders_and_debts(call) == ({"ear", "mouth", ADMISSION}, set())
    (word,) = call.clean("mouth")
    assert {debt.holder for pay in word.all(e.Pay) for debt in pay.debts} == {"ear", "mouth", ADMISSION}
    assert holders_and_debts(call) == (set(), {"ear", "mouth", ADMISSION})


def test_s14_a_flood_of_ids_leaves_nothing_behind() -> None:
    for n in range(200):
        call = Call(session_id=f"flood-{n}", route=None)
        for word in (call.open(), call.append(), call.touch(), call.cancel(at(1)), call.close(), call.update()):
            assert len(word.decision.effects) == 1  # one reply each, and no more
        assert (call.session, len(call.answers)) == (None, 0)


def test_s14_a_tombstone_goes_after_its_hour_and_not_before_its_slots_are_back() -> None:
    call = opened()
    call.close()
    call.wait_ms(TOMBSTONE_MS + 10_000)
    assert call.open_session.debts != ()
    call.pay_debts()
    call.wait_ms(1)
    assert call.session is None
