"""A cleanup: the debt left by a cancel, a close, an expiry or a failure.

Responsible for who still has to confirm what, when it is tried again and which commands wait for its outcome.
Leaves the abort itself to the stage workers, the release of the requests to the rules. Pure. Keeps I2 and I3: a
cleanup ends only when `waiting` is empty, and it is retried without limit until then. Times are server milliseconds.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any
from zlib import crc32

from msgspec import Struct
from msgspec.structs import replace

from control.core.fence import Fence


class CleanupKind(StrEnum):
    """Why requests have to go."""

    CANCEL = "cancel"
    EPOCH = "epoch"  # a command brought in a higher epoch without a cancel
    APPEND = "append"  # an append whose outcome is unknown
    END = "end"  # close, expiry, failure: the session goes with it


class OwedReply(Struct, frozen=True, gc=False, array_like=True):
    """A command that is answered with the cleanup's outcome, or with `timeout` at `deadline_ms`."""

    control_id: str
    op: str
    event: str  # the signal's event, or the close's reason
    fence: Fence
    next_fence: Fence | None
    deadline_ms: int
    session_config: dict[str, Any] | None = None  # what a cancel configures takes effect with its ok
    runtime_config: dict[str, Any] | None = None


class Cleanup(Struct, frozen=True, gc=False, array_like=True):
    """One debt. `number` is unique within the session's life; `epochs` names the requests, one each.

    `waiting`: the stage workers that have not confirmed. `attempts`: how often they were asked. `failed`: somebody was
    told that it had failed or timed out.
    """

    number: int
    kind: CleanupKind
    epochs: tuple[int, ...]
    waiting: tuple[str, ...]
    attempts: int
    created_ms: int
    retry_at_ms: int
    owed: tuple[OwedReply, ...] = ()
    failed: bool = False


def backoff_ms(session_id: str, number: int, attempts: int, *, base_ms: int, max_ms: int) -> int:
    """How long after attempt `attempts` (from 1) the next one comes: doubling, capped, spread over ±25 %.

    The spread comes from the cleanup's own name, so that a thousand cleanups of one lost worker don't return in one
    instant, and a replay of the same inputs decides the same.
    """
    delay_ms = min(max_ms, base_ms << min(attempts - 1, 20))
    spread = crc32(f"{session_id}/{number}/{attempts}".encode()) % 1000
    return delay_ms * (750 + spread // 2) // 1000


def confirm(cleanup: Cleanup, worker_id: str) -> Cleanup:
    """The cleanup without `worker_id` among those that still have to confirm."""
    return replace(cleanup, waiting=tuple(w for w in cleanup.waiting if w != worker_id))


def find_covering(cleanups: tuple[Cleanup, ...], epoch: int) -> Cleanup | None:
    """The pending cleanup that covers the request of `epoch`."""
    for cleanup in cleanups:
        if epoch in cleanup.epochs:
            return cleanup
    return None


def put(cleanups: tuple[Cleanup, ...], cleanup: Cleanup) -> tuple[Cleanup, ...]:
    """The cleanups with `cleanup` in the place of the one with its number, or at the end."""
    for index, known in enumerate(cleanups):
        if known.number == cleanup.number:
            return (*cleanups[:index], cleanup, *cleanups[index + 1 :])
    return (*cleanups, cleanup)


def drop(cleanups: tuple[Cleanup, ...], number: int) -> tuple[Cleanup, ...]:
    """The cleanups without number `number`."""
    return tuple(c for c in cleanups if c.number != number)


def find(cleanups: tuple[Cleanup, ...], number: int) -> Cleanup | None:
    """The cleanup with number `number`, if it is still pending."""
    for cleanup in cleanups:
        if cleanup.number == number:
            return cleanup
    return None
