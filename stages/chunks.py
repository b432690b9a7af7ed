"""Chunks: the input that the built-in engines understand.

Responsible for reading a prompt as audio, tokens or features, for both engines in the same way. Leaves prompts
of real models (token ids with images) to their policy and engine. Pure. Says no with a `ValueError` that an
engine turns into `invalid_argument`.

Audio is s16le mono PCM; tokens are integers that fit 64 bits; features are rows of float32, as an earlier stage's
hidden states.
"""

from collections.abc import Mapping
from typing import Any, Literal, cast

from msgspec import Struct

from stages.tensors import PackedTensor

ChunkKind = Literal["audio", "tokens", "features"]

SAMPLE_BYTES = 2
FLOAT_BYTES = 4
_TOKEN_LIMIT = 2**63


class Chunk(Struct, frozen=True):
    """`kind` is None where the prompt holds nothing; `data` is then empty. `width`: of each row of features."""

    kind: ChunkKind | None
    data: bytes | list[int]
    width: int = 1


NOTHING = Chunk(None, b"")


def read_chunk(prompt: Any) -> Chunk:
    """The chunk in a prompt: bytes, a list of ints, `{"audio": bytes}`, `{"tokens": [...]}`, a float32 tensor of
    rows, or nothing.

    Raises `ValueError` for anything else.
    """
    if isinstance(prompt, Mapping):
        fields = cast("Mapping[Any, Any]", prompt)
        if len(fields) != 1 or (kind := next(iter(fields))) not in ("audio", "tokens"):
            keys = sorted(map(str, fields))
            raise ValueError(f"a structured input is {{audio: bytes}} or {{tokens: [...]}}, not keys {keys}")
        chunk = read_chunk(fields[kind])
        if chunk.kind not in (None, kind):
            raise ValueError(f"the value of {kind!r} holds {chunk.kind}")
        return chunk
    if prompt is None:
        return NOTHING
    if isinstance(prompt, bytes | bytearray):
        return Chunk("audio", bytes(prompt)) if prompt else NOTHING
    if isinstance(prompt, list | tuple):
        tokens = list(cast("list[Any]", prompt))
        for index, token in enumerate(tokens):
            if type(token) is not int or not -_TOKEN_LIMIT <= token < _TOKEN_LIMIT:
                raise ValueError(f"tokens[{index}] is {token!r:.40}, not a 64-bit integer")
        return Chunk("tokens", tokens) if tokens else NOTHING
    if isinstance(prompt, PackedTensor):
        if prompt.dtype != "float32" or len(prompt.shape) != 2:
            raise ValueError(f"features are float32 of two dimensions, rows first, not {prompt!r}")
        return Chunk("features", bytes(prompt.data), prompt.shape[1]) if prompt.data else NOTHING
    raise ValueError(f"an input is bytes (audio) or a list of ints (tokens), not {type(prompt).__name__}")
