"""An event as a line: short, whole, and never a control character, whatever stands in the stream."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from control.core.fence import Fence
from control.core.replies import Lifecycle, Reply
from control.wire.events import LIFECYCLE, OUTPUT, REPLY, OutputEvent, encode_event
from workers.cli.describe import Heard, describe, read_entry
from workers.cli.tail import Watch

FENCE = Fence(0, 2, 3, 1)


def entry(kind: str, body: Any, number: int = 1) -> Heard:
    return read_entry(b"1700000000000-0", {b"t": kind.encode(), b"n": str(number).encode(), b"b": encode_event(body)})


def line(kind: str, body: Any) -> str:
    """What follows the time."""
    return describe(entry(kind, body)).partition(" ")[2].strip()


def output(kind: str, data: Any, **changes: Any) -> OutputEvent:
    event = OutputEvent(session_id="s", request_id="r", stage_id=1, fence=FENCE, seq=7, kind=kind, data=data)
    return msgspec.structs.replace(event, **changes)


def test_audio_is_shown_as_its_length() -> None:
    audio = output("audio", bytes(640), metadata={"sample_rate_hz": 16_000}, turn_end=True)
    assert line(OUTPUT, audio) == "1  output     0/2/3/1    stage 1 #7: audio, 640 bytes, 20 ms, end of turn"
    assert line(OUTPUT, output("audio", bytes(640))).endswith("audio, 640 bytes")


def test_tokens_and_text_are_shortened() -> None:
    assert line(OUTPUT, output("tokens", [1, 2, 3])).endswith("3 tokens: 1 2 3")
    assert line(OUTPUT, output("tokens", list(range(500)))).endswith("500 tokens: 0 1 2 3 4 5 6 7 8 9 10 11 ...")
    assert line(OUTPUT, output("text", "a\nb\x1b[31m" + "c" * 500)).endswith("text: a b [31m" + "c" * 92 + "...")
    assert line(OUTPUT, output("data", {"a": b"\x00"})).endswith("data: {'a': b'\\x00'}")


def test_a_reply_says_what_became_of_the_command() -> None:
    reply = Reply(
        control_id="c1", op="append", session_id="s", ok=True, fence=FENCE, accepted_fence=FENCE, lease_generation=0
    )
    assert line(REPLY, msgspec.structs.replace(reply, detail={"seq": 4})).endswith("append c1: ok, seq 4")
    refused = msgspec.structs.replace(reply, ok=False, code="timeout", message="too late", retryable=True)
    assert line(REPLY, refused).endswith("0/2/3/1    append c1: timeout (retryable): too late")


def test_a_lifecycle_event_says_why() -> None:
    event = Lifecycle(
        event="interrupted", session_id="s", fence=FENCE, lease_generation=2, cancelled_fence=Fence(0, 1, 3, 0)
    )
    assert line(LIFECYCLE, event).endswith("interrupted, cancelled 0/1/3/0 (lease generation 2)")
    event = Lifecycle(event="closed", session_id="s", fence=FENCE, lease_generation=2, reason="client_close")
    assert line(LIFECYCLE, event).endswith("closed, client_close (lease generation 2)")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {b"t": b"reply", b"n": b"one", b"b": b"\x80"},
        {b"t": b"\xff", b"n": b"1", b"b": b"\x80"},
        {b"t": b"reply", b"n": b"1", b"b": b"\xc1"},
        {b"t": b"reply", b"n": b"1", b"b": b"\x93\x01\x02\x03"},
        {b"t": b"output", b"n": b"1", b"b": b"\x80"},
        {b"t": b"output", b"n": b"1", b"b": encode_event({"fence": 5, "metadata": [], "data": None, "kind": b"x"})},
        {b"t": b"lifecycle", b"n": b"1", b"b": encode_event({"event": {"a": 1}, "fence": {"epoch": "x"}})},
        {b"t": b"reply", b"n": b"1", b"b": encode_event({"ok": True, "detail": "none", "accepted_fence": [1]})},
        {b"t": b"poem", b"n": b"1", b"b": encode_event({"a\n": b"\x00"})},
    ],
)
def test_whatever_stands_there_becomes_one_line(fields: dict[bytes, bytes]) -> None:
    shown = describe(read_entry(b"1700000000000-0", fields))
    assert "\n" not in shown
    assert shown.isprintable()


def test_a_watch_counts_what_is_missing_within_a_life_and_not_between_two() -> None:
    def lifecycle(event: str, number: int) -> Heard:
        body = Lifecycle(event=event, session_id="s", fence=FENCE, lease_generation=0)
        return entry(LIFECYCLE, body, number)

    watch = Watch(from_start=True)
    missing = [watch.take(lifecycle("closing", number)) for number in (3, 4, 6)]
    assert missing == [2, 0, 1]
    assert not watch.has_ended
    assert watch.take(lifecycle("closed", 7)) == 0
    assert watch.has_ended
    # A reply to an id without a session isn't counted.
    assert watch.take(entry(REPLY, {"ok": False}, 0)) == 0
    assert watch.take(lifecycle("opened", 1)) == 0
    assert not watch.has_ended
    assert watch.take(lifecycle("closing", 2)) == 0
    late = Watch(from_start=False)
    assert late.take(lifecycle("closing", 40)) == 0
    assert late.take(lifecycle("closing", 42)) == 1
