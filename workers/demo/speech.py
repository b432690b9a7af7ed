"""What the user says and when: utterances out of a recording, and the plan of the conversation.

Responsible for finding speech between pauses by its energy, and for who lets whom finish. Leaves reading files to
`wav.py` and the conversation itself to `dialogue.py`. Pure.

Whatever the recording, the plan is the same: six turns, four answers cut short, two heard to their end. Too few
utterances are said again, too many are left out, and a long one is cut where it is quietest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workers.demo.wav import Samples

FRAME_MS = 20

# The user's patience: None is as long as the answer lasts. The worker is killed in the first answer that is heard out.
PATIENCE_S: tuple[float | None, ...] = (1.0, 1.0, None, 1.0, 1.0, None)
MOST_HEARD = 0.5  # of an answer that is to be cut short

PAUSE_S = 0.26  # shorter ones are within an utterance
SHORTEST_S = 0.3
LONGEST_S = 4.0
_LEAD_S = 0.04

_SILENCE_DB = -60.0
_BELOW_SPEECH_DB = 30.0
_ABOVE_NOISE_DB = 6.0

# A conversation has to fit into a minute, start and end included.
assert (
    len(PATIENCE_S) * LONGEST_S + sum(LONGEST_S if patience is None else patience for patience in PATIENCE_S) <= 40
), "with the longest utterances the plan takes too long"


class Turn(Struct, frozen=True):
    """Something that the user says, and how long the user then listens (s); None: to the answer's end.

    `kill`: while the answer to it is heard, a control worker is killed.
    """

    sound: Samples
    listen_s: float | None
    kill: bool = False


def find_utterances(sound: Samples, rate_hz: int) -> list[Samples]:
    """The stretches of speech, in order, each a whole number of frames. Empty if there are none."""
    frame = rate_hz * FRAME_MS // 1000
    count = sound.size // frame
    levels = measure_db(sound[: count * frame].reshape(count, frame))
    if not count or np.percentile(levels, 95) < _SILENCE_DB:
        return []
    utterances: list[Samples] = []
    for begin, end in _stretches(levels >= _threshold_db(levels)):
        if (end - begin) * FRAME_MS < SHORTEST_S * 1000:
            continue
        lead = min(begin, round(_LEAD_S * 1000 / FRAME_MS))
        utterances += [sound[first * frame : last * frame] for first, last in _cut_long(levels, begin - lead, end)]
    return utterances


def plan_turns(utterances: Sequence[Samples], rate_hz: int, *, kill: bool) -> list[Turn]:
    """Who says what, and who lets whom finish. `utterances` must not be empty."""
    turns: list[Turn] = []
    for number, patience_s in enumerate(PATIENCE_S):
        sound = utterances[number % len(utterances)]
        listen_s = None if patience_s is None else min(patience_s, MOST_HEARD * sound.size / rate_hz)
        turns.append(Turn(sound, listen_s, kill and number == PATIENCE_S.index(None)))
    return turns


def measure_db(frames: Samples) -> Samples:
    """The loudness of each row, in dB below full scale; silence is -120."""
    power = np.square(frames, dtype=np.float64).mean(axis=-1) if frames.size else np.zeros(frames.shape[:-1])
    return (10 * np.log10(power + 1e-12)).astype(np.float32)


def _threshold_db(levels: Samples) -> float:
    """From where on a frame counts as speech: well below what is said, a little above the noise."""
    loud, noise = float(np.percentile(levels, 95)), float(np.percentile(levels, 10))
    return min(max(loud - _BELOW_SPEECH_DB, noise + _ABOVE_NOISE_DB), loud - _ABOVE_NOISE_DB)


def _stretches(active: np.ndarray) -> list[tuple[int, int]]:
    """Runs of active frames, those closer than a pause taken together."""
    runs: list[tuple[int, int]] = []
    for place in np.flatnonzero(active).tolist():
        if runs and (place - runs[-1][1]) * FRAME_MS < PAUSE_S * 1000:
            runs[-1] = (runs[-1][0], place + 1)
        else:
            runs.append((place, place + 1))
    return runs


def _cut_long(levels: Samples, begin: int, end: int) -> list[tuple[int, int]]:
    """The stretch in parts of at most `LONGEST_S`, cut where it is quietest in the second half of what is allowed."""
    most = round(LONGEST_S * 1000 / FRAME_MS)
    parts: list[tuple[int, int]] = []
    while end - begin > most:
        # Nor may what is left be too short to be an utterance.
        latest = min(begin + most, end - round(SHORTEST_S * 1000 / FRAME_MS))
        cut = begin + most // 2 + int(np.argmin(levels[begin + most // 2 : latest]))
        parts.append((begin, cut))
        begin = cut
    return [*parts, (begin, end)]
