"""Tensors between stages: what goes in comes out, and nothing else is taken for one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.tensors import EXTENSION, ITEM_BYTES, PackedTensor, pack, pack_extension, unpack_extension

_encoder = msgspec.msgpack.Encoder(enc_hook=pack_extension)
_decoder = msgspec.msgpack.Decoder(ext_hook=unpack_extension)


def there_and_back(value: Any) -> Any:
    return _decoder.decode(_encoder.encode({"hidden": value, "other": [1, "two"]}))["hidden"]


@given(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 5), max_size=4))
def test_type_shape_and_numbers_come_back_as_they_were(dtype: str, shape: list[int]) -> None:
    size = ITEM_BYTES[dtype]
    for length in shape:
        size *= length
    sent = PackedTensor(dtype, tuple(shape), bytes(range(256)) * (size // 256) + bytes(range(size % 256)))
    got = there_and_back(sent)
    assert (got.dtype, got.shape, bytes(got.data)) == (sent.dtype, sent.shape, sent.data)


def test_what_comes_out_is_a_view_of_the_message_and_not_a_copy() -> None:
    got = there_and_back(PackedTensor("uint8", (3,), b"abc"))
    assert isinstance(got.data, memoryview)


def test_numpy_arrays_travel_whatever_their_order_in_memory() -> None:
    np = pytest.importorskip("numpy")
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    got = there_and_back(array).numpy()
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    assert (got == array).all()
    assert not got.flags.writeable


@pytest.mark.torch
def test_torch_tensors_travel_those_of_half_precision_too() -> None:
    import torch  # noqa: PLC0415

    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool):
        tensor = torch.arange(6).reshape(2, 3).to(dtype).T
        got = there_and_back(tensor.requires_grad_() if dtype is torch.float32 else tensor).torch()
        assert got.dtype is dtype
        assert torch.equal(got, tensor.detach())
    assert there_and_back(torch.empty(0, 4)).torch().shape == (0, 4)
    assert there_and_back(torch.tensor(7)).torch().item() == 7
    with pytest.raises(TypeError, match="bfloat16"):
        there_and_back(torch.zeros(2, dtype=torch.bfloat16)).numpy()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "head can't be read"),
        (b"\x01\xc1", "head can't be read"),
        (b"\x05\x92\xa1x\x91\x01" + b"1234", "allowed are float16"),
        (bytes([11]) + msgspec.msgpack.encode(("float32", (2,))) + b"1234", "takes 8 bytes, and there are 4"),
        (bytes([11]) + msgspec.msgpack.encode(("float32", (-1,))), "none negative"),
    ],
)
def test_what_is_no_tensor_is_refused_with_the_reason(data: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        unpack_extension(EXTENSION, memoryview(data))


def test_too_many_dimensions_and_other_extensions_are_refused() -> None:
    with pytest.raises(ValueError, match="0 to 8 dimensions"):
        there_and_back(PackedTensor("uint8", (1,) * 9, b"x"))
    with pytest.raises(ValueError, match="extension type 5"):
        unpack_extension(5, memoryview(b""))


@pytest.mark.parametrize("value", [object(), {1}, 1j])
def test_anything_else_can_not_be_sent(value: object) -> None:
    with pytest.raises(TypeError, match="can't be sent"):
        pack(value)
