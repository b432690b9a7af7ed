"""The pipeline file: partitions, session limits, policy, and the stages with their engines.

Responsible for reading it and for every relation between its numbers. Leaves to the processes their own
settings (where Redis is, which stage they run) and to engines and policy what happens with their options.
Reads one file. The file gives durations in seconds (`_s`); the code gets whole milliseconds (`_ms`).

Says no with `PipelineError`: all problems at once, each with the path of its key and what is allowed.
"""

import difflib
import math
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Annotated, Any, Self, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from stages.engine import BUILT_IN, EngineConfigError, load_engine

SHIPPED = Path(__file__).resolve().parent.parent / "deploy" / "pipelines"
"""The folder of the pipelines that come with the project: `demo.yaml` and `demo-parrot.yaml`."""

_DAY_S = 86_400.0
_Seconds = Annotated[float, Field(ge=0.001, le=30 * _DAY_S, allow_inf_nan=False)]
_Bytes = Annotated[int, Field(ge=64, le=512 * 1024 * 1024)]
_IdBytes = Annotated[int, Field(ge=1, le=1024)]
_ImportPath = Annotated[str, Field(min_length=1)]


class PipelineError(ValueError):
    """A pipeline file that can't be used. `problems`: one line each, a key's path and what is allowed."""

    def __init__(self, source: str, problems: tuple[str, ...]) -> None:
        self.source = source
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join((f"{source}: {count}", *(f"  {problem}" for problem in problems))))


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SessionSection(_Section):
    """How long a session may be idle, detached, waited for, and how much it may have queued.

    `idle_ttl_s` null: a session never expires by being idle. `cleanup_timeout_s`: a cancel or close whose
    cleanup is not confirmed by then is answered `timeout`; the cleanup goes on. `restart_after_s`: a cleanup
    that is still unconfirmed asks for its engine's restart.
    """

    idle_ttl_s: _Seconds | None = 300.0
    disconnect_grace_s: _Seconds = 30.0
    append_timeout_s: _Seconds = 10.0
    cleanup_timeout_s: _Seconds = 5.0
    cleanup_backoff_s: _Seconds = 0.5
    cleanup_backoff_max_s: _Seconds = 30.0
    max_waiting_appends: Annotated[int, Field(ge=1, le=100_000)] = 32
    max_waiting_bytes: _Bytes = 4 * 1024 * 1024
    completed_append_limit: Annotated[int, Field(ge=1, le=100_000)] = 256
    restart_after_s: _Seconds = 60.0

    @model_validator(mode="after")
    def _relations(self) -> Self:
        if self.idle_ttl_s is not None and self.idle_ttl_s <= self.append_timeout_s:
            raise ValueError(
                f"idle_ttl_s ({self.idle_ttl_s:g}) must be greater than append_timeout_s "
                f"({self.append_timeout_s:g}): a session would expire as soon as one slow append ended"
            )
        if self.cleanup_backoff_s > self.cleanup_backoff_max_s:
            raise ValueError(
                f"cleanup_backoff_s ({self.cleanup_backoff_s:g}) must not exceed cleanup_backoff_max_s "
                f"({self.cleanup_backoff_max_s:g}): it is where the backoff begins"
            )
        if self.cleanup_timeout_s > self.restart_after_s:
            raise ValueError(
                f"cleanup_timeout_s ({self.cleanup_timeout_s:g}) must not exceed restart_after_s "
                f"({self.restart_after_s:g}): an engine would be restarted while its answer is waited for"
            )
        return self

    @property
    def idle_ttl_ms(self) -> int | None:
        """None: no idle expiry."""
        return None if self.idle_ttl_s is None else _ms(self.idle_ttl_s)

    @property
    def disconnect_grace_ms(self) -> int:
        """How long a detached session is kept."""
        return _ms(self.disconnect_grace_s)

    @property
    def append_timeout_ms(self) -> int:
        """How long a stage may take to accept or reject."""
        return _ms(self.append_timeout_s)

    @property
    def cleanup_timeout_ms(self) -> int:
        """The deadline of the reply, not of the cleanup."""
        return _ms(self.cleanup_timeout_s)

    @property
    def cleanup_backoff_ms(self) -> int:
        """The wait before the first retry."""
        return _ms(self.cleanup_backoff_s)

    @property
    def cleanup_backoff_max_ms(self) -> int:
        """The longest wait between two retries."""
        return _ms(self.cleanup_backoff_max_s)

    @property
    def restart_after_ms(self) -> int:
        """The age of a cleanup at which its engine's restart is asked for."""
        return _ms(self.restart_after_s)


