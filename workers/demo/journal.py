"""The journal of the demo's vLLM engine: what it did and when, a line each.

Responsible for the notes and for reading them. Times are seconds of this machine's monotonic clock, which its processes
share, so they can be compared with the demo's own.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

What = Literal["taken", "turn", "said", "ended", "asked", "freed", "held"]


class Note(Struct, frozen=True, array_like=True):
    """`taken`: the engine has a request; `turn`: the end of what is said to it, `said`: `count` tokens of its answer,
    `ended`: the answer is whole; `asked`: to drop it; `freed`: the core has.

    `held`, at the end: the core still has `count` requests.
    """

    at_s: float
    what: What
    request_id: str = ""
    count: int = 0


def encode_note(note: Note) -> bytes:
    """Its line."""
    return _encode(note) + b"\n"


def read_journal(path: Path) -> Iterable[Note]:
    """The notes in a journal, in order; a line that was cut short by a kill is left out. Raises OSError."""
    decode = msgspec.json.Decoder(Note).decode
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(msgspec.DecodeError):
            yield decode(line)


_encode = msgspec.json.Encoder().encode
