"""`python -m tests.chaos [--seconds 60] [--seed N]`: the real processes under faults, judged by what clients saw.

Responsible for the order of a run and its report. Its last line is `N faults, N violations`; exit status 1 if there are
any. Logs stay in a directory of their own if there are violations, or with --keep. Starts processes; talks to Redis.
"""

from __future__ import annotations

import argparse
import asyncio
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

from tests.chaos.checker import check, tell
from tests.chaos.faults import Faults
from tests.chaos.history import History, Leftovers, Violation
from tests.chaos.leftovers import read_leftovers, watch_limits
from tests.chaos.processes import Worker
from tests.chaos.proxy import Proxy
from tests.chaos.traffic import Traffic
from workers.embedded import ServerProcess, require_valkey_binary

if TYPE_CHECKING:
    from collections.abc import Sequence

PARTITIONS = 8
SESSIONS = 20
MAX_SESSIONS = 18  # below the number of producers: some opens are refused and tried again
START_S = 30.0
ANSWERED_S = 30.0  # within this time after the last fault everything is answered, said and closed
CLEAN_S = 20.0
STAGES = ("thinker", "thinker", "voice")
CONTROLS = 3
PIPELINE = f"""
partitions: {PARTITIONS}
max_sessions: {MAX_SESSIONS}
session:
  idle_ttl_s: null
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
        self.notes = (directory / "faults.log").open("w")
        self.server = ServerProcess(
            require_valkey_binary(), directory / "server", persist=True, args=("--appendfsync", "always")
        )
        self.workers: list[Worker] = []
        self.proxies: dict[str, Proxy] = {}
        self.overfull: set[str] = set()
        self.ended_alone: Counter[str] = Counter()

    def say(self, line: str) -> None:
        """A line into the log of faults, by the clock of the histories."""
        print(f"{time.monotonic() - self.began_s:8.3f} {line}", file=self.notes, flush=True)

    async def go(self) -> tuple[Traffic, Faults, list[Violation]]:
        """Start, disturb, calm down, judge, stop."""
        try:
            await asyncio.to_thread(self.server.start)
            await self._start_workers()
            return await self._disturb()
        finally:
            for worker in self.workers:
                worker.signal(signal.SIGCONT)
                worker.signal(signal.SIGTERM)
            for worker in self.workers:
                await asyncio.to_thread(worker.end, 5.0)
            for proxy in self.proxies.values():
                await proxy.close()
            self.server.kill()
            self.notes.close()

    async def _start_workers(self) -> None:
        pipeline = self.directory / "pipeline.yaml"
        pipeline.write_text(PIPELINE)
        common = ("--pipeline", str(pipeline), "--grace-s", "2")
        names = [(f"control-{n}", ("control", *common)) for n in range(1, CONTROLS + 1)]
        names += [(f"{stage}-{n}", ("stage", "--stage", stage, *common)) for n, stage in enumerate(STAGES, 1)]
        for name, arguments in names:
            proxy = self.proxies[name] = Proxy(self.server.port)
            await proxy.start()
            worker = Worker(name, arguments, proxy.port, self.directory / f"{name}.log")
            self.workers.append(worker)
            worker.start()

    async def _disturb(self) -> tuple[Traffic, Faults, list[Violation]]:
        traffic = Traffic(self.server.url, PARTITIONS, self.seed)
        self.began_s = traffic.began_s
        controls, stages = self.workers[:CONTROLS], self.workers[CONTROLS:]
        faults = Faults(self.server, controls, stages, self.proxies, self.seed, traffic.began_s, self.say)
        redis = Redis.from_url(self.server.url, socket_timeout=5)
        listening = asyncio.ensure_future(traffic.listen())
        beside = [
            listening,
            asyncio.ensure_future(watch_limits(redis, MAX_SESSIONS, self.overfull)),
            asyncio.ensure_future(self._supervise(faults)),
            asyncio.ensure_future(self._show(traffic, faults)),
        ]
        producing = [asyncio.ensure_future(traffic.produce(place)) for place in range(SESSIONS)]
        try:
            await self._until_it_works(traffic)
            await faults.run(self.seconds)
            self.say("no more faults")
            traffic.stop()
            await asyncio.wait(producing, timeout=ANSWERED_S)
            unfinished = sum(1 for task in producing if not task.done())
            left = await self._come_to_rest(redis)
            await asyncio.sleep(0.3)  # the listener may be a read behind
            violations = check(traffic.histories.values(), left, faults.stage_faults_s)
            if unfinished:
                what = f"{unfinished} producers still waited {ANSWERED_S:g} s after the last fault"
                violations.append(Violation("liveness", "producers", what))
            violations += self._find_crashes()
            for task in (*producing, listening):
                if task.done() and (error := task.exception()) is not None:
                    raise error
            if traffic.errors:
                raise traffic.errors[0]
            return traffic, faults, violations
        finally:
            for task in (*beside, *producing):
                task.cancel()
            await asyncio.gather(*beside, *producing, return_exceptions=True)
            await traffic.close()
            await redis.aclose()

    async def _until_it_works(self, traffic: Traffic) -> None:
        """The faults begin once some sessions are open."""
        deadline_s = time.monotonic() + START_S
        while sum(1 for history in traffic.histories.values() if history.seen) < SESSIONS // 2:
            if time.monotonic() > deadline_s:
                raise SystemExit(f"the workers didn't begin to serve within {START_S:g} s; logs in {self.directory}")
            await asyncio.sleep(0.1)

    def _find_crashes(self) -> list[Violation]:
        """A traceback in a worker's log is a bug, whatever became of the worker."""
        found: list[Violation] = []
        for worker in self.workers:
            text = (self.directory / f"{worker.name}.log").read_text(errors="replace")
            if count := text.count("Traceback (most recent call last)"):
                found.append(Violation("crash", worker.name, f"{count} tracebacks in its log"))
        return found

    async def _come_to_rest(self, redis: Redis) -> Leftovers:
        """What is left once nothing is, or once the patience is over."""
        deadline_s = time.monotonic() + CLEAN_S
        left = Leftovers(sessions=["never read"])
        while time.monotonic() < deadline_s:
            try:
                left = await read_leftovers(redis, PARTITIONS, self.overfull)
            except (RedisError, OSError):
                await asyncio.sleep(0.5)
                continue
            if left.clean:
                break
            await asyncio.sleep(0.5)
        return left

    async def _supervise(self, faults: Faults) -> None:
        """Start again what has ended by itself, as whatever runs it in production does."""
        while True:
            await asyncio.sleep(0.5)
            for worker in self.workers:
                if not worker.running and not faults.holds(worker):
                    self.say(f"{worker.name} has ended by itself with status {worker.status}; started again")
                    self.ended_alone[f"{worker.name} with status {worker.status}"] += 1
                    worker.start()

    async def _show(self, traffic: Traffic, faults: Faults) -> None:
        while True:
            await asyncio.sleep(5)
            ended = sum(1 for history in traffic.histories.values() if history.ended)
            outputs = sum(1 for h in traffic.histories.values() for e in h.seen if e.kind == "output")
            print(
                f"{traffic.now_s:6.1f} s  {faults.counts.total()} faults, {len(traffic.histories)} sessions "
                f"({ended} ended), {traffic.commands} commands, {traffic.unanswered} unanswered, {outputs} outputs",
                flush=True,
            )


