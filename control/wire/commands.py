"""A producer's command: from a stream entry's fields to a value of `control/core/commands.py`.

Responsible for version 1 of the command body, MessagePack or JSON, its limits, and the path of what is wrong; and for
tokens, which end here: a command has the digest. Leaves everything that depends on a session to the core. Pure. Says no
in two ways: a `Malformed` command where a session can be named, which the core answers; `Unreadable` where none can,
which becomes a dead letter. It never raises anything else, whatever the bytes.
"""

from __future__ import annotations

import binascii
import unicodedata
from base64 import b64decode
from hashlib import blake2b
from itertools import chain
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from control.core import commands as c
from control.core.fence import Component, Fence
from control.core.rejections import Code
from control.core.tokens import TokenDigest, digest_token
from control.wire.limits import TOKEN_MIN_BYTES, Limits

PROTOCOL = 1

# What a configuration may hold: no deeper than this, and the integers that MessagePack has.
MAX_LEVELS = 64
MIN_INTEGER, MAX_INTEGER = -(2**63), 2**64 - 1

_JSON_BRACE = ord("{")
# What the decoders make of maps, of lists, and of lists that are a map's key.
_CONTAINERS = {dict, list, tuple}


class Unreadable(Exception):
    """Nothing that could be answered: the reason, for the dead letter."""


class _Body(Struct, tag_field="op", kw_only=True):
    v: int
    control_id: str
    session_id: str
    fence: Fence
    expected_lease_generation: Component | None = None
    traceparent: str | None = None
    deadline_ms: Component | None = None
    token: str | None = None


class _Open(_Body, tag="open", kw_only=True):
    session_mode: str = "duplex"
    capabilities: c.Capabilities = c.Capabilities()
    session_config: dict[str, Any] | None = None
    runtime_config: dict[str, Any] | None = None


class _Append(_Body, tag="append", kw_only=True):
    mode: str
    payload: Raw | UnsetType = UNSET
    payload_b64: str | UnsetType = UNSET
    final: bool = False
    operation_id: str | None = None
    expected_epoch: Component | None = None


class _Signal(_Body, tag="signal", kw_only=True):
    event: str
    next_fence: Fence | None = None
    session_config: dict[str, Any] | None = None
    runtime_config: dict[str, Any] | None = None


class _Close(_Body, tag="close", kw_only=True):
    reason: str = "client_close"


class _Touch(_Body, tag="touch", kw_only=True):
    activity: str


class _Resume(_Body, tag="resume", kw_only=True):
    pass


class _Header(Struct, kw_only=True):
    """What a reply needs, read leniently from a body that isn't valid as a whole."""

    v: Any = None
    op: Any = None
    control_id: Any = None
    session_id: Any = None
    fence: Any = None
    token: Any = None


_Any = _Open | _Append | _Signal | _Close | _Touch | _Resume
_from_msgpack = msgspec.msgpack.Decoder(_Any)
_from_json = msgspec.json.Decoder(_Any)
_header_from_msgpack = msgspec.msgpack.Decoder(_Header)
_header_from_json = msgspec.json.Decoder(_Header)


class Received(Struct, frozen=True, gc=False):
    """A decoded entry. `payload`: an append's payload packed as MessagePack, if it came inside the body.

    An append whose payload came as the raw field `p` has None here: the commit moves it inside Redis.
    """

    command: c.Command
    payload: bytes | None = None


def decode_command(body: bytes, payload: bytes | None = None, limits: Limits = Limits()) -> Received:  # noqa: B008
    """The command in an entry's fields `b` and `p`.

    Raises `Unreadable` where no session can be named; otherwise a body that is wrong in any way comes back as a
    `Malformed` command with the code and message of its refusal.
    """
    if len(body) > limits.body_bytes:
        return _malformed(
            _read_header(body),
            Code.PAYLOAD_TOO_LARGE,
            f"$: the body has {len(body)} bytes, {limits.body_bytes} are allowed",
            limits,
        )
    json = body[:1] == b"{"
    try:
        decoded = (_from_json if json else _from_msgpack).decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        header = _read_header(body)
        if header.v not in (None, PROTOCOL):
            return _malformed(header, Code.UNSUPPORTED_VERSION, _version_message(header.v), limits)
        return _malformed(header, Code.INVALID_ARGUMENT, _spell(error), limits)
    if decoded.v != PROTOCOL:
        return _malformed(_header_of(decoded), Code.UNSUPPORTED_VERSION, _version_message(decoded.v), limits)
    wrong = _find_id_fault(decoded.session_id, limits.session_id_bytes)
    if wrong is not None:
        raise Unreadable(f"$.session_id: {wrong}")
    wrong = _find_id_fault(decoded.control_id, limits.control_id_bytes)
    if wrong is not None:
        return _malformed(_header_of(decoded), Code.INVALID_ARGUMENT, f"$.control_id: {wrong}", limits)
    wrong = None if decoded.token is None else _find_token_fault(decoded.token, limits)
    if wrong is not None:
        return _malformed(_header_of(decoded), Code.INVALID_ARGUMENT, f"$.token: {wrong}", limits)
    try:
        return _received(decoded, payload, limits, json=json)
    except _Refused as refusal:
        return _malformed(_header_of(decoded), refusal.code, str(refusal), limits)


