"""What a process is told about itself: where Redis is, which pipeline, how it logs, how long it may take to leave.

Responsible for the `BARGEIN_*` variables and the flags of the same names, a flag before its variable before the
default; for the password that comes in a file; and for where the pipeline file is if nobody names one. Leaves what is
in that file to `stages/pipeline.py`. Reads the environment and small files. Units: `_s` seconds.

A password never stands in a message, a log or a `repr`: `redis` is what to connect with, `address` what to show.
Says no with `SettingsError`: every problem at once, each with its variable and what is allowed.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self
from urllib.parse import parse_qs, quote, urlsplit, urlunsplit

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from control.store.access import CLUSTER, SCHEMES, open_access
from stages.pipeline import SHIPPED, Pipeline, PipelineError, load_pipeline

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PREFIX = "BARGEIN_"
DEFAULT_URL = "redis://127.0.0.1:6379/0"
PIPELINE_NAME = "demo-parrot.yaml"
# In the image and on machines that an operator has set up.
SYSTEM_PIPELINE = Path("/etc/bargein/pipeline.yaml")
# A copy that is part of the package, for an installation without the repository around it.
PACKAGED_PIPELINE = Path(__file__).resolve().parent / "cli" / PIPELINE_NAME

# What answers look like: the code reads them in one form.
_FIXED = frozenset({"decode_responses", "encoding", "encoding_errors", "protocol"})
_SCHEMES = tuple(f"{scheme}://" for scheme in SCHEMES)
# Kubernetes puts the addresses of services called bargein-* into every pod's environment.
_NOT_OURS = ("_SERVICE_HOST", "_SERVICE_PORT", "_PORT", "_TCP", "_ADDR", "_PROTO")


class SettingsError(ValueError):
    """Settings that can't be used. `problems`: one line each, the variable and what is allowed."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class Settings(BaseSettings):
    """The settings of one process; see `load_settings`.

    `grace_s`: how long it may take to leave after a SIGTERM. `pipeline` None: the first of `default_pipelines`
    that exists. `jobs_url` None: jobs are on the Redis of the sessions. `metrics_port`: where `/metrics`, `/healthz`
    and `/readyz` are; None: nowhere, 0: a free one.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        hide_input_in_errors=True,
    )

    redis_url: SecretStr = SecretStr(DEFAULT_URL)
    redis_password_file: Path | None = None
    jobs_url: SecretStr | None = None
    jobs_password_file: Path | None = None
    pipeline: Path | None = None
    stage: Annotated[str, Field(min_length=1)] | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_json: bool = False
    grace_s: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = 30.0
    metrics_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    metrics_port: Annotated[int, Field(ge=0, le=65_535)] | None = None

    @field_validator("metrics_port", mode="before")
    @classmethod
    def _not_of_kubernetes(cls, value: object) -> object:
        """It tells every pod about a service called bargein-metrics as BARGEIN_METRICS_PORT=tcp://..."""
        return None if isinstance(value, str) and value.startswith("tcp://") else value

    @field_validator("log_level", mode="before")
    @classmethod
    def _lower(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    @field_validator("redis_url", "jobs_url")
    @classmethod
    def _usable(cls, value: SecretStr | None) -> SecretStr | None:
        if value is None:
            return None
        url = value.get_secret_value()
        if not url.startswith(_SCHEMES):
            raise ValueError(f"must begin with {', '.join(_SCHEMES)}; a plain one is {DEFAULT_URL}")
        try:
            open_access(url).pool.make_connection()  # connects to nothing, but looks at every option
            for option in _FIXED.intersection(parse_qs(urlsplit(url).query)):
                raise ValueError(f"the option {option} is not open to choice")
        except (TypeError, ValueError) as error:
            # Their messages name the option, never the URL.
            raise ValueError(f"can't be used: {error}") from None
        return value

    @property
    def redis(self) -> str:
        """The URL to connect to, with the password of the file. Secret."""
        url = self.redis_url.get_secret_value()
        return url if self.redis_password_file is None else _with_password(url, _read_password(self, "redis"))

    @property
    def jobs(self) -> str:
        """The URL of the jobs' server, likewise. Secret. Raises `SettingsError` where it would be a cluster."""
        if self.jobs_url is None:
            if self.jobs_password_file is not None:
                raise SettingsError([f"{spell('jobs_password_file')}: without {PREFIX}JOBS_URL it is for nothing"])
            url = self.redis
        else:
            url = self.jobs_url.get_secret_value()
            if self.jobs_password_file is not None:
                url = _with_password(url, _read_password(self, "jobs"))
        if urlsplit(url).scheme.endswith(CLUSTER):
            raise SettingsError(
                [f"{spell('jobs_url')}: the queue of jobs can't be on a cluster; name a single server, or Sentinels"]
            )
        return url

    @property
    def address(self) -> str:
        """The URL without user, password and options: for people."""
        return public_url(self.redis_url.get_secret_value())

    @property
    def jobs_address(self) -> str:
        """The jobs' URL without user, password and options."""
        return public_url((self.jobs_url or self.redis_url).get_secret_value())

    @property
    def pipeline_path(self) -> Path:
        """The pipeline file. Raises `SettingsError` if none was named and none is found."""
        return self.pipeline or find_default_pipeline()

    def load_pipeline(self) -> Pipeline:
        """What is in the pipeline file. Raises `PipelineError` or `SettingsError`."""
        return load_pipeline(self.pipeline_path)

    def require_stage(self, pipeline: Pipeline) -> int:
        """The number of the stage that this process runs. Raises `SettingsError`."""
        known = ", ".join(stage.name for stage in pipeline.stages) or "none: it has no stages"
        if self.stage is None:
            raise SettingsError([f"{spell('stage')}: is missing; this pipeline has {known}"])
        try:
            return pipeline.require_stage_id(self.stage)
        except PipelineError:
            raise SettingsError([f"{spell('stage')}: is {self.stage!r}; this pipeline has {known}"]) from None

    @classmethod
    def load(cls, flags: Mapping[str, Any], environ: Mapping[str, str]) -> Self:
        """See `load_settings`."""
        given = {name: value for name, value in flags.items() if value is not None}
        for kind in ("redis", "jobs"):
            url = given.get(f"{kind}_url")
            if url is not None and _has_password(str(url)):
                problem = f"--{kind}-url: a password here would be read by everybody who can list processes"
                instead = f"{PREFIX}{kind.upper()}_URL, or {spell(f'{kind}_password_file')}"
                raise SettingsError([f"{problem}; use {instead}"])
        try:
            settings = cls(**given)
        except ValidationError as error:
            raise SettingsError(_problem(each, given, environ) for each in error.errors()) from None
        if settings.redis_password_file is not None:
            _read_password(settings, "redis")
        return settings


def load_settings(**flags: Any) -> Settings:
    """The settings of this process. A flag that is None was not given. Raises `SettingsError`."""
    return Settings.load(flags, os.environ)


def default_pipelines() -> tuple[Path, ...]:
    """Where a pipeline file is looked for if nobody names one, in this order."""
    return (SHIPPED / PIPELINE_NAME, SYSTEM_PIPELINE, PACKAGED_PIPELINE)


def find_default_pipeline() -> Path:
    """The first of `default_pipelines` that exists. Raises `SettingsError`."""
    for path in default_pipelines():
        if path.is_file():
            return path
    looked = ", ".join(str(path) for path in default_pipelines())
    raise SettingsError([f"{spell('pipeline')}: is missing, and there is none of {looked}"])


def public_url(url: str) -> str:
    """A Redis URL without user, password and options."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def spell(name: str) -> str:
    """A setting as its user knows it: `BARGEIN_GRACE_S (--grace-s)`."""
    return f"{PREFIX}{name.upper()} (--{name.replace('_', '-')})"


def find_misspelt(environ: Mapping[str, str]) -> list[str]:
    """A warning for each variable that looks like one of ours, misspelt."""
    known = [PREFIX + name.upper() for name in Settings.model_fields]
    warnings: list[str] = []
    for name in sorted(environ):
        if name in known or not name.startswith(PREFIX) or name.endswith(_NOT_OURS):
            continue
        close = difflib.get_close_matches(name, known, 1, 0.85)
        if close:
            warnings.append(f"{name} is not a setting; did you mean {close[0]}?")
    return warnings


def _has_password(url: str) -> bool:
    return ":" in urlsplit(url).netloc.rpartition("@")[0] or "password" in parse_qs(urlsplit(url).query)


def _with_password(url: str, password: str) -> str:
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user}:{quote(password, safe='')}@{host}"))


def _read_password(settings: Settings, kind: Literal["redis", "jobs"]) -> str:
    path: Path | None = getattr(settings, f"{kind}_password_file")
    url: SecretStr | None = getattr(settings, f"{kind}_url")
    name = spell(f"{kind}_password_file")
    assert path is not None
    assert url is not None
    if _has_password(url.get_secret_value()):
        raise SettingsError([f"{name}: there is a password in {PREFIX}{kind.upper()}_URL already; give one of them"])
    try:
        password = path.read_text(encoding="utf-8").rstrip("\r\n")
    except OSError as error:
        raise SettingsError([f"{name}: {path} cannot be read: {error.strerror or error}"]) from None
    except UnicodeDecodeError:
        raise SettingsError([f"{name}: {path} is not UTF-8 text"]) from None
    if not password:
        raise SettingsError([f"{name}: {path} is empty"])
    return password


def _problem(error: Mapping[str, Any], given: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """One line for people from one of pydantic's errors."""
    name = str(error["loc"][0])
    allowed: Mapping[str, Any] = error.get("ctx", {})
    # Where the value came from; the password's URL is the one value that is never shown.
    value = given.get(name, environ.get(PREFIX + name.upper()))
    shown = "it" if name.endswith("_url") else f"is {str(value)!r:.60}; it"
    match error["type"]:
        case "value_error":
            return f"{spell(name)}: {allowed['error']}"
        case "literal_error":
            what = f"must be one of {allowed['expected']}".replace("'", "")
        case "greater_than_equal":
            what = f"must be at least {allowed['ge']:g}"
        case "less_than_equal":
            what = f"must be at most {allowed['le']:g}"
        case "bool_parsing" | "bool_type":
            what = "must be true or false (1, 0, yes, no, on and off do as well)"
        case "int_parsing":
            what = "must be a whole number"
        case "float_parsing" | "float_type" | "finite_number":
            what = "must be a number"
        case _:
            what = f"can't be used: {error['msg'][0].lower()}{error['msg'][1:]}"
    return f"{spell(name)}: {shown} {what}"
