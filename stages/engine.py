"""The engine contract: what a stage worker and the engine inside it promise each other.

Responsible for the messages between the two, for how an engine says no and for building one from a pipeline
stage. Leaves queues, fences and publishing to the worker, and everything about the model to the engine.
Runs no model itself. Part of I2 (an abort returns only when the request is gone), I5 and I7.

An engine says no in four ways: `EngineConfigError` (its options; at construction or start), `EngineRefusal`
(one submission, nothing of it kept), `EnginePort.fail` (one request, S42), `EnginePort.died` (all, S41).
"""

from collections.abc import Mapping
from typing import Any, Literal, Protocol, TypeVar, cast, runtime_checkable

import msgspec
from msgspec import Struct, field

from control.core.fence import Fence
from stages.imports import ImportPathError, load_symbol

OutputKind = Literal["tokens", "text", "audio", "data"]

RefusalCode = Literal[
    "invalid_argument",
    "invalid_capability",
    "resource_exhausted",
    "failed_precondition",
    "payload_too_large",
    "not_found",
    "timeout",
    "internal",
]

Options = TypeVar("Options", bound=Struct)

BUILT_IN: Mapping[str, str] = {
    "parrot": "stages.parrot:ParrotEngine",
    "torch": "stages.torch_engine:TorchEngine",
    "vllm": "stages.vllm_engine:VllmEngine",
}


class Submission(Struct, frozen=True, kw_only=True):
    """One input for one request.

    `prompt` is what the policy's `plan_append` (stage 0) or the stage's adapter (later stages) made.
    `seq`: at stage 0 the append's number, from 1; at later stages the count of forwarded inputs, from 0.
    `turn_seq`: the same within the turn. `final`: this input ends the turn, the engine answers it with an
    output that has `turn_end`. `resumed`: the request already runs here and this is more input for it.
    `sampling` is this stage's element of what `configure_sampling_params` returned.
    """

    request_id: str
    session_id: str
    stage_id: int
    fence: Fence
    seq: int
    turn_seq: int
    mode: str
    prompt: Any
    final: bool
    sampling: Any = None
    session_config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    runtime_config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    config_generation: int = 0
    resumed: bool = False


class Output(Struct, frozen=True, kw_only=True):
    """One piece of what the model says.

    `data`: bytes (s16le mono PCM) for audio, a list of ints for tokens, a str for text, any value that
    MessagePack can hold for data; towards another stage also tensors (torch's, numpy's, `stages.tensors`).
    `fence` is copied from the submission whose turn produced it.
    """

    request_id: str
    fence: Fence
    kind: OutputKind
    data: Any
    turn_end: bool = False
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])


class Load(Struct, frozen=True, kw_only=True):
    """How busy an engine is. Reported with each heartbeat; placement and operators read it.

    `running`: requests that the engine works on now; `waiting`: requests with input that it has not begun;
    `slots_used`: requests that it holds, idle ones too; `utilisation`: 0 to 1, of whatever runs out first
    (KV cache, slots, real time); `tick_late_ms`: the worst lateness within about the last second. `accepts`: False
    where there is no room for another session just now, whatever slots are free; those that are here go on.
    `missed_ticks`: forwards that took longer than they may, since the start; `memory_bytes`: what the requests' states
    hold on the device. Both 0 where an engine has no such thing.
    """

    running: int = 0
    waiting: int = 0
    slots_used: int = 0
    utilisation: float = 0.0
    tick_late_ms: float = 0.0
    accepts: bool = True
    missed_ticks: int = 0
    memory_bytes: int = 0


class EngineError(Exception):
    """The engine said no to an abort: it still holds the request. The cleanup stays pending (D6)."""


class EngineConfigError(ValueError):
    """Options that an engine can't work with, or an engine that can't be loaded. Stops the process."""


