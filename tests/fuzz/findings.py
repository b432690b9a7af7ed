"""What a run of the fuzzer has found, and what it has seen.

Responsible for the notes, each with the entry that led to it, and for the bound on the time that one body may take.
A log entry at ERROR is a finding as well: nothing that a producer sends may be more than an expected refusal. Pure.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from control.wire.limits import Limits
from workers.entries import Entry, decode_entry

if TYPE_CHECKING:
    from tests.fuzz.damage import Shot

SHOWN_BYTES = 600
# CPU time that a body may take, many times what it needs: linear in its size, or it is a finding.
DECODE_S, DECODE_S_A_BYTE = 0.003, 1e-6
AT_MOST = 20


@dataclass
class Findings(logging.Handler):
    """`seen`: what became of the entries, counted. A logging handler, so that it can be told of errors."""

    limits: Limits = field(default_factory=Limits)
    partitions: int = 4
    notes: list[str] = field(default_factory=list[str])
    count: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    slowest: str = ""

    def __post_init__(self) -> None:
        super().__init__(logging.ERROR)

    __hash__ = object.__hash__

    def note(self, what: str, shot: Shot | None = None) -> None:
        """Something is wrong; with the entry that shows it, if it is one alone."""
        self.count += 1
        if len(self.notes) < AT_MOST:
            self.notes.append(what if shot is None else f"{what}\n    {tell(shot)}")

    def emit(self, record: logging.LogRecord) -> None:
        """What was logged as an error."""
        self.note(f"logged by {record.name}: {self.format(record)}")

    def decode(self, shot: Shot, entry_id: str) -> Entry | None:
        """The entry as the owner reads it; None if that raised, which it never may."""
        raw: list[Any] = [entry_id.encode(), shot.fields]
        began_s = time.thread_time()
        try:
            entry = decode_entry(shot.partition, (shot.stream, raw), self.partitions, self.limits)
        except BaseException as error:  # noqa: BLE001  whatever it is, it is a finding
            self.note(f"the decoder raised {error!r}", shot)
            return None
        took_s = time.thread_time() - began_s
        size = sum(map(len, shot.fields))
        if took_s > self.slowest_s:
            self.slowest_s, self.slowest = took_s, f"{size} bytes"
        if took_s > DECODE_S + size * DECODE_S_A_BYTE:
            self._measure_again(shot, raw, size)
        if (entry.unreadable is None) == (entry.received is None and entry.event is None):
            self.note(f"neither a command nor unreadable: {entry}", shot)
        return entry

    def _measure_again(self, shot: Shot, raw: list[Any], size: int) -> None:
        """A collection of garbage may have come between; three times are no accident."""
        best_s = min(self._time(shot, raw) for _ in range(3))
        if best_s > DECODE_S + size * DECODE_S_A_BYTE:
            self.note(f"decoding {size} bytes took {best_s * 1000:.1f} ms", shot)

    def _time(self, shot: Shot, raw: list[Any]) -> float:
        began_s = time.thread_time()
        decode_entry(shot.partition, (shot.stream, raw), self.partitions, self.limits)
        return time.thread_time() - began_s


def tell(shot: Shot) -> str:
    """An entry so that it can be sent again by hand."""
    fields = [value if len(value) <= SHOWN_BYTES else value[:SHOWN_BYTES] + b"..." for value in shot.fields]
    return f"stream {shot.stream} of partition {shot.partition}: {fields!r}"
