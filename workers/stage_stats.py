"""What one life of a stage worker counts, and how long its aborts took.

Responsible for the figures that go out with the heartbeat and that operators and the demo read. Leaves writing them to
the life. Pure: times are arguments. Server time is milliseconds with a fraction, monotonic time seconds.
"""

from __future__ import annotations

import json
from collections import deque

import msgspec
from msgspec import Struct

from workers.metrics.histogram import Histogram

LOG_LENGTH = 100


class StageStats(Struct):
    """Counters of one life. `outputs_*` name what became of outputs.

    `failed`: requests told to their owners as lost. `discarded`: submissions of aborted requests, never run.
    `repeated`: submissions that a failover brought back. `retries`: error answers, `reconnects`: lost connections.
    """

    accepted: int = 0
    rejected: int = 0
    discarded: int = 0
    repeated: int = 0
    outputs_delivered: int = 0
    outputs_forwarded: int = 0
    outputs_duplicate: int = 0
    outputs_dropped: int = 0
    outputs_stopped: int = 0
    outputs_late: int = 0
    aborts: int = 0
    cleaned: int = 0
    cleanup_failed: int = 0
    failed: int = 0
    unreadable: int = 0
    retries: int = 0
    reconnects: int = 0

    def figures(self) -> dict[str, int]:
        """As they are written beside the heartbeat."""
        return msgspec.structs.asdict(self)

    def plus(self, other: StageStats) -> StageStats:
        """Both together."""
        mine, others = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return StageStats(*map(sum, zip(mine, others, strict=True)))


class StageTimes:
    """How long aborts took since the process began: from an order's entry to the engine, and until it was confirmed."""

    def __init__(self) -> None:
        self.sent = Histogram()
        self.cleaned = Histogram()


class Progress(Struct, frozen=True, kw_only=True):
    """A look at a life. `beaten_s`, `read_s`: the last heartbeat that was taken, the reader that is furthest behind.

    Both by the monotonic clock, and good for `limit_s`. `load` is the engine's, of the last heartbeat that was tried.
    `submissions` and `aborts`: read from the queues and not acknowledged.
    """

    is_over: bool
    draining: bool
    is_healthy: bool
    beaten_s: float
    read_s: float
    limit_s: float
    load: dict[str, float]
    requests: int
    submissions: int
    aborts: int
    buffered_bytes: int


class ServerTime:
    """The server's clock seen from here, by the quickest of the last few answers to TIME."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=8)

    def note(self, sent_s: float, received_s: float, server_us: int) -> None:
        """An answer to TIME, between two monotonic times."""
        offset_s = server_us / 1_000_000 - (sent_s + received_s) / 2
        self._samples.append((received_s - sent_s, offset_s))

    def find_ms(self, monotonic_s: float) -> float | None:
        """The server's time at a monotonic time; None before the first answer."""
        if not self._samples:
            return None
        return (monotonic_s + min(self._samples)[1]) * 1000


class AbortLog:
    """The last aborts: when the order entered its queue and when the engine had dropped the request."""

    def __init__(self) -> None:
        self._rows: deque[dict[str, str | float]] = deque(maxlen=LOG_LENGTH)
        self._took_ms: deque[float] = deque(maxlen=LOG_LENGTH)
        self._most_ms = 0.0
        self._changed = False

    def note(self, request_id: str, entry_id: str, engine_ms: float) -> None:
        """A request is gone. `entry_id`: of the abort order, whose first part is the server's time."""
        entry_ms = int(entry_id.partition("-")[0])
        took_ms = max(0.0, engine_ms - entry_ms)
        self._rows.append({"request_id": request_id, "entry_ms": entry_ms, "engine_ms": round(engine_ms, 3)})
        self._took_ms.append(took_ms)
        self._most_ms = max(self._most_ms, took_ms)
        self._changed = True

    def take_figures(self) -> dict[str, str | float]:
        """`abort_ms_last`, `_p50`, `_max` and the log as JSON; empty if there is nothing new."""
        if not self._changed or not self._took_ms:
            return {}
        self._changed = False
        ordered = sorted(self._took_ms)
        return {
            "abort_ms_last": round(self._took_ms[-1], 3),
            "abort_ms_p50": round(ordered[len(ordered) // 2], 3),
            "abort_ms_max": round(self._most_ms, 3),
            "abort_log": json.dumps(list(self._rows), separators=(",", ":")),
        }

    def put_back(self) -> None:
        """What was taken has not reached the server."""
        self._changed = True
