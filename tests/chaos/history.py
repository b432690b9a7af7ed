"""What the clients of a chaos run did and saw, one record a session, and what was left at the end.

Responsible for the data alone. Leaves writing it to `traffic.py` and `leftovers.py`, judging it to `checker.py`. Pure.
Units: `_s` seconds on this process's monotonic clock, from the start of the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TERMINALS = frozenset({"closed", "expired"})


@dataclass(slots=True)
class Sent:
    """A command. `deliveries`: how often its XADD was tried, so the most replies that it may have."""

    control_id: str
    op: str
    epoch: int
    at_s: float
    tokens: tuple[int, ...] = ()
    next_epoch: int | None = None
    deliveries: int = 1


@dataclass(slots=True)
class Seen:
    """An entry of the session's stream: `kind` is reply, output or lifecycle."""

    kind: str
    n: int
    at_s: float
    body: dict[str, Any]

    @property
    def epoch(self) -> int:
        """The epoch of its fence; a fence travels as a map or, seldom, not at all."""
        fence = self.body.get("fence")
        return -1 if fence is None else int(fence["epoch"])

    @property
    def terminal(self) -> bool:
        return self.kind == "lifecycle" and self.body["event"] in TERMINALS


@dataclass(slots=True)
class History:
    """One session id, which lives once. `sent` is in the order of the stream.

    `trimmed`: the listener was away while the stream of an ended session was cut short, so what it did not see proves
    nothing. `settled_epoch`: the epoch that was given all the time it needs to be spoken, after the faults.
    """

    session_id: str
    sent: dict[str, Sent] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    trimmed: bool = False
    settled_epoch: int | None = None

    def replies(self, control_id: str) -> list[Seen]:
        return [entry for entry in self.seen if entry.kind == "reply" and entry.body["control_id"] == control_id]

    @property
    def ended(self) -> bool:
        return any(entry.terminal for entry in self.seen)


@dataclass(slots=True)
class Leftovers:
    """What Redis held once everything was closed. `slots` and `queues`: what is not empty, by name.

    `overfull`: places that were seen to hold more sessions than they may (I9).
    """

    sessions: list[str] = field(default_factory=list)
    debts: list[str] = field(default_factory=list)
    cleanups: int = 0
    slots: dict[str, list[str]] = field(default_factory=dict)
    queues: dict[str, int] = field(default_factory=dict)
    dead_letters: int = 0
    overfull: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.sessions or self.debts or self.cleanups or self.slots or self.queues)


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise: which, where and how."""

    rule: str
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.rule} {self.where}: {self.what}"
