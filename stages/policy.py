"""The model policy: the three questions that only someone who knows the model can answer.

Responsible for the hooks' contract, for loading and checking a policy, for the default one, and for adapters,
which make a later stage's prompt from what the stage before it said. Leaves to the control worker when to ask
for sampling parameters, and to the stage worker the other two. Pure but for imports.

A policy says no by raising `ValueError` or `TypeError`; then nothing has changed (I7, I8) and the producer
gets `invalid_argument` with the message.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Protocol, cast

import msgspec
from msgspec import Struct, field

from control.core.fence import Fence
from stages.chunks import read_chunk
from stages.engine import Output
from stages.imports import load_symbol

_EXACT = 2**53  # integers up to here are floats without loss

_HOOKS: Mapping[str, tuple[str, ...]] = {
    "configure_sampling_params": ("runtime_config", "defaults"),
    "plan_append": (
        "request_id",
        "session_id",
        "fence",
        "session_config",
        "runtime_config",
        "seq",
        "turn_seq",
        "mode",
        "payload",
        "final",
        "sampling",
    ),
    "decide_output": ("stage_id", "final_stage_id", "output"),
}
_ADAPTER = (
    "request_id",
    "session_id",
    "stage_id",
    "fence",
    "seq",
    "output",
    "session_config",
    "runtime_config",
)


class AppendPlan(Struct, frozen=True):
    """What goes to an engine as `Submission.prompt`: anything that this stage's engine understands."""

    prompt: Any


class OutputAction(StrEnum):
    """What else than going on to the next stage an output may do."""

    DIRECT_RESPONSE = "direct_response"


class OutputDecision(Struct, frozen=True):
    """`DIRECT_RESPONSE`: publish the output from this stage, with `metadata` added, and don't forward it."""

    action: OutputAction
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])


