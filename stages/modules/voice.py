"""Voice: a small streaming voice changer, as the demo's second stage and as an example of a streaming module.

Computes for real and with state: a causal FIR filter (it remembers the last samples), a ring modulator (it
remembers its carrier's phase) and a feedback echo (it remembers everything, ever more faintly). Runs models.

Bit-reproducible: the same samples come out whether a signal is streamed in frames or computed at once, alone
or in a batch, on any machine. For that it uses nothing but single additions and multiplications in one fixed
order, and a carrier from a table: a convolution or a cosine may round differently for another shape.
"""

import math

import torch
from torch import Tensor, nn

# A gentle low-pass with unit gain: sums to 1, so that a full-scale input can't overflow.
TAPS = (0.05, 0.1, 0.2, 0.3, 0.2, 0.1, 0.05)


class Voice(nn.Module):
    """Robot voice: out = level * (dry + wet * carrier) + echo_gain * out[echo_ms ago].

    Frames of `frame_samples` (at most the echo's length); float32 in, float32 out of the same length. The
    carrier's period must be a whole number of samples. Raises `ValueError` for options that don't fit.
    """

    def __init__(
        self,
        *,
        frame_samples: int = 320,
        sample_rate_hz: int = 16_000,
        carrier_hz: int = 50,
        depth: float = 0.7,
        level: float = 0.7,
        echo_ms: int = 60,
        echo_gain: float = 0.3,
    ) -> None:
        super().__init__()
        self.frame_samples = frame_samples
        self.sample_rate_hz = sample_rate_hz
        self.echo_samples = sample_rate_hz * echo_ms // 1000
        if not 1 <= frame_samples <= self.echo_samples:
            message = f"frame_samples is {frame_samples}; allowed is 1 to the echo's {self.echo_samples} samples"
            raise ValueError(message)
        if carrier_hz < 1 or sample_rate_hz % carrier_hz:
            raise ValueError(f"carrier_hz is {carrier_hz}; it must divide sample_rate_hz ({sample_rate_hz})")
        for name, value in (("depth", depth), ("level", level), ("echo_gain", echo_gain)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}; allowed is 0 to 1")
        self.period_samples = sample_rate_hz // carrier_hz
        turn = 2 * math.pi / self.period_samples
        # What a sample is multiplied with at each point of the period: the dry share and the modulated one.
        gain = [level * (1 - depth + depth * math.cos(turn * n)) for n in range(self.period_samples)]
        self.gain: Tensor
        self.echo_gain: Tensor
        self.taps: Tensor
        self.register_buffer("gain", torch.tensor(gain, dtype=torch.float32))
        self.register_buffer("echo_gain", torch.tensor(echo_gain, dtype=torch.float32))
        self.register_buffer("taps", torch.tensor(TAPS, dtype=torch.float32))

    def initial_state(self) -> dict[str, Tensor]:
        """Silence before the first sample; `phase` counts samples within the carrier's period."""
        return {
            "history": torch.zeros(len(TAPS) - 1),
            "phase": torch.zeros((), dtype=torch.int64),
            "echo": torch.zeros(self.echo_samples),
        }

    def forward(self, frames: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """`frames` [B, n] to [B, n]. State: `history` [B, taps - 1], `phase` [B], `echo` [B, samples]."""
        length = frames.shape[1]
        heard = torch.cat((state["history"], frames), dim=1)
        filtered = torch.zeros_like(frames)
        for index in range(len(TAPS)):
            filtered = filtered + self.taps[index] * heard[:, index : index + length]
        steps = torch.arange(length, device=frames.device)
        point = (state["phase"].unsqueeze(1) + steps) % self.period_samples
        said = filtered * self.gain[point] + self.echo_gain * state["echo"][:, :length]
        return said, {
            "history": heard[:, length:],
            "phase": (state["phase"] + length) % self.period_samples,
            "echo": torch.cat((state["echo"], said), dim=1)[:, length:],
        }
