"""The judge of appends and words: numbers, order, turns, and that everything accepted is said in the end."""

from __future__ import annotations

import pytest

from tests.chaos.check_words import runs
from tests.chaos.told import Told, broken


def test_a_doubled_seq_is_found() -> None:
    told = Told().open()
    told.append(1, seq=1)
    told.append(2, seq=1, turn_seq=2)
    assert broken(told.close()) == {"I5"}


def test_a_gap_in_seq_is_found() -> None:
    told = Told().open()
    told.append(1, seq=1)
    told.append(2, seq=3, turn_seq=2)
    assert broken(told.close()) == {"I5"}


def test_a_turn_that_counts_wrongly_is_found() -> None:
    told = Told().open()
    told.append(1, seq=1)
    told.append(2, seq=2, turn_seq=1)
    assert broken(told.close()) == {"I5"}


def test_appends_out_of_order_are_found() -> None:
    told = Told().open()
    first, second = told.send("append", tokens=(1,)), told.send("append", tokens=(2,))
    told.reply(second, seq=1, turn_seq=1)
    told.reply(first, seq=2, turn_seq=2)
    assert broken(told.close()) == {"I5"}


@pytest.mark.parametrize("said", [(1, 1, 2), (2,), (1, 3), (1, 2, 9)], ids=["repeated", "lost", "skipped", "foreign"])
def test_a_wrong_word_is_found(said: tuple[int, ...]) -> None:
    told = Told().open()
    told.append(1, 2, 3, seq=1)
    told.say(*said)
    assert broken(told.close()) == {"I5"}


def test_a_word_of_a_former_life_is_found() -> None:
    told = Told().open()
    told.append(1, seq=1)
    told.close().open(2)
    told.append(2, seq=1)
    told.say(1)
    assert broken(told.close()) == {"I5"}


def test_a_repeated_output_number_is_found() -> None:
    told = Told().open()
    told.append(1, 2, seq=1)
    told.say(1, 2)
    told.seen[-1].body["seq"] = 0
    assert broken(told.close()) == {"I5"}


def test_outputs_that_do_not_begin_with_number_0_are_found() -> None:
    told = Told().open()
    told.append(1, 2, seq=1)
    told.say(1, 2, skip=1)
    assert broken(told.close()) == {"I5"}


def test_words_of_a_refused_append_may_come_last_but_not_before_others() -> None:
    told = Told().open()
    told.append(1, seq=1)
    unsure = told.send("append", tokens=(2, 3))
    told.say(1, 2)
    told.event("interrupted", 1)
    told.reply(unsure, "stale_fence")
    assert broken(told.close()) == set()
    told = Told().open()
    unsure = told.send("append", tokens=(2, 3))
    told.say(2)
    told.append(1, seq=1)
    told.say(1)
    told.event("interrupted", 1)
    told.reply(unsure, "stale_fence")
    assert broken(told.close()) == {"I5"}


def test_words_that_never_come_are_found() -> None:
    told = Told().open()
    told.append(1, 2, seq=1)
    told.say(1)
    told.settled[1] = 0
    assert broken(told.close()) == {"liveness"}


# --- turns


def cut_off(*, skip: int) -> Told:
    """A turn whose last two words were cut off by the next one."""
    told = Told().open()
    told.append(1, 2, 3, seq=1)
    told.say(1)
    told.append(4, 5, seq=2, turn_seq=1, turn=(1, 0))
    told.say(4, 5, turn=(1, 0), skip=skip)
    told.settled[1] = 0
    return told.close()


def test_a_turn_may_be_cut_off_by_the_next_with_the_numbers_of_what_was_dropped() -> None:
    assert broken(cut_off(skip=0)) == broken(cut_off(skip=2)) == set()
    assert broken(cut_off(skip=3)) == {"I5"}


def test_a_turn_that_was_never_heard_leaves_its_numbers() -> None:
    told = Told().open()
    told.append(1, 2, seq=1, final=True)
    told.append(3, seq=2, turn_seq=1, turn=(0, 1))
    told.say(3, turn=(0, 1), skip=3)
    assert broken(told.close()) == set()


def test_a_word_of_one_turn_in_another_is_found() -> None:
    told = Told().open()
    told.append(1, 2, seq=1)
    told.append(3, seq=2, turn_seq=1, turn=(1, 0))
    told.say(2, turn=(1, 0))
    assert broken(told.close()) == {"I5"}


def test_mixed_turns_are_found() -> None:
    told = Told().open()
    told.append(1, 2, seq=1)
    following = told.send("append", tokens=(3, 4), turn=(1, 0))
    told.say(1)
    told.say(3, turn=(1, 0))
    told.say(2)
    told.say(4, turn=(1, 0))
    told.reply(following, seq=2, turn_seq=1)
    assert "I5" in broken(told.close())


def test_the_last_turn_has_to_be_said_unless_an_update_has_moved_on() -> None:
    told = Told().open()
    told.append(1, 2, seq=1)
    told.say(1, 2)
    told.append(3, seq=2, turn_seq=1, turn=(1, 0))
    told.settled[1] = 0
    assert broken(told) == {"I10", "liveness"}
    told.reply(told.send("signal", event="session.update", turn=(2, 0)))
    assert broken(told.close()) == set()


def ended(*, final: bool = True, missing: int = 0, again: bool = False) -> Told:
    told = Told().open()
    told.append(1, 2, seq=1, final=final)
    told.say(*(1, 2)[: 2 - missing], end=True)
    if again:
        told.seen[-2].body["turn_end"] = True
    return told.close()


def test_the_end_of_a_turn_is_said_once_after_all_of_it_and_only_if_it_was_ended() -> None:
    assert broken(ended()) == set()
    assert broken(ended(final=False)) == {"I5"}
    assert broken(ended(missing=1)) == {"I5"}
    assert broken(ended(again=True)) == {"I5"}


def test_an_end_of_a_turn_that_is_never_said_is_found() -> None:
    told = Told().open()
    told.append(1, seq=1, final=True)
    told.say(1)
    told.settled[1] = 0
    assert broken(told.close()) == {"liveness"}


def test_numbers_are_told_with_their_gaps() -> None:
    assert runs([1, 2, 3, 5, 7, 8]) == "1..3 5 7..8"
    assert runs([]) == "nothing"
