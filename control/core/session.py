"""A session: everything that a partition's owner remembers about one session id.

Responsible for the stored record, the fence record that scripts check and the next deadline. Leaves every change to
the rules. Pure. Several small machines side by side instead of one product of states: `phase`, the lease, the request
ledger, the append under way, the cleanups.

    vacant --open--> opening --placed--> open --close, expiry, failure--> closing --confirmed--> vacant

A vacant record is the tombstone of the last life (D4) and the place of slots that are still owed back.
Times are server milliseconds.
"""

from __future__ import annotations

from enum import IntEnum

from msgspec import Struct

from control.core import lease as leases
from control.core.cleanup import Cleanup
from control.core.fence import MAX_COMPONENT, Fence
from control.core.lease import Lease
from control.core.requests import Request
from control.core.tokens import TokenDigest

# Above every epoch: nothing may be submitted, forwarded or published any more.
FLOOR_CLOSED = MAX_COMPONENT + 1

TOMBSTONE_MS = 3_600_000

LAYOUT = 1


class Phase(IntEnum):
    """Stored as a number; see the header for the steps."""

    VACANT = 0
    OPENING = 1
    OPEN = 2
    CLOSING = 3


class AppendUnderWay(Struct, frozen=True, gc=False, array_like=True):
    """The one append that waits for its stage.

    `number` names the submission for acks. `first`: the request was only reserved before, so a rejection takes it
    back there. `fence` is the fence offered to the stage.
    """

    number: int
    control_id: str
    operation_id: str | None
    fence: Fence
    mode: str
    final: bool
    seq: int
    turn_seq: int
    first: bool
    generation: int
    deadline_ms: int
    payload_digest: bytes | None = None


class Opening(Struct, frozen=True, gc=False, array_like=True):
    """The open under way: what its reply needs, and which try at a route this is."""

    control_id: str
    attempt: int
    retry_at_ms: int


class Debt(Struct, frozen=True, gc=False, array_like=True):
    """A slot that `holder` still keeps for a life that is over or never began."""

    holder: str
    incarnation: int
    retry_at_ms: int


class Ended(Struct, frozen=True, gc=False, array_like=True):
    """The tombstone: the highest incarnation that has lived under this id."""

    incarnation: int
    at_ms: int


class Session(Struct, frozen=True, gc=False, array_like=True):
    """The stored record, array-encoded in this order; fields are only ever added at the end.

    `floor`: the lowest epoch that may still be submitted, forwarded or published. `turn_key`: the fence key that
    `input_turn_seq` counts in. `number`: the last one given to a submission or a cleanup. `cleanups` is stored apart,
    in the hash that operators read, and joined on load. `token`: what every command of this life has to show, if
    anything; a vacant record has none.
    """

    layout: int
    phase: Phase
    fence: Fence
    lease: Lease
    floor: int = 0
    session_mode: str = "duplex"
    implementation_level: str = ""
    input_modes: tuple[str, ...] = ()
    config: bytes = b""
    config_generation: int = 0
    input_seq: int = 0
    input_turn_seq: int = 0
    turn_key: tuple[int, int, int] | None = None
    requests: tuple[Request, ...] = ()
    append: AppendUnderWay | None = None
    route: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()
    number: int = 0
    opening: Opening | None = None
    debts: tuple[Debt, ...] = ()
    ended: Ended | None = None
    cleanups: tuple[Cleanup, ...] = ()
    token: TokenDigest | None = None

    def is_forgettable(self, now_ms: int) -> bool:
        """Whether a vacant record's tombstone has had its hour."""
        return self.ended is None or self.ended.at_ms + TOMBSTONE_MS <= now_ms


def vacant(*, debts: tuple[Debt, ...] = (), ended: Ended | None = None) -> Session:
    """The record of an id without a life."""
    return Session(LAYOUT, Phase.VACANT, Fence(0, 0, 0, 0), Lease(0, 0), debts=debts, ended=ended)


NOBODY = vacant()


def fence_record(session: Session) -> str | None:
    """What scripts check: `incarnation floor epoch turn response offered_epoch offered_turn offered_response`.

    None where nothing may be published at all. The offered fence is the accepted one while no append is under way.
    """
    if session.phase is not Phase.OPEN and session.phase is not Phase.CLOSING:
        return None
    fence = session.fence
    offered = fence if session.append is None else session.append.fence
    return (
        f"{fence.incarnation} {session.floor} {fence.epoch} {fence.turn_id} {fence.response_seq} "
        f"{offered.epoch} {offered.turn_id} {offered.response_seq}"
    )


def is_busy(session: Session) -> bool:
    """Whether an append or a command that waits for its cleanup is under way; the idle TTL counts from its end (S8)."""
    return session.append is not None or any(cleanup.owed for cleanup in session.cleanups)


def find_due_ms(session: Session, *, idle_ttl_ms: int | None, disconnect_grace_ms: int) -> int | None:
    """When time has something to say to the session, at the earliest; None if never."""
    debts = min((debt.retry_at_ms for debt in session.debts), default=None)
    if session.phase is Phase.VACANT:
        forget = None if session.ended is None else session.ended.at_ms + TOMBSTONE_MS
        return forget if debts is None else debts
    if session.phase is Phase.OPENING:
        due = None if session.opening is None else session.opening.retry_at_ms
    else:
        due = _live_due_ms(session, idle_ttl_ms, disconnect_grace_ms)
    if due is None or debts is None:
        return due if debts is None else debts
    return min(due, debts)


def _live_due_ms(session: Session, idle_ttl_ms: int | None, disconnect_grace_ms: int) -> int | None:
    due = leases.due_ms(
        session.lease,
        idle_ttl_ms=idle_ttl_ms,
        disconnect_grace_ms=disconnect_grace_ms,
        busy=is_busy(session),
    )
    if session.append is not None:
        due = session.append.deadline_ms if due is None else min(due, session.append.deadline_ms)
    for cleanup in session.cleanups:
        due = cleanup.retry_at_ms if due is None else min(due, cleanup.retry_at_ms)
        for owed in cleanup.owed:
            due = min(due, owed.deadline_ms)
    return due