class ModelPolicy(Protocol):
    """The hooks. A policy is built without arguments, once a process, and keeps nothing of a session."""

    def configure_sampling_params(
        self, *, runtime_config: Mapping[str, Any], defaults: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """The sampling parameters of a session, one element a stage, each of the type of its default.

        Runs at the partition's owner when a session opens or changes its `runtime_config`, before anything is
        changed. Pure and quick: other sessions wait for it. `defaults` come from the pipeline file.
        """
        ...

    def plan_append(
        self,
        *,
        request_id: str,
        session_id: str,
        fence: Fence,
        session_config: Mapping[str, Any],
        runtime_config: Mapping[str, Any],
        seq: int,
        turn_seq: int,
        mode: str,
        payload: Any,
        final: bool,
        sampling: Any,
    ) -> AppendPlan:
        """The first stage's prompt for an append. Runs at that stage's worker, where the tokenizer is.

        `payload`: bytes if the producer sent raw bytes, else the value it sent. `sampling`: the first stage's
        parameters. Raising rejects the append.
        """
        ...

    def decide_output(self, *, stage_id: int, final_stage_id: int, output: Output) -> OutputDecision | None:
        """What becomes of an output, at the worker that produced it. None: on to the next stage, or out."""
        ...


class Adapter(Protocol):
    """Makes a later stage's prompt from an output of the stage before it, at the later stage's worker.

    A function, or a class that is built without arguments and called. `stage_id`, `request_id` and `seq` are
    those of the stage that gets the prompt; the submission is final where the output has `turn_end`. Raising
    `ValueError` or `TypeError` fails the request.
    """

    def __call__(
        self,
        *,
        request_id: str,
        session_id: str,
        stage_id: int,
        fence: Fence,
        seq: int,
        output: Output,
        session_config: Mapping[str, Any],
        runtime_config: Mapping[str, Any],
    ) -> AppendPlan:
        """The prompt for `output`."""
        ...


class DefaultPolicy:
    """Passes audio and tokens through as they are, for engines that take them so (parrot, torch).

    `runtime_config["sampling"]` changes sampling parameters: a mapping (each key goes to every stage that has
    it), or a list with a mapping or null for each stage. Only keys that a stage's defaults have, with values
    of the same type.
    """

    def configure_sampling_params(
        self, *, runtime_config: Mapping[str, Any], defaults: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """The defaults with the session's own values merged in. Raises `ValueError` or `TypeError`."""
        wanted: Any = runtime_config.get("sampling")
        if wanted is None:
            return defaults
        if isinstance(wanted, Mapping):
            common = cast("Mapping[Any, Any]", wanted)
            for key in common:
                if not any(isinstance(each, Mapping) and key in each for each in defaults):
                    raise ValueError(f"sampling.{key}: no stage has it; {_known(defaults)}")
            return tuple(_merge(each, common, "sampling", partial=True) for each in defaults)
        if isinstance(wanted, list | tuple):
            each_stage = cast("list[Any]", wanted)
            if len(each_stage) != len(defaults):
                raise ValueError(f"sampling: has {len(each_stage)} elements, one for each of {len(defaults)} stages")
            return tuple(
                _merge(default, own, f"sampling[{stage}]", partial=False)
                for stage, (default, own) in enumerate(zip(defaults, each_stage, strict=True))
            )
        raise TypeError(f"sampling: must be a mapping or a list of mappings, not {type(wanted).__name__}")

    def plan_append(
        self,
        *,
        request_id: str,
        session_id: str,
        fence: Fence,
        session_config: Mapping[str, Any],
        runtime_config: Mapping[str, Any],
        seq: int,
        turn_seq: int,
        mode: str,
        payload: Any,
        final: bool,
        sampling: Any,
    ) -> AppendPlan:
        """The payload itself, if it is what `mode` says. Raises `ValueError`.

        Audio: bytes or `{"audio": bytes}`. Tokens: a list of ints, `{"tokens": [...]}`, or either as
        MessagePack. `turn_commit_only`: any of these, or nothing. An input that ends a turn may be empty.
        """
        del request_id, session_id, fence, session_config, runtime_config, seq, turn_seq, sampling
        if mode == "append_tokens" and isinstance(payload, bytes) and payload:
            # Raw bytes are how structured input travels; the owner doesn't look inside them.
            try:
                payload = msgspec.msgpack.decode(payload)
            except msgspec.DecodeError as error:
                raise ValueError(f"payload: tokens sent as bytes must be MessagePack: {error}") from None
        try:
            chunk = read_chunk(payload)
        except ValueError as error:
            raise ValueError(f"payload: {error}") from None
        if mode == "turn_commit_only" or (chunk.kind is None and final):
            return AppendPlan(payload)
        wanted = {"append_tokens": "tokens", "append_audio_chunk": "audio"}.get(mode)
        if wanted is None:
            raise ValueError(f"mode: this pipeline's policy does not know {mode!r}")
        if chunk.kind != wanted:
            raise ValueError(f"payload: {mode} needs {wanted}, and this holds {chunk.kind or 'nothing'}")
        return AppendPlan(payload)

    def decide_output(self, *, stage_id: int, final_stage_id: int, output: Output) -> OutputDecision | None:
        """Every output goes on to the next stage, or out."""
        del stage_id, final_stage_id, output
        return None


def pass_through(
    *,
    request_id: str,
    session_id: str,
    stage_id: int,
    fence: Fence,
    seq: int,
    output: Output,
    session_config: Mapping[str, Any],
    runtime_config: Mapping[str, Any],
) -> AppendPlan:
    """The default adapter: the output's data as it is."""
    del request_id, session_id, stage_id, fence, seq, session_config, runtime_config
    return AppendPlan(output.data)


def load_policy(path: str, sampling_defaults: tuple[Any, ...] | None = None) -> ModelPolicy:
    """The policy at `pkg.mod:Class` or `pkg.mod.Class`, checked.

    With `sampling_defaults` (one element a stage), also checks that an empty `runtime_config` gives
    parameters of the right shape. Raises `ImportPathError`, `TypeError` (a hook is missing or takes other
    arguments) or what `configured_sampling` raises.
    """
    policy: Any = load_symbol(path)()
    for name, keywords in _HOOKS.items():
        hook: object = getattr(policy, name, None)
        if not callable(hook):
            raise TypeError(f"policy {path!r} has no method {name}")
        _check_takes(hook, keywords, f"policy {path!r}: {name}")
    found = cast("ModelPolicy", policy)
    if sampling_defaults is not None:
        configured_sampling(found, runtime_config={}, defaults=sampling_defaults)
    return found


def load_adapter(path: str | None) -> Adapter:
    """The adapter at an import path, or the default one for None. Raises `ImportPathError` or `TypeError`."""
    if path is None:
        return pass_through
    found: Any = load_symbol(path)
    adapter: object = found() if isinstance(found, type) else found
    if not callable(adapter):
        raise TypeError(f"adapter {path!r} is neither a function nor a class whose objects can be called")
    _check_takes(adapter, _ADAPTER, f"adapter {path!r}")
    return cast("Adapter", adapter)


def configured_sampling(
    policy: ModelPolicy, *, runtime_config: Mapping[str, Any], defaults: tuple[Any, ...]
) -> tuple[Any, ...]:
    """What `configure_sampling_params` returns, once it is checked: a tuple, one element a stage, types kept.

    Raises `ValueError` or `TypeError`, from the hook or from here.
    """
    # A user's policy is not bound by the type that it promises.
    configured = cast("object", policy.configure_sampling_params(runtime_config=runtime_config, defaults=defaults))
    if not isinstance(configured, tuple):
        raise TypeError(f"the policy must return sampling parameters as a tuple, not {type(configured).__name__}")
    elements = cast("tuple[Any, ...]", configured)
    if len(elements) != len(defaults):
        raise ValueError(f"the policy must return sampling parameters for {len(defaults)} stages, not {len(elements)}")
    for stage_id, (element, default) in enumerate(zip(elements, defaults, strict=True)):
        if default is not None and not isinstance(element, type(default)):
            kinds = f"{type(element).__name__}, the default is a {type(default).__name__}"
            raise TypeError(f"the policy's sampling parameters for stage {stage_id} are a {kinds}")
    return elements


def _check_takes(hook: Callable[..., Any], keywords: tuple[str, ...], what: str) -> None:
    try:
        signature = inspect.signature(hook)
    except ValueError:
        return  # a builtin that does not tell
    try:
        signature.bind(**dict.fromkeys(keywords))
    except TypeError as error:
        raise TypeError(f"{what} must take the keywords {', '.join(keywords)}: {error}") from None


def _known(defaults: tuple[Any, ...]) -> str:
    keys = sorted(
        {str(key) for each in defaults if isinstance(each, Mapping) for key in cast("Mapping[Any, Any]", each)}
    )
    return f"allowed are {', '.join(keys)}" if keys else "no stage has any"


def _merge(default: Any, wanted: Any, path: str, *, partial: bool) -> Any:
    """`default` with the values of `wanted`. `partial`: keys that `default` lacks are another stage's."""
    if wanted is None:
        return default
    if not isinstance(wanted, Mapping):
        raise TypeError(f"{path}: must be a mapping, not {type(wanted).__name__}")
    own = cast("Mapping[Any, Any]", wanted)
    base: Mapping[Any, Any] = cast("Mapping[Any, Any]", default) if isinstance(default, Mapping) else {}
    unknown = [key for key in own if key not in base]
    if unknown and not partial:
        raise ValueError(f"{path}.{unknown[0]}: unknown; {_known((base,))}")
    if not base:
        return cast("Any", default)
    return {**base, **{key: _same_type(base[key], own[key], f"{path}.{key}") for key in own if key in base}}


def _same_type(default: Any, value: Any, path: str) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{path}: must be finite, not {value}")
    if isinstance(default, float) and type(value) is int and abs(value) <= _EXACT:
        return float(value)
    if default is None or type(value) is type(default):
        return value
    raise TypeError(f"{path}: must be {type(default).__name__}, not {type(value).__name__}")
