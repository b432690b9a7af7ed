"""What travels between a partition's owner and its stage workers: submissions, aborts and acks.

Responsible for their bytes; both ends are this project's own and of one layout version, so they are arrays, short and
quick. Leaves their meaning to `control/core/commands.py` and to the stage worker. Pure. Says no with `Unreadable`:
what comes out of Redis is checked like everything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from control.core import commands as c
from control.core.fence import Fence
from control.wire.commands import Unreadable


class SubmissionOrder(Struct, frozen=True, gc=False, array_like=True):
    """Input for one stage's engine. Its payload is the entry's field `p`.

    `number` is the submission's for the first stage, 0 for what an earlier stage forwards. `config` is empty where the
    stage has `generation` already. `packed`: the payload is MessagePack; else raw bytes.
    """

    session_id: str
    stage_id: int
    fence: Fence
    number: int
    seq: int
    turn_seq: int
    mode: str
    final: bool
    resumed: bool
    generation: int
    config: bytes
    route: tuple[str, ...]
    packed: bool
    traceparent: str | None = None


class AbortOrder(Struct, frozen=True, gc=False, array_like=True):
    """The requests of `epochs` must go. The entry's field `a` is the last submission that was unread before it.

    `restart`: they have been to go for so long that an engine that still can't let go of them must itself go.
    """

    session_id: str
    incarnation: int
    stage_id: int
    number: int
    attempt: int
    epochs: tuple[int, ...]
    restart: bool = False


class AcceptedAck(Struct, frozen=True, gc=False, array_like=True, tag=1):
    """The first stage took submission `number`."""

    session_id: str
    incarnation: int
    number: int


class RejectedAck(Struct, frozen=True, gc=False, array_like=True, tag=2):
    """The first stage refused submission `number`."""

    session_id: str
    incarnation: int
    number: int
    code: str
    message: str


class CleanedAck(Struct, frozen=True, gc=False, array_like=True, tag=3):
    """The worker holds nothing of cleanup `number` any more."""

    session_id: str
    incarnation: int
    number: int
    worker_id: str


class CleanupFailedAck(Struct, frozen=True, gc=False, array_like=True, tag=4):
    """The worker could not clean up."""

    session_id: str
    incarnation: int
    number: int
    attempt: int
    worker_id: str
    timed_out: bool
    message: str


class RequestFailedAck(Struct, frozen=True, gc=False, array_like=True, tag=5):
    """The worker lost the request of an epoch."""

    session_id: str
    incarnation: int
    epoch: int
    worker_id: str
    message: str


class AuditAck(Struct, frozen=True, gc=False, array_like=True, tag=7):
    """What a holder of slots has of a life of the session, whether or not anybody knows of it."""

    session_id: str
    incarnation: int
    holder: str
    stage_id: int
    epochs: tuple[int, ...]
    has_slot: bool


Ack = AcceptedAck | RejectedAck | CleanedAck | CleanupFailedAck | RequestFailedAck | AuditAck

_encoder = msgspec.msgpack.Encoder()
_ack = msgspec.msgpack.Decoder(Ack)
_submission = msgspec.msgpack.Decoder(SubmissionOrder)
_abort = msgspec.msgpack.Decoder(AbortOrder)
_config = msgspec.msgpack.Decoder(tuple[dict[str, Any], dict[str, Any], Any])

encode = _encoder.encode


def decode_ack(body: bytes) -> tuple[str, c.Event]:
    """The session id and the core's event of an ack. Raises `Unreadable`."""
    try:
        ack = _ack.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Unreadable(f"no ack: {error}") from error
    match ack:
        case AcceptedAck():
            return ack.session_id, c.Accepted(ack.incarnation, ack.number)
        case RejectedAck():
            return ack.session_id, c.Rejected(ack.incarnation, ack.number, ack.code, ack.message)
        case CleanedAck():
            return ack.session_id, c.Cleaned(ack.incarnation, ack.number, ack.worker_id)
        case CleanupFailedAck():
            return ack.session_id, c.CleanupFailed(
                ack.incarnation, ack.number, ack.attempt, ack.worker_id, ack.timed_out, ack.message
            )
        case RequestFailedAck():
            return ack.session_id, c.RequestFailed(ack.incarnation, ack.epoch, ack.worker_id, ack.message)
        case AuditAck():
            return ack.session_id, c.Audited(ack.holder, ack.stage_id, ack.incarnation, ack.epochs, ack.has_slot)


def decode_submission(body: bytes) -> SubmissionOrder:
    """Raises `Unreadable`."""
    try:
        return _submission.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Unreadable(f"no submission: {error}") from error


def decode_abort(body: bytes) -> AbortOrder:
    """Raises `Unreadable`."""
    try:
        return _abort.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Unreadable(f"no abort: {error}") from error


def decode_payload(payload: bytes, *, packed: bool) -> Any:
    """An append's payload as the producer meant it: bytes, or any MessagePack value. Raises `Unreadable`."""
    if not packed:
        return payload
    try:
        return msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Unreadable(f"$.payload: {error}") from error


def pack_config(
    session_config: Mapping[str, Any], runtime_config: Mapping[str, Any], sampling: tuple[Any, ...]
) -> bytes:
    """A session's configuration as it is stored and sent to the stages. TypeError where it can't be packed."""
    return _encoder.encode((session_config, runtime_config, sampling))


def unpack_config(packed: bytes) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """`(session_config, runtime_config, sampling parameters, one a stage)`."""
    return _config.decode(packed) if packed else ({}, {}, ())
