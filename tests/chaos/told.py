"""Histories written by hand, a step at a time, for the tests of the checker; `n` and the time follow.

Pure. A step is a second, so that times are easy to see.
"""

from __future__ import annotations

from typing import Any

from tests.chaos.checker import check_history
from tests.chaos.history import History, Seen, Sent, Span, Turn
from tests.chaos.losses import Losses

SESSION = "s1"


def fence(epoch: int, incarnation: int = 1, turn: Turn = (0, 0)) -> dict[str, int]:
    return {"incarnation": incarnation, "epoch": epoch, "turn_id": turn[0], "response_seq": turn[1]}


class Told(History):
    """`life` is the incarnation of what is sent and told from now on."""

    def __init__(self) -> None:
        super().__init__(SESSION)
        self.life = 1
        self._n = 0
        self._said: dict[tuple[int, int], int] = {}

    @property
    def now_s(self) -> float:
        return float(len(self.seen))

    def send(self, op: str, epoch: int = 0, **about: Any) -> str:
        control_id = f"{op}{len(self.sent)}"
        here: dict[str, Any] = {"incarnation": self.life}
        self.sent[control_id] = Sent(control_id, op, epoch, self.now_s, **(here | about))
        return control_id

    def see(self, kind: str, body: dict[str, Any], n: int | None = None) -> Seen:
        if n is None:
            n = self._n = self._n + 1
        entry = Seen(kind, n, self.now_s, body)
        self.seen.append(entry)
        return entry

    def event(self, event: str, epoch: int = 0, reason: str | None = None, **more: Any) -> Seen:
        if event == "opened":
            self._n = 0
        return self.see("lifecycle", {"event": event, "fence": fence(epoch, self.life), "reason": reason, **more})

    def reply(
        self, control_id: str, code: str | None = None, *, retryable: bool = False, n: int | None = None, **detail: Any
    ) -> Seen:
        body = {"control_id": control_id, "ok": code is None, "code": code, "message": "", "retryable": retryable}
        return self.see("reply", {**body, "fence": fence(0, self.life), "detail": None if code else detail}, n)

    def say(self, *tokens: int, epoch: int = 0, turn: Turn = (0, 0), end: bool = False, skip: int = 0) -> None:
        """An output a token. `skip`: so many numbers were dropped before; `end` marks the last."""
        place = self.life, epoch
        self._said[place] = self._said.get(place, 0) + skip
        for token in tokens:
            seq = self._said[place]
            self._said[place] = seq + 1
            body = {"fence": fence(epoch, self.life, turn), "data": [token], "seq": seq}
            self.see("output", body | {"turn_end": end and token == tokens[-1]})

    # whole exchanges

    def open(self, life: int = 1) -> Told:
        self.life = life
        opening = self.send("open")
        self.event("opened")
        self.reply(opening)
        return self

    def append(self, *tokens: int, seq: int, turn_seq: int | None = None, epoch: int = 0, **about: Any) -> str:
        control_id = self.send("append", epoch, tokens=tokens, **about)
        self.reply(control_id, seq=seq, turn_seq=seq if turn_seq is None else turn_seq)
        return control_id

    def interrupt(self, to: int) -> str:
        cancel = self.send("signal", to - 1, next_epoch=to)
        self.event("interrupted", to)
        self.reply(cancel)
        return cancel

    def detach(self, generation: int = 0) -> str:
        detach = self.send("touch", activity="detach", generation=generation)
        self.reply(detach, lease_generation=generation)
        return detach

    def resume(self, generation: int = 0) -> str:
        resume = self.send("resume", generation=generation)
        self.reply(resume, lease_generation=generation + 1)
        return resume

    def close(self) -> Told:
        closing = self.send("close")
        self.event("closing", reason="client_close")
        self.reply(closing)
        self.event("closed", reason="client_close")
        return self


def conversation(life: int = 1) -> Told:
    """Open, speak, interrupt in the middle of the answer, go on."""
    told = Told().open(life)
    told.append(1, 2, 3, seq=1)
    told.say(1, 2)
    told.append(4, seq=2)
    told.interrupt(1)
    told.append(5, 6, seq=1, epoch=1)
    told.say(5, 6, epoch=1)
    told.settled[life] = 1
    return told


def broken(told: History, *spans: Span, homes: dict[str, str] | None = None) -> set[str]:
    """The rules that the checker finds broken."""
    losses = Losses(list(spans), frozenset({"thinker-1", "voice-3"}), homes or {})
    return {violation.rule for violation in check_history(told, losses)}
