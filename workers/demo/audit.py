"""The audit: whether anything stale was delivered, judged from what a listener was given, in its order.

Responsible for the one rule that the demo is about: after `interrupted`, no output of an older epoch (I1). It is
applied twice, to what the client handed to its user and to what the session's stream holds. Leaves reading to the
others. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(slots=True)
class Audit:
    """Counts what came by. `stale`: outputs of an epoch that was over. `missing`: numbers left out."""

    events: int = 0
    outputs: int = 0
    interruptions: int = 0
    stale: int = 0
    missing: int = 0
    _floor_epoch: int = 0
    _last_number: int = 0

    def output(self, epoch: int) -> None:
        """An output of that epoch was delivered."""
        self.events += 1
        self.outputs += 1
        self.stale += epoch < self._floor_epoch

    def lifecycle(self, event: str, epoch: int) -> None:
        """A lifecycle event; `epoch` is the one that its fence is in."""
        self.events += 1
        if event == "interrupted":
            self.interruptions += 1
            self._floor_epoch = max(self._floor_epoch, epoch)

    def reply(self) -> None:
        """A reply."""
        self.events += 1

    def entry(self, kind: str, number: int, body: Mapping[str, Any]) -> None:
        """An entry of the session's stream, with its number and its decoded body."""
        if number > self._last_number + 1:
            self.missing += number - self._last_number - 1
        self._last_number = number
        if kind == "output":
            self.output(body["fence"]["epoch"])
        elif kind == "lifecycle":
            self.lifecycle(body["event"], body["fence"]["epoch"])
        else:
            self.reply()
