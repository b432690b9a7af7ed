"""Replies and lifecycle events: what a session's listener is told by the control side.

Responsible for their shape, which is the wire protocol's. Leaves outputs to the stage workers. Pure. Every reply
carries the accepted fence and the lease generation, both null where no session is left to have them.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from control.core.fence import Fence

FIRST_STAGE = 0


class OpenDetail(Struct, frozen=True, gc=False, kw_only=True):
    """The details keep the reference's field names, so that its clients read them unchanged (D9)."""

    supported: bool = True
    implementation_level: str
    data_plane_session: bool = True
    session_mode: str
    scheduler_request_context: bool
    request_id: str | None


class AppendDetail(Struct, frozen=True, gc=False, kw_only=True):
    """An append that a stage has accepted. `seq` counts in the epoch, `turn_seq` in the turn, both from 1."""

    supported: bool = True
    implementation_level: str
    data_plane_append: bool = True
    request_id: str
    response_stage_id: int
    seq: int
    turn_id: int
    response_seq: int
    turn_seq: int
    mode: str
    resumable: bool = True


class LocalAppendDetail(Struct, frozen=True, gc=False, kw_only=True):
    """An append where no model policy is configured: counted, sent nowhere."""

    supported: bool = True
    data_plane_append: bool = False
    seq: int
    turn_id: int
    turn_seq: int
    mode: str


class SignalDetail(Struct, frozen=True, gc=False, kw_only=True):
    """A cancel or an update."""

    supported: bool = True
    data_plane_signal: bool = True
    event: str
    fence: Fence
    next_fence: Fence | None


class CloseDetail(Struct, frozen=True, gc=False, kw_only=True):
    """A close that ended something."""

    supported: bool = True
    data_plane_close: bool = True
    reason: str


class TouchDetail(Struct, frozen=True, gc=False, kw_only=True):
    """Activity that was noted."""

    supported: bool = True
    activity: str
    lease_generation: int


class ResumeDetail(Struct, frozen=True, gc=False, kw_only=True):
    """The generation that the resumed attachment speaks with from now on."""

    supported: bool = True
    lease_generation: int


Detail = OpenDetail | AppendDetail | LocalAppendDetail | SignalDetail | CloseDetail | TouchDetail | ResumeDetail


class Reply(Struct, frozen=True, gc=False, kw_only=True):
    """The one answer to a command. `code` is null if `ok`."""

    control_id: str
    op: str
    session_id: str
    ok: bool
    code: str | None = None
    message: str = ""
    retryable: bool = False
    fence: Fence | None
    accepted_fence: Fence | None
    lease_generation: int | None
    detail: Any = None


class Lifecycle(Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """An event of a session's life. `cancelled_fence` comes with `interrupted` only.

    `worker_id`: the stage worker whose loss ends the session, with the first event that says so.
    """

    event: str
    session_id: str
    fence: Fence
    lease_generation: int
    reason: str | None = None
    cancelled_fence: Fence | None = None
    worker_id: str | None = None


OPENED = "opened"
INTERRUPTED = "interrupted"
EPOCH_LOST = "epoch_lost"
CLOSING = "closing"
CLOSED = "closed"
EXPIRED = "expired"
TERMINAL_EVENTS = frozenset({CLOSED, EXPIRED})
