"""The torch side of the torch engine: a user's streaming module, and one forward pass for many requests.

Responsible for loading the module, for checking that it keeps its contract, for stacking frames and states
into a batch and for finding the row that broke it. Leaves requests, turns and time to `torch_engine.py`.
Runs models, all of it in the model thread. Imports torch, so nothing else may import it at the top.

Says no with `ValueError` (the module does not keep its contract) and `ModuleBrokenError` (it no longer does).
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn

from stages.chunks import FLOAT_BYTES, SAMPLE_BYTES, ChunkKind
from stages.imports import load_symbol
from stages.rows import Computed, Failed, ModuleBrokenError, Row
from stages.tensors import PackedTensor, pack

_PCM_SCALE = 32768.0
_KINDS: tuple[ChunkKind, ...] = ("audio", "tokens", "features")


class StreamingBatch:
    """A loaded module. `frame_samples`: samples (or tokens) that one forward takes of each request."""

    def __init__(self, module: nn.Module, device: str) -> None:
        self.frame_samples = _count(module, "frame_samples", None)
        self.sample_rate_hz = _count(module, "sample_rate_hz", 16_000)
        self.input_kind: ChunkKind = _kind(module, "input_kind")
        self.output_kind: ChunkKind = _kind(module, "output_kind")
        # Of one row of features; where the input is none, nobody asks.
        self.feature_size = _count(module, "feature_size", 1)
        if not callable(getattr(module, "initial_state", None)):
            raise ValueError("it has no method initial_state()")  # noqa: TRY004  a wrong configuration
        self._device = torch.device(device)
        self._module = module.to(self._device).eval()
        with _inference():
            self.state_bytes = _size_bytes(self._initial_state())
        # Two rows: the batch dimension can't be mistaken for another one.
        for rows in (1, 2):
            self._silence(rows)

    def compute(self, rows: Sequence[Row]) -> list[Computed | Failed]:
        """One forward for all rows; if that fails, one for each, so that only the culprit does (S42).

        Raises `ModuleBrokenError` if every row fails and silence does too.
        """
        try:
            return list(self._forward(rows))
        except Exception as error:  # noqa: BLE001  it is the user's code
            if len(rows) == 1:
                results: list[Computed | Failed] = [Failed(_reason(error))]
            else:
                results = [self._alone(row) for row in rows]
        if all(isinstance(result, Failed) for result in results):
            try:
                self._silence(1)
            except Exception as error:  # noqa: BLE001  it is the user's code
                raise ModuleBrokenError(f"the module fails even on silence: {_reason(error)}") from None
        return results

    def _alone(self, row: Row) -> Computed | Failed:
        try:
            return self._forward([row])[0]
        except Exception as error:  # noqa: BLE001  it is the user's code
            return Failed(_reason(error))

    def _silence(self, rows: int) -> None:
        nothing: bytes | list[int] = [] if self.input_kind == "tokens" else b""
        with _inference():
            first = _shapes(self._initial_state())
        for computed in self._forward([Row(nothing, None) for _ in range(rows)]):
            if (shapes := _shapes(computed.state)) != first:
                raise ValueError(f"initial_state() gives {first}, but forward's state is {shapes} for each row")

    def _forward(self, rows: Sequence[Row]) -> list[Computed]:
        with _inference():
            states = [self._initial_state() if row.state is None else row.state for row in rows]
            output, state = self._check(self._module(self._frames(rows), _stack(states)), len(rows))
            if self.output_kind == "audio":
                # A NaN or infinity would be heard as a click, and stay in the state for ever.
                if not bool(torch.isfinite(output).all()):
                    raise ValueError("the module's output is not finite")
                output = output.to(torch.float32) * _PCM_SCALE
                output = output.round().clamp(-_PCM_SCALE, _PCM_SCALE - 1).to(torch.int16)
            if self.output_kind == "features":
                output = output.to(torch.float32)
            output = output.cpu()
            return [Computed(self._piece(output[index], row), _row(state, index)) for index, row in enumerate(rows)]

    def _initial_state(self) -> Any:
        return _place(cast("Any", self._module).initial_state(), self._device)

    def _frames(self, rows: Sequence[Row]) -> Tensor:
        if self.input_kind == "audio":
            size = self.frame_samples * 2
            pcm = bytearray().join(bytes(cast("bytes", row.data)).ljust(size, b"\0") for row in rows)
            frames = torch.frombuffer(pcm, dtype=torch.int16).reshape(len(rows), self.frame_samples)
            return frames.to(self._device).to(torch.float32) / _PCM_SCALE
        if self.input_kind == "features":
            size = self.frame_samples * self.feature_size * FLOAT_BYTES
            rows_of_floats = bytearray().join(bytes(cast("bytes", row.data)).ljust(size, b"\0") for row in rows)
            frames = torch.frombuffer(rows_of_floats, dtype=torch.float32)
            return frames.reshape(len(rows), self.frame_samples, self.feature_size).to(self._device)
        padded = [list(row.data) + [0] * (self.frame_samples - len(row.data)) for row in rows]
        return torch.tensor(padded, dtype=torch.int64, device=self._device)

    def _check(self, result: object, rows: int) -> tuple[Tensor, Any]:
        pair = cast("tuple[Any, ...]", result) if isinstance(result, tuple) else ()
        if len(pair) != 2:
            raise ValueError("forward did not return a tuple (output, state)")
        output, state = pair
        dimensions = 3 if self.output_kind == "features" else 2
        if not isinstance(output, Tensor) or output.dim() != dimensions or output.shape[0] != rows:
            shape = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            wanted = f"[{rows}, out, features]" if dimensions == 3 else f"[{rows}, out]"
            raise ValueError(f"forward's output is {shape}, not a tensor {wanted}")
        if output.is_floating_point() == (self.output_kind == "tokens"):
            message = "audio and features are floating point, tokens are integers"
            raise ValueError(f"forward's output is {output.dtype}; {message}")
        return output, state

    def _piece(self, output: Tensor, row: Row) -> bytes | list[int] | PackedTensor:
        """The output of one row, cut in proportion if the input was less than a frame."""
        taken = len(row.data) // self._item_bytes()
        if taken < self.frame_samples:
            output = output[: math.ceil(output.shape[0] * taken / self.frame_samples)]
        if self.output_kind == "audio":
            return output.numpy().tobytes()
        if self.output_kind == "features":
            # Its own memory: a window on the batch would keep all of it.
            return pack(output.clone())
        return cast("list[int]", output.tolist())

    def _item_bytes(self) -> int:
        """What one sample, token or row of features is in a frame's data: bytes, or an element."""
        if self.input_kind == "audio":
            return SAMPLE_BYTES
        return self.feature_size * FLOAT_BYTES if self.input_kind == "features" else 1


