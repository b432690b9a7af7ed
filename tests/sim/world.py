"""A run: the world of a plan, from its first process to the last word, and what was wrong with it.

Responsible for starting the product's workers as simulated processes, for starting them again when they have died, and
for saying when everything has come to rest. Leaves what goes wrong to `faults.py`, what clients do to `traffic.py`,
judging to `watch.py`, `histories.py` and `endings.py`.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.sim.engine import EngineRecord, Given, SimEngine, Trouble
from tests.sim.faults import Faults
from tests.sim.loop import STARTS_S, Process, SimLoop, Stuck
from tests.sim.network import Network
from tests.sim.plan import CALM_S, TROUBLES
from tests.sim.server import SimServer
from tests.sim.trace import Trace
from tests.sim.traffic import Traffic
from tests.sim.watch import Violation, Watch
from workers.control import ControlWorker
from workers.stage import StageWorker

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Coroutine, Generator

    from tests.sim.plan import Plan

URL = "redis://store:6379"
PATIENCE_S = 30.0
"""How long after the faults everything may take to come to rest."""
LOOK_S = 0.25


@dataclass(slots=True)
class Result:
    """`ended_s`: virtual; `commands`: what the server has carried out."""

    seed: int
    violations: list[Violation]
    digest: int
    ended_s: float
    commands: int
    lines: list[str] = field(default_factory=list)
    loses: bool = False


class World:
    """Everything of one run."""

    def __init__(self, plan: Plan, *, telling: bool = False) -> None:
        self.plan = plan
        self.loop = SimLoop()
        self.calm_s = STARTS_S + CALM_S
        self.trace = Trace(self.loop, telling=telling)
        self.server = SimServer(self.loop)
        self.network = Network(self.loop, random.Random(f"net/{plan.seed}"), self.server, jitter_s=plan.jitter_s)
        self.network.tell = self.trace.say
        self.records: list[EngineRecord] = []
        self.given: list[Given] = []
        self.bodies: dict[str, list[bytes]] = {}
        self.processes: dict[str, Process] = {}
        self.workers: dict[str, Any] = {}
        self.life_roles: dict[str, str] = {}
        self.engines: dict[str, EngineRecord] = {}
        self.lost_writes = False
        self.watch = Watch(self)
        self.traffic = Traffic(self)
        self.faults = Faults(self)
        self._lives: dict[str, int] = {}
        self._tasks: list[asyncio.Task[Any]] = []

    @property
    def roles(self) -> list[str]:
        return list(self._lives)

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run something that is no process of the product; an error of it ends the run."""
        self._tasks.append(self.loop.create_task(work, context=self.server.context))

    def run(self) -> Result:
        """Until everything is at rest, or patience is over."""
        with _patched(self), contextlib.suppress(_Enough):
            try:
                self.loop.run_until_complete(self.loop.create_task(self._main(), context=self.server.context))
            except Stuck as stuck:
                self.watch.note("liveness", "loop", str(stuck))
            finally:
                for crash in self.loop.crashes:
                    self.watch.note("crash", "loop", crash)
                self.loop.dispose()
        return Result(
            self.plan.seed,
            self.watch.violations,
            self.trace.digest,
            self.loop.now_s - STARTS_S,
            self.trace.commands,
            self.trace.lines,
            self.plan.loses,
        )

    # Processes.

    def begin(self, role: str) -> Process:
        """The next life of a role."""
        life = self._lives[role] = self._lives.get(role, 0) + 1
        process = self.processes[role] = Process(f"{role}/{life}", self.loop)
        process.on_death.append(lambda: self._note_death(role, process))
        work = self._control(role, life) if role.startswith("control") else self._stage(role)
        task = process.start(work)
        task.add_done_callback(lambda done: self._note_end(process, done), context=self.server.context)
        self.trace.say(f"{process.name} starts")
        return process

    async def _control(self, role: str, life: int) -> None:
        worker = self.workers[role] = ControlWorker(URL, self.plan.pipeline, worker_id=f"{role}.{life}")
        await worker.run()

    async def _stage(self, role: str) -> None:
        stage_id = int(role[5])
        process = self.processes[role]
        choose = random.Random(f"{self.plan.seed}/{process.name}")
        troubles = [
            Trouble(f.kind, STARTS_S + f.at_s, STARTS_S + f.more["until_s"], f.more["only"])
            for f in self.plan.faults
            if f.kind in TROUBLES and f.who == role
        ]

        def build() -> SimEngine:
            record = self.engines[role] = EngineRecord(role, stage_id)
            self.records.append(record)
            return SimEngine(
                record,
                troubles,
                choose,
                worker_id=lambda: worker.worker_id,
                note=lambda given: self._note_given(stage_id, given),
                breach=lambda what: self.watch.note("engine contract", role, what),
            )

        worker = self.workers[role] = StageWorker(URL, self.plan.pipeline, stage_id, build_engine=build)
        await worker.run()

    def _note_given(self, stage_id: int, given: Given) -> None:
        self.trace.say(f"{given.worker_id} engine takes {given.request_id} {list(given.tokens)}")
        self.watch.look_at_given(given)
        if stage_id == 0:
            self.given.append(given)

    def _note_death(self, role: str, process: Process) -> None:
        """It is gone, with what was on its device; whoever runs it starts the next."""
        self.trace.say(f"{process.name} is gone")
        record = self.engines.get(role)
        if record is not None:
            record.over = True
            record.holds.clear()
        self.loop.call_later(self.faults.back_s(role), self.begin, role, context=self.server.context)

    def _note_end(self, process: Process, task: asyncio.Task[Any]) -> None:
        """A worker's `run` has returned or raised: its process exits."""
        error = None if task.cancelled() else task.exception()
        self.trace.say(f"{process.name} ends: {error!r}")
        process.kill()

    # The run.

    async def _main(self) -> None:
        self.server.before = self.watch.before
        self.server.after = self._after
        plan = self.plan
        for stage in range(2):
            for number in range(plan.stages[stage]):
                self.begin(f"stage{stage}-{number}")
        for number in range(plan.controls):
            self.begin(f"control-{number}")
        self.faults.schedule()
        self.traffic.start()
        await self._until_rest()
        self.watch.judge_end()

    def _after(self, role: str, label: str, args: list[bytes], answer: Any) -> None:
        log = self.server.store.log
        self.trace.note(role, label, args, answer, log)
        self.watch.after(role, label, args, answer)
        log.clear()

    async def _until_rest(self) -> None:
        import asyncio  # noqa: PLC0415

        while True:
            await asyncio.sleep(LOOK_S)
            for task in self._tasks:
                if task.done():
                    task.result()
            self._tasks = [task for task in self._tasks if not task.done()]
            if self.watch.is_hopeless:
                raise _Enough
            if self.loop.now_s < self.calm_s and not (self.traffic.is_done and not self.faults.are_pending):
                continue
            if self.traffic.is_done and self.faults.are_over and self.watch.is_at_rest():
                return
            if self.loop.now_s > self.calm_s + PATIENCE_S:
                return

    def note_reader_reset(self, after: dict[bytes, bytes]) -> None:
        """The listener reads from where the server is now: what came before was lost with the server's tail."""
        for name, position in list(after.items()):
            stream = self.server.store.peek(name)
            if stream is None:
                after[name] = b"0-0"
            elif stream.last < tuple(map(int, position.split(b"-"))):
                after[name] = b"%d-%d" % stream.last


