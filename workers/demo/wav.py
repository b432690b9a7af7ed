"""WAV files: any of them in, as mono samples at a rate of one's choice; mono or stereo s16le out.

Responsible for the RIFF container, the sample formats and the conversion of channels, width and rate. Leaves what is in
the sound to `speech.py`. Reads and writes files. Python's own `wave` module refuses floats, A-law, µ-law and, before
3.12, everything with more than two channels.

Samples are float32 between -1 and 1. Says no with `NotSpeech`, whose message names the file and what would do.
"""

from __future__ import annotations

import math
import struct
import wave
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Samples = NDArray[np.float32]

MAX_SECONDS = 120
MAX_BYTES = 512 * 1024 * 1024

_PCM, _FLOAT, _A_LAW, _MU_LAW, _EXTENSIBLE = 1, 3, 6, 7, 0xFFFE
_WHAT_WORKS = "what works is PCM of 8 to 32 bits, float, A-law or µ-law"

# The filter's length on each side, in periods of the lower rate; its side lobes are 60 dB down with this window.
_SIDE_PERIODS = 16
_KAISER_BETA = 6.0
# Outputs that are computed at a time: numpy copies what overlaps before it multiplies.
_BLOCK = 65_536


class NotSpeech(Exception):
    """A file that the demo can't use as speech."""


def read_wav(path: Path, rate_hz: int) -> Samples:
    """The file's sound as mono at `rate_hz`; its first two minutes. Raises `NotSpeech`."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise NotSpeech(f"{path} is larger than {MAX_BYTES // 1024**2} MiB; cut a minute of speech out of it")
        content = path.read_bytes()
    except OSError as error:
        raise NotSpeech(f"{path} can't be read: {error.strerror or error}") from None
    try:
        sound, its_rate_hz = decode_wav(content)
    except ValueError as error:
        raise NotSpeech(f"{path} {error}") from None
    return resample(sound[: MAX_SECONDS * its_rate_hz], its_rate_hz, rate_hz)


def decode_wav(content: bytes) -> tuple[Samples, int]:
    """A WAV file's bytes as mono samples and their rate (Hz). ValueError says what is wrong, without a subject."""
    if content[:4] not in (b"RIFF", b"RF64") or content[8:12] != b"WAVE":
        raise ValueError(f"is not a WAV file{_guess(content)}")
    form: tuple[int, int, int, int] | None = None
    place = 12
    while place + 8 <= len(content):
        name, size = struct.unpack_from("<4sI", content, place)
        body = place + 8
        if name == b"fmt ":
            form = _read_format(content[body : body + size])
        elif name == b"data":
            if form is None:
                raise ValueError("is a broken WAV file: its data come before their format")
            # Who writes to a pipe can't know the size, and leaves it open; a file may also have been cut off.
            return _read_samples(content[body : body + size], *form), form[2]
        place = body + size + size % 2
    raise ValueError("is a broken WAV file: it has no data")


