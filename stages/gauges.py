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


class Budget:
    """How many rows a forward may take to stay within a time. `rows`: for the next one, 1 to `most`.

    A forward costs something whatever its size, and something a row. Which is how much is not known, so the bound
    follows what was seen: a forward over the budget halves what it took, one that was well within it, and full, adds a
    quarter.
    """

    def __init__(self, budget_ms: float | None, most: int) -> None:
        self._budget_ms = budget_ms
        self._most = most
        self.rows = most

    def note(self, rows: int, took_ms: float) -> bool:
        """A forward of `rows` rows took so long. True: longer than it may."""
        if self._budget_ms is None:
            return False
        if took_ms > self._budget_ms:
            self.rows = max(1, min(self.rows, rows // 2))
            return True
        if rows >= self.rows and took_ms < 0.75 * self._budget_ms:
            self.rows = min(self._most, self.rows + max(1, self.rows // 4))
        return False
