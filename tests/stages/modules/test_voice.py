"""The shipped voice: the same samples, however they are streamed."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch isn't installed (make test TORCH=1)")

import numpy as np  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from stages.engine import EngineConfigError  # noqa: E402
from stages.modules.voice import TAPS, Voice  # noqa: E402
from stages.torch_engine import TorchEngine  # noqa: E402
from tests.stages.ear import Ear, input_for, joined, request_name  # noqa: E402

pytestmark = pytest.mark.torch

FloatArray = NDArray[np.float32]


def noise(samples: int, seed: int) -> FloatArray:
    return np.random.default_rng(seed).uniform(-1, 1, samples).astype(np.float32)


def by_hand(signal: FloatArray) -> FloatArray:
    """The voice's formula over a whole signal, sample by sample, in single precision and without torch."""
    voice = Voice()
    period, delay = voice.period_samples, voice.echo_samples
    gain = np.array([0.7 * (1 - 0.7 + 0.7 * math.cos(2 * math.pi / period * n)) for n in range(period)], np.float32)
    taps, echo_gain = np.array(TAPS, np.float32), np.float32(0.3)
    heard = np.concatenate((np.zeros(len(taps) - 1, np.float32), signal))
    said = np.zeros_like(signal)
    for n in range(len(signal)):
        filtered = np.float32(0)
        for k, tap in enumerate(taps):
            filtered = filtered + tap * heard[n + k]
        said[n] = filtered * gain[n % period] + echo_gain * (said[n - delay] if n >= delay else np.float32(0))
    return said


def stream(voice: Voice, signals: list[FloatArray], cuts: list[int]) -> FloatArray:
    """The signals as one batch, in frames that end at `cuts`."""
    states = [voice.initial_state() for _ in signals]
    state: dict[str, Any] = {key: torch.stack([each[key] for each in states]) for key in states[0]}
    batch, said = torch.from_numpy(np.stack(signals)), []
    with torch.inference_mode():
        for start, end in zip([0, *cuts], cuts, strict=False):
            output, state = voice(batch[:, start:end], state)
            said.append(output)
    return torch.cat(said, dim=1).numpy()


def test_streamed_frames_are_the_whole_signals_computation_bit_for_bit() -> None:
    signal = noise(320 * 12, 1)
    expected = by_hand(signal)
    for frame in (320, 960, 96, 1):
        cuts = list(range(frame, len(signal) + 1, frame))
        if frame == 1:
            cuts = [*range(1, 1500), len(signal) - 960 * 2, len(signal) - 960, len(signal)]
        assert np.array_equal(stream(Voice(), [signal], cuts)[0], expected)


def test_a_batch_says_what_each_would_say_alone_bit_for_bit() -> None:
    signals = [noise(320 * 8, seed) for seed in range(9)]
    cuts = list(range(320, 320 * 8 + 1, 320))
    together = stream(Voice(), signals, cuts)
    for signal, said in zip(signals, together, strict=True):
        assert np.array_equal(stream(Voice(), [signal], cuts)[0], said)


def test_a_full_scale_signal_changes_and_does_not_overflow() -> None:
    signal = np.ones(320 * 50, np.float32)
    said = by_hand(signal)
    assert np.abs(said).max() <= 1
    assert not np.allclose(said[:1000], signal[:1000], atol=0.1)


async def test_the_engine_says_the_whole_signals_computation() -> None:
    engine, ear = TorchEngine({"module": "stages.modules.voice:Voice"}), Ear()
    await engine.start(ear)
    expected: dict[str, bytes] = {}
    for number in range(5):
        name = request_name(f"s{number}")
        pcm = (noise(320 * 4 + 100 * number, number) * 32767).astype("<i2")
        padded = np.concatenate((pcm, np.zeros(-len(pcm) % 320, "<i2"))).astype(np.float32) / np.float32(32768)
        said = np.clip(np.round(by_hand(padded) * np.float32(32768)), -32768, 32767).astype("<i2")
        expected[name] = said[: len(pcm)].tobytes()
        data = pcm.tobytes()
        await engine.submit(input_for(name, data[:777], final=False))
        await engine.submit(input_for(name, data[777:], seq=2, resumed=True))
    for name, said_bytes in expected.items():
        assert joined(await ear.turn_ends(name)) == said_bytes
    await engine.stop()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frame_samples": 961}, "1 to the echo's 960"),
        ({"carrier_hz": 33}, "must divide"),
        ({"echo_gain": 1.5}, "echo_gain is 1.5; allowed is 0 to 1"),
    ],
)
async def test_options_that_do_not_fit_are_named(options: dict[str, Any], message: str) -> None:
    engine = TorchEngine({"module": "stages.modules.voice:Voice", "module_options": options})
    with pytest.raises(EngineConfigError, match=message):
        await engine.start(Ear())
