"""What a producer puts on the wire, and what it makes of what comes back."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from bargein_client import errors
from bargein_client.protocol import (
    Fence,
    Lifecycle,
    Output,
    Reply,
    build_command,
    commands_key,
    config_key,
    decode_entry,
    error_of,
    events_key,
    partition_of,
    require_partitions,
    require_session_id,
)

FENCE = {"incarnation": 1, "epoch": 2, "turn_id": 3, "response_seq": 4}


def entry(kind: str, n: int, body: Any) -> dict[bytes, bytes]:
    packed = msgpack.packb(body)
    assert packed is not None
    return {b"t": kind.encode(), b"n": str(n).encode(), b"b": packed}


@pytest.mark.parametrize(
    ("session_id", "crc32"),
    [("123456789", 0xCBF43926), ("The quick brown fox jumps over the lazy dog", 0x414FA339), ("é", 0x0E048D3E)],
)
def test_partitions_are_the_crc32_of_the_id(session_id: str, crc32: int) -> None:
    assert [partition_of(session_id, partitions) for partitions in (1, 16, 2**32)] == [0, crc32 % 16, crc32]


def test_keys_carry_the_partition_as_hash_tag() -> None:
    assert config_key("bargein") == "bargein:config"
    assert commands_key("bargein", 3) == "bargein:{3}:commands"
    assert events_key("mine", 3, "s:{0}") == "mine:{3}:events:s:{0}"


def test_a_command_has_the_keys_of_the_contract() -> None:
    command = build_command("touch", "s0", Fence(1, 2, 3, 4), {"activity": "heartbeat"})
    assert msgpack.unpackb(command.fields["b"]) == {
        "v": 1,
        "op": "touch",
        "control_id": command.control_id,
        "session_id": "s0",
        "fence": FENCE,
        "activity": "heartbeat",
    }
    assert command.fields.keys() == {"b"}
    assert build_command("touch", "s0", Fence(0), {}).control_id != command.control_id


def test_a_raw_payload_goes_beside_the_body() -> None:
    command = build_command("append", "s0", Fence(0), {}, b"{\x00")
    assert command.fields["p"] == b"{\x00"
    assert "payload" not in msgpack.unpackb(command.fields["b"])


def test_a_reply_is_decoded() -> None:
    body = {
        "control_id": "c",
        "op": "append",
        "session_id": "s0",
        "ok": True,
        "code": None,
        "message": None,
        "retryable": False,
        "fence": FENCE,
        "accepted_fence": None,
        "lease_generation": None,
        "detail": {"seq": 1},
        "of_a_newer_version": 1,
    }
    assert decode_entry(entry("reply", 7, body)) == (
        7,
        Reply("c", "append", "s0", True, None, "", False, Fence(1, 2, 3, 4), None, None, {"seq": 1}),
    )


def test_an_output_is_decoded() -> None:
    body = {
        "session_id": "s0",
        "request_id": "r",
        "stage_id": 1,
        "fence": FENCE,
        "seq": 0,
        "kind": "audio",
        "data": b"\xff",
        "turn_end": True,
        "metadata": {1: "not a string"},
    }
    expected = Output("s0", "r", 1, Fence(1, 2, 3, 4), 0, "audio", b"\xff", True, {1: "not a string"})  # type: ignore[dict-item]
    assert decode_entry(entry("output", 1, body)) == (1, expected)


def test_a_lifecycle_event_is_decoded() -> None:
    body = {"event": "interrupted", "reason": None, "fence": FENCE, "cancelled_fence": FENCE}
    n, event = decode_entry(entry("lifecycle", 2, body | {"lease_generation": 3}))
    assert (n, event) == (2, Lifecycle("interrupted", None, Fence(1, 2, 3, 4), 3, Fence(1, 2, 3, 4)))
    assert isinstance(event, Lifecycle)
    assert not event.terminal
    assert all(Lifecycle(name, None, Fence(0), 0).terminal for name in ("closed", "expired"))


def test_a_type_of_a_newer_version_is_counted_and_not_shown() -> None:
    assert decode_entry(entry("weather", 4, {})) == (4, None)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        entry("reply", 1, {}),
        entry("reply", 1, [1]),
        entry("lifecycle", 1, {"event": "opened", "fence": {"incarnation": 0}}),
        entry("output", 1, None),
        entry("output", 1, {}) | {b"n": b"x"},
        entry("output", 1, {}) | {b"b": b"\xc1"},
        entry("output", 1, {}) | {b"b": b""},
        entry("output", 1, {}) | {b"b": b"\x81\xa1a"},
        entry("output", 1, {}) | {b"b": b"\x01\x01"},
        entry("output", 1, {}) | {b"b": b"\xa1\xff"},
    ],
)
def test_an_entry_that_can_not_be_read_is_a_value_error(fields: dict[bytes, bytes]) -> None:
    with pytest.raises(ValueError, match="unreadable event"):
        decode_entry(fields)


@pytest.mark.parametrize("bad", ["", "x" * 129, "ä" * 65, "a\x00", "a\nb", "a\x7f", "\x85", "\ud800"])
def test_an_id_that_no_worker_could_answer_is_refused(bad: str) -> None:
    with pytest.raises(ValueError):
        require_session_id(bad)


@pytest.mark.parametrize("good", ["a", "x" * 128, "ä" * 64, "a b:{c}*", "電話"])
def test_any_other_id_will_do(good: str) -> None:
    assert require_session_id(good) == good


def test_the_config_says_how_many_partitions_there_are() -> None:
    assert require_partitions({b"protocol": b"1", b"partitions": b"16", b"more": b"?"}, "bargein") == 16


def test_a_missing_config_means_that_no_worker_has_started() -> None:
    with pytest.raises(errors.NotReadyError, match="mine:config is missing") as caught:
        require_partitions({}, "mine")
    assert caught.value.retryable


@pytest.mark.parametrize(
    "config",
    [
        {b"protocol": b"2", b"partitions": b"16"},
        {b"partitions": b"16"},
        {b"protocol": b"1"},
        {b"protocol": b"1", b"partitions": b"0"},
        {b"protocol": b"1", b"partitions": b"-1"},
        {b"protocol": b"1", b"partitions": b"\xff"},
    ],
)
def test_a_config_of_another_protocol_is_refused(config: dict[bytes, bytes]) -> None:
    with pytest.raises(errors.UnsupportedVersionError):
        require_partitions(config, "bargein")


def test_an_error_says_code_message_and_session() -> None:
    reply = Reply("c", "append", "s0", False, "timeout", "stage 0 is silent", True, None, Fence(1), 3)
    error = error_of(reply)
    assert isinstance(error, errors.StageTimeoutError)
    assert str(error) == "timeout: stage 0 is silent (session s0)"
    assert (error.retryable, error.accepted_fence, error.lease_generation) == (True, Fence(1), 3)
