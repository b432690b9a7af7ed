"""Rows: what passes between the torch engine and its batch, one row a request and forward.

Apart from both, so that the engine can be imported without torch. Pure.
"""

from typing import Any

from msgspec import Struct

from stages.tensors import PackedTensor


class Row(Struct):
    """One request's part in a forward. `data`: a frame or, at a turn's end, less. `state`: None at first."""

    data: bytes | list[int]
    state: Any


class Computed(Struct):
    """What a row became: output of the frame's length (in proportion, for short ones), and the next state."""

    data: bytes | list[int] | PackedTensor
    state: Any


class Failed(Struct, frozen=True):
    """A row that the module could not compute even when it was alone. Its state is as before."""

    reason: str


class ModuleBrokenError(Exception):
    """The module fails even on silence: no request can be served any more."""
