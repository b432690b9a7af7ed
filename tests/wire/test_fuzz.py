"""Whatever the bytes: they are a command, or unreadable; and what is a command, the core decides.

Random bytes, valid bodies with bytes changed, valid bodies with values changed, and acks likewise. Nothing may raise
but `Unreadable`, and nothing that a step leaves may be impossible to store or to send.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from control.core import commands as c
from control.core import effects as e
from control.wire.commands import Received, Unreadable, decode_command
from control.wire.events import encode_event
from control.wire.limits import Limits
from control.wire.orders import decode_order
from control.wire.stage import (
    decode_abort,
    decode_ack,
    decode_payload,
    decode_submission,
    encode,
    pack_config,
    unpack_config,
)
from tests.core.call import Call, opened, talking
from tests.core.call import settings as core_settings
from tests.wire.bodies import BODIES, FENCE, body, in_json, packed
from tests.wire.test_orders import ORDERS
from tests.wire.test_stage import ABORT, ACKS, SUBMISSION

STABLE = settings(max_examples=300, derandomize=True, database=None)
FEWER = settings(STABLE, max_examples=150)

VALID = [encode_(plain) for plain in BODIES.values() for encode_ in (packed, in_json)]
WORDS = [encode(ack) for ack, _ in ACKS] + [encode(SUBMISSION), encode(ABORT)] + [encode(order) for order, _ in ORDERS]

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=12)
    | st.binary(max_size=12)
    | st.sampled_from(["open", "append", "signal", "barge_in", "s1", "append_tokens", 0, 1, 2, 2**53])
)
KEYS = st.text(max_size=8) | st.sampled_from(sorted({key for plain in BODIES.values() for key in plain} | set(FENCE)))
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)
EXTENSIONS = st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=16))


@st.composite
def changed_bytes(draw: st.DrawFn, valid: list[bytes]) -> bytes:
    """A valid body with bytes overwritten, cut out, doubled or put in."""
    data = bytearray(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(1, 4))):
        if not data:
            break
        place, length = draw(st.integers(0, len(data) - 1)), draw(st.integers(0, 8))
        match draw(st.sampled_from(["set", "cut", "double", "put"])):
            case "set":
                data[place] = draw(st.integers(0, 255))
            case "cut":
                del data[place : place + length]
            case "double":
                data[place:place] = data[place : place + length]
            case _:
                data[place:place] = draw(st.binary(max_size=8))
    return bytes(data)


@st.composite
def changed_values(draw: st.DrawFn) -> dict[str, Any]:
    """A valid body with keys left out, replaced or added."""
    plain = dict(draw(st.sampled_from(list(BODIES.values()))))
    for _ in range(draw(st.integers(1, 3))):
        key = draw(st.sampled_from(sorted(plain)) | KEYS)
        if draw(st.booleans()):
            plain[key] = draw(VALUES)
        else:
            plain.pop(key, None)
    return plain


def reason_of(read: Callable[..., Any], *args: Any, **kwargs: Any) -> str | None:
    """Why nothing could be read; None if something was. Anything but `Unreadable` comes through."""
    try:
        read(*args, **kwargs)
    except Unreadable as error:
        return str(error)
    return None


def check(data: bytes, payload: bytes | None = None) -> c.Command | None:
    """Decode, and check what came out; None where nobody can be answered."""
    reason = reason_of(decode_command, data, payload)
    if reason is not None:
        assert 0 < len(reason) < 1000
        return None
    received = decode_command(data, payload)
    assert isinstance(received, Received)
    command = received.command
    assert isinstance(command, c.Command)
    assert 0 < len(command.session_id.encode()) <= Limits().session_id_bytes
    assert len(command.control_id.encode()) <= Limits().control_id_bytes
    if received.payload is not None:
        decode_payload(received.payload, packed=True)
    return command


def check_decision(call: Call, command: c.Command) -> None:
    """The core decides the command, and everything that comes of it can be stored and sent."""
    call.session_id = command.session_id
    word = call.feed(command)
    if call.session is not None:
        msgspec.msgpack.encode(call.session)
    for effect in word.decision.effects:
        match effect:
            case e.Answer(reply, remember):
                assert len(encode_event(reply)) < 2 * len(msgspec.msgpack.encode(command)) + 4096
                encode(remember)
            case e.Announce(lifecycle):
                encode_event(lifecycle)
            case e.Submit():
                encode(effect.config)
            case _:
                pass


def fresh_calls() -> list[Call]:
    wired = core_settings(pack_config=pack_config, unpack_config=unpack_config, configure=lambda config: (config,))
    vacant, closing = Call(wired), talking()
    closing.close()
    return [vacant, opened(), talking(), closing]


@STABLE
@given(st.binary(max_size=200))
@example(b"")
@example(b"{")
@example(b"\x80")
@example(b"\xff")
@example(b'{"v":1e400,"session_id":"s"}')
@example(b'{"v":' + b"9" * 5000 + b',"session_id":"s"}')
def test_any_bytes_are_a_command_or_unreadable(data: bytes) -> None:
    check(data)


@STABLE
@given(data=changed_bytes(VALID), payload=st.none() | st.binary(max_size=10))
def test_a_valid_body_with_bytes_changed_is_a_command_or_unreadable(data: bytes, payload: bytes | None) -> None:
    command = check(data, payload)
    if command is not None:
        for call in fresh_calls():
            check_decision(call, command)


@STABLE
@given(plain=changed_values(), as_json=st.booleans())
def test_a_valid_body_with_values_changed_is_answered_whatever_the_phase(plain: dict[str, Any], as_json: bool) -> None:
    if as_json:
        data = json.dumps(plain, default=repr, allow_nan=False) if _is_finite(plain) else "{}"
        command = check(data.encode())
    else:
        command = check(packed(plain))
    if command is not None:
        for call in fresh_calls():
            check_decision(call, command)


@FEWER
@given(session_config=st.dictionaries(KEYS, VALUES | EXTENSIONS, max_size=4), op=st.sampled_from(["open", "signal"]))
def test_whatever_configuration_is_let_in_can_be_stored(session_config: dict[str, Any], op: str) -> None:
    rest = {"event": "session.update"} if op == "signal" else {}
    plain = body(op, **rest, session_config=session_config, runtime_config=session_config)
    command = check(packed(plain))
    assert command is not None
    for call in fresh_calls():
        check_decision(call, command)


@FEWER
@given(
    depth=st.integers(0, 3_000), key=st.sampled_from(["session_config", "payload", "x", "fence", "v", "capabilities"])
)
def test_nesting_of_any_depth_is_refused_not_fatal(depth: int, key: str) -> None:
    start = packed(body("open"))
    count = start[0] + 1
    check(bytes([count]) + start[1:] + packed(key) + b"\x81\xa1x" + b"\x91" * depth + b"\x01")
    text = in_json(body("open"))
    check(text[:-1] + f', "{key}": {{"x": '.encode() + b"[" * depth + b"]" * depth + b"}}")


@FEWER
@given(
    number=st.integers(-(10**40), 10**40), key=st.sampled_from(["v", "deadline_ms", "fence", "session_config", "mode"])
)
def test_an_integer_of_any_size_is_refused_not_fatal(number: int, key: str) -> None:
    plain = body("append", mode="append_tokens")
    for value in (number, {"x": number}, {**FENCE, "epoch": number}):
        command = check(in_json({**plain, key: value}))
        assert command is not None
        for call in fresh_calls():
            check_decision(call, command)


@FEWER
@given(twice=st.sampled_from(sorted(BODIES["append in full"])), value=VALUES, first=st.booleans())
def test_a_key_that_comes_twice_is_no_crash(twice: str, value: Any, first: bool) -> None:
    plain = BODIES["append in full"]
    pairs = [*plain.items(), (twice, value)]
    if first:
        pairs.reverse()
    data = bytes([0x80 + len(pairs)]) + b"".join(packed(key) + packed(item) for key, item in pairs)
    command = check(data)
    if command is not None:
        for call in fresh_calls():
            check_decision(call, command)


@STABLE
@given(data=st.binary(max_size=100) | changed_bytes(WORDS))
@pytest.mark.parametrize("read", [decode_ack, decode_submission, decode_abort, decode_order])
def test_any_bytes_from_a_stage_are_a_word_or_unreadable(read: Any, data: bytes) -> None:
    assert reason_of(read, data) != ""


@STABLE
@given(data=changed_bytes([encode(ack) for ack, _ in ACKS]))
def test_any_word_of_a_stage_is_decided_whatever_the_phase(data: bytes) -> None:
    try:
        _, event = decode_ack(data)
    except Unreadable:
        return
    for call in fresh_calls():
        call.feed(event)


@FEWER
@given(data=st.binary(max_size=60), is_packed=st.booleans())
def test_any_payload_is_a_value_or_unreadable(data: bytes, is_packed: bool) -> None:
    reason = reason_of(decode_payload, data, packed=is_packed)
    assert reason is None or reason.startswith("$.payload: ")
    assert is_packed or reason is None


def _is_finite(value: Any) -> bool:
    try:
        json.dumps(value, default=repr, allow_nan=False)
    except ValueError:
        return False
    return True