class LimitsSection(_Section):
    """Sizes of what comes in, and of one session's event stream (`events_bytes`)."""

    body_bytes: _Bytes = 1024 * 1024
    payload_bytes: _Bytes = 1024 * 1024
    events_bytes: _Bytes = 1024 * 1024
    session_id_bytes: _IdBytes = 128
    control_id_bytes: _IdBytes = 128


class ControlSection(_Section):
    """The processes' clockwork: how soon a killed owner is replaced, when a stage worker counts as lost.

    `brake_s`: how long nothing is closed when more than a third of a stage's workers fall silent at once.
    `audit_s`: how often what runs and what holds a slot is compared with the sessions.
    """

    lease_s: _Seconds = 3.0
    heartbeat_s: _Seconds = 5.0
    heartbeat_interval_s: _Seconds = 1.0
    brake_s: _Seconds = 60.0
    audit_s: _Seconds = 60.0
    batch_max: Annotated[int, Field(ge=1, le=1000)] = 48

    @model_validator(mode="after")
    def _relations(self) -> Self:
        if self.heartbeat_interval_s * 2 > self.heartbeat_s:
            raise ValueError(
                f"heartbeat_interval_s ({self.heartbeat_interval_s:g}) must be at most half of heartbeat_s "
                f"({self.heartbeat_s:g}): one late heartbeat would be taken for a lost worker"
            )
        return self

    @property
    def lease_ms(self) -> int:
        """How long a partition's lease lasts without renewal."""
        return _ms(self.lease_s)

    @property
    def heartbeat_ms(self) -> int:
        """How long a heartbeat may stand still."""
        return _ms(self.heartbeat_s)

    @property
    def brake_ms(self) -> int:
        """How long the brake holds at most."""
        return _ms(self.brake_s)

    @property
    def heartbeat_interval_ms(self) -> int:
        """How often a worker beats."""
        return _ms(self.heartbeat_interval_s)


class Stage(_Section):
    """One stage. `capacity`: how many sessions one of its workers takes.

    `sampling`: the defaults that `configure_sampling_params` gets. `adapter` makes the prompts, from stage 1
    on. `options`: the engine's own.
    """

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")]
    engine: _ImportPath
    capacity: Annotated[int, Field(ge=1, le=1_000_000)] = 64
    sampling: dict[str, Any] | None = None
    adapter: _ImportPath | None = None
    options: dict[str, Any] = Field(default_factory=dict[str, Any])


class Pipeline(_Section):
    """A whole pipeline file. `policy` null: only `turn_commit_only` input, answered without a stage."""

    partitions: Annotated[int, Field(ge=1, le=4096)] = 16
    max_sessions: Annotated[int, Field(ge=1)] | None = None
    policy: _ImportPath | None = "stages.policy:DefaultPolicy"
    session: SessionSection = SessionSection()
    limits: LimitsSection = LimitsSection()
    control: ControlSection = ControlSection()
    # A request id has room for four digits; a chain of more than a few dozen models is a mistake.
    stages: Annotated[tuple[Stage, ...], Field(strict=False, max_length=64)] = ()

    @model_validator(mode="after")
    def _relations(self) -> Self:
        if self.policy is not None and not self.stages:
            raise ValueError("stages: there must be at least one, unless policy is null")
        if self.stages and self.stages[0].adapter is not None:
            raise ValueError("stages.0.adapter: must be null; the policy's plan_append makes the first stage's prompts")
        names = [stage.name for stage in self.stages]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise ValueError(f"stages.{index}.name: {name!r} is taken by stage {names.index(name)}")
        if self.limits.payload_bytes > self.session.max_waiting_bytes:
            raise ValueError(
                f"session.max_waiting_bytes ({self.session.max_waiting_bytes}) must be at least "
                f"limits.payload_bytes ({self.limits.payload_bytes}): an append of a size that is allowed "
                "could never wait"
            )
        return self

    @property
    def final_stage_id(self) -> int:
        """The number of the last stage; -1 without stages."""
        return len(self.stages) - 1

    @property
    def sampling_defaults(self) -> tuple[dict[str, Any] | None, ...]:
        """One element a stage, for `configure_sampling_params`."""
        return tuple(stage.sampling for stage in self.stages)

    def find_stage_id(self, name: str) -> int | None:
        """The number of the stage of that name, or None."""
        return next((index for index, stage in enumerate(self.stages) if stage.name == name), None)

    def require_stage_id(self, name: str) -> int:
        """The number of the stage of that name. Raises `PipelineError` with the names that there are."""
        index = self.find_stage_id(name)
        if index is None:
            known = ", ".join(stage.name for stage in self.stages) or "none"
            raise PipelineError("stage", (f"{name!r} is not a stage of this pipeline; it has {known}",))
        return index

    @classmethod
    def example(cls) -> Self:
        """Two parrots that speak without waiting: the smallest pipeline with two stages, for tests."""
        fast = {"pace": "fast"}
        return cls(
            stages=(
                Stage(name="thinker", engine="parrot", options=fast),
                Stage(name="voice", engine="parrot", options={**fast, "reply": "stream"}),
            )
        )


