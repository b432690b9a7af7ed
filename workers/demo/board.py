"""The board: what is known at this moment, for whoever shows it.

Responsible for holding it in one place, so that the parts that learn something needn't know how it is shown. Leaves
showing to `view.py`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from msgspec import Struct

SILENT_DB = -120.0


class RequestState(Struct, frozen=True):
    """A request of one epoch at one stage. `state`: reserved, running, cleaning or released."""

    epoch: int
    stage: str
    state: str


@dataclass(slots=True)
class Board:
    """See the header. Loudness is dB below full scale. `names`: what the control workers' ids are called here.

    `signals_ms`: when the server took the interruption of an epoch, by its clock; `barge_in_ms`: how long the last one
    of them took to reach the engines.
    """

    began_s: float = field(default_factory=time.monotonic)
    doing: str = "starting"
    user_db: float = SILENT_DB
    model_db: float = SILENT_DB
    talking: bool = False
    epoch: int = 0
    turn: int = 0
    interruptions: int = 0
    requests: list[RequestState] = field(default_factory=list[RequestState])
    outputs_heard: int = 0
    outputs_dropped: int = 0
    stale_delivered: int = 0
    signals_ms: dict[int, int] = field(default_factory=dict[int, int])
    barge_in_ms: float | None = None
    partition: int | None = None
    owner: str | None = None
    controls: list[str] = field(default_factory=list[str])
    names: dict[str, str] = field(default_factory=dict[str, str])
    killed: str | None = None
    stages: list[str] = field(default_factory=list[str])

    def name_of(self, worker_id: str | None) -> str:
        """What a control worker is called here: `control-1` or `control-2`."""
        return self.names.get(worker_id or "", worker_id or "nobody")

    @property
    def elapsed_s(self) -> float:
        """Since the demo began."""
        return time.monotonic() - self.began_s

    def count(self, state: str) -> int:
        """How many requests are in that state."""
        return sum(1 for request in self.requests if request.state == state)
