"""Tokens on the wire: what is one, where it may be, and that only its digest gets through."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import msgspec
import pytest

from control.core import commands as c
from control.core.tokens import digest_token
from control.wire.commands import Unreadable, decode_command
from control.wire.limits import MIB, TOKEN_MIN_BYTES, Limits
from tests.wire.bodies import BODIES, TOKEN, Encode, body, decode, in_json, packed, refusal

ENCODINGS = pytest.mark.parametrize("encode", [packed, in_json], ids=["MessagePack", "JSON"])
DIGEST = digest_token(TOKEN.encode())


@ENCODINGS
@pytest.mark.parametrize("name", BODIES)
def test_every_command_may_carry_a_token(name: str, encode: Encode) -> None:
    assert decode({**BODIES[name], "token": TOKEN}, encode).token == DIGEST
    assert decode({**BODIES[name], "token": None}, encode).token is None


def test_the_digest_is_sha_256_of_the_utf_8() -> None:
    command = decode(body("touch", activity="heartbeat", token=TOKEN))
    assert command.token is not None
    assert command.token.sha256 == sha256(TOKEN.encode()).digest()


@ENCODINGS
@pytest.mark.parametrize("token", ["t" * 16, "ö" * 8, "t" * 256, "🎙" * 64, "\x00" * 16, "a token with\n blanks"])
def test_any_text_of_16_to_256_bytes_is_a_token(token: str, encode: Encode) -> None:
    assert decode(body("close", token=token), encode).token == digest_token(token.encode())


@ENCODINGS
@pytest.mark.parametrize("token", ["", "t" * 15, "ö" * 7 + "t", "t" * 257, "ö" * 129, "t" * 100_000])
def test_a_token_of_another_length_is_refused_by_its_path_and_not_shown(token: str, encode: Encode) -> None:
    size = len(token.encode())
    code, message = refusal(body("close", token=token), encode)
    assert (code, message) == ("invalid_argument", f"$.token: it has {size} bytes, 16 to 256 are allowed")


@ENCODINGS
@pytest.mark.parametrize("token", [7, True, [TOKEN], {"token": TOKEN}])
def test_a_token_that_is_no_text_is_refused_by_its_path(token: Any, encode: Encode) -> None:
    code, message = refusal(body("close", token=token), encode)
    assert code == "invalid_argument"
    assert message.startswith("$.token: ")
    assert TOKEN not in message


def test_bytes_are_no_token() -> None:
    assert refusal(body("close", token=TOKEN.encode()))[1].startswith("$.token: ")


def test_half_a_surrogate_pair_is_no_token() -> None:
    for half in (b"\\ud800", b"\xed\xa0\x80"):
        with pytest.raises(Unreadable):
            decode_command(in_json(body("close", token="x" * 20)).replace(b"x" * 20, half * 20))
    with pytest.raises(Unreadable):
        decode_command(packed(body("close", token="x" * 21)).replace(b"x" * 21, b"\xed\xa0\x80" * 7))


def test_the_limit_is_that_which_is_given() -> None:
    assert decode(body("close", token="t" * 20), token_bytes=20).token is not None
    assert refusal(body("close", token="t" * 21), token_bytes=20)[1].endswith("16 to 20 are allowed")
    assert Limits().token_bytes > TOKEN_MIN_BYTES


@ENCODINGS
@pytest.mark.parametrize(
    "changes",
    [{"v": 2}, {"op": "dance"}, {"fence": 7}, {"control_id": ""}, {"deadline_ms": -1}, {"x": "y" * MIB}],
    ids=["version", "op", "fence", "control id", "deadline", "too large"],
)
def test_a_body_that_is_no_command_still_shows_its_token(changes: dict[str, Any], encode: Encode) -> None:
    command = decode({**body("close", token=TOKEN), **changes}, encode)
    assert isinstance(command, c.Malformed)
    assert command.token == DIGEST
    assert TOKEN not in command.message


@ENCODINGS
def test_a_body_that_is_no_command_and_shows_half_a_token_shows_none(encode: Encode) -> None:
    for token in (TOKEN[:10], 7, [TOKEN], None):
        assert decode({**body("close", token=token), "v": 2}, encode).token is None


@ENCODINGS
@pytest.mark.parametrize("name", BODIES)
def test_no_command_holds_or_shows_its_token(name: str, encode: Encode) -> None:
    received = decode_command(encode({**BODIES[name], "token": TOKEN}))
    for text in (repr(received), repr(received.command)):
        assert TOKEN not in text
        assert DIGEST.sha256.hex() not in text
        assert repr(DIGEST.sha256)[2:-1] not in text
    assert TOKEN.encode() not in msgspec.msgpack.encode(received.command)
