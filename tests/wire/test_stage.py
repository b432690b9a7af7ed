"""What travels between owner and stage workers reads the same at the other end, or is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from control.core import commands as c
from control.core.fence import Fence
from control.wire.commands import Unreadable, decode_command
from control.wire.orders import decode_order
from control.wire.stage import (
    AbortOrder,
    AcceptedAck,
    AuditAck,
    CleanedAck,
    CleanupFailedAck,
    RejectedAck,
    RequestFailedAck,
    SubmissionOrder,
    decode_abort,
    decode_ack,
    decode_payload,
    decode_submission,
    encode,
    pack_config,
    unpack_config,
)
from tests.wire.bodies import body, in_json

SUBMISSION = SubmissionOrder(
    session_id="s1",
    stage_id=0,
    fence=Fence(1, 2, 3, 4),
    number=5,
    seq=6,
    turn_seq=7,
    mode="append_tokens",
    final=True,
    resumed=False,
    generation=2,
    config=b"\x00\xff",
    route=("ear", "mouth"),
    packed=True,
    traceparent="00-1-2-03",
)
ABORT = AbortOrder("s1", 1, 0, 5, 2, (1, 2))

ACKS: list[tuple[Any, c.Event]] = [
    (AcceptedAck("s1", 1, 5), c.Accepted(1, 5)),
    (RejectedAck("s1", 1, 5, "invalid_argument", "no"), c.Rejected(1, 5, "invalid_argument", "no")),
    (CleanedAck("s1", 1, 6, "ear"), c.Cleaned(1, 6, "ear")),
    (CleanupFailedAck("s1", 1, 6, 2, "ear", True, "no"), c.CleanupFailed(1, 6, 2, "ear", True, "no")),
    (RequestFailedAck("s1", 1, 3, "ear", "no"), c.RequestFailed(1, 3, "ear", "no")),
    (AuditAck("s1", 1, "ear", 0, (3, 4), True), c.Audited("ear", 0, 1, (3, 4), True)),
]
READERS = pytest.mark.parametrize("read", [decode_ack, decode_submission, decode_abort, decode_order])


@pytest.mark.parametrize(("ack", "event"), ACKS)
def test_an_ack_is_an_event_of_its_session(ack: Any, event: c.Event) -> None:
    assert decode_ack(encode(ack)) == ("s1", event)


def test_every_kind_of_ack_has_a_tag_of_its_own() -> None:
    tags = [msgspec.msgpack.decode(encode(ack))[0] for ack, _ in ACKS]
    assert tags == [1, 2, 3, 4, 5, 7]  # 6 was an order's


def test_submissions_and_aborts_are_short_arrays_that_read_the_same() -> None:
    assert decode_submission(encode(SUBMISSION)) == SUBMISSION
    assert decode_abort(encode(ABORT)) == ABORT
    assert isinstance(msgspec.msgpack.decode(encode(SUBMISSION)), list)
    assert isinstance(msgspec.msgpack.decode(encode(ABORT)), list)


def test_a_field_that_a_newer_owner_has_added_is_ignored() -> None:
    longer = [*msgspec.msgpack.decode(encode(ABORT)), "new"]
    assert decode_abort(encode(longer)) == ABORT


@READERS
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        b"{}",
        b"\x91\x63",
        b"\x94\x01\xa1\xff\x01\x01",
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        encode([]),
        encode([9, "s1"]),
        encode([1, "s1", "one", 5]),
        encode([1, None, 1, 5]),
        encode({"session_id": "s1"}),
        encode(ABORT)[:-1],
        encode(SUBMISSION) + b"\x00",
    ],
)
def test_what_is_none_of_them_is_unreadable(read: Any, data: bytes) -> None:
    with pytest.raises(Unreadable) as error:
        read(data)
    assert 5 < len(str(error.value)) < 500


def test_a_submission_with_a_fence_that_no_script_could_compare_is_unreadable() -> None:
    plain = msgspec.msgpack.decode(encode(SUBMISSION))
    plain[2]["epoch"] = 2**53
    with pytest.raises(Unreadable, match="no submission"):
        decode_submission(encode(plain))


# --- payloads and configurations ---------------------------------------------------------------------------------


def test_a_raw_payload_is_handed_on_as_it_is_and_a_packed_one_is_opened() -> None:
    assert decode_payload(b"\x00\xff\xc1", packed=False) == b"\x00\xff\xc1"
    assert decode_payload(encode({"ids": [1, 2]}), packed=True) == {"ids": [1, 2]}


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x92\x01", b"\x91" * 100_000, b"\xa1\xff"])
def test_a_packed_payload_that_cannot_be_opened_is_unreadable(data: bytes) -> None:
    with pytest.raises(Unreadable, match=r"^\$\.payload: "):
        decode_payload(data, packed=True)


@pytest.mark.parametrize("value", [None, [1, {"a": "ö"}], "x", b"\x00"])
def test_a_payload_reaches_the_stage_as_the_producer_meant_it(value: Any) -> None:
    got = decode_command(encode(body("append", mode="x", payload=value)))
    assert got.payload is not None
    assert decode_payload(got.payload, packed=True) == value


def test_a_configuration_reads_the_same_at_the_stage() -> None:
    sampling = ({"temperature": 1}, {"voice": "b"})
    packed = pack_config({"a": 1}, {"b": [None, b"\x00"]}, sampling)
    assert unpack_config(packed) == ({"a": 1}, {"b": [None, b"\x00"]}, list(sampling))
    assert unpack_config(b"") == ({}, {}, ())


def test_whatever_a_body_may_configure_can_be_packed_and_read_again() -> None:
    deep: Any = 1
    for _ in range(60):
        deep = [deep]
    config = {"deep": deep, "large": 2**64 - 1, "small": -(2**63), "text": "\u2028", "fraction": 1e308}
    command = decode_command(in_json(body("open", session_config=config, runtime_config=config))).command
    assert isinstance(command, c.Open)
    assert command.session_config == config
    assert unpack_config(pack_config(config, config, ()))[:2] == (config, config)


def test_what_a_policy_makes_may_not_be_packable_and_then_says_so() -> None:
    with pytest.raises(TypeError):
        pack_config({}, {}, (object(),))
