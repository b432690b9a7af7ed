"""Speech as tokens: a crude codec, and the policy and the adapter that put a language model between two voices.

A frame of 20 ms becomes one token of 256, its loudness and its pitch in four bits each; a token becomes a tone. So a
model of tokens is spoken to and speaks: `SpokenPolicy` makes a producer's audio the first stage's tokens, `voice_of`
the model's tokens the next stage's audio. Speech models do the same with codecs that one understands. Pure.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.chunks import read_chunk
from stages.policy import AppendPlan, DefaultPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stages.engine import Output

RATE_HZ = 16_000
FRAME = RATE_HZ // 50
FRAME_BYTES = 2 * FRAME
TOKENS = 256

# Multiples of a frame's own frequency: a tone ends where the next one begins, at zero.
PITCHES_HZ = (150, 200, 250, 300, 350, 400, 450, 500, 600, 700, 800, 900, 1_000, 1_200, 1_400, 1_600)
_SILENT_DB, _LOUD_DB = -60.0, -6.0


def encode_speech(pcm: bytes) -> list[int]:
    """Audio (s16le, mono, 16 kHz) as tokens, one for each 20 ms begun."""
    samples = np.frombuffer(pcm[: len(pcm) // 2 * 2], "<i2").astype(np.float64) / 32768
    frames = np.pad(samples, (0, -samples.size % FRAME)).reshape(-1, FRAME)
    loud = 10 * np.log10(np.square(frames).mean(axis=1) + 1e-12)
    level = np.clip(np.rint(15 * (loud - _SILENT_DB) / (_LOUD_DB - _SILENT_DB)), 0, 15).astype(int)
    # Twice a period, and once where a frame begins.
    crossings = (np.diff(np.signbit(frames), axis=1) != 0).sum(axis=1) + 1
    pitch = np.abs(crossings[:, None] * (RATE_HZ / FRAME / 2) - np.array(PITCHES_HZ)).argmin(axis=1)
    return [int(code) for code in 16 * level + pitch]


def decode_speech(tokens: Sequence[int]) -> bytes:
    """Tokens as audio, 20 ms each. A token that is none of the codec's is silence."""
    frames = _frames()
    return b"".join(frames[token] if 0 <= token < TOKENS else bytes(FRAME_BYTES) for token in tokens)


@cache
def _frames() -> list[bytes]:
    time_s = np.arange(FRAME) / RATE_HZ
    tones = [np.sin(2 * np.pi * hz * time_s) for hz in PITCHES_HZ]
    step_db = (_LOUD_DB - _SILENT_DB) / 15
    levels = [0.0, *(np.sqrt(2) * 10 ** ((_SILENT_DB + step_db * level) / 20) for level in range(1, 16))]
    return [np.rint(32767 * level * tone).astype("<i2").tobytes() for level in levels for tone in tones]


class SpokenPolicy(DefaultPolicy):
    """The default policy, with audio made tokens before the first stage gets it."""

    def plan_append(self, **hook: Any) -> AppendPlan:
        """Tokens, of audio or as they came. Raises `ValueError`."""
        chunk = read_chunk(super().plan_append(**hook).prompt)
        return AppendPlan(encode_speech(chunk.data) if isinstance(chunk.data, bytes) else chunk.data)


def voice_of(*, output: Output, **_: Any) -> AppendPlan:
    """An adapter: the model's tokens as audio. Raises `TypeError` for what isn't tokens."""
    if output.kind != "tokens":
        raise TypeError(f"speech is made of tokens, not of {output.kind}")
    return AppendPlan(decode_speech(output.data))