class _Refused(Exception):
    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


def _received(body: Any, payload: bytes | None, limits: Limits, *, json: bool) -> Received:
    common: dict[str, Any] = {
        "control_id": body.control_id,
        "session_id": body.session_id,
        "fence": body.fence,
        "expected_lease_generation": body.expected_lease_generation,
        "traceparent": body.traceparent,
        "deadline_ms": body.deadline_ms,
        "token": None if body.token is None else digest_token(body.token.encode()),
    }
    match body:
        case _Append():
            return _append(body, common, payload, limits, json=json)
        case _Open():
            _require_plain("$.capabilities.input_modes", body.capabilities.input_modes)
            _require_plain_config(body)
            return Received(
                c.Open(
                    **common,
                    session_mode=body.session_mode,
                    capabilities=body.capabilities,
                    session_config=body.session_config,
                    runtime_config=body.runtime_config,
                )
            )
        case _Signal():
            if body.event in c.CANCEL_EVENTS:
                kind: type[c.Cancel | c.Update] = c.Cancel
            elif body.event == c.UPDATE_EVENT:
                kind = c.Update
            else:
                return Received(c.UnknownSignal(**common, event=body.event))
            _require_plain_config(body)
            return Received(
                kind(
                    **common,
                    event=body.event,
                    next_fence=body.next_fence,
                    session_config=body.session_config,
                    runtime_config=body.runtime_config,
                )
            )
        case _Close():
            return Received(c.Close(**common, reason=body.reason))
        case _Touch():
            return Received(c.Touch(**common, activity=body.activity))
        case _:
            return Received(c.Resume(**common))


def _append(body: _Append, common: dict[str, Any], payload: bytes | None, limits: Limits, *, json: bool) -> Received:
    inline = None
    if payload is None:
        inline = _inline_payload(body, json=json)
    elif body.payload is not UNSET or body.payload_b64 is not UNSET:
        raise _Refused(Code.INVALID_ARGUMENT, "$.payload: the entry has a field p as well; send the payload once")
    size = len(payload if payload is not None else inline or b"")
    if size > limits.payload_bytes:
        raise _Refused(Code.PAYLOAD_TOO_LARGE, f"$.payload: it has {size} bytes, {limits.payload_bytes} are allowed")
    if body.operation_id is not None:
        wrong = _find_id_fault(body.operation_id, limits.control_id_bytes)
        if wrong is not None:
            raise _Refused(Code.INVALID_ARGUMENT, f"$.operation_id: {wrong}")
    content = payload if payload is not None else inline or b""
    command = c.Append(
        **common,
        mode=body.mode,
        final=body.final,
        operation_id=body.operation_id,
        expected_epoch=body.expected_epoch,
        payload_digest=None if body.operation_id is None else blake2b(content, digest_size=8).digest(),
        payload_bytes=size,
    )
    return Received(command, inline)


def _inline_payload(body: _Append, *, json: bool) -> bytes:
    if body.payload_b64 is not UNSET:
        if not json or body.payload is not UNSET:
            raise _Refused(Code.INVALID_ARGUMENT, "$.payload_b64: only a JSON body has it, and in place of payload")
        try:
            return msgspec.msgpack.encode(b64decode(body.payload_b64, validate=True))
        except (binascii.Error, ValueError) as error:
            raise _Refused(Code.INVALID_ARGUMENT, f"$.payload_b64: {error}") from error
    if body.payload is UNSET:
        return msgspec.msgpack.encode(None)
    if not json:
        return bytes(body.payload)
    try:
        return msgspec.msgpack.encode(msgspec.json.decode(body.payload))
    except (msgspec.MsgspecError, OverflowError, RecursionError) as error:
        raise _Refused(Code.INVALID_ARGUMENT, f"$.payload: {error}") from error


