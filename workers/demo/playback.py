"""The user's loudspeaker and microphone: what was heard and said, sample by sample, on one timeline.

Responsible for when each piece of the model's voice would have been heard, for cutting it off at an interruption, and
for laying a voice out at the end. Leaves files to `wav.py`. Pure: times are arguments, in seconds since the
conversation began.

A loudspeaker begins an answer a little after its first piece has come, so that later pieces may be that late (a jitter
buffer), and then plays on without gaps. What comes later than that leaves a gap, as it would on a telephone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from workers.demo.speech import measure_db
from workers.demo.wav import from_pcm

if TYPE_CHECKING:
    from workers.demo.wav import Samples

BUFFER_S = 0.04


@dataclass(slots=True)
class Track:
    """One voice on the timeline. Pieces lie one after another, never over one another."""

    rate_hz: int
    pieces: list[tuple[float, Samples]] = field(default_factory=list["tuple[float, Samples]"])

    @property
    def end_s(self) -> float:
        """When the last piece ends; 0 before the first."""
        if not self.pieces:
            return 0.0
        start_s, sound = self.pieces[-1]
        return start_s + sound.size / self.rate_hz

    def add(self, start_s: float, sound: Samples) -> None:
        """A piece, from that time on or from the end of the last one."""
        self.pieces.append((max(start_s, self.end_s), sound))

    def cut(self, at_s: float) -> float:
        """Nothing is heard from then on; how much of what was there is lost (s)."""
        lost = 0
        while self.pieces and self.end_s > at_s:
            start_s, sound = self.pieces.pop()
            kept = max(0, round((at_s - start_s) * self.rate_hz))
            lost += sound.size - min(kept, sound.size)
            if kept:
                self.pieces.append((start_s, sound[:kept]))
                break
        return lost / self.rate_hz

    def level_db(self, at_s: float) -> float:
        """How loud it is at a time near the end; -120 in a gap."""
        for start_s, sound in reversed(self.pieces):
            if start_s <= at_s:
                heard = start_s + sound.size / self.rate_hz > at_s
                return float(measure_db(sound)) if heard and sound.size else -120.0
        return -120.0

    def lay_out(self, length_s: float) -> Samples:
        """The whole timeline up to `length_s`, silence between the pieces."""
        out = np.zeros(max(0, round(length_s * self.rate_hz)), dtype=np.float32)
        for start_s, sound in self.pieces:
            begin = round(start_s * self.rate_hz)
            part = sound[: max(0, out.size - begin)]
            out[begin : begin + part.size] = part
        return out


class Loudspeaker:
    """Plays the model's voice. `ended_s`: when the answer that has come to its end will have been heard out."""

    def __init__(self, rate_hz: int, buffer_s: float = BUFFER_S) -> None:
        self.track = Track(rate_hz)
        self.ended_s: float | None = None
        self.first_s: float | None = None
        self._buffer_s = buffer_s

    def expect(self) -> None:
        """Another answer is to come."""
        self.first_s = self.ended_s = None

    def play(self, at_s: float, pcm: bytes, *, last: bool) -> None:
        """A piece has come; `last` of its answer."""
        if pcm:
            # Whoever is late begins anew with the full buffer, else every later piece would be late as well.
            due_s = at_s + self._buffer_s if at_s >= self.track.end_s else self.track.end_s
            if self.first_s is None:
                self.first_s = due_s
            self.track.add(due_s, from_pcm(pcm))
        if last:
            self.ended_s = max(at_s, self.track.end_s)

    def cut(self, at_s: float) -> float:
        """Fall silent now; how much of what had come is never heard (s)."""
        return self.track.cut(at_s)

    def is_playing(self, at_s: float) -> bool:
        """Whether something is heard at that time."""
        return self.first_s is not None and self.first_s <= at_s < self.track.end_s
