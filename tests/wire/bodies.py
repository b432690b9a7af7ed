"""Bodies of every op, as a producer would write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec

from control.core import commands as c
from control.wire.commands import decode_command
from control.wire.limits import Limits

Body = dict[str, Any]
Encode = Callable[[Any], bytes]

FENCE = {"incarnation": 1, "epoch": 2, "turn_id": 3, "response_seq": 4}
NEXT = {"incarnation": 1, "epoch": 3, "turn_id": 0, "response_seq": 0}

TOKEN = "sixteen bytes or möre"


def body(op: str, /, **fields: Any) -> Body:
    """A body of `op` with what every one needs."""
    return {"v": 1, "op": op, "control_id": "c1", "session_id": "s1", "fence": FENCE, **fields}


BODIES: dict[str, Body] = {
    "open": body("open"),
    "open in full": body(
        "open",
        session_mode="turn",
        capabilities={"input_modes": ["append_tokens"], "implementation_level": "mine"},
        session_config={"voice": "b", "nested": [{"a": [1, 2.5, None, True]}]},
        runtime_config={"temperature": 0.5},
        expected_lease_generation=7,
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        deadline_ms=1500,
    ),
    "append": body("append", mode="append_tokens", payload=[1, 2, 3]),
    "append in full": body(
        "append",
        mode="append_tokens",
        payload={"text": "hällo", "ids": [1, 2]},
        final=True,
        operation_id="say1",
        expected_epoch=2,
    ),
    "append of nothing": body("append", mode="turn_commit_only"),
    "barge_in": body("signal", event="barge_in", next_fence=NEXT),
    "input.cancel": body("signal", event="input.cancel", next_fence=NEXT, session_config={"voice": "b"}),
    "response.cancel": body("signal", event="response.cancel", next_fence=NEXT, runtime_config={}),
    "session.update": body("signal", event="session.update", session_config={}),
    "unknown signal": body("signal", event="sneeze"),
    "close": body("close"),
    "close in full": body("close", reason="open_rollback"),
    "touch": body("touch", activity="playback_ack"),
    "resume": body("resume", expected_lease_generation=3),
    "open with a token": body("open", token=TOKEN),
    "append with a token": body("append", mode="append_tokens", payload=[1], token=TOKEN),
}

packed: Encode = msgspec.msgpack.encode


def in_json(value: Any) -> bytes:
    """As redis-cli would send it."""
    return json.dumps(value).encode()


def decode(plain: Body, encode: Encode = packed, payload: bytes | None = None, **limits: int) -> c.Command:
    """The command in a body."""
    return decode_command(encode(plain), payload, Limits(**limits)).command


def refusal(plain: Body, encode: Encode = packed, payload: bytes | None = None, **limits: int) -> tuple[str, str]:
    """Code and message of a body that is refused."""
    command = decode(plain, encode, payload, **limits)
    assert isinstance(command, c.Malformed), command
    return command.code, command.message
