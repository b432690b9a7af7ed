"""What a control worker has done so far, for health checks, metrics and tests. Pure.

Everything has its place from the start, so that another thread can read while the loop counts. Times are the server's
milliseconds. An owner counts what a commit has decided only once the commit is confirmed (`Tally`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from control.core.cleanup import CleanupKind
from control.core.rejections import CODES
from workers.metrics import tally as t
from workers.metrics.histogram import BUCKETS, WHOLE_MS, Histogram

if TYPE_CHECKING:
    from workers.metrics.tally import Tally

OPS = ("open", "append", "signal", "close", "touch", "resume", "other")
OK, OTHER = "ok", "other"
OUTCOMES = (OK, *sorted(CODES), OTHER)
KINDS = tuple(kind.value for kind in CleanupKind)
REFUSED, TIMED_OUT = FAILURES = ("refused", "timeout")
# What of a control worker speaks Redis by itself.
PARTS = ("owner", "ownership", "observer", "slots", "metrics")


@dataclass(slots=True)
class CleanupStats:
    """Cleanups of one kind. `joined`: became part of the one that ends their session."""

    begun: int = 0
    attempts: int = 0
    confirmed: int = 0
    joined: int = 0
    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAILURES, 0))


@dataclass(slots=True)
class ControlStats:
    """Counters since the start."""

    commands: int = 0
    acks: int = 0
    orders: int = 0
    commits: int = 0
    refused_commits: int = 0
    dead_letters: int = 0
    missing_entries: int = 0
    reconnects: int = 0
    answered: dict[str, dict[str, int]] = field(default_factory=lambda: {op: dict.fromkeys(OUTCOMES, 0) for op in OPS})
    latency: dict[str, Histogram] = field(default_factory=lambda: {op: Histogram() for op in OPS})
    fenced: Histogram = field(default_factory=Histogram)
    let_go: Histogram = field(default_factory=Histogram)
    cleanups: dict[str, CleanupStats] = field(default_factory=lambda: {kind: CleanupStats() for kind in KINDS})
    redis_errors: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    redis_lost: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))

    def note_trouble(self, part: str, *, lost: bool) -> None:
        """Redis has answered with an error, or the connection is lost."""
        counts = self.redis_lost if lost else self.redis_errors
        counts[part] += 1

    def count(self, tally: Tally, now_ms: int) -> None:
        """A commit is confirmed; it was written at `now_ms`."""
        answered, latency = self.answered, self.latency
        for reply, entered_ms in tally.answered:
            op = reply.op
            outcomes = answered.get(op)
            if outcomes is None:
                # A body that is no command may call itself anything.
                op, outcomes = OTHER, answered[OTHER]
            outcomes[OK if reply.ok else reply.code if reply.code in outcomes else OTHER] += 1
            if entered_ms is not None:
                histogram, took_ms = latency[op], now_ms - entered_ms
                if 0 <= took_ms <= WHOLE_MS:
                    # As `note_ms`, without its call: this is done for each command.
                    histogram.counts[BUCKETS[took_ms]] += 1
                    histogram.sum_ms += took_ms
                else:
                    histogram.note_ms(took_ms)
        for what, kind, at_ms in tally.notes:
            self._count(what, kind, now_ms - at_ms)

    def _count(self, what: int, kind: str, took_ms: int) -> None:
        if what == t.FENCED:
            self.fenced.note_ms(took_ms)
            return
        if what == t.LET_GO:
            self.let_go.note_ms(took_ms)
            return
        counts = self.cleanups[kind]
        if what == t.BEGUN:
            counts.begun += 1
        elif what == t.ASKED:
            counts.attempts += 1
        elif what == t.CONFIRMED:
            counts.confirmed += 1
        elif what == t.JOINED:
            counts.joined += 1
        else:
            counts.failures[TIMED_OUT if what == t.TIMED_OUT else REFUSED] += 1
