"""The system of a failover run: one server, control workers and stage workers as processes, none of them in the way.

Responsible for starting and ending it, for who owns what and for when it is settled. Leaves the measuring to
`failover.py`. Starts processes; talks to Redis. Units: `_s` seconds.
"""

from __future__ import annotations

import asyncio
import re
import signal
import time
from typing import TYPE_CHECKING

from redis.asyncio import Redis
from redis.exceptions import RedisError

from control.store.inspect import fetch_controls, fetch_partitions, fetch_sessions, fetch_stage_workers
from tests.chaos.processes import Worker
from tests.chaos.server import ChaosServer
from workers.ownership import rendezvous

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

SETTLED_S = 20.0
CONTROL = re.compile(r"(control-\w+) \(pid \d+\)")
LIFE = re.compile(r"stage worker (\S+) takes sessions")
PARTITIONS = 16
PIPELINE = """
partitions: {partitions}
control: {{lease_s: {lease_s:g}, heartbeat_s: {heartbeat_s:g}, heartbeat_interval_s: {interval_s:g}}}
stages:
  - name: thinker
    engine: parrot
    capacity: 200
    options: {{reply: stream, pace: fast}}
  - name: voice
    engine: parrot
    capacity: 200
    options: {{reply: stream, pace: fast}}
"""


class Stand:
    """`async with Stand(directory)`: everything runs and is settled inside. The times are the pipeline's defaults."""

    def __init__(
        self,
        directory: Path,
        *,
        controls: int = 2,
        stages: tuple[str, ...] = ("thinker", "thinker", "voice", "voice"),
        lease_s: float = 3.0,
        heartbeat_s: float = 5.0,
    ) -> None:
        self.lease_s, self.heartbeat_s = lease_s, heartbeat_s
        self.server = ChaosServer(directory / "server")
        self.controls: list[Worker] = []
        self.stages: list[Worker] = []
        self._directory = directory
        self._control_count = controls
        self._stage_names = stages
        self._redis: Redis | None = None

    async def __aenter__(self) -> Stand:
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            await asyncio.to_thread(self.server.start)
            self._redis = Redis.from_url(self.server.url, socket_timeout=5)
            pipeline = self._directory / "pipeline.yaml"
            pipeline.write_text(
                PIPELINE.format(
                    partitions=PARTITIONS,
                    lease_s=self.lease_s,
                    heartbeat_s=self.heartbeat_s,
                    interval_s=self.heartbeat_s / 5,
                )
            )
            common = ("--pipeline", str(pipeline), "--grace-s", "5")
            for number in range(1, self._control_count + 1):
                self.controls.append(self._worker(f"control-{number}", ("control", *common)))
            for number, stage in enumerate(self._stage_names, 1):
                self.stages.append(self._worker(f"{stage}-{number}", ("stage", "--stage", stage, *common)))
            for worker in (*self.controls, *self.stages):
                worker.start()
            await self.wait_settled(self.controls)
            # Each control worker has looked at the stages once more: sessions are placed on all of them.
            await asyncio.sleep(self.heartbeat_s / 10 + 0.2)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._end()

    async def _end(self) -> None:
        for worker in (*self.controls, *self.stages):
            await asyncio.to_thread(worker.kill)
            await asyncio.to_thread(worker.end, 1.0)
        if self._redis is not None:
            await self._redis.aclose()
        self.server.kill()

    @property
    def redis(self) -> Redis:
        assert self._redis is not None
        return self._redis

    def id_of(self, worker: Worker) -> str:
        """The id of the process's present life, by its log; empty before it has one."""
        pattern = CONTROL if worker in self.controls else LIFE
        found = pattern.findall((self._directory / f"{worker.name}.log").read_text(errors="replace"))
        return found[-1] if found else ""

    async def fetch_owners(self) -> dict[int, str | None]:
        """Partition -> the worker id that owns it."""
        return {row.partition: row.owner for row in await fetch_partitions(self.redis, PARTITIONS)}

    async def fetch_sessions_of(self, stage: Worker) -> set[str]:
        """The sessions on whose route a stage worker is."""
        worker_id = self.id_of(stage)
        found = await fetch_sessions(self.redis, PARTITIONS, None, 10_000)
        return {row.session_id for row in found.rows if worker_id in row.route and row.phase == "open"}

    async def wait_settled(self, controls: list[Worker], within_s: float = SETTLED_S) -> float:
        """Until just these control workers share the partitions as they should, and every stage is there; when."""
        deadline_s = time.monotonic() + within_s
        while not await self._is_settled(controls):
            if time.monotonic() > deadline_s:
                owners = await self.fetch_owners()
                ids = [self.id_of(worker) for worker in controls]
                raise TimeoutError(f"the partitions are not shared out among {ids} after {within_s:g} s: {owners}")
            await asyncio.sleep(0.02)
        return time.monotonic()

    async def _is_settled(self, controls: list[Worker]) -> bool:
        ids = sorted(self.id_of(worker) for worker in controls)
        try:
            known = [row.worker_id for row in await fetch_controls(self.redis, PARTITIONS) if row.partitions]
            owners = await self.fetch_owners()
            live = {row.worker_id for row in (await fetch_stage_workers(self.redis)).rows if row.state == "live"}
        except (RedisError, OSError):
            return False
        if sorted(known) != ids or not all(owners[p] == rendezvous(p, ids) for p in owners):
            return False
        return all(self.id_of(worker) in live for worker in self.stages if worker.running and not worker.stopped)

    def _worker(self, name: str, arguments: tuple[str, ...]) -> Worker:
        return Worker(name, arguments, self.server.port, self._directory / f"{name}.log")

    async def freeze(self, worker: Worker, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after that time."""
        worker.signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        worker.signal(signal.SIGCONT)
