"""What a stage is told, and tokens into text, piece by piece.

Responsible for what a vLLM stage takes as a prompt, and for text that never ends in half a letter. Leaves tokenizing
itself to the model's tokenizer. Pure. Says no with a `ValueError` that the engine turns into `invalid_argument`.
"""

from collections.abc import Mapping
from typing import Any, Protocol, cast

from msgspec import Struct

from stages.chunks import read_chunk

_HALF = "\N{REPLACEMENT CHARACTER}"
# A letter is at most four bytes, so at most four tokens; what is still unreadable then will not become readable.
_MOST_HELD = 8


class Decoder(Protocol):
    """The part of a tokenizer that makes text of tokens."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        """The text of all tokens together."""
        ...


class Prompt(Struct, frozen=True):
    """Tokens or text, and `media`, what vLLM calls `multi_modal_data`: by modality, for the placeholders among them."""

    said: list[int] | str
    media: Mapping[str, Any] | None = None


def read_prompt(prompt: Any, vocabulary: int) -> Prompt:
    """A prompt: a list of ints, `{"tokens": [...]}`, a str, `{"text": str}` or nothing.

    A mapping may have `multi_modal_data` beside its tokens or text. Raises `ValueError` for anything else, and for
    tokens outside of the `vocabulary`.
    """
    media: Mapping[str, Any] | None = None
    if isinstance(prompt, Mapping) and "multi_modal_data" in prompt:
        fields = dict(cast("Mapping[Any, Any]", prompt))
        found, prompt = fields.pop("multi_modal_data"), fields
        if not isinstance(found, Mapping) or not found:
            raise ValueError("multi_modal_data must be a mapping by modality, as {'audio': ...}")
        media = {str(name): each for name, each in cast("Mapping[Any, Any]", found).items()}
        if set(fields) not in ({"text"}, {"tokens"}):
            raise ValueError(f"multi_modal_data goes with 'tokens' or 'text', not with keys {sorted(map(str, fields))}")
    return Prompt(_read_said(prompt, vocabulary), media)


def _read_said(prompt: Any, vocabulary: int) -> list[int] | str:
    if isinstance(prompt, Mapping):
        fields = cast("Mapping[Any, Any]", prompt)
        if set(fields) == {"text"}:
            prompt = fields["text"]
            if not isinstance(prompt, str):
                raise ValueError(f"the value of 'text' is a {type(prompt).__name__}")
    if isinstance(prompt, str):
        return prompt
    chunk = read_chunk(prompt)
    if chunk.kind not in (None, "tokens"):
        raise ValueError(f"this stage takes tokens or text; a policy's plan_append can make them from {chunk.kind}")
    tokens = list(chunk.data)
    for index, token in enumerate(tokens):
        if not 0 <= token < vocabulary:
            raise ValueError(f"tokens[{index}] is {token}; the model's vocabulary has {vocabulary} tokens")
    return tokens


class TurnText:
    """The text of one turn. Tokens of one letter may come apart, and a space belongs to what follows it."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._tokens: list[int] = []
        self._told = 0  # the text up to this token has been given out
        self._base = 0  # decoding begins here, a little earlier, so that spaces come out right

    def add(self, tokens: list[int], *, end: bool = False) -> str:
        """What can be read now that could not before. `end`: nothing follows, so everything is given out."""
        self._tokens += tokens
        before = self._decoder.decode(self._tokens[self._base : self._told], skip_special_tokens=True)
        after = self._decoder.decode(self._tokens[self._base :], skip_special_tokens=True)
        if after.endswith(_HALF) and not end and len(self._tokens) - self._told < _MOST_HELD:
            return ""
        # From here on: the former piece is enough of a run-up.
        self._base, self._told = self._told, len(self._tokens)
        return after[len(before) :]
