"""What a session's listener reads."""

from __future__ import annotations

from typing import Any

from control.core.fence import Fence
from control.wire.events import LIFECYCLE, OUTPUT, REPLY, OutputEvent, decode_event, encode_event
from tests.core.call import at, talking

FENCE = {"incarnation": 1, "epoch": 2, "turn_id": 3, "response_seq": 4}


def test_an_output_is_a_map_of_the_wires_fields() -> None:
    event = OutputEvent(
        session_id="s1",
        request_id="duplex-s.czE.i.1.e.2.r.stage1",
        stage_id=1,
        fence=Fence(1, 2, 3, 4),
        seq=0,
        kind="audio",
        data=b"\x00\x01",
        turn_end=True,
        metadata={"ms": 20},
    )
    assert decode_event(encode_event(event)) == {
        "session_id": "s1",
        "request_id": "duplex-s.czE.i.1.e.2.r.stage1",
        "stage_id": 1,
        "fence": FENCE,
        "seq": 0,
        "kind": "audio",
        "data": b"\x00\x01",
        "turn_end": True,
        "metadata": {"ms": 20},
    }


def test_an_output_without_metadata_has_a_map_of_its_own() -> None:
    plain: dict[str, Any] = {"session_id": "s", "request_id": "r", "stage_id": 0, "fence": Fence(0, 0, 0, 0)}
    one, other = (OutputEvent(**plain, seq=n, kind="text", data="x") for n in (0, 1))
    assert one.metadata == {}
    assert one.metadata is not other.metadata


def test_replies_and_lifecycle_events_are_maps_too() -> None:
    call = talking()
    call.cancel(at(1))
    reply = decode_event(encode_event(call.replies[-1]))
    assert (reply["op"], reply["ok"], reply["code"], reply["detail"]["seq"]) == ("append", True, None, 1)
    lifecycle = decode_event(encode_event(call.lifecycle[-1]))
    assert (lifecycle["event"], lifecycle["cancelled_fence"]["epoch"]) == ("interrupted", 0)
    assert "reason" not in lifecycle


def test_the_three_kinds_are_named_as_on_the_wire() -> None:
    assert (REPLY, OUTPUT, LIFECYCLE) == ("reply", "output", "lifecycle")
