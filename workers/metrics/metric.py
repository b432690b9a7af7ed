"""What a metric is declared with, and what its labels may be.

Responsible for the rules that names keep. Leaves the metrics themselves to `declared.py` and its neighbours. Pure.
A label has a closed set of values, or as many as the pipeline file has partitions or stages: never a session, a request
or a worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
Role = Literal["control", "stage", "maintenance"]
ALL: tuple[Role, ...] = ("control", "stage", "maintenance")
CONTROL: tuple[Role, ...] = ("control",)
STAGE: tuple[Role, ...] = ("stage",)
MAINTENANCE: tuple[Role, ...] = ("maintenance",)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `unit`: of its values. `labels`: in the order in which values are given. `roles`: who has it."""

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    roles: tuple[Role, ...] = CONTROL

    def __post_init__(self) -> None:
        assert self.name.startswith("bargein_"), self.name
        assert (self.kind == "counter") == self.name.endswith("_total"), self.name
        for unit in ("seconds", "bytes", "ratio"):
            stem = self.name.removesuffix("_total")
            assert (self.unit == unit) == stem.endswith(f"_{unit}"), f"{self.name} is in {self.unit}"


LABELS = {
    "op": "open, append, signal, close, touch, resume; other: a body that is no command",
    "outcome": "in `bargein_commands_total`: ok, or the error code of the reply; elsewhere what became of it",
    "partition": "its number, 0 to the pipeline's `partitions` less one",
    "stream": "commands, acks, orders",
    "phase": "vacant, opening, open, closing; unreadable",
    "state": "of a request: reserved, submitted, cleaning; of a stage worker: live, draining, dead",
    "kind": "of a cleanup: cancel, epoch, append, end",
    "reason": "refused: the engine said no; timeout: it didn't answer in time",
    "stage": "its name in the pipeline file; `other` for one that isn't in it any more",
    "part": "what of the process spoke to Redis: owner, ownership, observer, slots, metrics, stage, maintenance",
    "sample": "quick: backlogs and leases; census: sessions, requests, cleanups; slots: their holders",
    "check": "as `/readyz` names it",
    "queue": "submissions, aborts",
    "ending": "left, fenced, engine_lost, broken",
    "role": "control, stage, maintenance",
    "duty": "a kind of upkeep, as `workers/maintenance/upkeep.py` names it; drain, close: steps of operators' jobs",
    "version": "of the project",
}
