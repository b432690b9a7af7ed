"""What producers sent and listeners saw in one run, one account a session id.

Responsible for the data alone; `traffic.py` fills it, `histories.py` judges it. Pure. Times: virtual seconds.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

TERMINALS = frozenset({"closed", "expired"})


@dataclass(slots=True)
class Sent:
    """A command. `deliveries`: how often its XADD was tried. `fence`: incarnation, epoch, turn, response.

    `bad`: it is refused for what it is. `given_up`: its producer sends it no more.
    """

    control_id: str
    op: str
    fence: tuple[int, int, int, int]
    at_s: float
    tokens: tuple[int, ...] = ()
    next_epoch: int | None = None
    expected: int | None = None
    deliveries: int = 0
    bad: bool = False
    given_up: bool = False
    answered_s: float | None = None


@dataclass(slots=True)
class Seen:
    """An entry of the session's stream. `at_ms`: when it was written, by the server's clock."""

    kind: str
    n: int
    at_s: float
    at_ms: int
    body: dict[str, Any]

    @property
    def epoch(self) -> int:
        fence = self.body.get("fence")
        return -1 if fence is None else int(fence["epoch"])

    @property
    def incarnation(self) -> int:
        fence = self.body.get("fence")
        return -1 if fence is None else int(fence["incarnation"])


@dataclass(slots=True)
class Account:
    """One session id. `sent` is in the order of sending, which is that of the stream."""

    session_id: str
    sent: dict[str, Sent] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    replies: dict[str, list[Seen]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    opened: set[int] = field(default_factory=set)
    lost: set[tuple[int, int]] = field(default_factory=set)
    dismissed: set[int] = field(default_factory=set)
    unheard: list[str] = field(default_factory=list)
    waiters: list[asyncio.Future[None]] = field(default_factory=list)

    def note(self, entry: Seen) -> None:
        """An entry that the listener has read."""
        self.seen.append(entry)
        body = entry.body
        if entry.kind == "reply":
            self.replies.setdefault(body["control_id"], []).append(entry)
            sent = self.sent.get(body["control_id"])
            if sent is not None and sent.answered_s is None:
                sent.answered_s = entry.at_s
        elif entry.kind == "lifecycle":
            if body["event"] == "opened":
                self.opened.add(entry.incarnation)
            elif body["event"] in TERMINALS:
                self.ended.add(entry.incarnation)
            elif body["event"] == "epoch_lost":
                self.lost.add((entry.incarnation, entry.epoch))
        self.wake()

    def wake(self) -> None:
        """Whoever waits for news looks again."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def find_reply(self, control_id: str) -> dict[str, Any] | None:
        """The last one."""
        replies = self.replies.get(control_id)
        return replies[-1].body if replies else None
