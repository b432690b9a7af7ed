"""A producer's command: both encodings, every limit, and the path of what is wrong."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from control.core import commands as c
from control.core.fence import MAX_COMPONENT, Fence
from control.wire.commands import MAX_LEVELS, Received, Unreadable, decode_command
from control.wire.limits import MIB, Limits
from tests.wire.bodies import BODIES, FENCE, NEXT, Body, Encode, body, decode, in_json, packed, refusal

ENCODINGS = pytest.mark.parametrize("encode", [packed, in_json], ids=["MessagePack", "JSON"])
COMMON: dict[str, Any] = {"control_id": "c1", "session_id": "s1", "fence": Fence(1, 2, 3, 4)}
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NEXT_FENCE = Fence(1, 3, 0, 0)

COMMANDS: dict[str, c.Command] = {
    "open": c.Open(**COMMON),
    "open in full": c.Open(
        **COMMON,
        session_mode="turn",
        capabilities=c.Capabilities(input_modes=["append_tokens"], implementation_level="mine"),
        session_config={"voice": "b", "nested": [{"a": [1, 2.5, None, True]}]},
        runtime_config={"temperature": 0.5},
        expected_lease_generation=7,
        traceparent=TRACE,
        deadline_ms=1500,
    ),
    "barge_in": c.Cancel(**COMMON, event="barge_in", next_fence=NEXT_FENCE),
    "input.cancel": c.Cancel(**COMMON, event="input.cancel", next_fence=NEXT_FENCE, session_config={"voice": "b"}),
    "response.cancel": c.Cancel(**COMMON, event="response.cancel", next_fence=NEXT_FENCE, runtime_config={}),
    "session.update": c.Update(**COMMON, session_config={}),
    "unknown signal": c.UnknownSignal(**COMMON, event="sneeze"),
    "close": c.Close(**COMMON),
    "close in full": c.Close(**COMMON, reason="open_rollback"),
    "touch": c.Touch(**COMMON, activity="playback_ack"),
    "resume": c.Resume(**COMMON, expected_lease_generation=3),
}


@ENCODINGS
@pytest.mark.parametrize("name", COMMANDS)
def test_every_op_is_read_field_by_field(name: str, encode: Encode) -> None:
    assert decode(BODIES[name], encode) == COMMANDS[name]


@pytest.mark.parametrize("name", BODIES)
def test_both_encodings_say_the_same(name: str) -> None:
    assert decode_command(packed(BODIES[name])) == decode_command(in_json(BODIES[name]))


@ENCODINGS
@pytest.mark.parametrize("name", BODIES)
def test_unknown_keys_are_ignored(name: str, encode: Encode) -> None:
    newer = {**BODIES[name], "priority": 9, "hints": {"deep": [{"x": None}]}, "fence": {**FENCE, "shard": 1}}
    assert decode(newer, encode) == decode(BODIES[name], encode)


@ENCODINGS
def test_the_order_of_keys_does_not_matter(encode: Encode) -> None:
    for plain in BODIES.values():
        assert decode(dict(reversed(plain.items())), encode) == decode(plain, encode)


def test_a_fence_may_be_as_high_as_a_script_can_compare() -> None:
    top = dict.fromkeys(FENCE, MAX_COMPONENT)
    assert decode(body("close", fence=top)).fence == Fence(*(MAX_COMPONENT,) * 4)


# --- what is wrong, and where ------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Body, str]] = {
    "no version": ({k: x for k, x in body("close").items() if k != "v"}, "$: Object missing required field `v`"),
    "no op": ({k: x for k, x in body("close").items() if k != "op"}, "$: Object missing required field `op`"),
    "an op that is none": (body("dance"), "$.op: Invalid value 'dance'"),
    "an op that is no text": (body("close", op=7), "$.op: "),
    "no control id": (
        {k: x for k, x in body("close").items() if k != "control_id"},
        "$: Object missing required field `control_id`",
    ),
    "a control id that is no text": (body("close", control_id=7), "$.control_id: "),
    "an empty control id": (body("close", control_id=""), "$.control_id: it is empty"),
    "no fence": (
        {k: x for k, x in body("close").items() if k != "fence"},
        "$: Object missing required field `fence`",
    ),
    "a fence that is none": (body("close", fence=[1, 2, 3, 4]), "$.fence: "),
    "half a fence": (body("close", fence={"incarnation": 1}), "$.fence: Object missing required field `epoch`"),
    "a fence below zero": (body("close", fence={**FENCE, "turn_id": -1}), "$.fence.turn_id: "),
    "a fence too high": (body("close", fence={**FENCE, "epoch": 2**53}), "$.fence.epoch: "),
    "a fence of fractions": (body("close", fence={**FENCE, "epoch": 1.5}), "$.fence.epoch: "),
    "a fence of words": (body("close", fence={**FENCE, "epoch": "2"}), "$.fence.epoch: "),
    "a next fence too high": (
        body("signal", event="barge_in", next_fence={**NEXT, "epoch": 2**64 - 1}),
        "$.next_fence.epoch: ",
    ),
    "a generation below zero": (body("close", expected_lease_generation=-1), "$.expected_lease_generation: "),
    "a deadline of words": (body("close", deadline_ms="soon"), "$.deadline_ms: "),
    "a traceparent that is no text": (body("close", traceparent=1), "$.traceparent: "),
    "an append without mode": (body("append"), "$: Object missing required field `mode`"),
    "a final that is no yes or no": (body("append", mode="x", final=1), "$.final: "),
    "an operation without name": (body("append", mode="x", operation_id=""), "$.operation_id: it is empty"),
    "an operation of bytes": (body("append", mode="x", operation_id="a\x00b"), "$.operation_id: it has a control"),
    "a signal without event": (body("signal"), "$: Object missing required field `event`"),
    "a touch without activity": (body("touch"), "$: Object missing required field `activity`"),
    "a reason that is no text": (body("close", reason=None), "$.reason: "),
    "a configuration that is no map": (body("open", session_config=[1]), "$.session_config: "),
    "capabilities that are no map": (body("open", capabilities="all"), "$.capabilities: "),
    "modes that are no list": (body("open", capabilities={"input_modes": "all"}), "$.capabilities.input_modes: "),
}


@ENCODINGS
@pytest.mark.parametrize("name", WRONG)
def test_a_refusal_names_the_path_of_what_is_wrong(name: str, encode: Encode) -> None:
    plain, message = WRONG[name]
    code, got = refusal(plain, encode)
    assert code == "invalid_argument"
    assert got.startswith(message), got


@ENCODINGS
def test_a_refusal_keeps_what_could_be_read(encode: Encode) -> None:
    command = decode(body("append", mode=7), encode)
    assert command == c.Malformed(**COMMON, op="append", code="invalid_argument", message=command.message)  # type: ignore[attr-defined]
    command = decode(body("close", fence={"incarnation": 1}, control_id=7), encode)
    assert isinstance(command, c.Malformed)
    assert (command.session_id, command.control_id, command.fence, command.op) == ("s1", "", None, "close")


def test_an_op_of_any_length_is_named_shortly() -> None:
    command = decode(body("x" * 10_000))
    assert isinstance(command, c.Malformed)
    assert command.op == "x" * 32


# --- versions --------------------------------------------------------------------------------------------------


@ENCODINGS
@pytest.mark.parametrize("version", [0, 2, -1, 2**63])
def test_another_version_is_named_as_such(version: int, encode: Encode) -> None:
    code, message = refusal(body("close", v=version), encode)
    assert code == "unsupported_version"
    assert message.startswith(f"$.v: version {version}")


@ENCODINGS
def test_a_newer_version_is_named_as_such_even_where_its_body_looks_wrong(encode: Encode) -> None:
    assert refusal({**body("sing"), "v": 2, "fence": "new"}, encode)[0] == "unsupported_version"
    assert refusal({**body("close"), "v": "2"}, encode)[0] == "unsupported_version"


@ENCODINGS
@pytest.mark.parametrize("version", [True, 1.0, None])
def test_a_version_that_only_looks_like_one_is_refused(version: Any, encode: Encode) -> None:
    assert refusal(body("close", v=version), encode)[0] == "invalid_argument"


# --- limits ----------------------------------------------------------------------------------------------------


@ENCODINGS
@pytest.mark.parametrize("text", ["s" * 128, "ö" * 64, "語" * 42 + "ss", "🎙" * 32], ids=[1, 2, 3, 4])
def test_an_id_of_128_bytes_is_allowed(text: str, encode: Encode) -> None:
    assert len(text.encode()) == 128
    command = decode(body("close", session_id=text, control_id=text), encode)
    assert (command.session_id, command.control_id) == (text, text)


@ENCODINGS
@pytest.mark.parametrize("text", ["s" * 129, "ö" * 64 + "s", "語" * 43, "🎙" * 33, "s" * 10**5], ids=[1, 2, 3, 4, "far"])
def test_an_id_of_more_bytes_is_refused(text: str, encode: Encode) -> None:
    code, message = refusal(body("close", control_id=text), encode)
    assert (code, message) == ("invalid_argument", "$.control_id: it has more than 128 bytes")
    with pytest.raises(Unreadable, match=r"\$\.session_id: it has more than 128 bytes"):
        decode(body("close", session_id=text), encode)


@ENCODINGS
@pytest.mark.parametrize("char", ["\x00", "\n", "\x1b", "\x7f", "\x85", "\x9f"])
def test_an_id_with_a_control_character_is_refused(char: str, encode: Encode) -> None:
    text = f"a{char}b"
    assert refusal(body("close", control_id=text), encode)[1].startswith("$.control_id: it has a control character")
    with pytest.raises(Unreadable, match=r"\$\.session_id: it has a control character"):
        decode(body("close", session_id=text), encode)


@pytest.mark.parametrize("text", ["call 7", "a{b}c:*", "Ünï-cödé 🎙", "\u202e", "-", "\u2028", "\u200d", "'\"\\"])
def test_any_other_text_is_an_id(text: str) -> None:
    assert decode(body("close", session_id=text), in_json).session_id == text


def test_limits_are_those_that_are_given() -> None:
    assert decode(body("close", control_id="c" * 9), control_id_bytes=9)
    assert refusal(body("close", control_id="c" * 10), control_id_bytes=9)[1].endswith("more than 9 bytes")
    with pytest.raises(Unreadable):
        decode(body("close"), session_id_bytes=1)


@ENCODINGS
def test_a_body_may_be_as_large_as_the_limit_and_not_a_byte_larger(encode: Encode) -> None:
    plain = body("open", session_config={"text": ""})
    short = len(encode(body("open", session_config={"text": "x" * 1000}))) - 1000
    text = "x" * (Limits().body_bytes - short - 2)
    for extra, large in ((0, False), (100, True)):
        plain = body("open", session_config={"text": text + "x" * extra})
        if large:
            code, message = refusal(plain, encode)
            assert code == "payload_too_large"
            assert message == f"$: the body has {len(encode(plain))} bytes, {MIB} are allowed"
        else:
            assert len(encode(plain)) <= MIB
            assert isinstance(decode(plain, encode), c.Open)


def test_s54_a_body_of_ten_mebibytes_is_refused_to_its_sender() -> None:
    command = decode(body("append", mode="append_tokens", payload=b"x" * (10 * MIB)))
    assert isinstance(command, c.Malformed)
    assert (command.code, command.session_id, command.control_id) == ("payload_too_large", "s1", "c1")


# --- payloads --------------------------------------------------------------------------------------------------


def received(plain: Body, encode: Encode = packed, payload: bytes | None = None) -> Received:
    return decode_command(encode(plain), payload)


def test_a_payload_in_its_own_field_is_never_looked_at() -> None:
    raw = bytes(range(256)) * 10
    got = received(body("append", mode="append_audio_chunk"), payload=raw)
    assert got.payload is None  # the commit moves it inside Redis
    assert isinstance(got.command, c.Append)
    assert (got.command.payload_bytes, got.command.payload_digest) == (2560, None)


@ENCODINGS
@pytest.mark.parametrize("value", [None, 7, "hällo", [1, [2, {"a": None}]], {"text": "x"}, True, 2.5, "", []])
def test_a_payload_inside_the_body_is_any_value_packed_as_messagepack(value: Any, encode: Encode) -> None:
    got = received(body("append", mode="append_tokens", payload=value), encode)
    assert got.payload is not None
    assert msgspec.msgpack.decode(got.payload) == value
    assert isinstance(got.command, c.Append)
    assert got.command.payload_bytes == len(got.payload)


def test_bytes_come_as_they_are_in_messagepack_and_as_base64_in_json() -> None:
    in_pack = received(body("append", mode="append_audio_chunk", payload=b"\x00\xff"))
    as_text = received(body("append", mode="append_audio_chunk", payload_b64="AP8="), in_json)
    assert in_pack == as_text
    assert in_pack.payload is not None
    assert msgspec.msgpack.decode(in_pack.payload) == b"\x00\xff"


def test_an_append_without_a_payload_carries_nothing() -> None:
    got = received(body("append", mode="turn_commit_only"))
    assert got.payload == msgspec.msgpack.encode(None)


@pytest.mark.parametrize("text", ["AP8", "AP8=\n", "A P8=", "ä", "====", "AP8-"])
def test_a_payload_that_is_no_base64_is_refused(text: str) -> None:
    code, message = refusal(body("append", mode="x", payload_b64=text), in_json)
    assert code == "invalid_argument"
    assert message.startswith("$.payload_b64: ")


@pytest.mark.parametrize(
    ("fields", "encode", "payload", "path"),
    [
        ({"payload": 1, "payload_b64": ""}, in_json, None, "$.payload_b64: "),
        ({"payload_b64": ""}, packed, None, "$.payload_b64: only a JSON body has it"),
        ({"payload": 1}, packed, b"x", "$.payload: the entry has a field p as well"),
        ({"payload": None}, in_json, b"", "$.payload: the entry has a field p as well"),
        ({"payload_b64": ""}, in_json, b"x", "$.payload: the entry has a field p as well"),
        ({"payload_b64": 7}, in_json, None, "$.payload_b64: "),
    ],
)
def test_a_payload_comes_once(fields: Body, encode: Encode, payload: bytes | None, path: str) -> None:
    code, message = refusal(body("append", mode="x", **fields), encode, payload)
    assert code == "invalid_argument"
    assert message.startswith(path)


def test_an_integer_that_messagepack_does_not_have_is_refused_in_a_payload() -> None:
    huge = json.dumps(body("append", mode="x", payload=[10**30])).encode()
    command = decode_command(huge).command
    assert isinstance(command, c.Malformed)
    assert command.message.startswith("$.payload: ")


def test_a_payload_has_a_limit_of_its_own() -> None:
    plain = body("append", mode="append_audio_chunk")
    assert isinstance(decode(plain, payload=b"x" * 10, payload_bytes=10), c.Append)
    code, message = refusal(plain, payload=b"x" * 11, payload_bytes=10)
    assert (code, message) == ("payload_too_large", "$.payload: it has 11 bytes, 10 are allowed")
    inline = body("append", mode="append_audio_chunk", payload=b"x" * 9)  # two bytes more once packed
    assert refusal(inline, payload_bytes=10)[0] == "payload_too_large"


def test_a_payload_is_hashed_only_where_an_operation_may_be_repeated() -> None:
    def digest(payload: bytes, **fields: Any) -> bytes | None:
        command = decode(body("append", mode="x", **fields), payload=payload)
        assert isinstance(command, c.Append)
        return command.payload_digest

    assert digest(b"a") is None
    one, same, other = (digest(x, operation_id="say1") for x in (b"a", b"a", b"b"))
    assert one == same != other
    assert one is not None
    assert len(one) == 8


def test_the_same_payload_has_the_same_digest_however_it_came() -> None:
    plain = body("append", mode="x", payload=[1, 2], operation_id="say1")
    one, other = decode(plain, packed), decode(plain, in_json)
    assert one == other


# --- configurations --------------------------------------------------------------------------------------------


def nested(levels: int) -> Any:
    value: Any = 1
    for n in range(levels):
        value = [value] if n % 2 else {"a": value}
    return value


@ENCODINGS
@pytest.mark.parametrize("field", ["session_config", "runtime_config"])
@pytest.mark.parametrize("op", ["open", "signal"])
def test_a_configuration_may_be_nested_so_deep_and_no_deeper(op: str, field: str, encode: Encode) -> None:
    rest = {"event": "session.update"} if op == "signal" else {}
    assert not isinstance(decode(body(op, **rest, **{field: {"x": nested(MAX_LEVELS - 1)}}), encode), c.Malformed)
    code, message = refusal(body(op, **rest, **{field: {"x": nested(MAX_LEVELS)}}), encode)
    assert (code, message) == ("invalid_argument", f"$.{field}: it is nested more than {MAX_LEVELS} levels deep")


def test_input_modes_that_are_nested_are_refused_like_any_other_nonsense() -> None:
    assert isinstance(decode(body("open", capabilities={"input_modes": [["x"]]})), c.Open)  # the core says no
    message = refusal(body("open", capabilities={"input_modes": [nested(200)]}))[1]
    assert message.startswith("$.capabilities.input_modes: ")


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**30])
@pytest.mark.parametrize("where", [{"x": 0}, {"x": [0]}, {"x": {"y": [{"z": 0}]}}])
def test_a_configuration_holds_only_integers_that_messagepack_has(number: int, where: Body) -> None:
    text = json.dumps(body("open", runtime_config=where)).replace(": 0", f": {number}").replace("[0]", f"[{number}]")
    text = text.replace(f'"turn_id": {number}', '"turn_id": 0')
    command = decode_command(text.encode()).command
    assert isinstance(command, c.Malformed)
    assert command.message == "$.runtime_config: an integer in it has more than 64 bits"


@ENCODINGS
@pytest.mark.parametrize("number", [2**64 - 1, -(2**63)])
def test_the_largest_integers_pass(number: int, encode: Encode) -> None:
    command = decode(body("open", runtime_config={"x": number}), encode)
    assert isinstance(command, c.Open)
    assert command.runtime_config == {"x": number}


# --- S54: what is no command at all ------------------------------------------------------------------------------

UNREADABLE: dict[str, bytes] = {
    "nothing": b"",
    "a NUL": b"\x00",
    "NULs": b"\x00" * 100,
    "an integer": b"\x07",
    "a list": msgspec.msgpack.encode([1, 2]),
    "text": b"hello",
    "the old text protocol": b"PING\r\n",
    "truncated MessagePack": packed(BODIES["open in full"])[:-5],
    "trailing bytes": packed(BODIES["close"]) + b"\x00",
    "truncated JSON": in_json(BODIES["open in full"])[:-5],
    "two JSON values": in_json(BODIES["close"]) * 2,
    "a JSON list": b"[1]",
    "JSON after a blank": b" " + in_json(BODIES["close"]),
    "JSON that is not UTF-8": in_json(BODIES["close"]).replace(b"c1", b"c\xff"),
    "half a surrogate": in_json(BODIES["close"]).replace(b"c1", b"\\ud800"),
    "no text inside MessagePack": packed(BODIES["close"]).replace(b"\xa2c1", b"\xa2\xff\xfe"),
    "NaN in JSON": in_json(body("open", runtime_config={"x": float("nan")})),
    "deep nesting": b"\x91" * 100_000 + b"\x01",
    "deep JSON": b'{"a":' * 100_000,
    "deep nesting in a body": b"\x81\xa1x" + b"\x91" * 5_000 + b"\x01",
    "a map of a billion": b"\xdf\x3b\x9a\xca\x00",
    "text of four gigabytes": b"\xdb\xff\xff\xff\xff",
    "no session": packed({k: x for k, x in BODIES["close"].items() if k != "session_id"}),
    "an empty session": packed(body("close", session_id="")),
    "a session that is no text": packed(body("close", session_id=7)),
    "a session of bytes": packed(body("close", session_id=b"s1")),
    "a session of NULs": packed(body("close", session_id="\x00")),
    "an empty map": packed({}),
    "an empty object": b"{}",
    "a large body that names nobody": packed({"x": "y" * (2 * MIB)}),
}


@pytest.mark.parametrize("data", UNREADABLE.values(), ids=UNREADABLE)
def test_s54_what_names_nobody_is_unreadable_with_a_reason(data: bytes) -> None:
    with pytest.raises(Unreadable) as error:
        decode_command(data)
    assert 5 < len(str(error.value)) < 500


def test_s54_a_key_that_comes_twice_counts_once() -> None:
    twice = in_json(body("close")).replace(b'"op"', b'"reason": "first", "reason": "second", "op"')
    assert decode_command(twice).command == c.Close(**COMMON, reason="second")
    two_ops = in_json(body("close")).replace(b'"op"', b'"op": "open", "op"')
    command = decode_command(two_ops).command
    assert isinstance(command, c.Malformed)
    assert command.code == "invalid_argument"


def test_s54_not_a_number_is_a_number_in_messagepack() -> None:
    command = decode(body("open", runtime_config={"x": float("nan"), "y": float("inf")}))
    assert isinstance(command, c.Open)


def test_s54_extensions_and_timestamps_travel_in_a_configuration() -> None:
    command = decode(body("open", runtime_config={"x": msgspec.msgpack.Ext(5, b"y")}))
    assert isinstance(command, c.Open)
    assert command.runtime_config == {"x": msgspec.msgpack.Ext(5, b"y")}
