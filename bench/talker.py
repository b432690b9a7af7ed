"""A streaming module with as much to compute as is wanted: a stack of GRUs over audio frames. Needs torch.

For `bench/torch_stage.py`: the state moves with the request, the weights are random, the sound is noise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Talker(nn.Module):
    """`hidden` and `layers` set the size; one frame is 20 ms at 16 kHz."""

    frame_samples = 320
    sample_rate_hz = 16_000

    def __init__(self, *, hidden: int = 512, layers: int = 2) -> None:
        super().__init__()
        self.hidden, self.layers = hidden, layers
        self.ear = nn.Linear(self.frame_samples, hidden)
        self.core = nn.GRU(hidden, hidden, num_layers=layers)
        self.mouth = nn.Linear(hidden, self.frame_samples)

    def initial_state(self) -> Any:
        """One vector a layer."""
        return torch.zeros(self.layers, self.hidden)

    def forward(self, frames: Tensor, state: Tensor) -> tuple[Tensor, Any]:
        """One step for every row."""
        said, following = self.core(torch.tanh(self.ear(frames)).unsqueeze(0), state.transpose(0, 1).contiguous())
        return torch.tanh(self.mouth(said.squeeze(0))), following.transpose(0, 1)
