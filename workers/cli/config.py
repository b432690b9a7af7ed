"""`bargein config check` and `bargein config show`: whether the configuration is right, and what it is.

Responsible for showing settings and pipeline as the processes will see them, every default put in, passwords left out.
Leaves the rules to `workers/settings.py` and `stages/pipeline.py`. Talks to nobody.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from stages.engine import BUILT_IN, EngineConfigError, load_engine
from stages.imports import ImportPathError
from stages.pipeline import Pipeline, PipelineError, load_pipeline
from stages.policy import load_adapter
from workers.cli.endings import Failure, Status, plainly
from workers.cli.options import AsJson, Grace, LogJson, LogLevel, PasswordFile, PipelineFile, RedisUrl
from workers.cli.output import note, print_json
from workers.cli.run import load_policy_plainly
from workers.settings import PREFIX, Settings, find_misspelt, load_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

app = typer.Typer(help="Check a pipeline file; show the settings.", no_args_is_help=True, add_completion=False)


@app.command()
@plainly
def check(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="A pipeline file; else the one that is set", show_default=False),
    ] = None,
    imports: Annotated[
        bool, typer.Option("--imports", help="Import the engines and adapters too, as their stages' machines do")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a pipeline file and show it with every default. Status 2 if it can't be used."""
    path = file or load_settings().pipeline_path
    problems: list[str] = []
    pipeline = None
    try:
        pipeline = load_pipeline(path)
    except PipelineError as error:
        problems += error.problems
    else:
        problems += _find_import_problems(pipeline, imports=imports)
    if as_json:
        content = None if pipeline is None else _plain(pipeline)
        print_json({"file": str(path), "ok": not problems, "problems": problems, "pipeline": content})
    elif pipeline is not None and not problems:
        print(f"# {path} is fine\n{_yaml(_plain(pipeline))}", end="")
    if problems and not as_json:
        raise PipelineError(str(path), tuple(problems))
    if problems:
        raise typer.Exit(int(Status.SETTINGS))


@app.command()
@plainly
def show(
    redis_url: RedisUrl = None,
    redis_password_file: PasswordFile = None,
    pipeline: PipelineFile = None,
    log_level: LogLevel = None,
    log_json: LogJson = None,
    grace_s: Grace = None,
    as_json: AsJson = False,
) -> None:
    """The settings as a process started here would have them, where each comes from, and the pipeline."""
    flags = {
        "redis_url": redis_url,
        "redis_password_file": redis_password_file,
        "pipeline": pipeline,
        "log_level": log_level,
        "log_json": log_json,
        "grace_s": grace_s,
    }
    settings = load_settings(**flags)
    described = settings.load_pipeline()
    rows = _rows(settings, flags, os.environ)
    if as_json:
        print_json({"settings": rows, "pipeline": _plain(described)})
    else:
        for name, (value, origin) in ((name, row.values()) for name, row in rows.items()):
            text = "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            print(f"{PREFIX}{name.upper()}={text}   # {origin}")
        print(f"\n# {settings.pipeline_path}\n{_yaml(_plain(described))}", end="")
    for warning in find_misspelt(os.environ):
        note(f"bargein: {warning}")


def _rows(settings: Settings, flags: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Each setting's value, secrets left out, and its origin: `flag`, `environment` or `default`."""
    shown: dict[str, Any] = {"redis_url": settings.address, "pipeline": str(settings.pipeline_path)}
    if settings.jobs_url is not None:
        shown["jobs_url"] = settings.jobs_address
    rows: dict[str, dict[str, Any]] = {}
    for name in type(settings).model_fields:
        value = shown.get(name, getattr(settings, name))
        if flags.get(name) is not None:
            origin = "flag"
        else:
            origin = "environment" if environ.get(PREFIX + name.upper()) else "default"
        rows[name] = {"value": str(value) if isinstance(value, Path) else value, "origin": origin}
    return rows


def _find_import_problems(pipeline: Pipeline, *, imports: bool) -> list[str]:
    problems: list[str] = []
    try:
        load_policy_plainly(pipeline)
    except Failure as failure:
        problems.append(str(failure))
    if not imports:
        return problems
    for index, stage in enumerate(pipeline.stages):
        try:
            if stage.engine not in BUILT_IN:
                load_engine(stage.engine, stage.options)
        except Exception as error:  # noqa: BLE001  whatever the user's code raises
            problems.append(f"stages.{index}.engine: {_spell(error)}")
        try:
            load_adapter(stage.adapter)
        except Exception as error:  # noqa: BLE001  likewise
            problems.append(f"stages.{index}.adapter: {_spell(error)}")
    return problems


def _spell(error: Exception) -> str:
    expected = isinstance(error, EngineConfigError | ImportPathError | TypeError)
    return str(error) if expected else f"{type(error).__name__}: {error}"


def _plain(pipeline: Pipeline) -> dict[str, Any]:
    return pipeline.model_dump(mode="json")


def _yaml(value: dict[str, Any]) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
