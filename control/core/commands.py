"""The closed union of what a session can be told: a producer's commands, and events from stages and from time.

Responsible for the vocabulary of the transition table. Leaves the wire's checks to `control/wire`, the meaning to
the rules. Pure. Public: the commands are the wire protocol's version 1, field by field.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from control.core.fence import Fence
from control.core.tokens import TokenDigest


class Command(Struct, frozen=True, gc=False, kw_only=True):
    """What every command carries.

    `control_id` names it for good: the same id again is the same command (D5). `deadline_ms` counts from the
    stream entry's own time; a command older than that is refused as `timeout`, a cancel or a close never is. `token`:
    the digest of the token that it shows; an open's is the one that its whole life will be asked for.
    """

    control_id: str
    session_id: str
    fence: Fence
    expected_lease_generation: int | None = None
    traceparent: str | None = None
    deadline_ms: int | None = None
    token: TokenDigest | None = None


DEFAULT_LEVEL = "serving_session_adapter"


class Capabilities(Struct, frozen=True, gc=False, kw_only=True):
    """What a client wants to send. `input_modes` empty or absent: `turn_commit_only`."""

    input_modes: list[Any] | None = None
    implementation_level: str | None = None

    @property
    def level(self) -> str:
        """The implementation level that replies name."""
        return self.implementation_level or DEFAULT_LEVEL


class Open(Command, frozen=True, gc=False, kw_only=True):
    """Begin a life of a session id."""

    session_mode: str = "duplex"
    capabilities: Capabilities = Capabilities()
    session_config: dict[str, Any] | None = None
    runtime_config: dict[str, Any] | None = None


class Append(Command, frozen=True, gc=False, kw_only=True):
    """Input for the model. The payload stays in Redis; `payload_digest` is set only where `operation_id` is."""

    mode: str
    final: bool = False
    operation_id: str | None = None
    expected_epoch: int | None = None
    payload_digest: bytes | None = None
    payload_bytes: int = 0


class Cancel(Command, frozen=True, gc=False, kw_only=True):
    """Interrupt: `barge_in`, `input.cancel` or `response.cancel`. `fence` is the one cancelled."""

    event: str
    next_fence: Fence | None = None
    session_config: dict[str, Any] | None = None
    runtime_config: dict[str, Any] | None = None


class Update(Command, frozen=True, gc=False, kw_only=True):
    """`session.update`: a new configuration, and possibly a further fence."""

    event: str = "session.update"
    next_fence: Fence | None = None
    session_config: dict[str, Any] | None = None
    runtime_config: dict[str, Any] | None = None


class UnknownSignal(Command, frozen=True, gc=False, kw_only=True):
    """A signal whose event is none of the four. Refused before anything is looked at."""

    event: str


class Close(Command, frozen=True, gc=False, kw_only=True):
    """End a life. Repeating it is fine (S12)."""

    reason: str = "client_close"


class Touch(Command, frozen=True, gc=False, kw_only=True):
    """Activity without input; `detach` starts the disconnect grace."""

    activity: str


class Resume(Command, frozen=True, gc=False, kw_only=True):
    """Take a session up again; a compare-and-swap on the lease generation, which is then required."""


class Malformed(Command, frozen=True, gc=False, kw_only=True):
    """A body that names a session but is no valid command: answered with the path of what is wrong.

    `fence` is None where it can't be read; `op` is whatever the body called itself.
    """

    fence: Fence | None = None  # type: ignore[assignment]  a malformed body may have none
    op: str
    code: str
    message: str


# What stages say. `incarnation` tells a late word for a former life apart.


class Accepted(Struct, frozen=True, gc=False):
    """The first stage took the submission `number`."""

    incarnation: int
    number: int


class Rejected(Struct, frozen=True, gc=False):
    """The first stage refused the submission `number` and kept nothing of it (I7)."""

    incarnation: int
    number: int
    code: str
    message: str


class Cleaned(Struct, frozen=True, gc=False):
    """`worker_id` no longer holds any request of the cleanup `number`."""

    incarnation: int
    number: int
    worker_id: str


class CleanupFailed(Struct, frozen=True, gc=False):
    """`worker_id` could not clean up at `attempt`. `timed_out`: its engine did not answer; else it said no."""

    incarnation: int
    number: int
    attempt: int
    worker_id: str
    timed_out: bool
    message: str


class RequestFailed(Struct, frozen=True, gc=False):
    """A stage lost the request of an epoch: an engine error, an out-of-memory kill, a context overflow."""

    incarnation: int
    epoch: int
    worker_id: str
    message: str


class Audited(Struct, frozen=True, gc=False):
    """What a holder of slots has of a life of the session: requests of `epochs`, and a slot or none.

    `stage_id`: the holder's stage, if it is a stage worker.
    """

    holder: str
    stage_id: int
    incarnation: int
    epochs: tuple[int, ...]
    has_slot: bool


class StageLost(Struct, frozen=True, gc=False):
    """A stage worker's life is over and fenced off: it holds nothing any more and can say nothing any more."""

    worker_id: str


# What placement says.


class Placed(Struct, frozen=True, gc=False):
    """Every slot of the route chosen at `attempt` is taken."""

    incarnation: int
    attempt: int


class PlacementRefused(Struct, frozen=True, gc=False):
    """`holder` had no slot for the route chosen at `attempt`."""

    incarnation: int
    attempt: int
    holder: str


class DebtPaid(Struct, frozen=True, gc=False):
    """`holder` gave the slot of a life back, or is gone itself."""

    incarnation: int
    holder: str


# What time says.


class Due(Struct, frozen=True, gc=False):
    """A deadline may have passed. `output_ms`: the last delivered output, 0 if none.

    `may_expire` is false until the backlog was read to its end and the clock has settled; work that is owed
    (a placement, a debt, the retry of a cleanup) goes on all the same. `anew`: the partition was taken over or read
    again since, so nobody may be placing or paying any more; what is owed of that kind is asked for at once.
    """

    output_ms: int = 0
    may_expire: bool = True
    anew: bool = False


class RetryNow(Struct, frozen=True, gc=False):
    """An operator wants every pending cleanup tried again, whatever its backoff."""


class Dismissed(Struct, frozen=True, gc=False):
    """An operator wants this life ended, whatever its client thinks; its listener hears `reason`."""

    incarnation: int
    reason: str


class Poisoned(Struct, frozen=True, gc=False):
    """An input of this session can't be committed or decided; the session ends as `command_failed`."""

    message: str


Event = (
    Open
    | Append
    | Cancel
    | Update
    | UnknownSignal
    | Malformed
    | Close
    | Touch
    | Resume
    | Accepted
    | Rejected
    | Cleaned
    | CleanupFailed
    | RequestFailed
    | StageLost
    | Audited
    | Placed
    | PlacementRefused
    | DebtPaid
    | Due
    | RetryNow
    | Dismissed
    | Poisoned
)

_OPS: dict[type[Command], str] = {
    Open: "open",
    Append: "append",
    Cancel: "signal",
    Update: "signal",
    UnknownSignal: "signal",
    Close: "close",
    Touch: "touch",
    Resume: "resume",
}


def op_of(command: Command) -> str:
    """The op as the wire spells it."""
    return command.op if isinstance(command, Malformed) else _OPS[type(command)]


CANCEL_EVENTS = frozenset({"barge_in", "input.cancel", "response.cancel"})
UPDATE_EVENT = "session.update"
