"""`python -m tests.chaos [--seconds 60] [--seed N]`: the real processes under faults, judged by what clients saw.

Responsible for the order of a run. Leaves the report to `report.py`. Its last line is `N faults, N violations`; exit
status 1 if there are any. Logs stay in a directory of their own if there are violations, or with --keep. Starts
processes; talks to Redis.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from redis.asyncio import Redis
from redis.exceptions import RedisError

from tests.chaos.checker import GRACE_S, check
from tests.chaos.faults import Faults
from tests.chaos.history import Leftovers, Violation
from tests.chaos.leftovers import read_leftovers, watch_limits
from tests.chaos.losses import EVERYBODY, Losses
from tests.chaos.processes import Worker
from tests.chaos.proxy import Proxy
from tests.chaos.report import report, write_histories
from tests.chaos.server import ChaosServer
from tests.chaos.traffic import Traffic
from workers.cli.leaving import end_tasks

if TYPE_CHECKING:
    from collections.abc import Sequence

PARTITIONS = 8
SESSIONS = 20
MAX_SESSIONS = 18  # below the number of producers: some opens are refused and tried again
# Between two looks at processes and keys, which tell nobody when they change.
LOOK_S = 0.3
SHOW_S = 5.0
START_S = 30.0
ANSWERED_S = 30.0  # within this time after the last fault everything is answered, said and closed
CLEAN_S = 20.0
STAGES = ("thinker", "thinker", "voice")
CONTROLS = 3
LIFE = re.compile(r"stage worker (\S+) takes sessions")
PIPELINE = f"""
partitions: {PARTITIONS}
max_sessions: {MAX_SESSIONS}
session:
  idle_ttl_s: null
  disconnect_grace_s: {GRACE_S:g}
  append_timeout_s: 5
  cleanup_timeout_s: 2
  cleanup_backoff_s: 0.3
  cleanup_backoff_max_s: 2
control: {{lease_s: 1.0, heartbeat_s: 1.5, heartbeat_interval_s: 0.3, brake_s: 2}}
stages:
  - name: thinker
    engine: parrot
    capacity: 16
    options: {{reply: stream, pace: realtime, frame_ms: 30, delay_ms: 20, abort_delay_ms: 20}}
  - name: voice
    engine: parrot
    capacity: 20
    options: {{reply: stream, pace: fast, delay_ms: 10, abort_delay_ms: 5}}
