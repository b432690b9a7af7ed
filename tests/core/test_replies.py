"""Replies and lifecycle events keep the shape of the wire, and the codes their meaning."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from control.core.rejections import CODES, RETRYABLE, Code, Rejection
from control.core.session import Phase
from tests.core.call import Call, at, opened, talking, without_policy

REPLY_FIELDS = {
    "control_id",
    "op",
    "session_id",
    "ok",
    "code",
    "message",
    "retryable",
    "fence",
    "accepted_fence",
    "lease_generation",
    "detail",
}


def said(call: Call) -> dict[str, dict[str, Any]]:
    """The last good detail of each op, as it goes on the wire."""
    return {r.op: msgspec.to_builtins(r.detail) for r in call.replies if r.ok}


def test_d09_every_reply_has_the_same_fields_and_one_flat_detail() -> None:
    call = talking()
    call.touch()
    call.resume()
    call.update(session_config={"voice": "b"})
    call.append(mode="telepathy")
    call.close()
    call.clean()
    for reply in call.replies:
        plain = msgspec.to_builtins(reply)
        assert set(plain) == REPLY_FIELDS
        for name, value in (plain["detail"] or {}).items():
            assert not isinstance(value, list), (reply.op, name)
            assert not isinstance(value, dict) or name in {"fence", "next_fence"}, (reply.op, name)


def test_d09_each_op_has_one_detail_with_the_references_names() -> None:
    call = talking()
    call.touch()
    call.resume()
    call.cancel(at(1))
    call.clean()
    call.close()
    fence = {"incarnation": 1, "epoch": 0, "turn_id": 0, "response_seq": 0}
    assert said(call) == {
        "open": {
            "supported": True,
            "implementation_level": "serving_session_adapter",
            "data_plane_session": True,
            "session_mode": "duplex",
            "scheduler_request_context": True,
            "request_id": "duplex-s.Y2FsbC0x.i.1.e.0.r.stage0",
        },
        "append": {
            "supported": True,
            "implementation_level": "serving_session_adapter",
            "data_plane_append": True,
            "request_id": "duplex-s.Y2FsbC0x.i.1.e.0.r.stage0",
            "response_stage_id": 1,
            "seq": 1,
            "turn_id": 0,
            "response_seq": 0,
            "turn_seq": 1,
            "mode": "append_tokens",
            "resumable": True,
        },
        "touch": {"supported": True, "activity": "heartbeat", "lease_generation": 0},
        "resume": {"supported": True, "lease_generation": 1},
        "signal": {
            "supported": True,
            "data_plane_signal": True,
            "event": "barge_in",
            "fence": fence,
            "next_fence": {**fence, "epoch": 1},
        },
        "close": {"supported": True, "data_plane_close": True, "reason": "client_close"},
    }


def test_d09_an_append_without_a_stage_behind_it_says_so() -> None:
    call = Call(without_policy())
    call.open(input_modes=[])
    call.append(mode="turn_commit_only")
    assert said(call)["append"] == {
        "supported": True,
        "data_plane_append": False,
        "seq": 1,
        "turn_id": 0,
        "turn_seq": 1,
        "mode": "turn_commit_only",
    }


def test_the_codes_are_those_of_the_wire() -> None:
    known = {
        "stale_fence",
        "invalid_capability",
        "resource_exhausted",
        "not_found",
        "invalid_argument",
        "timeout",
        "failed_precondition",
        "cleanup_failed",
        "payload_too_large",
        "unsupported_version",
        "internal",
    }
    assert known == CODES


@pytest.mark.parametrize("code", Code)
def test_a_refusal_is_retryable_only_where_the_same_command_may_succeed(code: Code) -> None:
    expected = code in {Code.RESOURCE_EXHAUSTED, Code.TIMEOUT, Code.CLEANUP_FAILED}
    assert Rejection(code, "").retryable is (code in RETRYABLE) is expected


def test_a_good_reply_has_no_code_and_a_bad_one_no_detail() -> None:
    call = opened()
    good, bad = call.touch().reply, call.touch("wave").reply
    assert (good.ok, good.code, good.message, good.retryable) == (True, None, "", False)
    assert (bad.ok, bad.code, bad.detail) == (False, "invalid_argument", None)
    assert bad.message
    assert (bad.accepted_fence, bad.lease_generation) == (at(0), 0)


def test_a_lifecycle_event_leaves_out_what_it_does_not_have() -> None:
    call = talking()
    call.cancel(at(1))
    call.close()
    call.clean()
    assert call.phase is Phase.VACANT
    plain = [msgspec.to_builtins(event) for event in call.lifecycle]
    assert [(x["event"], "reason" in x, "cancelled_fence" in x) for x in plain] == [
        ("opened", False, False),
        ("interrupted", False, True),
        ("closing", True, False),
        ("closed", True, False),
    ]
    assert all(set(x) >= {"event", "session_id", "fence", "lease_generation"} for x in plain)
