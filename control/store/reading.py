"""How much one read may bring: a bound in bytes for a command that only knows a bound in entries.

Responsible for XREAD's COUNT, which is for each stream: with many streams and payloads of a megabyte, a fixed one is
either slow or unbounded. Leaves reading to `workers/owner.py` and `queues.py`. Pure.

The count begins small, doubles while streams come back full (a backlog) and what came was within the budget, and
shrinks again once nothing waits. So only a backlog of small entries that turns into one of large ones can bring more
than the budget, once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FIRST = 4
BUDGET_BYTES = 16 * 1024 * 1024


class ReadSize:
    """`count`: for the next read, of each stream; 1 to `most`."""

    __slots__ = ("_budget_bytes", "_first", "_most", "count")

    def __init__(self, most: int, budget_bytes: int = BUDGET_BYTES) -> None:
        self._most = most
        self._first = min(FIRST, most)
        self._budget_bytes = budget_bytes
        self.count = self._first

    def note(self, streams: Iterable[Sequence[Any]]) -> None:
        """What the read with this count has brought: each stream's entries as the client gives them."""
        some = list(streams)
        if any(len(entries) >= self.count for entries in some):
            size_bytes = sum(len(value) for entries in some for _, fields in entries for value in fields or ())
            if size_bytes > self._budget_bytes:
                self.count = max(1, self.count * self._budget_bytes // size_bytes)
            elif 2 * size_bytes <= self._budget_bytes:
                self.count = min(self._most, 2 * self.count)
        elif self.count > self._first:
            self.count = max(self._first, self.count // 2)
        elif self.count < self._first:
            self.count += 1
