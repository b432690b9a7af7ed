"""What stays the same over all lives of a stage worker: the pipeline's part, the policy, names and bounds.

Responsible for choosing the bounds. Leaves everything that happens to the lives. Pure.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from control.store.keys import PartitionKeys

if TYPE_CHECKING:
    from stages.pipeline import Pipeline, Stage
    from stages.policy import Adapter, ModelPolicy

BLOCK_S = 1.0
CONNECTION_TIMEOUT_S = 5.0
assert CONNECTION_TIMEOUT_S > BLOCK_S, "a blocking read must end before its connection gives up (S57)"

BUFFER_BYTES = 64 * 1024 * 1024
TOTAL_BUFFER_BYTES = 4 * BUFFER_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSetup:
    """`abort_timeout_s`: how long an engine may take to confirm an abort. `linger_s`: how long an output waits for
    company. `request_buffer_bytes`, `total_buffer_bytes`: what may wait for a server that is away or full.
    """

    pipeline: Pipeline
    stage_id: int
    policy: ModelPolicy
    adapter: Adapter
    abort_timeout_s: float
    linger_s: float = 0.005
    request_buffer_bytes: int = BUFFER_BYTES
    total_buffer_bytes: int = TOTAL_BUFFER_BYTES

    @property
    def stage(self) -> Stage:
        """This worker's part of the pipeline file."""
        return self.pipeline.stages[self.stage_id]

    @property
    def final_stage_id(self) -> int:
        """The number of the route's last stage."""
        return self.pipeline.final_stage_id

    @property
    def block_ms(self) -> int:
        """How long a read waits; short enough that readers show progress between two heartbeats."""
        return max(1, round(1000 * min(BLOCK_S, self.pipeline.control.heartbeat_interval_s)))

    @property
    def half_events_bytes(self) -> int:
        """As the publish script wants it."""
        return max(1, self.pipeline.limits.events_bytes // 2)

    def partition_keys(self) -> list[PartitionKeys]:
        """The keys of every partition, in order."""
        return [PartitionKeys(partition) for partition in range(self.pipeline.partitions)]


class Backoff:
    """How long to wait before trying again: doubling, capped, spread so that many don't return in one instant."""

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._next_s = first_s

    def next_s(self) -> float:
        """The wait before the next try."""
        delay_s = self._next_s
        self._next_s = min(self._most_s, 2 * delay_s)
        return delay_s * random.uniform(0.75, 1.25)

    def reset(self) -> None:
        """It worked."""
        self._next_s = self._first_s