class _Enough(Exception):
    """So much is wrong that nothing more has to be seen."""


class _Listener(logging.Handler):
    """The workers' own log: into the trace, and what they did not expect to the watch."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        if self._world.loop.is_closed() or self._world.loop.is_disposing:
            return
        self._world.trace.say(f"log: {record.getMessage()}")
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and "told to" not in str(error):
            self._world.watch.note("crash", "worker", f"{record.getMessage()}: {error!r}")


@contextlib.contextmanager
def _patched(world: World) -> Generator[None]:
    """Time and chance are the simulation's while it runs, and the workers' log is heard."""
    choose = random.Random(f"tokens/{world.plan.seed}")
    state = random.getstate()
    random.seed(world.plan.seed)
    # When cycles are collected depends on what ran before, and some of what is collected closes a connection.
    was_collecting = gc.isenabled()
    gc.disable()
    monotonic, token_hex = time.monotonic, secrets.token_hex
    log = logging.getLogger("bargein")
    level, propagate = log.level, log.propagate
    listener = _Listener(world)
    log.addHandler(listener)
    log.setLevel(logging.INFO if world.trace.telling else logging.ERROR)
    log.propagate = False

    def hexed(count: int | None = None) -> str:
        return choose.randbytes(count or 32).hex()

    time.monotonic, secrets.token_hex = world.loop.time, hexed
    try:
        yield
    finally:
        time.monotonic, secrets.token_hex = monotonic, token_hex
        log.removeHandler(listener)
        log.setLevel(level)
        log.propagate = propagate
        random.setstate(state)
        if was_collecting:
            gc.enable()
