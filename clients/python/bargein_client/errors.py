"""What a caller can catch: a class for each error code of the protocol, three for no answer at all.

Pure. Leaves the decision whether a reply is an error to protocol.py, and trying again to mailbox.py.
How it says no: every error has `code` (the wire's word), `retryable` (worth trying again as it is),
`session_id` and, where a worker has answered, its `reply`, with the fence and lease generation that hold now.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bargein_client.protocol import Fence, Reply


class BargeinError(Exception):
    """The base of all of them; itself used only for a code that this version does not know."""

    default_code = "internal"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        retryable: bool = False,
        session_id: str | None = None,
        reply: Reply | None = None,
    ) -> None:
        self.code = code or self.default_code
        self.message = message
        self.retryable = retryable
        self.session_id = session_id
        self.reply = reply
        about = f" (session {session_id})" if session_id else ""
        super().__init__(f"{self.code}: {message}{about}")

    @property
    def accepted_fence(self) -> Fence | None:
        """The session's position when the worker refused; None if it knows no such session."""
        return self.reply.accepted_fence if self.reply else None

    @property
    def lease_generation(self) -> int | None:
        """The session's lease generation when the worker refused; None if it knows no such session."""
        return self.reply.lease_generation if self.reply else None


class StaleFenceError(BargeinError):
    """The command belongs to an epoch, a turn or a life of the session that is over."""

    default_code = "stale_fence"


class InvalidCapabilityError(BargeinError):
    """The session was opened with an input mode that the pipeline does not have."""

    default_code = "invalid_capability"


class ResourceExhaustedError(BargeinError):
    """No free slot, or too many appends queued. Nothing was changed; try again later."""

    default_code = "resource_exhausted"


class NotFoundError(BargeinError):
    """No such session, or not any more."""

    default_code = "not_found"


class InvalidArgumentError(BargeinError):
    """The command is wrong in itself; the message names the path."""

    default_code = "invalid_argument"


class StageTimeoutError(BargeinError):
    """A stage did not answer in time. If it was an append, its epoch is lost: go on with an interrupt."""

    default_code = "timeout"


class FailedPreconditionError(BargeinError):
    """The session is not in a state for this: closing, an epoch that is lost, another lease generation or token."""

    default_code = "failed_precondition"


class CleanupFailedError(BargeinError):
    """A stage said no to a cleanup. The command holds all the same; the worker goes on trying."""

    default_code = "cleanup_failed"


class PayloadTooLargeError(BargeinError):
    """The body or the payload is above the server's limit."""

    default_code = "payload_too_large"


class UnsupportedVersionError(BargeinError):
    """The two sides speak different versions of the protocol."""

    default_code = "unsupported_version"


class InternalError(BargeinError):
    """A fault of the worker while it handled this command."""

    default_code = "internal"


class NoReplyError(BargeinError, TimeoutError):
    """The command is in Redis, but no worker has answered it or its re-sends. Its outcome is unknown."""

    default_code = "no_reply"


class UnreachableError(BargeinError, ConnectionError):
    """Redis is away or refuses the command, or this client was closed. The outcome is unknown."""

    default_code = "unreachable"


class NotReadyError(BargeinError):
    """Redis is there, but no worker has ever started on it, so the partitions are not known yet."""

    default_code = "not_ready"


ERROR_BY_CODE: dict[str, type[BargeinError]] = {
    error.default_code: error
    for error in (
        StaleFenceError,
        InvalidCapabilityError,
        ResourceExhaustedError,
        NotFoundError,
        InvalidArgumentError,
        StageTimeoutError,
        FailedPreconditionError,
        CleanupFailedError,
        PayloadTooLargeError,
        UnsupportedVersionError,
        InternalError,
    )
}
