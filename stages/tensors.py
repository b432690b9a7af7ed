"""Tensors on their way from stage to stage: hidden states, embeddings, audio as floats.

Responsible for their form in MessagePack (extension type 1: type, shape, then the numbers as they lie in memory, little
endian) and for checking it. Leaves to `workers/stage_forward.py` where it is used: between stages, never towards
listeners. Pure: needs neither numpy nor torch, and takes and gives theirs where they are there. Says no with
`ValueError` or `TypeError`.

Nothing is copied that needn't be: what is read is a view of the message that it came in.
"""

from __future__ import annotations

import sys
from math import prod
from typing import Any, cast

import msgspec

EXTENSION = 1
MAX_DIMENSIONS = 8

# What one number takes, in bytes. torch's names; numpy has the same, but no bfloat16.
ITEM_BYTES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "bool": 1,
}

assert sys.byteorder == "little", "the numbers are sent as they lie in memory"


class PackedTensor:
    """A tensor without its library. `data`: its numbers in C order. An adapter may hand it on, or take it apart.

    No struct: msgspec would make a map of one by itself, and never ask how it wants to travel.
    """

    __slots__ = ("data", "dtype", "shape")

    def __init__(self, dtype: str, shape: tuple[int, ...], data: bytes | memoryview) -> None:
        self.dtype = dtype
        self.shape = shape
        self.data = data

    def __repr__(self) -> str:
        return f"PackedTensor({self.dtype}{list(self.shape)})"

    def numpy(self) -> Any:
        """A numpy array over the same memory, read-only. Raises TypeError for bfloat16, which numpy doesn't know."""
        import numpy as np  # noqa: PLC0415  only where somebody wants one

        if self.dtype == "bfloat16":
            raise TypeError("numpy has no bfloat16; take torch()")
        return np.frombuffer(self.data, dtype=self.dtype).reshape(self.shape)

    def torch(self, device: str = "cpu") -> Any:
        """A torch tensor of its own memory on `device`."""
        import torch  # noqa: PLC0415  only where somebody wants one

        # torch wants memory that it may write to, and this is somebody's message.
        own = torch.frombuffer(bytearray(self.data), dtype=getattr(torch, self.dtype)) if self.data else None
        flat = torch.empty(0, dtype=getattr(torch, self.dtype)) if own is None else own
        return flat.reshape(self.shape).to(device)


def pack(value: object) -> PackedTensor:
    """A torch tensor, a numpy array or a `PackedTensor` as one. Raises TypeError for anything else."""
    if isinstance(value, PackedTensor):
        return value
    made: Any = value
    # By what it can do, not by its class: that would need its library.
    if hasattr(made, "detach") and hasattr(made, "untyped_storage"):
        made = made.detach().cpu().contiguous()
        name = str(made.dtype).removeprefix("torch.")
        return _checked(name, tuple(made.shape), _bytes_of(made))
    if hasattr(made, "__array_interface__") and hasattr(made, "tobytes"):
        return _checked(str(made.dtype), tuple(made.shape), cast("bytes", made.tobytes()))
    raise TypeError(f"a {type(value).__name__} can't be sent to another stage")


def pack_extension(value: object) -> msgspec.msgpack.Ext:
    """For `msgspec.msgpack.Encoder(enc_hook=...)`."""
    packed = pack(value)
    _checked(packed.dtype, packed.shape, packed.data)
    head = msgspec.msgpack.encode((packed.dtype, packed.shape))
    return msgspec.msgpack.Ext(EXTENSION, b"".join((bytes([len(head)]), head, packed.data)))


def unpack_extension(code: int, data: memoryview) -> PackedTensor:
    """For `msgspec.msgpack.Decoder(ext_hook=...)`. Raises ValueError for what is no tensor."""
    if code != EXTENSION:
        raise ValueError(f"MessagePack extension type {code} is unknown; {EXTENSION} is a tensor")
    length = data[0] if data else 0
    try:
        dtype, shape = msgspec.msgpack.decode(data[1 : 1 + length], type=tuple[str, tuple[int, ...]])
    except msgspec.DecodeError as error:
        raise ValueError(f"a tensor's head can't be read: {error}") from error
    return _checked(dtype, shape, data[1 + length :])


def _checked(dtype: str, shape: tuple[int, ...], data: bytes | memoryview) -> PackedTensor:
    size = ITEM_BYTES.get(dtype)
    if size is None:
        raise ValueError(f"a tensor of {dtype} can't be sent; allowed are {', '.join(ITEM_BYTES)}")
    if len(shape) > MAX_DIMENSIONS or any(length < 0 for length in shape):
        raise ValueError(f"a tensor of shape {list(shape)}: 0 to {MAX_DIMENSIONS} dimensions, none negative")
    wanted = prod(shape) * size
    if len(data) != wanted:
        raise ValueError(f"a tensor {dtype}{list(shape)} takes {wanted} bytes, and there are {len(data)}")
    return PackedTensor(dtype, shape, data)


def _bytes_of(tensor: Any) -> bytes:
    import torch  # noqa: PLC0415  it is a torch tensor, so torch is there

    if not tensor.numel():
        return b""
    # As bytes first: numpy knows every type of torch's but bfloat16, and bytes it knows.
    return cast("bytes", tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