def load_batch(path: str, options: Mapping[str, Any], device: str, num_threads: int | None) -> StreamingBatch:
    """Build the module at an import path with `options` as keywords, and check it on silence.

    Raises `ValueError` if it does not keep the contract; what the module's own code raises comes through.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    module = load_symbol(path)(**options)
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        raise ValueError(f"it is a {kind}, not a torch.nn.Module")  # noqa: TRY004  a wrong configuration
    return StreamingBatch(module, device)


def _inference() -> AbstractContextManager[None]:
    return cast("AbstractContextManager[None]", torch.inference_mode())


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def _count(module: nn.Module, name: str, default: int | None) -> int:
    value: object = getattr(module, name, default)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"its attribute {name} is {value!r}; it must be an integer of at least 1")
    return value


def _kind(module: nn.Module, name: str) -> ChunkKind:
    value: Any = getattr(module, name, "audio")
    if value not in _KINDS:
        raise ValueError(f"its attribute {name} is {value!r}; allowed are {', '.join(_KINDS)}")
    return value


# A state is a tensor, or a dict, list or tuple of states, or None. The same shape for every request, always.


def _place(state: Any, device: torch.device) -> Any:
    if isinstance(state, Tensor):
        return state.to(device)
    return _rebuild(state, [_place(part, device) for part in _parts(state)])


def _stack(states: list[Any]) -> Any:
    """Copies, so a forward that fails, or works in place, leaves the requests' own states as they were."""
    first = states[0]
    if isinstance(first, Tensor):
        return torch.stack(states)
    if isinstance(first, Mapping):
        # By key: two dicts that are equal may still be in different orders.
        keys = list(cast("Mapping[Any, Any]", first))
        columns = [[state[key] for state in states] for key in keys]
    else:
        columns = [list(column) for column in zip(*map(_parts, states), strict=True)]
    return _rebuild(first, [_stack(column) for column in columns])


def _row(state: Any, index: int) -> Any:
    """Copies, so that a request's state is not a window on the whole batch, which would outlive an abort."""
    if isinstance(state, Tensor):
        return state[index].clone()
    return _rebuild(state, [_row(part, index) for part in _parts(state)])


def _size_bytes(state: Any) -> int:
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    return sum(_size_bytes(part) for part in _parts(state))


def _shapes(state: Any) -> Any:
    if isinstance(state, Tensor):
        return f"{str(state.dtype).removeprefix('torch.')}{list(state.shape)}"
    if isinstance(state, Mapping):
        return {key: _shapes(part) for key, part in cast("Mapping[Any, Any]", state).items()}
    return [_shapes(part) for part in _parts(state)]


def _parts(state: Any) -> list[Any]:
    if state is None:
        return []
    if isinstance(state, Mapping):
        return list(cast("Mapping[Any, Any]", state).values())
    if isinstance(state, list | tuple):
        return list(cast("list[Any]", state))
    raise ValueError(f"a state holds a {type(state).__name__}; allowed are tensors in dicts, lists and tuples")


def _rebuild(state: Any, parts: list[Any]) -> Any:
    if state is None:
        return None
    if isinstance(state, Mapping):
        return dict(zip(cast("Mapping[Any, Any]", state), parts, strict=True))
    if isinstance(state, list):
        return parts
    if hasattr(state, "_fields"):  # a named tuple takes its parts one by one
        return type(state)(*parts)
    return tuple(parts)
