"""An entry of a session's event stream as a line for people, or as one for programs.

Responsible for reading entries leniently: whatever stands there, `read_entry` returns something to show. Leaves the
stream to `tail.py` and `send.py`. Pure. Audio is shown as its length, tokens shortened, fences as `i/e/t/r`.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec import Struct

from control.core.replies import OPENED, TERMINAL_EVENTS
from control.wire.events import LIFECYCLE, OUTPUT, REPLY, decode_event

if TYPE_CHECKING:
    from collections.abc import Mapping

TOKENS_SHOWN = 12
TEXT_SHOWN = 100
SAMPLE_BYTES = 2


class Heard(Struct, frozen=True, kw_only=True):
    """An entry. `number` counts in each life of the session from 1; 0 is a reply to an id without a session."""

    entry_id: str
    kind: str
    number: int
    body: dict[str, Any]

    @property
    def at_ms(self) -> int:
        """When it entered the stream, by the server's clock."""
        return int(self.entry_id.partition("-")[0])

    @property
    def is_terminal(self) -> bool:
        """Whether a life of the session ends with it."""
        return self.kind == LIFECYCLE and self.body.get("event") in TERMINAL_EVENTS

    @property
    def begins(self) -> bool:
        """Whether a life of the session begins with it."""
        return self.kind == LIFECYCLE and self.body.get("event") == OPENED

    def answers(self, control_id: str) -> bool:
        """Whether it is the reply to that command."""
        return self.kind == REPLY and self.body.get("control_id") == control_id


def read_entry(entry_id: bytes, fields: Mapping[bytes, bytes]) -> Heard:
    """The entry; one that can't be read has the kind `unreadable`."""
    name = entry_id.decode(errors="replace")
    try:
        kind, number = fields[b"t"].decode(), int(fields[b"n"])
        body = decode_event(fields[b"b"])
    except (KeyError, ValueError, msgspec.DecodeError, RecursionError) as error:
        return Heard(entry_id=name, kind="unreadable", number=-1, body={"error": repr(error)})
    if not isinstance(body, dict):
        return Heard(entry_id=name, kind="unreadable", number=number, body={"error": "its body is no map"})
    return Heard(entry_id=name, kind=kind, number=number, body=cast("dict[str, Any]", body))


def describe(heard: Heard) -> str:
    """`12:00:01.123    3  output     0/0/1/0  stage 1 #0: audio, 640 bytes, 20 ms`."""
    at = datetime.fromtimestamp(heard.at_ms / 1000).astimezone().strftime("%H:%M:%S.%f")[:-3]
    number = "?" if heard.number < 0 else str(heard.number)
    fence = heard.body.get("accepted_fence") if heard.kind == REPLY else heard.body.get("fence")
    return f"{at} {number:>5}  {heard.kind:<10} {_fence(fence):<10} {_TELL.get(heard.kind, _tell_other)(heard.body)}"


def _tell_reply(body: dict[str, Any]) -> str:
    what = f"{body.get('op')} {body.get('control_id')}"
    if body.get("ok"):
        seq = _map(body.get("detail")).get("seq")
        return f"{what}: ok" if seq is None else f"{what}: ok, seq {seq}"
    retry = " (retryable)" if body.get("retryable") else ""
    return f"{what}: {body.get('code')}{retry}: {body.get('message')}"


def _tell_output(body: dict[str, Any]) -> str:
    what = f"stage {body.get('stage_id')} #{body.get('seq')}: {_tell_data(body)}"
    return f"{what}, end of turn" if body.get("turn_end") else what


def _tell_data(body: dict[str, Any]) -> str:
    kind, data = body.get("kind"), body.get("data")
    if isinstance(data, bytes):
        rate_hz = _map(body.get("metadata")).get("sample_rate_hz")
        if kind == "audio" and isinstance(rate_hz, int) and rate_hz > 0:
            return f"audio, {len(data)} bytes, {1000 * len(data) / SAMPLE_BYTES / rate_hz:g} ms"
        return f"{kind}, {len(data)} bytes"
    if isinstance(data, list):
        some = cast("list[Any]", data)
        shown = " ".join(str(token) for token in some[:TOKENS_SHOWN])
        return f"{len(some)} {kind}: {_shorten(shown)}{' ...' if len(some) > TOKENS_SHOWN else ''}"
    return f"{kind}: {_shorten(str(data))}"


def _tell_lifecycle(body: dict[str, Any]) -> str:
    parts = [str(body.get("event"))]
    if body.get("reason"):
        parts.append(str(body["reason"]))
    if body.get("cancelled_fence"):
        parts.append(f"cancelled {_fence(body['cancelled_fence'])}")
    return f"{', '.join(parts)} (lease generation {body.get('lease_generation')})"


def _tell_other(body: dict[str, Any]) -> str:
    return _shorten(str(body))


_TELL = {REPLY: _tell_reply, OUTPUT: _tell_output, LIFECYCLE: _tell_lifecycle}


def _fence(value: Any) -> str:
    names = ("incarnation", "epoch", "turn_id", "response_seq")
    return "/".join(str(_map(value).get(name, "?")) for name in names) if value else "-"


def _map(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _shorten(text: str) -> str:
    """On one line, without control characters, and not too long."""
    text = "".join(char if char.isprintable() else " " for char in text)
    return text if len(text) <= TEXT_SHOWN else f"{text[:TEXT_SHOWN]}..."