def _waits_s(history: History) -> list[tuple[float, str, float]]:
    """How long each command waited for its first reply: seconds, its control_id, when it was sent."""
    first: dict[str, float] = {}
    for entry in history.seen:
        if entry.kind == "reply":
            first.setdefault(entry.body["control_id"], entry.at_s)
    return [
        (first[one.control_id] - one.at_s, one.control_id, one.at_s)
        for one in history.sent.values()
        if one.control_id in first
    ]


def report(run: Run, traffic: Traffic, faults: Faults, violations: list[Violation]) -> None:
    """The result, for people; the last line is for machines."""
    histories = list(traffic.histories.values())
    waits = sorted((wait for history in histories for wait in _waits_s(history)), reverse=True)
    reasons: Counter[str] = Counter()
    codes: Counter[str] = Counter()
    for history in histories:
        reasons.update(str(e.body.get("reason")) for e in history.seen if e.terminal)
        codes.update(str(e.body["code"] or "ok") for e in history.seen if e.kind == "reply")
    deliveries = sum(sent.deliveries for history in histories for sent in history.sent.values())
    outputs = sum(1 for history in histories for entry in history.seen if entry.kind == "output")
    print(f"\nseed {run.seed}, {run.seconds:g} s of faults, {time.monotonic() - run.began_s:.0f} s in all")
    print(f"commands   {traffic.commands} in {len(histories)} sessions, {deliveries} deliveries, {outputs} outputs")
    print(f"replies    {traffic.answers}: {_table(codes)}")
    print(f"ends       {_table(reasons)}")
    print(f"faults     {_table(faults.counts)}")
    print(f"left alone {_table(run.ended_alone)}")
    print(f"unjudged   {sum(history.trimmed for history in histories)} sessions in part: cut before they were read")
    if waits:
        median_s = waits[len(waits) // 2][0]
        worst = ", ".join(f"{wait:.2f} s ({name} at {at_s:.1f} s)" for wait, name, at_s in waits[:3])
        print(f"no service {worst}; median {median_s * 1000:.0f} ms")
    for rule, count in Counter(violation.rule for violation in violations).most_common():
        print(f"violated   {rule}: {count}")
    told: set[str] = set()
    for violation in violations[:40]:
        print(f"\n{violation}")
        if violation.where in traffic.histories and violation.where not in told and len(told) < 5:
            told.add(violation.where)
            print("\n".join(tell(traffic.histories[violation.where])))
    if violations:
        with (run.directory / "histories.log").open("w") as log:
            for history in histories:
                print(history.session_id, *tell(history), sep="\n", file=log)
        print(f"\nseed {run.seed}; logs, faults and histories: {run.directory}")


def _table(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common()) or "none"


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
    report(run, traffic, faults, violations)
    if not violations and not options.keep:
        shutil.rmtree(directory, ignore_errors=True)
    print(f"{faults.counts.total()} faults, {len(violations)} violations", flush=True)
    return 1 if violations else 0


if __name__ == "__main__":
    # A signal ends the run through its `finally`s, so that nothing is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
