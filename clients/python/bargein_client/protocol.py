"""The wire protocol, version 1, as a producer sees it: which key, which bytes, and what comes back.

Pure. Start here to write a producer in another language: everything that a message needs is in this file.
Leaves the order of things (fences, awaited replies, gaps) to conversation.py and mailbox.py, and Redis to
aio_link.py and sync_link.py.
Units: `_ms` milliseconds, `_bytes` bytes; an event id is Redis' own `ms-seq`.
How it says no: ValueError for what a producer may not send or a worker could not have sent.
"""

from __future__ import annotations

import unicodedata
import uuid
import zlib
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import msgpack

from bargein_client.errors import ERROR_BY_CODE, BargeinError, NotReadyError, UnsupportedVersionError

PROTOCOL = 1
SESSION_ID_MAX_BYTES = 128
TOKEN_MIN_BYTES, TOKEN_MAX_BYTES = 16, 256

SessionMode: TypeAlias = Literal["duplex", "turn"]
InputMode: TypeAlias = Literal[
    "append_tokens",
    "append_audio_chunk",
    "replace_latest_chunk",
    "reencode_context",
    "rollback_to_checkpoint",
    "turn_commit_only",
]
CancelKind: TypeAlias = Literal["barge_in", "input.cancel", "response.cancel"]
Activity: TypeAlias = Literal[
    "heartbeat", "attach", "detach", "playback_ack", "append", "signal", "resume", "model_output"
]
OutputKind: TypeAlias = Literal["tokens", "text", "audio", "data"]


class Fence(NamedTuple):
    """A position in a session: which life, interrupted how often, which turn, which response to it."""

    incarnation: int
    epoch: int = 0
    turn_id: int = 0
    response_seq: int = 0


@dataclass(frozen=True, slots=True)
class Command:
    """One entry for a command stream. Sending it again is safe: workers know it by its `control_id`.

    Its repr doesn't show `fields`, which may hold a token.
    """

    control_id: str
    op: str
    session_id: str
    fields: dict[str, bytes] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Reply:
    """The one answer to a command. `detail` is by `op`; `code` is None if `ok`."""

    control_id: str
    op: str
    session_id: str
    ok: bool
    code: str | None
    message: str
    retryable: bool
    fence: Fence | None
    accepted_fence: Fence | None
    lease_generation: int | None
    detail: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Output:
    """Something the model said. `seq` counts from 0, by request and stage.

    `data`: for `audio` bytes, s16le mono PCM; for `text` a string; for `tokens` a list; for `data` anything.
    """

    session_id: str
    request_id: str
    stage_id: int
    fence: Fence
    seq: int
    kind: OutputKind
    data: Any
    turn_end: bool = False
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """What became of the session.

    `event`: `opened`, `interrupted` (with its `cancelled_fence`), `epoch_lost` (go on with an interrupt),
    `closing`, and at last `expired` or `closed`.
    """

    event: str
    reason: str | None
    fence: Fence
    lease_generation: int | None
    cancelled_fence: Fence | None = None

    @property
    def terminal(self) -> bool:
        """Nothing of this life of the session follows."""
        return self.event in ("closed", "expired")


@dataclass(frozen=True, slots=True)
class Gap:
    """Events that this listener will not see. `missing` is None if nobody can say how many.

    `local`: they had come, but weren't fetched from `events()` before its buffer was full.
    """

    missing: int | None
    local: bool = False


Event: TypeAlias = Output | Lifecycle | Reply | Gap


def partition_of(session_id: str, partitions: int) -> int:
    """The partition, 0 to `partitions` - 1, that a session's keys live in."""
    return zlib.crc32(session_id.encode()) % partitions


def config_key(prefix: str) -> str:
    """The hash that the first worker writes: `protocol` and `partitions`."""
    return f"{prefix}:config"


def commands_key(prefix: str, partition: int) -> str:
    """The stream of one partition that commands are added to."""
    return f"{prefix}:{{{partition}}}:commands"


def events_key(prefix: str, partition: int, session_id: str) -> str:
    """The stream of one session that replies, outputs and lifecycle events are read from."""
    return f"{prefix}:{{{partition}}}:events:{session_id}"


def require_partitions(config: dict[bytes, bytes], prefix: str) -> int:
    """The number of partitions that the workers agreed on.

    Raises NotReadyError if no worker has started yet, UnsupportedVersionError if they speak another protocol.
    """
    if not config:
        raise NotReadyError(f"{config_key(prefix)} is missing: no worker has started on this Redis yet", retryable=True)
    spoken, partitions = (config.get(name, b"").decode(errors="replace") for name in (b"protocol", b"partitions"))
    if spoken != str(PROTOCOL):
        spoken = spoken or "(none)"
        raise UnsupportedVersionError(f"the workers speak protocol {spoken}, this client {PROTOCOL}: upgrade one")
    if not partitions.isdecimal() or int(partitions) < 1:
        raise UnsupportedVersionError(f"{config_key(prefix)} has partitions = {partitions!r}, not a number above 0")
    return int(partitions)