class EngineRefusal(Exception):
    """A submission that the engine did not take. Nothing of it was kept (I7)."""

    def __init__(self, code: RefusalCode, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.code: RefusalCode = code
        self.message = message
        self.retryable = retryable


class EnginePort(Protocol):
    """How an engine talks back to its worker. Called on the event loop only; all three return at once."""

    def emit(self, output: Output) -> None:
        """Hand over an output. The worker buffers it; it never blocks and never raises."""
        ...

    def fail(self, request_id: str, message: str) -> None:
        """This request died, and the engine no longer holds it. Its session ends; the others go on (S42)."""
        ...

    def died(self, message: str) -> None:
        """The engine died with everything in it. The worker ends its life; this is the engine's last call."""
        ...


@runtime_checkable
class Engine(Protocol):
    """Runs the requests of one stage on one device. Built as `Engine(options)` from a pipeline stage.

    What the worker guarantees:

    - `start` is called once and has returned before anything else is called; `stop` is called once, last.
      All calls come from one event loop.
    - Submits of one request come in the order of their `seq` and one at a time: the next one only after the
      former returned or was refused. Submits of different requests run side by side.
    - Request ids are unique: two requests never share one, and after an abort of an id was called it is
      never submitted again. So an engine need not remember the ids that it has forgotten.
    - `resumed` is False for a request's first submission, and for the next one while the first was refused;
      else it is True.
    - An abort may come at any time: before the first submit (the submit then never comes), during a submit,
      between tokens, after the request has failed, twice, and twice at the same time.
    - A fence only rises within a request, and its incarnation and epoch stay. A submission with a higher
      `turn_id` or `response_seq` makes the outputs of the lower ones worthless: nobody will hear them.

    What an engine guarantees:

    - The constructor checks the options and nothing else; it is cheap, imports no model library and raises
      `EngineConfigError`. `start` loads the model, and raises if it can't.
    - No call blocks the event loop: what takes longer than a millisecond runs in a thread or process.
    - `submit` returns as soon as the input is accepted, not when it is answered. Having raised
      `EngineRefusal`, it has kept nothing. A submission that contradicts `resumed` is refused as
      `failed_precondition`.
    - Every accepted `final` input is answered by exactly one output with `turn_end`, unless the request is
      aborted, has failed, or has meanwhile got input with a higher fence.
    - A request stays until it is aborted or fails, also between its turns.
    - Once `abort` has returned, no thread, queue, cache or device holds anything of the request, and no
      output of it is emitted any more. An abort that was cancelled or raised may be repeated.
    - What happens to one request (bad input, too long a context, a crash of its own) touches no other.
    """

    name: str
    # An engine may also have `capacity_limit: int | None`, known once it has started: more sessions than that are never
    # placed on it, since the worker refuses to start with a larger `capacity`.

    async def start(self, port: EnginePort) -> None:
        """Load the model and get ready. Raises `EngineConfigError`, or whatever kept it from loading."""
        ...

    async def submit(self, submission: Submission) -> None:
        """Take an input. Returns when it is accepted; raises `EngineRefusal` if it is not."""
        ...

    async def abort(self, request_id: str) -> None:
        """Drop a request; returns only once it is gone (I2). An unknown id returns at once.

        Raises `TimeoutError` if it could not be confirmed in time, `EngineError` if it was refused.
        """
        ...

    def load(self) -> Load:
        """How busy the engine is. Cheap: called at every heartbeat."""
        ...

    def healthy(self) -> bool:
        """Whether it still makes progress. False asks the worker to end this life."""
        ...

    async def stop(self) -> None:
        """Drop everything and free the device. Bounded in time; nothing is emitted after it returned."""
        ...


def load_engine(name_or_path: str, options: Mapping[str, Any]) -> Engine:
    """The engine of a pipeline stage: a built-in name, or the import path of a class that takes `options`.

    Raises `EngineConfigError` if there is no such engine, if it lacks a part of the contract, or if it does
    not accept its options.
    """
    path = BUILT_IN.get(name_or_path, name_or_path)
    if "." not in path and ":" not in path:
        known = ", ".join(BUILT_IN)
        message = f"engine {name_or_path!r} is unknown; built in are {known}; your own is package.module:Class"
        raise EngineConfigError(message)
    try:
        build = load_symbol(path)
    except ImportPathError as error:
        raise EngineConfigError(f"engine {error}") from error
    if not callable(build):
        raise EngineConfigError(f"engine {path!r} is not a class")
    engine: object = build(options)
    missing = [name for name in ("start", "submit", "abort", "load", "healthy", "stop") if not _has(engine, name)]
    if not isinstance(getattr(engine, "name", None), str):
        missing.append("name")
    if missing:
        raise EngineConfigError(f"engine {path!r} lacks {', '.join(missing)} of the engine contract")
    return cast("Engine", engine)


def read_options(kind: type[Options], options: Mapping[str, Any]) -> Options:
    """An engine's options as a struct of its own. Raises `EngineConfigError` with the key and its bounds."""
    known = [each.encode_name for each in msgspec.structs.fields(kind)]
    unknown = [key for key in options if key not in known]
    if unknown:
        raise EngineConfigError(f"{unknown[0]}: unknown option; allowed are {', '.join(known)}")
    for each in msgspec.structs.fields(kind):
        if each.required and each.encode_name not in options:
            raise EngineConfigError(f"{each.encode_name}: is missing")
    try:
        return msgspec.convert(dict(options), kind)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        raise EngineConfigError(f"{path.removesuffix('`')}: {reason}") from None


def _has(engine: object, method: str) -> bool:
    return callable(getattr(engine, method, None))
