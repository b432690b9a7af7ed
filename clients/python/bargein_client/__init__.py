"""Bargein's producer for Python: open a session, append, interrupt, close, iterate over what the model says.

`AsyncBargein` is for asyncio, `Bargein` for threads. The example is in README.md, the wire in protocol.py.
"""

from bargein_client.aio import AsyncBargein, AsyncSession
from bargein_client.conversation import Bookmark
from bargein_client.errors import (
    BargeinError,
    CleanupFailedError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    InvalidCapabilityError,
    NoReplyError,
    NotFoundError,
    NotReadyError,
    PayloadTooLargeError,
    ResourceExhaustedError,
    StageTimeoutError,
    StaleFenceError,
    UnreachableError,
    UnsupportedVersionError,
)
from bargein_client.mailbox import Options
from bargein_client.protocol import Event, Fence, Gap, Lifecycle, Output, Reply
from bargein_client.sync import Bargein, Session

__all__ = [
    "AsyncBargein",
    "AsyncSession",
    "Bargein",
    "BargeinError",
    "Bookmark",
    "CleanupFailedError",
    "Event",
    "FailedPreconditionError",
    "Fence",
    "Gap",
    "InternalError",
    "InvalidArgumentError",
    "InvalidCapabilityError",
    "Lifecycle",
    "NoReplyError",
    "NotFoundError",
    "NotReadyError",
    "Options",
    "Output",
    "PayloadTooLargeError",
    "Reply",
    "ResourceExhaustedError",
    "Session",
    "StageTimeoutError",
    "StaleFenceError",
    "UnreachableError",
    "UnsupportedVersionError",
]
