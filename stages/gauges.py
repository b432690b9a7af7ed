"""Small measurements that the engines report with their load.

Responsible for figures that must fade by themselves when nothing happens. Leaves to the engines what is
measured. Pure: the time is an argument. Times are seconds of a monotonic clock.
"""

from collections import deque


class RecentPeak:
    """The highest of the values noted within the last `window_s`; 0 when there was none."""

    def __init__(self, window_s: float = 1.0) -> None:
        self._window_s = window_s
        # Falling values only: whatever is older and lower than a new value can never be the peak again.
        self._falling: deque[tuple[float, float]] = deque()

    def note(self, now_s: float, value: float) -> None:
        """Remember `value`. Constant time on average, and at most one entry for each distinct fall."""
        while self._falling and self._falling[-1][1] <= value:
            self._falling.pop()
        self._falling.append((now_s, value))
        self._forget(now_s)

    def read(self, now_s: float) -> float:
        """The peak as of `now_s`."""
        self._forget(now_s)
        return self._falling[0][1] if self._falling else 0.0

    def _forget(self, now_s: float) -> None:
        while self._falling and self._falling[0][0] < now_s - self._window_s:
            self._falling.popleft()
