"""Measurements that fade."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stages.gauges import RecentPeak


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