def resample(sound: Samples, from_hz: int, to_hz: int) -> Samples:
    """The same sound at another rate, by a polyphase low-pass filter."""
    if from_hz == to_hz or not sound.size:
        return sound
    common = math.gcd(from_hz, to_hz)
    up, down = to_hz // common, from_hz // common
    # The raised rate, from_hz * up, has a sample at every place where an input or an output can be; the filter is
    # sampled there, and `slower` samples of it are one period of the lower rate.
    slower = max(up, down)
    side = _SIDE_PERIODS * slower
    places = np.arange(-side, side + 1) / slower
    kernel = (np.sinc(places) * np.kaiser(places.size, _KAISER_BETA) * up / slower).astype(np.float32)
    out = np.zeros(-(-sound.size * up // down), dtype=np.float32)
    # Every up-th output meets the same taps: the kernel's samples where inputs lie, newest input first.
    for first in range(min(up, out.size)):
        newest, skip = divmod(first * down + side, up)
        taps = kernel[skip::up][::-1]
        wanted = out[first::up]
        missing = newest + down * (wanted.size - 1) + 1 - sound.size
        padded = np.concatenate((np.zeros(taps.size, np.float32), sound, np.zeros(max(0, missing), np.float32)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, taps.size)[newest + 1 :: down]
        for block in range(0, wanted.size, _BLOCK):
            wanted[block : block + _BLOCK] = windows[block : min(block + _BLOCK, wanted.size)] @ taps
    return out


def to_pcm(sound: Samples) -> bytes:
    """s16le; what is louder than full scale is clipped."""
    return np.clip(np.rint(sound * 32767), -32768, 32767).astype("<i2").tobytes()


def from_pcm(pcm: bytes) -> Samples:
    """The samples of s16le; an odd last byte is none."""
    return np.frombuffer(pcm[: len(pcm) // 2 * 2], "<i2").astype(np.float32) / np.float32(32768)


def write_wav(path: Path, channels: tuple[Samples, ...], rate_hz: int) -> None:
    """One or more channels of the same length as s16le. Raises OSError."""
    interleaved = np.stack(channels, axis=1).reshape(-1)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(len(channels))
        file.setsampwidth(2)
        file.setframerate(rate_hz)
        file.writeframes(to_pcm(interleaved))


def _guess(content: bytes) -> str:
    """What it is instead, if that is plain."""
    known = {b"ID3": "MP3", b"\xff\xfb": "MP3", b"OggS": "Ogg", b"fLaC": "FLAC", b"\x1aE\xdf\xa3": "Matroska or WebM"}
    for start, name in known.items():
        if content.startswith(start):
            return f" but {name}; convert it, for instance with: ffmpeg -i FILE speech.wav"
    if content[4:8] == b"ftyp":
        return " but MP4; convert it, for instance with: ffmpeg -i FILE speech.wav"
    return "" if content else ": it is empty"


def _read_format(chunk: bytes) -> tuple[int, int, int, int]:
    """`(kind, channels, rate in Hz, bits a sample)`."""
    if len(chunk) < 16:
        raise ValueError("is a broken WAV file: its format is too short")
    kind, channels, rate_hz, _, _, bits = struct.unpack_from("<HHIIHH", chunk)
    if kind == _EXTENSIBLE and len(chunk) >= 26:
        kind = struct.unpack_from("<H", chunk, 24)[0]
    widths = {_PCM: (8, 16, 24, 32), _FLOAT: (32, 64), _A_LAW: (8,), _MU_LAW: (8,)}
    if kind not in widths:
        raise ValueError(f"has a compressed format (number {kind}); {_WHAT_WORKS}")
    if bits not in widths[kind]:
        raise ValueError(f"has {bits} bits a sample; {_WHAT_WORKS}")
    if not 1 <= channels <= 64 or not 1000 <= rate_hz <= 768_000:
        raise ValueError(f"is a broken WAV file: {channels} channels at {rate_hz} Hz")
    return kind, channels, rate_hz, bits


def _read_samples(data: bytes, kind: int, channels: int, rate_hz: int, bits: int) -> Samples:
    """All channels in one."""
    del rate_hz
    frame_bytes = channels * bits // 8
    data = data[: len(data) // frame_bytes * frame_bytes]
    if kind == _FLOAT:
        flat = np.nan_to_num(np.frombuffer(data, f"<f{bits // 8}"), nan=0.0, posinf=1.0, neginf=-1.0)
    elif kind in (_A_LAW, _MU_LAW):
        flat = (_a_law() if kind == _A_LAW else _mu_law())[np.frombuffer(data, np.uint8)]
    elif bits == 8:
        flat = (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
    elif bits == 24:
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        flat = wide.view("<i4").reshape(-1).astype(np.float64) / 2**31
    else:
        flat = np.frombuffer(data, f"<i{bits // 8}").astype(np.float64) / 2 ** (bits - 1)
    return flat.reshape(-1, channels).mean(axis=1).astype(np.float32)


def _mu_law() -> NDArray[np.float64]:
    """What each of the 256 codes of G.711 stands for."""
    code = ~np.arange(256) & 0xFF
    size = (((code & 0x0F) << 3) + 0x84 << ((code & 0x70) >> 4)) - 0x84
    return np.where(code & 0x80, -size, size) / 32768


def _a_law() -> NDArray[np.float64]:
    """The same for the other half of G.711."""
    code = np.arange(256) ^ 0x55
    segment = (code & 0x70) >> 4
    step = ((code & 0x0F) << 4) + 8
    size = np.where(segment > 0, (step + 0x100) << np.maximum(segment - 1, 0), step)
    return np.where(code & 0x80, size, -size) / 32768