def require_known(partitions: int | None) -> int:
    """Their number, once it was read. Raises NotReadyError."""
    if partitions is None:
        raise NotReadyError("call connect() first: how many partitions there are is not known yet", retryable=True)
    return partitions


def require_session_id(session_id: str) -> str:
    """The id itself. Raises ValueError for one that no worker could answer: it would end as a dead letter."""
    size_bytes = len(session_id.encode())
    if not 1 <= size_bytes <= SESSION_ID_MAX_BYTES:
        raise ValueError(f"session_id must have 1 to {SESSION_ID_MAX_BYTES} bytes of UTF-8, this one has {size_bytes}")
    if any(unicodedata.category(character) == "Cc" for character in session_id):
        raise ValueError("session_id must have no control characters")
    return session_id


def require_token(token: str | None) -> str | None:
    """The token itself, if there is one. Raises ValueError for one that no worker would take, without showing it."""
    if token is None:
        return None
    try:
        size_bytes = len(token.encode())
    except UnicodeEncodeError:
        raise ValueError("token has half a surrogate pair") from None
    if not TOKEN_MIN_BYTES <= size_bytes <= TOKEN_MAX_BYTES:
        allowed = f"{TOKEN_MIN_BYTES} to {TOKEN_MAX_BYTES} bytes of UTF-8"
        raise ValueError(f"token must have {allowed}, this one has {size_bytes}")
    return token


def build_command(
    op: str,
    session_id: str,
    fence: Fence,
    keys: dict[str, Any],
    raw_payload: bytes | None = None,
    token: str | None = None,
) -> Command:
    """A command with a new `control_id`. `keys` are those of its `op`; `raw_payload` goes beside the body.

    `token`: the session's, if it has one. An open with a token makes it the session's.
    """
    control_id = uuid.uuid4().hex
    head = {
        "v": PROTOCOL,
        "op": op,
        "control_id": control_id,
        "session_id": session_id,
        "fence": fence._asdict(),
    }
    if token is not None:
        head["token"] = token
    fields = {"b": cast("bytes", msgpack.packb(head | keys))}
    if raw_payload is not None:
        fields["p"] = raw_payload
    return Command(control_id, op, session_id, fields)


def decode_entry(fields: dict[bytes, bytes]) -> tuple[int, Reply | Output | Lifecycle | None]:
    """One entry of an event stream: its number within the session's life, and what it says.

    The event is None for a type that only a newer client knows. Raises ValueError if the entry cannot be
    read.
    """
    try:
        number = int(fields[b"n"])
        decode = _DECODERS.get(fields[b"t"])
        if decode is None:
            return number, None
        return number, decode(cast("dict[str, Any]", msgpack.unpackb(fields[b"b"], strict_map_key=False)))
    except (KeyError, TypeError, ValueError, AttributeError, msgpack.UnpackException) as error:
        raise ValueError(f"unreadable event: {error!r}") from error


def error_of(reply: Reply) -> BargeinError:
    """The exception that a reply with `ok` false stands for."""
    kind = ERROR_BY_CODE.get(reply.code or "", BargeinError)
    return kind(reply.message, code=reply.code, retryable=reply.retryable, session_id=reply.session_id, reply=reply)


def _fence(value: Any) -> Fence:
    return Fence(value["incarnation"], value["epoch"], value["turn_id"], value["response_seq"])


def _fence_or_none(value: Any) -> Fence | None:
    return None if value is None else _fence(value)


def _reply(body: dict[str, Any]) -> Reply:
    return Reply(
        control_id=body["control_id"],
        op=body["op"],
        session_id=body["session_id"],
        ok=body["ok"],
        code=body.get("code"),
        message=body.get("message") or "",
        retryable=bool(body.get("retryable")),
        fence=_fence_or_none(body.get("fence")),
        accepted_fence=_fence_or_none(body.get("accepted_fence")),
        lease_generation=body.get("lease_generation"),
        detail=body.get("detail") or {},
    )


def _output(body: dict[str, Any]) -> Output:
    return Output(
        session_id=body["session_id"],
        request_id=body["request_id"],
        stage_id=body["stage_id"],
        fence=_fence(body["fence"]),
        seq=body["seq"],
        kind=body["kind"],
        data=body.get("data"),
        turn_end=bool(body.get("turn_end")),
        metadata=body.get("metadata") or {},
    )


def _lifecycle(body: dict[str, Any]) -> Lifecycle:
    return Lifecycle(
        event=body["event"],
        reason=body.get("reason"),
        fence=_fence(body["fence"]),
        lease_generation=body.get("lease_generation"),
        cancelled_fence=_fence_or_none(body.get("cancelled_fence")),
    )


_DECODERS = {b"reply": _reply, b"output": _output, b"lifecycle": _lifecycle}
