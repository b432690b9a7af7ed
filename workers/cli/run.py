"""`bargein control` and `bargein stage`: the long-lived processes.

Responsible for their settings, their logging and their end. Leaves the work to `workers/control.py` and
`workers/stage.py`, maintenance to `upkeep.py`. A wrong setting ends them before anything has started (status 2), a
server that can't be trusted likewise (status 3); after that they go on for ever, whatever Redis does.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Annotated, Any, cast

import typer
import yaml

from stages.imports import ImportPathError
from stages.pipeline import Pipeline, parse_pipeline
from workers.cli.endings import EXPECTED, Failure, Status, plainly
from workers.cli.leaving import run_until_told
from workers.cli.logs import set_up_logging
from workers.cli.options import (
    Grace,
    LogJson,
    LogLevel,
    MetricsHost,
    MetricsPort,
    PasswordFile,
    PipelineFile,
    RedisUrl,
)
from workers.control import ControlWorker
from workers.control_setup import core_settings, ease_garbage_collection
from workers.metrics.control import ControlMetrics
from workers.metrics.serving import MetricsServer, Watched, serving
from workers.metrics.stage import StageMetrics
from workers.settings import Settings, SettingsError, load_settings, spell
from workers.stage import StageWorker
from workers.tasks import end_tasks

log = logging.getLogger("bargein.process")

# What an engine may take to stop after its requests have had their grace.
ENGINE_STOP_S = 10.0


@plainly
def control(
    redis_url: RedisUrl = None,
    redis_password_file: PasswordFile = None,
    pipeline: PipelineFile = None,
    log_level: LogLevel = None,
    log_json: LogJson = None,
    grace_s: Grace = None,
    metrics_host: MetricsHost = None,
    metrics_port: MetricsPort = None,
) -> None:
    """Run a control worker: it owns a share of the partitions and decides what their sessions are told.

    Start as many as you like; they share the partitions out among themselves. SIGTERM hands them over.
    """
    settings = load_settings(
        redis_url=redis_url,
        redis_password_file=redis_password_file,
        pipeline=pipeline,
        log_level=log_level,
        log_json=log_json,
        grace_s=grace_s,
        metrics_host=metrics_host,
        metrics_port=metrics_port,
    )
    described = settings.load_pipeline()
    set_up_logging(settings)
    core = load_policy_plainly(described)
    ease_garbage_collection()
    asyncio.run(_control(settings, described, core))


async def _control(settings: Settings, pipeline: Pipeline, core: Any) -> None:
    worker = ControlWorker(settings.redis, pipeline, settings=core)
    log.info(
        "%s (pid %d): Redis at %s, pipeline %s", worker.worker_id, os.getpid(), settings.address, settings.pipeline_path
    )
    async with watched(ControlMetrics(worker, pipeline, settings.redis), settings):
        await run_until_told(worker.run(), worker.stop, settings.grace_s)
    log.info("%s has left", worker.worker_id)


@plainly
def stage(
    stage: Annotated[
        str | None, typer.Option("--stage", help="Which stage of the pipeline. Else BARGEIN_STAGE", show_default=False)
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option("--engine", help="Another engine than the pipeline's: built in, or package.module:Class"),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Short for --option model=...")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", help="An engine option as key=value, the value in YAML; key.key=value goes deeper"),
    ] = None,
    capacity: Annotated[int | None, typer.Option("--capacity", help="How many sessions it takes")] = None,
    redis_url: RedisUrl = None,
    redis_password_file: PasswordFile = None,
    pipeline: PipelineFile = None,
    log_level: LogLevel = None,
    log_json: LogJson = None,
    grace_s: Grace = None,
    metrics_host: MetricsHost = None,
    metrics_port: MetricsPort = None,
) -> None:
    """Run a stage worker: one process that runs one stage's engine.

    SIGTERM takes no new sessions, finishes or lets go of the others within the grace time, and leaves.
    """
    settings = load_settings(
        redis_url=redis_url,
        redis_password_file=redis_password_file,
        pipeline=pipeline,
        stage=stage,
        log_level=log_level,
        log_json=log_json,
        grace_s=grace_s,
        metrics_host=metrics_host,
        metrics_port=metrics_port,
    )
    described = settings.load_pipeline()
    stage_id = settings.require_stage(described)
    options = [*([f"model={model}"] if model is not None else []), *(option or [])]
    described = override_stage(described, stage_id, engine, options, capacity)
    set_up_logging(settings)
    load_policy_plainly(described)
    asyncio.run(_stage(settings, described, stage_id))


async def _stage(settings: Settings, pipeline: Pipeline, stage_id: int) -> None:
    name = pipeline.stages[stage_id].name
    try:
        worker = StageWorker(settings.redis, pipeline, stage_id)
    except (ImportPathError, TypeError, ValueError) as error:
        raise Failure(f"stage {name}: {error}", Status.SETTINGS) from None
    log.info(
        "stage %s (pid %d): engine %s, Redis at %s, pipeline %s",
        name,
        os.getpid(),
        pipeline.stages[stage_id].engine,
        settings.address,
        settings.pipeline_path,
    )

    def stop() -> None:
        worker.request_stop(settings.grace_s)

    lived = asyncio.ensure_future(worker.wait_ready())
    try:
        async with watched(StageMetrics(worker, pipeline, stage_id), settings):
            await run_until_told(worker.run(), stop, settings.grace_s, ENGINE_STOP_S)
    except Exception as error:
        if lived.done() or isinstance(error, (Failure, *EXPECTED)):
            raise
        # The model is missing, the device is full: nothing that a traceback through our code explains.
        log.debug("stage %s could not start", name, exc_info=True)
        message = f"stage {name}: could not start: {type(error).__name__}: {error}"
        raise Failure(f"{message} ({spell('log_level')} debug shows where)") from None
    finally:
        await end_tasks(lived)
    log.info("stage %s has left", name)


@asynccontextmanager
async def watched(by: Watched, settings: Settings) -> AsyncGenerator[None]:
    """With the metrics where the settings want them. Raises `Failure` if the address can't be had."""
    port = settings.metrics_port
    try:
        server = MetricsServer(by, settings.metrics_host, port) if port is not None else None
    except OSError as error:
        where = f"{settings.metrics_host}:{port}"
        message = f"{spell('metrics_port')}: {where} can't be had: {error.strerror or error}"
        raise Failure(message, Status.SETTINGS) from None
    async with serving(by, server):
        yield


