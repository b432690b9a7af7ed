"""Measurements that fade."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stages.gauges import Budget, RecentPeak


@given(
    notes=st.lists(st.tuples(st.floats(0, 0.7), st.floats(0, 100)), max_size=40),
    after_s=st.floats(0, 3),
)
def test_a_peak_is_the_highest_value_of_the_window(notes: list[tuple[float, float]], after_s: float) -> None:
    peak, now_s, noted = RecentPeak(window_s=1.0), 0.0, []
    for gap_s, value in notes:
        now_s += gap_s
        peak.note(now_s, value)
        noted.append((now_s, value))
    now_s += after_s
    assert peak.read(now_s) == max((value for at_s, value in noted if at_s >= now_s - 1.0), default=0.0)


def test_without_a_budget_a_forward_takes_as_many_rows_as_there_may_be() -> None:
    budget = Budget(None, 64)
    assert not budget.note(64, 10_000)
    assert budget.rows == 64


def test_a_budget_finds_what_fits_and_follows_when_that_changes() -> None:
    budget, row_ms, taken = Budget(10, 256), 1.0, []
    for _ in range(100):
        taken.append(budget.rows)
        budget.note(budget.rows, 2 + row_ms * budget.rows)
    assert taken[0] == 256
    assert all(2 <= rows <= 8 for rows in taken[-30:]), taken[-30:]
    for _ in range(100):
        budget.note(budget.rows, 2 + 0.01 * budget.rows)
    assert budget.rows == 256, "the module has become quicker"


def test_a_forward_that_was_not_full_says_nothing_about_more_rows() -> None:
    budget = Budget(10, 256)
    budget.note(256, 1_000)
    rows = budget.rows
    for _ in range(20):
        budget.note(1, 0.1)
    assert budget.rows == rows


def test_one_row_is_the_least_even_if_it_takes_too_long() -> None:
    budget = Budget(1, 4)
    missed = [budget.note(budget.rows, 50) for _ in range(5)]
    assert missed == [True] * 5
    assert budget.rows == 1
