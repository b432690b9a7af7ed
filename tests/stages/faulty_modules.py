"""Streaming modules that do wrong on purpose, for the torch engine's tests. Needs torch."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

FRAME = 160

# A sample that a module trips over, as s16le and as the module sees it.
POISON = 12_345
POISON_BYTES = POISON.to_bytes(2, "little")


class Counting(nn.Module):
    """Well-behaved: adds to each sample how many frames came before, times 1/32768. Notes its batch sizes."""

    frame_samples = FRAME
    batches: list[int]

    def __init__(self) -> None:
        super().__init__()
        self.batches = []
        LATEST.append(self)

    def initial_state(self) -> Any:
        return {"frames": torch.zeros(()), "deep": (torch.zeros(7919), [torch.zeros(2, 3)], None)}

    def forward(self, frames: Tensor, state: Any) -> tuple[Tensor, Any]:
        self.batches.append(frames.shape[0])
        count = state["frames"]
        return frames + count.unsqueeze(1) / 32768, {"deep": state["deep"], "frames": count + 1}


LATEST: list[Counting] = []
"""The modules that were built, so that a test can look inside the engine's."""


class Poisonable(Counting):
    """Raises for a batch in which any sample is the poison."""

    def forward(self, frames: Tensor, state: Any) -> tuple[Tensor, Any]:
        if bool((frames * 32768 == POISON).any()):
            raise RuntimeError("poison")
        return super().forward(frames, state)


class NotANumber(Counting):
    """Divides by zero where the poison is."""

    def forward(self, frames: Tensor, state: Any) -> tuple[Tensor, Any]:
        said, following = super().forward(frames, state)
        return torch.where(frames * 32768 == POISON, frames / 0.0, said), following


class BreaksForGood(Counting):
    """Raises for everything once it has seen the poison, as a device does after a fault."""

    broken = False

    def forward(self, frames: Tensor, state: Any) -> tuple[Tensor, Any]:
        self.broken = self.broken or bool((frames * 32768 == POISON).any())
        if self.broken:
            raise RuntimeError("device-side fault")
        return super().forward(frames, state)


class Gated(Counting):
    """Waits inside the forward, where there is a poison, until the test opens the gate."""

    entered = threading.Event()
    gate = threading.Event()

    def forward(self, frames: Tensor, state: Any) -> tuple[Tensor, Any]:
        if bool((frames * 32768 == POISON).any()):
            Gated.entered.set()
            assert Gated.gate.wait(60)
        return super().forward(frames, state)


class Doubling(nn.Module):
    """Says two samples for one, from tokens to audio and without a state."""

    frame_samples = 4
    input_kind = "tokens"

    def initial_state(self) -> None:
        return None

    def forward(self, frames: Tensor, state: None) -> tuple[Tensor, None]:
        return frames.repeat_interleave(2, dim=1).to(torch.float32) / 32768, state


class Reversing(nn.Module):
    """From tokens to tokens."""

    frame_samples = 3
    input_kind = "tokens"
    output_kind = "tokens"

    def initial_state(self) -> Tensor:
        return torch.zeros(1)

    def forward(self, frames: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return -frames, state


class WithoutFrame(nn.Module):
    pass


class WithoutState(nn.Module):
    frame_samples = FRAME


class GrowingState(Counting):
    """Its state is longer after each frame: it can't be batched."""

    def initial_state(self) -> Tensor:
        return torch.zeros(1)

    def forward(self, frames: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return frames, torch.cat((state, frames), dim=1)


class ForgetsTheBatch(Counting):
    def initial_state(self) -> Tensor:
        return torch.zeros(1)

    def forward(self, frames: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return frames.sum(dim=0, keepdim=True), state


class ReturnsNoState(Counting):
    def forward(self, frames: Tensor, state: Any) -> Any:
        return frames


class KeepsAnObject(Counting):
    def initial_state(self) -> Any:
        return {"thing": object()}


def not_a_module() -> object:
    return object()


class Widening(nn.Module):
    """Well-behaved, tokens to features: each token as a row (token, how many came before). Keeps the count."""

    frame_samples = 4
    input_kind = "tokens"
    output_kind = "features"

    def initial_state(self) -> Any:
        return torch.zeros(())

    def forward(self, frames: Tensor, state: Any) -> tuple[Tensor, Any]:
        position = state.unsqueeze(1) + torch.arange(frames.shape[1])
        return torch.stack([frames.to(torch.float32), position], dim=2), state + frames.shape[1]


class Narrowing(nn.Module):
    """Well-behaved, features to tokens: the sum of each row."""

    frame_samples = 2
    input_kind = "features"
    output_kind = "tokens"
    feature_size = 2

    def initial_state(self) -> Any:
        return None

    def forward(self, frames: Tensor, state: Any) -> tuple[Tensor, Any]:
        return frames.sum(dim=2).to(torch.int64), state


class Slow(Counting):
    """Takes 2 ms for each row of a batch."""

    def forward(self, frames: Tensor, state: Any) -> tuple[Tensor, Any]:
        threading.Event().wait(0.002 * frames.shape[0])
        return super().forward(frames, state)
