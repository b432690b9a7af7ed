"""The brake: when many workers of one stage fall silent at once, the fault is more likely on the way than in them.

Responsible for saying whether a silent worker's life may be ended now. Leaves noticing silence and ending lives to
`observer.py`. Pure: times are monotonic seconds that it is given. Without it a network fault of a minute would close
every session of a stage (S86); with it they wait, and go on if the workers come back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

# Losses further apart than this have nothing to do with each other.
WINDOW_S = 60.0
# A single worker may always be given up, be it the only one of its stage.
FEWEST = 2
SHARE = 3
"""More than one in so many, and the brake holds."""


@dataclass(slots=True)
class Brake:
    """One stage's. `hold_s`: how long it holds at most for a worker that stays silent."""

    hold_s: float
    _lost_s: deque[float] = field(default_factory=deque[float])

    def note_lost(self, now_s: float) -> None:
        """A life of the stage was given up."""
        self._lost_s.append(now_s)

    def holds(self, *, silent: int, present: int, now_s: float) -> bool:
        """Whether too many went at once. `silent` of the `present` workers don't move; the lost ones count as well."""
        while self._lost_s and now_s - self._lost_s[0] > WINDOW_S:
            self._lost_s.popleft()
        gone = silent + len(self._lost_s)
        return gone >= FEWEST and gone * SHARE > present + len(self._lost_s)