"""


class Run:
    """One run in `directory`."""

    def __init__(self, seconds: float, seed: int, directory: Path) -> None:
        self.seconds = seconds
        self.seed = seed
        self.directory = directory
        self.began_s = time.monotonic()
        self.ended_alone: Counter[str] = Counter()
        self._notes = (directory / "faults.log").open("w")
        self._server = ChaosServer(directory / "server")
        self._workers: list[Worker] = []
        self._proxies: dict[str, Proxy] = {}
        self._overfull: set[str] = set()

    async def go(self) -> tuple[Traffic, Faults, list[Violation]]:
        """Start, disturb, calm down, judge, stop."""
        try:
            await asyncio.to_thread(self._server.start)
            await self._start_workers()
            return await self._disturb()
        finally:
            for worker in self._workers:
                worker.signal(signal.SIGCONT)
                worker.signal(signal.SIGTERM)
            for worker in self._workers:
                await asyncio.to_thread(worker.end, 5.0)
            for proxy in self._proxies.values():
                await proxy.close()
            self._server.kill()
            self._notes.close()

    def _say(self, line: str) -> None:
        """A line into the log of faults, by the clock of the histories."""
        print(f"{time.monotonic() - self.began_s:8.3f} {line}", file=self._notes, flush=True)

    async def _start_workers(self) -> None:
        pipeline = self.directory / "pipeline.yaml"
        pipeline.write_text(PIPELINE)
        common = ("--pipeline", str(pipeline), "--grace-s", "2")
        names = [(f"control-{n}", ("control", *common)) for n in range(1, CONTROLS + 1)]
        names += [(f"{stage}-{n}", ("stage", "--stage", stage, *common)) for n, stage in enumerate(STAGES, 1)]
        for name, arguments in names:
            proxy = self._proxies[name] = Proxy(self._server.port)
            await proxy.start()
            worker = Worker(name, arguments, proxy.port, self._log_of(name))
            self._workers.append(worker)
            worker.start()

    async def _disturb(self) -> tuple[Traffic, Faults, list[Violation]]:
        traffic = Traffic(self._server.url, PARTITIONS, self.seed)
        self.began_s = traffic.began_s
        controls, stages = self._workers[:CONTROLS], self._workers[CONTROLS:]
        faults = Faults(self._server, controls, stages, self._proxies, self.seed, traffic.began_s, self._say)
        redis = Redis.from_url(self._server.url, socket_timeout=5)
        listening = asyncio.ensure_future(traffic.listen())
        beside = [
            listening,
            asyncio.ensure_future(watch_limits(redis, MAX_SESSIONS, self._overfull)),
            asyncio.ensure_future(self._supervise(faults)),
            asyncio.ensure_future(self._show(traffic, faults)),
        ]
        producing = [asyncio.ensure_future(traffic.produce(place)) for place in range(SESSIONS)]
        try:
            await self._until_it_works(traffic)
            await faults.run(self.seconds)
            self._say("no more faults")
            traffic.stop()
            await asyncio.wait(producing, timeout=ANSWERED_S)
            unfinished = sum(1 for task in producing if not task.done())
            left = await self._come_to_rest(redis)
            await traffic.catch_up(listening)
            violations = check(traffic.histories.values(), left, self._find_losses(faults, stages))
            if unfinished:
                what = f"{unfinished} producers still waited {ANSWERED_S:g} s after the last fault"
                violations.append(Violation("liveness", "producers", what))
            violations += [*faults.violations, *self._find_crashes()]
            for task in (*producing, *beside):
                if task.done() and (error := task.exception()) is not None:
                    raise error
            if traffic.errors:
                raise traffic.errors[0]
            return traffic, faults, violations
        finally:
            await end_tasks(*beside, *producing)
            await traffic.close()
            await redis.aclose()

    async def _until_it_works(self, traffic: Traffic) -> None:
        """The faults begin once some sessions are open."""
        deadline_s = time.monotonic() + START_S
        while sum(1 for history in traffic.histories.values() if history.seen) < SESSIONS // 2:
            if time.monotonic() > deadline_s:
                raise SystemExit(f"the workers didn't begin to serve within {START_S:g} s; logs in {self.directory}")
            await asyncio.sleep(LOOK_S)

    def _log_of(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def _find_losses(self, faults: Faults, stages: Sequence[Worker]) -> Losses:
        """The faults, and which process had which worker ids: the logs say so."""
        homes = {
            worker_id: worker.name
            for worker in stages
            for worker_id in LIFE.findall(self._log_of(worker.name).read_text(errors="replace"))
        }
        return Losses(faults.spans, frozenset(worker.name for worker in stages), homes)

    def _find_crashes(self) -> list[Violation]:
        """A traceback in a worker's log is a bug, whatever became of the worker."""
        found: list[Violation] = []
        for worker in self._workers:
            text = self._log_of(worker.name).read_text(errors="replace")
            if count := text.count("Traceback (most recent call last)"):
                found.append(Violation("crash", worker.name, f"{count} tracebacks in its log"))
        return found

    async def _come_to_rest(self, redis: Redis) -> Leftovers:
        """What is left once nothing is, or once the patience is over."""
        deadline_s = time.monotonic() + CLEAN_S
        left = Leftovers(sessions=["never read"])
        while time.monotonic() < deadline_s:
            try:
                left = await read_leftovers(redis, PARTITIONS, self._overfull)
            except (RedisError, OSError):
                await asyncio.sleep(LOOK_S)
                continue
            if left.clean:
                break
            await asyncio.sleep(LOOK_S)
        return left

    async def _supervise(self, faults: Faults) -> None:
        """Start again what has ended by itself, as whatever runs it in production does."""
        while True:
            await asyncio.sleep(LOOK_S)
            if not faults.holds(EVERYBODY) and await asyncio.to_thread(self._server.revive):
                self._say("the server has ended by itself; started again")
                self.ended_alone["server"] += 1
            for worker in self._workers:
                if not worker.running and not faults.holds(worker.name):
                    self._say(f"{worker.name} has ended by itself with status {worker.status}; started again")
                    self.ended_alone[f"{worker.name} with status {worker.status}"] += 1
                    worker.start()

    async def _show(self, traffic: Traffic, faults: Faults) -> None:
        while True:
            await asyncio.sleep(SHOW_S)
            seen = [entry for history in traffic.histories.values() for entry in history.seen]
            print(
                f"{traffic.now_s:6.1f} s  {faults.counts.total()} faults, {len(traffic.histories)} sessions "
                f"({sum(entry.terminal for entry in seen)} ends), {traffic.commands} commands, "
                f"{traffic.unanswered} unanswered, {sum(entry.kind == 'output' for entry in seen)} outputs",
                flush=True,
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="how long there are faults (default 60)")
    parser.add_argument("--seed", type=int, default=None, help="chooses faults and traffic (default: by the clock)")
    parser.add_argument("--keep", action="store_true", help="keep the logs whatever the outcome")
    options = parser.parse_args(arguments)
    seed = int(time.time()) % 1_000_000 if options.seed is None else options.seed
    directory = Path(tempfile.mkdtemp(prefix="bargein-chaos-"))
    run = Run(options.seconds, seed, directory)
    print(f"seed {seed}; logs in {directory}", flush=True)
    traffic, faults, violations = asyncio.run(run.go())
    print(f"\nseed {seed}, {options.seconds:g} s of faults, {time.monotonic() - run.began_s:.0f} s in all")
    report(traffic, faults, run.ended_alone, violations)
    if violations or options.keep:
        write_histories(traffic, directory / "histories.log")
        print(f"\nseed {seed}; logs, faults and histories: {directory}")
    else:
        shutil.rmtree(directory, ignore_errors=True)
    print(f"{faults.counts.total()} faults, {len(violations)} violations", flush=True)
    return 1 if violations else 0


if __name__ == "__main__":
    # A signal ends the run through its `finally`s, so that nothing is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
