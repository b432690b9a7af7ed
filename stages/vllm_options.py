"""The options of a vLLM stage, and its sampling parameters, both checked before vLLM is even imported.

Responsible for what may be set and for saying plainly what may not. Leaves vLLM's own engine arguments to
`vllm_core.py`, which knows the installed version's. Pure.

Says no with `EngineConfigError` (options) and `ValueError` (a session's sampling parameters).
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from stages.engine import EngineConfigError, read_options

_Milliseconds = Annotated[float, Meta(gt=0, le=3_600_000)]
_Count = Annotated[int, Meta(ge=1)]

DEFAULT_MAX_TOKENS = 256


class VllmOptions(Struct, frozen=True, kw_only=True):
    """The `options:` of a vLLM stage.

    `model`: a folder or a name that vLLM can load. `engine`: fields of vLLM's `AsyncEngineArgs` by their names.
    `environment`: variables that are set before vLLM is imported, for the whole process. `output`: what the
    stage says. `sampling`: defaults under the session's own. `prefill`: begin with a turn's input before its
    end. `max_requests`: what is held at most; None: one less than vLLM's `max_num_seqs`, which is the bound.
    New requests are refused while more than `refuse_above_kv` of the KV cache is in use. `fork`: start vLLM's
    processes by forking, which is quicker and only for CPUs.

    An abort that isn't confirmed within `abort_timeout_ms` is given up; the core is asked every
    `watch_every_ms` whether it answers, and counts as dead if it hasn't for `hang_after_ms`.
    """

    model: Annotated[str, Meta(min_length=1)]
    engine: dict[str, Any] = field(default_factory=dict[str, Any])
    environment: dict[str, str] = field(default_factory=dict[str, str])
    output: Literal["tokens", "text"] = "tokens"
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    prefill: bool = True
    max_requests: _Count | None = None
    refuse_above_kv: Annotated[float, Meta(gt=0, le=1)] = 0.9
    fork: bool = False
    abort_timeout_ms: _Milliseconds = 5_000
    watch_every_ms: _Milliseconds = 1_000
    hang_after_ms: _Milliseconds = 10_000


class Sampling(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters that a session may set; named and meant as in vLLM's `SamplingParams`.

    `max_tokens` is also bounded by what is left of the context. Not given: 256.
    """

    max_tokens: _Count | UnsetType | None = UNSET
    min_tokens: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    temperature: Annotated[float, Meta(ge=0, le=100)] | UnsetType = UNSET
    top_p: Annotated[float, Meta(gt=0, le=1)] | UnsetType = UNSET
    top_k: Annotated[int, Meta(ge=-1)] | UnsetType = UNSET
    min_p: Annotated[float, Meta(ge=0, le=1)] | UnsetType = UNSET
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | UnsetType = UNSET
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | UnsetType = UNSET
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | UnsetType = UNSET
    seed: int | UnsetType | None = UNSET
    stop_token_ids: list[Annotated[int, Meta(ge=0)]] | UnsetType = UNSET
    ignore_eos: bool | UnsetType = UNSET
    logit_bias: dict[Annotated[int, Meta(ge=0)], float] | UnsetType = UNSET
    allowed_token_ids: list[Annotated[int, Meta(ge=0)]] | UnsetType = UNSET


# What vLLM has and can't be had here, with the values that ask for nothing.
_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "n": ((None, 1), "a request that goes on over several turns has one answer (n = 1)"),
    "stop": ((None, "", []), "stop strings are not possible with input that comes in pieces; use stop_token_ids"),
    "output_kind": ((None,), "outputs come as they are made; an answer that comes in one piece is not possible"),
}


def read_vllm_options(options: Mapping[str, Any]) -> VllmOptions:
    """The options, checked as far as that is possible without vLLM. Raises `EngineConfigError`."""
    read = read_options(VllmOptions, options)
    if "model" in read.engine:
        raise EngineConfigError("engine.model: the model is the option `model`")
    try:
        read_sampling(read.sampling)
    except ValueError as error:
        raise EngineConfigError(str(error)) from None
    find_seats(read)
    if read.watch_every_ms >= read.hang_after_ms:
        raise EngineConfigError("watch_every_ms: must be less than hang_after_ms")
    return read


def find_seats(options: VllmOptions) -> int | None:
    """How many requests will be held, if that is known before vLLM is asked. Raises `EngineConfigError`."""
    seats = options.engine.get("max_num_seqs")
    return check_seats(options, seats) if isinstance(seats, int) else options.max_requests


def check_seats(options: VllmOptions, seats: int) -> int:
    """How many requests may be held with `max_num_seqs` = `seats`. Raises `EngineConfigError`.

    Below it: requests that are idle between their turns keep their seats, and with all of them taken no new
    one would ever begin.
    """
    if seats < 2:
        raise EngineConfigError(f"engine.max_num_seqs: is {seats}; it must be at least 2")
    if options.max_requests is None:
        return seats - 1
    if options.max_requests >= seats:
        raise EngineConfigError(f"max_requests: is {options.max_requests}; it must be below max_num_seqs ({seats})")
    return options.max_requests


def read_sampling(*layers: Any) -> dict[str, Any]:
    """The sampling parameters of several layers, later ones first. Raises `ValueError` with the key."""
    merged: dict[str, Any] = {}
    for layer in layers:
        if layer is None:
            continue
        if not isinstance(layer, Mapping):
            raise ValueError(f"sampling: must be a mapping, not {type(layer).__name__}")  # noqa: TRY004  refused
        merged.update(cast("Mapping[str, Any]", layer))
    for key, (harmless, reason) in _REFUSED.items():
        if key in merged and merged.pop(key) not in harmless:
            raise ValueError(f"sampling.{key}: {reason}")
    known = [each.encode_name for each in msgspec.structs.fields(Sampling)]
    unknown = [key for key in merged if key not in known]
    if unknown:
        raise ValueError(f"sampling.{unknown[0]}: unknown; allowed are {', '.join(known)}")
    try:
        read = msgspec.convert(merged, Sampling)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        raise ValueError(f"sampling.{path.removesuffix('`')}: {reason}") from None
    values = {key: value for key, value in msgspec.structs.asdict(read).items() if value is not UNSET}
    if values.get("max_tokens") is None:
        values["max_tokens"] = DEFAULT_MAX_TOKENS
    if values.get("min_tokens", 0) > values["max_tokens"]:
        raise ValueError(f"sampling.min_tokens: is {values['min_tokens']}, more than max_tokens")
    return values
