"""What the clients of a chaos run did and saw, one record a session id, and what was left at the end.

Responsible for the data alone. Leaves writing it to `traffic.py`, `session.py` and `leftovers.py`, judging it to
`checker.py`. Pure. Units: `_s` seconds on this process's monotonic clock, from the start of the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TERMINALS = frozenset({"closed", "expired"})

# `(turn_id, response_seq)`: within an epoch neither ever falls.
Turn = tuple[int, int]


@dataclass(slots=True)
class Sent:
    """A command, with what of it the checker has to know.

    `deliveries`: how often its XADD was tried, so the most replies that it may have. `event`: of a signal. `final`: of
    an append. `generation`: the lease generation that it expects. `activity`: of a touch.
    """

    control_id: str
    op: str
    epoch: int
    at_s: float
    tokens: tuple[int, ...] = ()
    next_epoch: int | None = None
    deliveries: int = 1
    incarnation: int = 1
    turn: Turn = (0, 0)
    event: str = "barge_in"
    activity: str = "heartbeat"
    final: bool = False
    generation: int | None = None

    @property
    def cancels(self) -> bool:
        return self.op == "signal" and self.next_epoch is not None


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
    def incarnation(self) -> int:
        """The life that its fence names. A reply may be said in a later life than its command's."""
        fence = self.body.get("fence")
        return -1 if fence is None else int(fence["incarnation"])

    @property
    def turn(self) -> Turn:
        fence = self.body["fence"]
        return int(fence["turn_id"]), int(fence["response_seq"])

    @property
    def terminal(self) -> bool:
        return self.kind == "lifecycle" and self.body["event"] in TERMINALS

    def is_event(self, name: str) -> bool:
        return self.kind == "lifecycle" and self.body["event"] == name


@dataclass(slots=True)
class History:
    """One session id and all its lives. `sent` is in the order of the stream.

    `trimmed`: the lives of which the listener missed a part, because it was away while the stream of an ended life was
    cut short; what it did not see of them proves nothing. `settled`: by life, the epoch that was given all the time it
    needs to be spoken, after the last input.
    """

    session_id: str
    sent: dict[str, Sent] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    trimmed: set[int] = field(default_factory=set)
    settled: dict[int, int] = field(default_factory=dict)

    def replies(self, control_id: str) -> list[Seen]:
        return [entry for entry in self.seen if entry.kind == "reply" and entry.body["control_id"] == control_id]

    def find_life(self) -> int | None:
        """The life that is open or closing as far as was seen, or None."""
        for entry in reversed(self.seen):
            if entry.kind != "reply":
                return None if entry.terminal else entry.incarnation
        return None

    def has_ended(self, incarnation: int) -> bool:
        return any(entry.terminal and entry.incarnation == incarnation for entry in reversed(self.seen))


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


@dataclass(slots=True)
class Span:
    """A fault: its kind, whom it fell on (`everybody` if nobody alone), and from when to when. Not over: no end."""

    kind: str
    name: str
    began_s: float
    ended_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise: which, where and how."""

    rule: str
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.rule} {self.where}: {self.what}"
