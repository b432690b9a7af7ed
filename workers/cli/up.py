"""`bargein up`: a server, a control worker, one stage worker a stage, and maintenance, for development.

Responsible for which processes there are, for saying when all of them are ready, and for the order of the end: first
the stages, while somebody still confirms their cleanups, then the control worker, then the server. Leaves one child to
`children.py`, the server to `workers/embedded.py`. Everything ends with this process, however that ends.

The address goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from redis.asyncio import Redis
from redis.exceptions import RedisError
from rich.text import Text

from control.store.inspect import fetch_config, fetch_partitions, fetch_stage_workers
from control.store.link import LOST
from workers.cli.children import Child
from workers.cli.endings import Failure, Status, plainly
from workers.cli.leaving import SIGNALS, leave_at_once
from workers.cli.options import Grace, LogJson, LogLevel, PipelineFile
from workers.cli.output import make_console
from workers.cli.run import load_policy_plainly
from workers.embedded import ServerProcess, require_valkey_binary
from workers.settings import DEFAULT_URL, PREFIX, Settings, load_settings
from workers.tasks import end_tasks

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from rich.console import Console

    from stages.pipeline import Pipeline

USUAL_PORT = 6379
KEPT_IN = Path("bargein-data")
GRACE_S = 2.0
LOOK_S = 0.2
# The control worker looks for stage workers ten times in a heartbeat time, or each second; and a bit.
NOTICE_MS = 200
COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red")


@plainly
def up(
    pipeline: PipelineFile = None,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="The server's folder; else a temporary one, or bargein-data with --persist"),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", min=0, max=65_535, help="The server's port, 0 for any; else 6379 if it is free"),
    ] = None,
    persist: Annotated[bool, typer.Option("--persist", help="Keep the sessions over a restart")] = False,
    log_level: LogLevel = None,
    log_json: LogJson = None,
    grace_s: Grace = None,
) -> None:
    """Start everything on a server of its own: for development, on this machine only.

    Ctrl-C or SIGTERM ends all of it; once more ends it at once.
    """
    settings = load_settings(pipeline=pipeline, log_level=log_level, log_json=log_json, grace_s=grace_s)
    described = settings.load_pipeline()
    load_policy_plainly(described)
    with contextlib.ExitStack() as stack:
        if directory is None and not persist:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bargein-up-")))
        chosen = _choose_port() if port is None else port
        server = ServerProcess(require_valkey_binary(), directory or KEPT_IN, port=chosen, persist=persist)
        try:
            asyncio.run(_Everything(settings, described, server).run())
        finally:
            server.stop()


class _Everything:
    """One run of `bargein up`."""

    def __init__(self, settings: Settings, pipeline: Pipeline, server: ServerProcess) -> None:
        self._settings = settings
        self._pipeline = pipeline
        self._server = server
        self._console = make_console(stderr=True)
        self._names = ["control", *(stage.name for stage in pipeline.stages), "maintenance"]
        self._told = asyncio.Event()
        self._children: list[Child] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        with _status(self._console, "starting the server"):
            url = await asyncio.to_thread(self._server.start)
        self._children = self._make_children(url)
        work: list[Coroutine[Any, Any, None]] = [child.run() for child in self._children]
        self._tasks = [asyncio.create_task(each) for each in work]
        extra = [asyncio.create_task(self._announce(url)), asyncio.create_task(self._keep_server())]
        told = asyncio.create_task(self._told.wait())
        try:
            await asyncio.wait([told, *self._tasks, *extra[1:]], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks(told, *extra)
            await self._end()
        for task in extra:
            if not task.cancelled():
                task.result()
        for child in self._children:
            if child.hopeless:
                raise Failure(f"{child.name} can't run with this configuration; see above", Status.SETTINGS)

    def _make_children(self, url: str) -> list[Child]:
        settings = self._settings
        environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        grace_s = settings.grace_s if "grace_s" in settings.model_fields_set else GRACE_S
        environment |= {
            f"{PREFIX}REDIS_URL": url,
            f"{PREFIX}PIPELINE": str(settings.pipeline_path.absolute()),
            f"{PREFIX}LOG_LEVEL": settings.log_level,
            f"{PREFIX}LOG_JSON": str(settings.log_json).lower(),
            f"{PREFIX}GRACE_S": f"{grace_s:g}",
            # A free one each; their logs say which.
            f"{PREFIX}METRICS_PORT": "0",
        }
        stages = [
            Child(stage.name, ["stage", "--stage", stage.name], environment, self._say)
            for stage in self._pipeline.stages
        ]
        control, maintenance = (Child(name, [name], environment, self._say) for name in ("control", "maintenance"))
        return [control, *stages, maintenance]

    def _on_signal(self, number: signal.Signals) -> None:
        if self._told.is_set():
            for child in self._children:
                child.signal(signal.SIGKILL)
            self._server.kill()
            leave_at_once(128 + number)
        self._note(f"{number.name}: stopping everything; once more ends it at once")
        self._told.set()

    async def _announce(self, url: str) -> None:
        """Say where it is, as soon as it is all there."""
        with _status(self._console, "starting the workers"):
            await self._become_ready(url)
        print(url, flush=True)
        prefix = "" if url == DEFAULT_URL else f"export {PREFIX}REDIS_URL={url}\n  "
        self._note(f"ready, on {url}; in another terminal:")
        self._note(f"""  {prefix}bargein send '{{"op": "open", "session_id": "first"}}'\n  bargein tail first""")

    async def _become_ready(self, url: str) -> None:
        """Wait until every partition has an owner, and every stage a worker that the owner has had time to notice."""
        wanted = {stage.name for stage in self._pipeline.stages}
        noticed_ms = min(1_000, self._pipeline.control.heartbeat_ms // 10) + NOTICE_MS
        async with Redis.from_url(url, socket_timeout=5) as redis:
            while True:
                with contextlib.suppress(*LOST, RedisError):
                    config = await fetch_config(redis)
                    if config is not None:
                        rows = await fetch_partitions(redis, config.partitions)
                        workers = (await fetch_stage_workers(redis)).rows
                        live = {row.stage for row in workers if row.state == "live" and row.age_ms > noticed_ms}
                        if all((row.lease_left_ms or 0) > 0 for row in rows) and wanted <= live:
                            return
                await asyncio.sleep(LOOK_S)

    async def _keep_server(self) -> None:
        """Start the server again if it dies. Raises `ServerError` if it doesn't come back."""
        while True:
            await asyncio.sleep(LOOK_S)
            if not self._server.running:
                self._note(f"the server is gone; starting it again\n{self._server.log_tail(5)}")
                await asyncio.to_thread(self._server.restart)

    async def _end(self) -> None:
        others, control = self._children[1:], self._children[:1]
        with _status(self._console, "stopping"):
            for some in (others, control):
                for child in some:
                    child.stop()
                tasks = [task for child, task in zip(self._children, self._tasks, strict=True) if child in some]
                if tasks:
                    await asyncio.wait(tasks)
            await asyncio.to_thread(self._server.stop)

    def _say(self, name: str, line: str) -> None:
        width = max(map(len, self._names))
        colour = COLOURS[self._names.index(name) % len(COLOURS)]
        self._console.print(Text.assemble((f"{name:<{width}} | ", colour), line), soft_wrap=True)

    def _note(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


def _status(console: Console, text: str) -> Any:
    return console.status(text) if console.is_terminal else nullcontext()


def _choose_port() -> int:
    """The usual port if nobody has it, else 0 for any."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # A connection that is still closing on the port doesn't count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", USUAL_PORT))
        except OSError:
            return 0
    return USUAL_PORT
