"""Which stage workers there are, and the choice of a route for a session that opens.

Responsible for the choice: live, a free slot, then the least loaded. Leaves the slots themselves to
`control/store/slots.py`: a snapshot may be old, and only the slot decides. Pure.

A worker's load is a second old, so what it was sent since counts as well: else all opens of a second would go to one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Candidate:
    """A stage worker as last seen, with the sessions that this owner has sent it since.

    `utilisation`, `waiting`, `accepts`: as its engine says (`stages.engine.Load`).
    """

    worker_id: str
    capacity: int
    used: int
    utilisation: float = 0.0
    waiting: int = 0
    accepts: bool = True
    sent: int = 0

    @property
    def is_free(self) -> bool:
        """Whether another session may be placed there."""
        return self.accepts and self.used < self.capacity

    @property
    def load(self) -> tuple[float, int, int, str]:
        """The lower, the sooner it is chosen: how full it is by whatever is fullest, then by input that waits."""
        share = 1 / self.capacity
        fullness = max(self.used * share, self.utilisation + self.sent * share)
        return fullness, self.waiting, self.used, self.worker_id


class Directory:
    """The live workers of each stage."""

    def __init__(self, stage_count: int) -> None:
        self._stages: list[list[Candidate]] = [[] for _ in range(stage_count)]

    def replace(self, stages: list[list[Candidate]]) -> None:
        """A new snapshot, one list a stage."""
        self._stages = stages

    def choose_route(self) -> tuple[str, ...] | None:
        """One worker a stage, each then one session fuller here; None if a stage has no free slot."""
        chosen: list[Candidate] = []
        for candidates in self._stages:
            free = [c for c in candidates if c.is_free]
            if not free:
                return None
            chosen.append(min(free, key=lambda c: c.load))
        for candidate in chosen:
            candidate.used += 1
            candidate.sent += 1
        return tuple(c.worker_id for c in chosen)

    @property
    def has_room(self) -> bool:
        """Whether every stage has a free slot, as far as is known."""
        return all(any(c.is_free for c in candidates) for candidates in self._stages)

    def note_freed(self, worker_id: str) -> None:
        """A session has given its slot back."""
        for candidates in self._stages:
            for candidate in candidates:
                if candidate.worker_id == worker_id and candidate.used > 0:
                    candidate.used -= 1

    def note_full(self, worker_id: str) -> None:
        """A worker has refused a slot: don't choose it again before the next snapshot."""
        for candidates in self._stages:
            for candidate in candidates:
                if candidate.worker_id == worker_id:
                    candidate.used = candidate.capacity
