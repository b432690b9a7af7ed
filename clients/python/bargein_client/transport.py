"""What both shells must know about redis-py: which errors pass, how sockets are set, what answers look like.

Pure, apart from naming redis-py's classes. Leaves every call to aio_nodes.py and sync_nodes.py.
A read never blocks longer than half the socket's timeout: so a quiet stream is not taken for a dead
connection, and a dead connection is noticed.
Units: `_s` seconds, `_ms` milliseconds.
How it says no: ValueError for a Redis client that could not work; UnreachableError for what won't pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, cast

from redis import exceptions

from bargein_client.errors import BargeinError, NoReplyError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bargein_client.mailbox import Options
    from bargein_client.protocol import Command

Entry: TypeAlias = tuple[bytes, dict[bytes, bytes]]

# On top of the longest blocking read.
SOCKET_MARGIN_S = 2.0
READ_COUNT = 64
STOPPED = "this client has stopped listening"

# A connection that broke or hung, a server that is full, loading, read-only or failing over.
TRANSIENT: tuple[type[Exception], ...] = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.OutOfMemoryError,
    exceptions.ReadOnlyError,
    exceptions.ClusterDownError,
    exceptions.MasterDownError,
    exceptions.TryAgainError,
    exceptions.ClusterError,
    # Not a RedisError, and said of a cluster none of whose nodes answers at the moment.
    exceptions.RedisClusterException,
    OSError,
)
# The same, for what redis-py has no class for.
BUSY = ("BUSY ", "MISCONF ", "NOREPLICAS ")
# These look like broken connections to redis-py, but trying again will not help.
REFUSED: tuple[type[Exception], ...] = (exceptions.AuthenticationError, exceptions.AuthorizationError)
FAILED: tuple[type[Exception], ...] = (*TRANSIENT, *REFUSED, exceptions.RedisError)


def socket_settings(options: Options, url: str = "") -> dict[str, Any]:
    """Arguments for redis-py's `from_url`. It must not retry: what may be sent twice is known here."""
    timeout_s = options.reply_timeout_s / 2 + SOCKET_MARGIN_S
    # A socket of this machine has none, and redis-py refuses to be told so.
    keepalive = {} if url.startswith("unix:") else {"socket_keepalive": True}
    return {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s, **keepalive}


def require_socket_timeout_s(redis: Any) -> float:
    """The socket timeout of a client that was handed in.

    Raises ValueError if it has none, or decodes its answers.
    """
    settings = cast("dict[str, Any]", redis.get_connection_kwargs())
    timeout_s = settings.get("socket_timeout")
    if not timeout_s:
        raise ValueError("give the Redis client a socket_timeout: without one a dead connection is never noticed")
    if settings.get("decode_responses"):
        raise ValueError("the Redis client must have decode_responses=False: events are MessagePack, not text")
    return float(timeout_s)


def block_ms(wait_s: float, socket_timeout_s: float) -> int:
    """The BLOCK of one read; never 0, which would mean for ever."""
    return max(1, int(min(wait_s, socket_timeout_s / 2) * 1000))


def passes(error: Exception) -> bool:
    """Whether it is worth trying again."""
    if isinstance(error, REFUSED):
        return False
    return isinstance(error, TRANSIENT) or str(error).startswith(BUSY)


def unreachable(error: Exception, session_id: str | None = None) -> UnreachableError:
    """What the caller gets to see of an error of Redis."""
    message = f"{type(error).__name__}: {error}"
    return UnreachableError(message, retryable=passes(error), session_id=session_id)


def no_reply(command: Command, options: Options) -> NoReplyError:
    """What the caller gets to see when no worker has answered."""
    message = f"no reply to {command.op} after {options.attempts} sends: is a control worker running?"
    return NoReplyError(message, retryable=True, session_id=command.session_id)


def close_holds(refusal: BargeinError) -> bool:
    """Whether a session is over although its close was refused: its cleanup goes on without us."""
    return refusal.reply is not None and (refusal.retryable or refusal.code == "not_found")


def entries_of(answer: Any) -> list[Entry]:
    """The entries of an XREAD of one stream, in either version of Redis' protocol."""
    if not answer:
        return []
    if isinstance(answer, dict):
        batches = cast("Iterable[list[list[Entry]]]", answer.values())
        return [entry for batch in batches for entries in batch for entry in entries]
    return cast("list[tuple[bytes, list[Entry]]]", answer)[0][1]


def last_id_of(answer: list[Entry]) -> str:
    """The newest event id, of an XREVRANGE of one entry."""
    return answer[0][0].decode() if answer else "0-0"


def time_ms_of(answer: Any) -> int:
    """Redis' clock. A cluster answers for each node; the newest counts."""
    times = cast("Iterable[Any]", answer.values() if isinstance(answer, dict) else [answer])
    return max(int(seconds) * 1000 + int(micros) // 1000 for seconds, micros in times)
