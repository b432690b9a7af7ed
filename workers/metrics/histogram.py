"""A histogram that costs the hot path a bisection and two additions.

Responsible for the buckets that all durations share. Leaves names and labels to `declared.py`. Pure. One thread writes,
another may read at any moment: it sees whole numbers, and a count that is the sum of the buckets.
"""

from __future__ import annotations

from bisect import bisect_left

# From what a barge-in should take to what nobody waits for.
BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_BOUNDS_MS = tuple(bound_s * 1000 for bound_s in BOUNDS_S)
# The bucket of each of the first whole milliseconds: what an owner measures is almost always one of them.
WHOLE_MS = 1000
BUCKETS = tuple(bisect_left(_BOUNDS_MS, ms) for ms in range(WHOLE_MS + 1))


class Histogram:
    """How long something took. `counts`: by bucket, each without those below it, the last one for all above."""

    __slots__ = ("counts", "sum_ms")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_ms = 0.0

    def note_ms(self, took_ms: float) -> None:
        """Once more. Below 0, because two clocks differ a little, is 0."""
        self.counts[bisect_left(_BOUNDS_MS, took_ms)] += 1
        self.sum_ms += max(took_ms, 0.0)

    @property
    def count(self) -> int:
        """How often."""
        return sum(self.counts)

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """Buckets as Prometheus has them, (upper bound in seconds, count up to it), and the sum in seconds."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), list(self.counts), strict=True):
            total += count
            buckets.append((bound, total))
        return buckets, self.sum_ms / 1000