def load_pipeline(path: str | Path) -> Pipeline:
    """The pipeline in a YAML file. Raises `PipelineError`, also for a file that can't be read."""
    source = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PipelineError(source, (f"cannot be read: {error.strerror or error}",)) from None
    except UnicodeDecodeError as error:
        raise PipelineError(source, (f"is not UTF-8 text: {error}",)) from None
    try:
        content = yaml.load(text, _Loader)  # noqa: S506  _Loader is a safe loader
    except yaml.YAMLError as error:
        raise PipelineError(source, (f"is not YAML: {' '.join(str(error).split())}",)) from None
    return parse_pipeline({} if content is None else content, source)


def parse_pipeline(content: Any, source: str) -> Pipeline:
    """The pipeline in a value, as YAML or JSON gives it. `source` names it in errors. Raises `PipelineError`.

    Checks the options of built-in engines too; a user's own engine is not imported, since it may need what
    only its stage's machine has.
    """
    if not isinstance(content, Mapping):
        raise PipelineError(source, (f"must be a mapping of keys, not {_kind(content)}",))
    try:
        pipeline = Pipeline.model_validate(content)
    except ValidationError as error:
        raise PipelineError(source, tuple(_problem(each) for each in error.errors())) from None
    problems: list[str] = []
    for index, stage in enumerate(pipeline.stages):
        if stage.engine in BUILT_IN:
            try:
                load_engine(stage.engine, stage.options)
            except EngineConfigError as error:
                problems.append(f"stages.{index}.options.{error}")
        elif "." not in stage.engine and ":" not in stage.engine:
            known = ", ".join(BUILT_IN)
            problems.append(
                f"stages.{index}.engine: {stage.engine!r} is neither built in ({known}) nor an import path "
                "(package.module:Class)"
            )
    if problems:
        raise PipelineError(source, tuple(problems))
    return pipeline


class _Loader(yaml.SafeLoader):
    """YAML without surprises: of two equal keys, SafeLoader silently takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    problem = f"the key {key_node.value!r} is there twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _ms(seconds: float) -> int:
    return math.ceil(seconds * 1000 - 1e-6)


def _kind(value: object) -> str:
    kind = type(value).__name__
    return {"NoneType": "null", "str": "text", "dict": "a mapping", "list": "a list"}.get(kind, kind)


def _problem(error: Mapping[str, Any]) -> str:
    """One line for people from one of pydantic's errors."""
    location = [str(part) for part in error["loc"]]
    path, given, allowed = ".".join(location), error["input"], error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden":
            known = _keys_at(location[:-1])
            close = difflib.get_close_matches(location[-1], known, 1)
            hint = f"did you mean {close[0]}? " if close else ""
            return f"{path}: unknown key; {hint}allowed are {', '.join(known)}"
        case "missing":
            return f"{path}: is missing"
        case "greater_than_equal":
            return f"{path}: is {given!r}; it must be at least {allowed['ge']:g}"
        case "less_than_equal":
            return f"{path}: is {given!r}; it must be at most {allowed['le']:g}"
        case "string_pattern_mismatch":
            return f"{path}: is {given!r}; it must match {allowed['pattern']}"
        case "value_error":
            # A relation between keys. Those of the whole file name the full path of their key themselves.
            return f"{path}.{allowed['error']}" if path else str(allowed["error"])
        case "model_type" | "model_attributes_type":
            return f"{path}: must be a mapping of keys, not {_kind(given)}"
        case _:
            return f"{path}: {error['msg'][0].lower()}{error['msg'][1:]}, not {_kind(given)} {given!r:.60}"


def _keys_at(location: list[str]) -> list[str]:
    """The keys that are allowed in the section at `location`."""
    section: type[BaseModel] = Pipeline
    for part in location:
        if not part.isdigit():
            annotation = section.model_fields[part].annotation
            section = Stage if part == "stages" else cast("type[BaseModel]", annotation)
    return list(section.model_fields)