def _require_plain_config(body: _Open | _Signal) -> None:
    _require_plain("$.session_config", body.session_config)
    _require_plain("$.runtime_config", body.runtime_config)


def _require_plain(path: str, value: Any) -> None:
    """Refuse what could be read here but not packed again, or not read again by whoever stands deeper in its stack.

    Level by level and kind by kind: a body of a million values must not hold up everybody else (I11).
    """
    level, values = 0, [value]
    while values:
        kinds = set(map(type, values))
        if int in kinds:
            numbers = values if len(kinds) == 1 else [x for x in values if type(x) is int]
            if min(numbers) < MIN_INTEGER or max(numbers) > MAX_INTEGER:
                raise _Refused(Code.INVALID_ARGUMENT, f"{path}: an integer in it has more than 64 bits")
        if level > MAX_LEVELS:
            raise _Refused(Code.INVALID_ARGUMENT, f"{path}: it is nested more than {MAX_LEVELS} levels deep")
        level += 1
        inner: list[Any] = []
        for kind in kinds & _CONTAINERS:
            some = values if len(kinds) == 1 else [x for x in values if type(x) is kind]
            inner.extend(chain.from_iterable(some))
            if kind is dict:
                inner.extend(chain.from_iterable(each.values() for each in some))
        values = inner


def _read_header(body: bytes) -> _Header:
    decoder = _header_from_json if body[:1] and body[0] == _JSON_BRACE else _header_from_msgpack
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Unreadable(f"the body is no MessagePack or JSON map: {_spell(error)}") from error


def _header_of(body: Any) -> _Header:
    return _Header(
        v=body.v,
        op=body.__struct_config__.tag,
        control_id=body.control_id,
        session_id=body.session_id,
        fence=body.fence,
        token=body.token,
    )


def _malformed(header: _Header, code: Code, message: str, limits: Limits) -> Received:
    if not isinstance(header.session_id, str):
        raise Unreadable(f"$.session_id: missing or not a string, so nobody can be answered; {message[:200]}")
    wrong = _find_id_fault(header.session_id, limits.session_id_bytes)
    if wrong is not None:
        raise Unreadable(f"$.session_id: {wrong}")
    fence = header.fence
    if not isinstance(fence, Fence):
        try:
            fence = msgspec.convert(fence, Fence)
        except msgspec.ValidationError:
            fence = None
    control_id = header.control_id
    if not isinstance(control_id, str) or _find_id_fault(control_id, limits.control_id_bytes) is not None:
        control_id = ""
    op = header.op if isinstance(header.op, str) else ""
    return Received(
        c.Malformed(
            control_id=control_id,
            session_id=header.session_id,
            fence=fence,
            op=op[:32],
            code=code,
            message=message,
            token=_find_shown_token(header, limits),
        )
    )


def _find_shown_token(header: _Header, limits: Limits) -> TokenDigest | None:
    """The token that a body shows although it is no command: its refusal must not be another's."""
    token = header.token
    if not isinstance(token, str) or _find_token_fault(token, limits) is not None:
        return None
    return digest_token(token.encode())


def _find_token_fault(token: str, limits: Limits) -> str | None:
    """What is wrong with a token, without a word of it; or None."""
    size = len(token.encode())
    if TOKEN_MIN_BYTES <= size <= limits.token_bytes:
        return None
    return f"it has {size} bytes, {TOKEN_MIN_BYTES} to {limits.token_bytes} are allowed"


def _find_id_fault(text: str, limit_bytes: int) -> str | None:
    """What is wrong with an id, or None."""
    if 0 < len(text) <= limit_bytes and text.isascii() and text.isprintable():
        return None
    if not text:
        return "it is empty"
    if len(text) > limit_bytes or (not text.isascii() and len(text.encode("utf-8", "surrogatepass")) > limit_bytes):
        return f"it has more than {limit_bytes} bytes"
    if not text.isprintable() and any(unicodedata.category(char) in {"Cc", "Cs"} for char in text):
        return "it has a control character or half a surrogate pair"
    return None


def _version_message(version: object) -> str:
    return f"$.v: version {version!r} is not understood here, {PROTOCOL} is"


def _spell(error: Exception) -> str:
    """msgspec's message with the path first: `$.fence.epoch: Expected ...`."""
    if isinstance(error, RecursionError):
        return "$: it is nested too deeply"
    text, at, path = str(error).rpartition(" - at `")
    return f"{path.rstrip('`')}: {text}" if at else f"$: {error}"
