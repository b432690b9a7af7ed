"""The system of the demo: a server, two control workers and one worker for each stage, each a real process.

Responsible for starting them, for knowing when they are ready, for killing one on demand and for ending all of them.
Leaves a single child to `workers/cli/children.py`, the server to `workers/embedded.py`. Starts processes; talks to
Redis to see who is there. What the workers log goes to one file. Says no with `Failure`, which carries the end of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from typing import IO, TYPE_CHECKING

from redis.asyncio import Redis
from redis.exceptions import RedisError

from control.store.inspect import fetch_config, fetch_controls, fetch_partitions, fetch_stage_workers
from control.store.link import LOST
from workers.cli.children import Child
from workers.cli.endings import Failure
from workers.embedded import ServerProcess, require_valkey_binary
from workers.ownership import rendezvous
from workers.settings import PREFIX

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from stages.pipeline import Pipeline
    from workers.demo.board import Board

READY_S = 60.0
LOOK_S = 0.05
GRACE_S = 1.0
BEYOND_GRACE_S = 2.0
SOCKET_TIMEOUT_S = 5.0
LINES_SHOWN = 12

CONTROLS = ("control-1", "control-2")


class System:
    """`folder` is the server's, `log_path` gets what the workers log. `say` hears of each step, `board` of names."""

    def __init__(
        self,
        pipeline: Pipeline,
        pipeline_path: Path,
        folder: Path,
        log_path: Path,
        board: Board,
        say: Callable[[str], None],
        *,
        ready_s: float = READY_S,
        beyond_grace_s: float = BEYOND_GRACE_S,
    ) -> None:
        """`ready_s`: how long the workers may take to start, `beyond_grace_s`: to stop once they hold nothing."""
        self._ready_s = ready_s
        self._beyond_grace_s = beyond_grace_s
        self._pipeline = pipeline
        self._board = board
        self._say = say
        self._log_path = log_path
        self._server = ServerProcess(require_valkey_binary(), folder)
        self._starting: asyncio.Task[str] | None = None
        self._pipeline_path = pipeline_path
        self._children: dict[str, Child] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._killed: set[str] = set()
        self._log: IO[str] | None = None
        self._tail: deque[str] = deque(maxlen=LINES_SHOWN)
        self._redis: Redis | None = None

    @property
    def url(self) -> str:
        """The server's, once it has started."""
        return self._server.url

    @property
    def redis(self) -> Redis:
        """A connection for questions, once the server has started."""
        assert self._redis is not None, "not before start"
        return self._redis

    async def start(self) -> None:
        """Start everything and wait until a session could be opened. Raises `Failure` or `ServerError`."""
        self._log = self._log_path.open("w", encoding="utf-8")
        # Shielded: a thread can't be cancelled, and `end` has to know whether a server came of it.
        self._starting = asyncio.create_task(asyncio.to_thread(self._server.start))
        await asyncio.shield(self._starting)
        self._redis = Redis.from_url(self.url, socket_timeout=SOCKET_TIMEOUT_S)
        self._say(f"an embedded Valkey runs on {self.url}")
        stages = [stage.name for stage in self._pipeline.stages]
        self._start_child(CONTROLS[0], ["control"])
        for name in stages:
            self._start_child(f"stage {name}", ["stage", "--stage", name])
        # One after the other, so that it is known which process goes by which id.
        await self._wait_for(lambda: self._has_joined(CONTROLS[0]), "the first control worker")
        self._start_child(CONTROLS[1], ["control"])
        await self._wait_for(lambda: self._has_joined(CONTROLS[1]), "the second control worker")
        await self._wait_for(lambda: self._are_live(stages), "the stage workers")
        await self._wait_for(self._are_shared_out, "the partitions to be shared out")
        for name, child in self._children.items():
            self._say(f"{name} is ready (process {child.pid})")

    async def guard(self) -> None:
        """Watch the children until cancelled. Raises `Failure` for one that ended unbidden."""
        while True:
            self._check()
            await asyncio.sleep(LOOK_S)

    async def kill(self, worker_id: str) -> int:
        """SIGKILL a control worker; its process id, once it is gone."""
        name = self._board.names[worker_id]
        child = self._children[name]
        pid = child.pid
        assert pid is not None, f"{name} doesn't run"
        self._killed.add(name)
        child.stop(signal.SIGKILL)
        await asyncio.wait([self._tasks[name]])
        return pid

    async def end(self) -> None:
        """End every process that was started, in order; whoever doesn't leave in time is killed."""
        stages = [name for name in self._children if name not in CONTROLS]
        for some in (stages, CONTROLS):
            await self._end_children([name for name in some if name in self._tasks])
        if self._redis is not None:
            with contextlib.suppress(RedisError, *LOST):
                await self._redis.aclose()
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
        await asyncio.to_thread(self._server.stop)
        if self._log is not None:
            self._log.close()

    def kill_all(self) -> None:
        """End everything at once, for whoever can't wait."""
        for child in self._children.values():
            child.stop(signal.SIGKILL)
        self._server.kill()

    def _start_child(self, name: str, arguments: Sequence[str]) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
        environment |= {
            f"{PREFIX}REDIS_URL": self.url,
            f"{PREFIX}PIPELINE": str(self._pipeline_path),
            f"{PREFIX}GRACE_S": f"{GRACE_S:g}",
        }
        child = self._children[name] = Child(name, arguments, environment, self._note)
        self._tasks[name] = asyncio.create_task(child.run(), name=name)

    def _note(self, name: str, line: str) -> None:
        text = f"{name} | {line}"
        self._tail.append(text)
        if self._log is not None and not self._log.closed:
            self._log.write(text + "\n")
            self._log.flush()

    def _check(self) -> None:
        for name, child in self._children.items():
            if name in self._killed:
                continue
            if child.hopeless or child.starts > 1 or self._tasks[name].done():
                log = "\n".join(f"  {line}" for line in self._tail)
                raise Failure(f"{name} has ended unexpectedly; the last that was logged:\n{log}")

    async def _wait_for(self, is_so: Callable[[], Awaitable[bool]], what: str) -> None:
        self._board.doing = f"waiting for {what}"
        try:
            async with asyncio.timeout(self._ready_s):
                while True:
                    self._check()
                    with contextlib.suppress(RedisError, *LOST):
                        if await is_so():
                            return
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            log = "\n".join(f"  {line}" for line in self._tail)
            raise Failure(f"waited {self._ready_s:g} s for {what}; the last that was logged:\n{log}") from None

    async def _has_joined(self, name: str) -> bool:
        for row in await fetch_controls(self.redis, 0):
            if row.worker_id not in self._board.names:
                self._board.names[row.worker_id] = name
                return True
        return False

    async def _are_live(self, stages: Sequence[str]) -> bool:
        rows = (await fetch_stage_workers(self.redis)).rows
        return set(stages) <= {row.stage for row in rows if row.state == "live"}

    async def _are_shared_out(self) -> bool:
        """Whether everybody has what will be theirs, so that nothing moves while the conversation begins."""
        config = await fetch_config(self.redis)
        if config is None:
            return False
        rows = await fetch_partitions(self.redis, config.partitions)
        return all(row.owner == rendezvous(row.partition, self._board.names) for row in rows)

    async def _end_children(self, names: Sequence[str]) -> None:
        tasks = [self._tasks[name] for name in names]
        for name in names:
            self._children[name].stop()
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=GRACE_S + self._beyond_grace_s)
            for name in names:
                if self._tasks[name] in left:
                    self._children[name].signal(signal.SIGKILL)
            await asyncio.wait(tasks)
