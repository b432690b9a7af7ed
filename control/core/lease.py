"""The lease: who is attached to a session, until when, and whether it has ended.

Responsible for activity, the disconnect grace, the generation and the terminal mark. Leaves to `session.py`
which operation is under way, and to the rules what an expiry does. Pure. Times are server milliseconds.

The generation rises with every resume and with the terminal mark, so that a gateway that speaks for a former
attachment is told apart (D11, S82).
"""

from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace


class Activity(StrEnum):
    """What a touch may report."""

    APPEND = "append"
    SIGNAL = "signal"
    PLAYBACK_ACK = "playback_ack"
    HEARTBEAT = "heartbeat"
    ATTACH = "attach"
    DETACH = "detach"
    RESUME = "resume"
    MODEL_OUTPUT = "model_output"


ACTIVITIES = frozenset(activity.value for activity in Activity)

IDLE_TTL_EXPIRED = "idle_ttl_expired"
DISCONNECT_GRACE_EXPIRED = "disconnect_grace_expired"
EXPIRY_REASONS = frozenset({IDLE_TTL_EXPIRED, DISCONNECT_GRACE_EXPIRED})


class Lease(Struct, frozen=True, gc=False, array_like=True):
    """`detached_at_ms` is None while attached, `terminal_reason` None while the session lives."""

    generation: int
    last_activity_ms: int
    detached_at_ms: int | None = None
    terminal_reason: str | None = None


def touch(lease: Lease, now_ms: int) -> Lease:
    """The lease after activity. Only a resume ends a detach (S7)."""
    return replace(lease, last_activity_ms=now_ms)


def detach(lease: Lease, now_ms: int) -> Lease:
    """The lease of a session whose client has gone; the disconnect grace counts from here."""
    return replace(lease, last_activity_ms=now_ms, detached_at_ms=now_ms)


def resume(lease: Lease, now_ms: int) -> Lease:
    """The lease of a session that was taken up again, under the next generation."""
    return Lease(lease.generation + 1, now_ms)


def end(lease: Lease, reason: str) -> Lease:
    """The lease with its terminal mark. The first reason stays."""
    if lease.terminal_reason is not None:
        return lease
    return replace(lease, generation=lease.generation + 1, detached_at_ms=None, terminal_reason=reason)


def find_expiry(
    lease: Lease,
    now_ms: int,
    *,
    idle_ttl_ms: int | None,
    disconnect_grace_ms: int,
    output_ms: int,
    busy: bool,
) -> str | None:
    """Why the lease is over at `now_ms`, or None.

    `output_ms` is the last delivered output, which counts as activity; `busy` an operation that the idle TTL
    must not cut short (S8). The grace counts through both, since nobody is there to hear (S6).
    """
    if lease.terminal_reason is not None:
        return None
    if lease.detached_at_ms is not None and now_ms >= lease.detached_at_ms + disconnect_grace_ms:
        return DISCONNECT_GRACE_EXPIRED
    if busy or idle_ttl_ms is None:
        return None
    return IDLE_TTL_EXPIRED if now_ms >= max(lease.last_activity_ms, output_ms) + idle_ttl_ms else None


def due_ms(lease: Lease, *, idle_ttl_ms: int | None, disconnect_grace_ms: int, busy: bool) -> int | None:
    """When the lease has to be looked at again, or None. Never later than its true end; outputs may move that on."""
    if lease.terminal_reason is not None:
        return None
    grace = None if lease.detached_at_ms is None else lease.detached_at_ms + disconnect_grace_ms
    idle = None if busy or idle_ttl_ms is None else lease.last_activity_ms + idle_ttl_ms
    if grace is None or idle is None:
        return grace if idle is None else idle
    return min(grace, idle)