def override_stage(
    pipeline: Pipeline, stage_id: int, engine: str | None, options: list[str], capacity: int | None
) -> Pipeline:
    """The pipeline with one stage as the flags want it. Another engine begins without the former one's options.

    Raises `SettingsError` or `PipelineError`.
    """
    if engine is None and not options and capacity is None:
        return pipeline
    content = pipeline.model_dump(mode="python")
    described = content["stages"][stage_id]
    if engine is not None and engine != described["engine"]:
        described["engine"], described["options"] = engine, {}
    if capacity is not None:
        described["capacity"] = capacity
    _merge(described["options"], options)
    return parse_pipeline(content, "the pipeline with the flags of this stage")


def read_engine_options(texts: list[str]) -> dict[str, Any]:
    """`key=value` and `key.key=value`, the values in YAML. Raises `SettingsError`."""
    options: dict[str, Any] = {}
    _merge(options, texts)
    return options


def _merge(options: dict[str, Any], texts: list[str]) -> None:
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            raise SettingsError([f"--option: is {text!r}; it must be key=value"])
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise SettingsError([f"--option {key}: is not YAML: {' '.join(str(error).split())}"]) from None
        place = options
        *above, last = key.split(".")
        for part in above:
            deeper: object = place.setdefault(part, {})
            if not isinstance(deeper, dict):
                raise SettingsError([f"--option {key}: {part} is no mapping, so it has no {last}"])
            place = cast("dict[str, Any]", deeper)
        place[last] = parsed


def load_policy_plainly(pipeline: Pipeline) -> Any:
    """The core's settings, with the pipeline's policy imported. Raises `Failure` for a policy that can't be used."""
    try:
        return core_settings(pipeline)
    except ImportPathError as error:
        raise Failure(f"policy: {error}", Status.SETTINGS) from None
    except Exception as error:
        # It is the user's code: whatever it raises, the traceback is worth having, but only for who asks for it.
        log.debug("loading the policy %s failed", pipeline.policy, exc_info=True)
        message = f"policy: {pipeline.policy!r} can't be used: {type(error).__name__}: {error}"
        raise Failure(f"{message} ({spell('log_level')} debug shows where)", Status.SETTINGS) from None
