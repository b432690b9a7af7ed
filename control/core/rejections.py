"""The closed set of refusals: every way to say no to a command, with its code and whether to try again.

Responsible for codes and their `retryable`. Leaves the choice to the rules. Pure. A rejection is expected
traffic, no failure: nothing changed (I8), nothing is logged above info.
"""

from enum import StrEnum

from msgspec import Struct


class Code(StrEnum):
    """The error codes of the wire protocol."""

    STALE_FENCE = "stale_fence"
    INVALID_CAPABILITY = "invalid_capability"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    NOT_FOUND = "not_found"
    INVALID_ARGUMENT = "invalid_argument"
    TIMEOUT = "timeout"
    FAILED_PRECONDITION = "failed_precondition"
    CLEANUP_FAILED = "cleanup_failed"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    UNSUPPORTED_VERSION = "unsupported_version"
    INTERNAL = "internal"


CODES = frozenset(code.value for code in Code)

# Retryable: the same command, sent again unchanged, may succeed.
RETRYABLE = frozenset({Code.RESOURCE_EXHAUSTED, Code.TIMEOUT, Code.CLEANUP_FAILED})


class Rejection(Struct, frozen=True, gc=False):
    """A refusal. `message` is for people: what happened, to which session, and what to do."""

    code: Code
    message: str

    @property
    def retryable(self) -> bool:
        """Whether the same command may succeed later."""
        return self.code in RETRYABLE
