"""Whether a session had a cause to be told `stage_lost`, from the record of the faults.

Responsible for the excuse alone: a loss needs a fault at the lost stage worker, or at everybody, that lasts still or
was over only so long ago that the loss could not have been noticed and told before. Leaves histories to `checker.py`.
Pure. Units: `_s` seconds since the start of the run.

An event that names the lost worker (`worker_id`) is held to the faults of that worker's own process; `homes` says
which process had which worker ids. One that doesn't is held to those of every stage worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.chaos.history import Seen, Span

EVERYBODY = "everybody"
# The heartbeat time, the brake's, and a little, with nobody in the way of those who judge and tell.
CALM_S = 4.5
# However much was in the way meanwhile.
MOST_S = 15.0
# Faults that can make a stage worker look lost, or end it, though they fall on everybody.
GRAVE = frozenset({"stall all", "server crash", "disk full", "no writes"})


@dataclass(frozen=True, slots=True)
class Losses:
    """`stages`: the names of the stage workers' processes. `homes`: worker id -> process."""

    spans: list[Span] = field(default_factory=list)
    stages: frozenset[str] = frozenset()
    homes: dict[str, str] = field(default_factory=dict)

    def is_caused(self, event: Seen) -> bool:
        """Whether a fault explains `event`, the closing or closed of a session whose reason is `stage_lost`."""
        home = self.homes.get(str(event.body.get("worker_id")))
        return any(self._explains(span, event.at_s, home) for span in self.spans)

    def _explains(self, span: Span, at_s: float, home: str | None) -> bool:
        if span.name == EVERYBODY:
            hits = span.kind in GRAVE
        else:
            hits = span.name in self.stages if home is None else span.name == home
        if not hits or at_s < span.began_s:
            return False
        if at_s <= span.ended_s:
            return True
        return at_s <= span.ended_s + MOST_S and self._calm_s(span.ended_s, at_s) <= CALM_S

    def _calm_s(self, from_s: float, to_s: float) -> float:
        """How much of that time nothing hindered the control workers, who judge and tell."""
        hindered = [
            (max(from_s, span.began_s), min(to_s, span.ended_s + 1.0))
            for span in self.spans
            if span.name not in self.stages and span.began_s < to_s and span.ended_s + 1.0 > from_s
        ]
        calm_s, at_s = 0.0, from_s
        for began_s, ended_s in sorted(hindered):
            calm_s += max(0.0, began_s - at_s)
            at_s = max(at_s, ended_s)
        return calm_s + max(0.0, to_s - at_s)
