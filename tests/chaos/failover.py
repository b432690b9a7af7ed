"""`python -m tests.chaos.failover [--rounds N]`: how long sessions wait when a process dies, leaves, joins or freezes.

One kind of fault at a time on an otherwise quiet system, with small commands on every session. Leaves the system to
`stand.py`, the commands to `probe.py`. Prints a line a round and a table: kind, rounds, target, median, p99, worst, met
or not; exit status 1 if a p99 is beyond its target by more than a generous factor. Units: `_s` seconds.

What is measured: for a killed or frozen control worker, from the fault to the first answer to a command that was sent
after it, for each of its sessions. For one that leaves or joins, the longest wait of each session that moves, and of
all sessions in a time without a fault (`quiet`). For a stage worker, from the fault to its sessions' `closed`.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.chaos.probe import Probe
from tests.chaos.stand import PARTITIONS, Stand

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from tests.chaos.probe import Line
    from tests.chaos.processes import Worker

    Say = Callable[[str], None]

SESSIONS = 40
FACTOR = 2.0
PATIENCE_S = 20.0
AFTER_S = 1.5  # how long the waits are looked at after a hand-over
HANDOVER_S = 0.1
BETWEEN_S = 1.0  # traffic without a fault, so that none is measured together with the tail of the one before


@dataclass(slots=True)
class Figure:
    """The samples of one kind, a session and round each."""

    kind: str
    target_s: float | None
    rounds: int = 0
    samples_s: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)

    @property
    def p99_s(self) -> float:
        ordered = sorted(self.samples_s)
        return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]

    @property
    def worst_s(self) -> float:
        return max(self.samples_s)

    @property
    def met(self) -> bool:
        return self.target_s is None or self.p99_s <= self.target_s

    def add(self, samples_s: Iterable[float]) -> str:
        """One more round; what it was, for people."""
        fresh = list(samples_s)
        self.rounds += 1
        self.samples_s += fresh
        return f"{self.kind}: {len(fresh)} sessions, median {_ms(statistics.median(fresh))}, worst {_ms(max(fresh))}"


class Measurement:
    """All figures of a run on one stand. `lease_s` and `heartbeat_s` are the stand's."""

    def __init__(self, lease_s: float, heartbeat_s: float, say: Say) -> None:
        takeover_s, fenced_s = lease_s + 0.5, heartbeat_s + 1.0
        self.killed_control = Figure("killed control worker", takeover_s)
        self.frozen_control = Figure("frozen control worker", takeover_s)
        self.woken_control = Figure("control worker that wakes up", None)
        self.leaving_control = Figure("leaving control worker", HANDOVER_S)
        self.joining_control = Figure("joining control worker", HANDOVER_S)
        self.quiet = Figure("quiet", None)
        self.server = Figure("server restart, once it is up", takeover_s)
        self.killed_stage = Figure("killed stage worker", fenced_s)
        self.frozen_stage = Figure("frozen stage worker", fenced_s)
        self.frozen_stages = Figure("a whole stage frozen, once awake", None)
        self.failures: list[str] = []
        self._say = say

    @property
    def figures(self) -> list[Figure]:
        """Those that have samples."""
        return [figure for figure in vars(self).values() if isinstance(figure, Figure) and figure.samples_s]

    async def try_it(self, round_of_it: Awaitable[None], what: str) -> None:
        """A round that goes wrong is told in the end; the others are measured all the same."""
        try:
            await round_of_it
        except (AssertionError, TimeoutError) as error:
            self.failures.append(f"{what}: {error}")
            self._say(f"FAILED  {what}: {error}")

    # --- control workers

    async def kill_control(self, stand: Stand, probe: Probe, victim: Worker) -> None:
        """Killed, and started again afterwards."""
        lines = await _lines_of(stand, probe, victim)
        began_s = time.monotonic()
        victim.kill()
        self._say(self.killed_control.add(await _first_answers_s(probe, lines, began_s)))
        victim.start()
        await stand.wait_settled(stand.controls)
        await asyncio.sleep(BETWEEN_S)

    async def freeze_control(self, stand: Stand, probe: Probe, victim: Worker) -> None:
        """Stopped for longer than its lease, then it wakes up and comes back."""
        lines = await _lines_of(stand, probe, victim)
        began_s = time.monotonic()
        frozen = asyncio.create_task(stand.freeze(victim, stand.lease_s + 2))
        self._say(self.frozen_control.add(await _first_answers_s(probe, lines, began_s)))
        await frozen
        woken_s = time.monotonic()
        await stand.wait_settled(stand.controls)
        self._say(self.woken_control.add(await _worst_waits_s(probe, lines, woken_s)))

    async def move_control(self, stand: Stand, probe: Probe, victim: Worker) -> None:
        """One leaves in order, then one joins; each after a quiet time to compare with."""
        self._say(self.quiet.add(await _worst_waits_s(probe, probe.lines, time.monotonic())))
        lines = await _lines_of(stand, probe, victim)
        others = [worker for worker in stand.controls if worker is not victim]
        began_s = time.monotonic()
        victim.signal(signal.SIGTERM)
        await stand.wait_settled(others)
        self._say(self.leaving_control.add(await _worst_waits_s(probe, lines, began_s)))
        status = await asyncio.to_thread(victim.end, 5.0)
        if status != 0:
            raise AssertionError(f"{victim.name} left with status {status}")
        began_s = time.monotonic()
        victim.start()
        await stand.wait_settled(stand.controls)
        lines = await _lines_of(stand, probe, victim)
        self._say(self.joining_control.add(await _worst_waits_s(probe, lines, began_s)))

    async def restart_server(self, stand: Stand, probe: Probe) -> None:
        """Killed and started again at once."""
        await asyncio.to_thread(stand.server.restart, crash=True)
        up_s = time.monotonic()
        self._say(self.server.add(await _first_answers_s(probe, probe.lines, up_s)))
        await stand.wait_settled(stand.controls)
        await asyncio.sleep(BETWEEN_S)

    # --- stage workers

    async def kill_stage(self, stand: Stand, probe: Probe, victim: Worker) -> None:
        """Killed; nothing takes its place."""
        await self._lose_stage(self.killed_stage, stand, probe, victim, lambda: asyncio.to_thread(victim.kill))

    async def freeze_stage(self, stand: Stand, probe: Probe, victim: Worker) -> None:
        """Stopped until its sessions are told, then it wakes up: a new life."""
        old = stand.id_of(victim)

        async def freeze() -> None:
            victim.signal(signal.SIGSTOP)

        await self._lose_stage(self.frozen_stage, stand, probe, victim, freeze)
        victim.signal(signal.SIGCONT)
        await _until(lambda: stand.id_of(victim) != old, f"{victim.name} did not begin a new life")

    async def freeze_stages(self, stand: Stand, probe: Probe, victim: Worker) -> None:
        """S86: all workers of a stage, for longer than the heartbeat time. The brake holds; nobody is told anything."""
        stage = victim.name.rpartition("-")[0]
        victims = [worker for worker in stand.stages if worker.name.startswith(stage)]
        await asyncio.gather(*(stand.freeze(worker, stand.heartbeat_s + 2) for worker in victims))
        woken_s = time.monotonic()
        await asyncio.sleep(BETWEEN_S)
        ended = [line.session_id for line in probe.lines if line.ended_s is not None]
        if ended:
            raise AssertionError(f"the brake did not hold for {len(ended)} of {len(probe.lines)} sessions")
        self._say(self.frozen_stages.add(await _first_answers_s(probe, probe.lines, woken_s, "append")))

    async def _lose_stage(
        self, figure: Figure, stand: Stand, probe: Probe, victim: Worker, strike: Callable[[], Awaitable[None]]
    ) -> None:
        told = await stand.fetch_sessions_of(victim)
        began_s = time.monotonic()
        await strike()
        lines = [line for line in probe.lines if line.session_id in told]
        await _until(lambda: all(line.ended_s is not None for line in lines), "not every session was told")
        await asyncio.sleep(0.5)
        wrong = [line.session_id for line in probe.lines if line.ended_s is not None and line not in lines]
        wrong += [line.session_id for line in lines if line.reason != "stage_lost"]
        if wrong:
            raise AssertionError(f"ended, or for another reason: {wrong}")
        self._say(figure.add(line.ended_s - began_s for line in lines if line.ended_s is not None))


async def _lines_of(stand: Stand, probe: Probe, owner: Worker) -> list[Line]:
    """The sessions that a control worker owns."""
    owners, worker_id = await stand.fetch_owners(), stand.id_of(owner)
    lines = [line for line in probe.lines if owners[line.partition] == worker_id]
    if not lines:
        raise AssertionError(f"{owner.name} ({worker_id}) owns no session: {owners}")
    return lines


async def _first_answers_s(probe: Probe, lines: Sequence[Line], began_s: float, op: str | None = None) -> list[float]:
    def answers() -> list[float | None]:
        return [probe.find_first_answer_s(line, began_s, op) for line in lines]

    await _until(lambda: None not in answers(), "not every session was answered")
    probe.check()
    return [answered_s - began_s for answered_s in answers() if answered_s is not None]


async def _worst_waits_s(probe: Probe, lines: Sequence[Line], from_s: float) -> list[float]:
    """The longest wait of each session from then until a while from now."""
    to_s = time.monotonic() + AFTER_S
    await asyncio.sleep(AFTER_S + 0.2)
    probe.check()
    return [probe.find_worst_s(line, from_s, to_s) for line in lines]


async def _until(holds: Callable[[], bool], otherwise: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{otherwise} within {PATIENCE_S:g} s")
        await asyncio.sleep(0.02)


async def measure_controls(measurement: Measurement, rounds: int, sessions: int, directory: Path) -> None:
    """Control workers and the server, all on one stand."""
    async with (
        Stand(directory / "control") as stand,
        Probe(stand.server.url, PARTITIONS, sessions) as probe,
    ):
        for number in range(rounds):
            victim = stand.controls[number % len(stand.controls)]
            await measurement.move_control(stand, probe, victim)
            await measurement.kill_control(stand, probe, victim)
            await measurement.freeze_control(stand, probe, victim)
            await measurement.restart_server(stand, probe)


async def measure_stages(measurement: Measurement, rounds: int, sessions: int, directory: Path) -> None:
    """Stage workers, each round on a stand of its own: the brake counts the losses of the last minute."""
    for number in range(rounds):
        for strike in (measurement.kill_stage, measurement.freeze_stage, measurement.freeze_stages):
            async with (
                Stand(directory / f"{strike.__name__}-{number}") as stand,
                Probe(stand.server.url, PARTITIONS, sessions) as probe,
            ):
                await asyncio.sleep(BETWEEN_S)
                victim = stand.stages[(2 * number) % len(stand.stages)]
                await measurement.try_it(strike(stand, probe, victim), f"{strike.__name__} {victim.name}")


async def measure(rounds: int, sessions: int, only: str | None, directory: Path, say: Say) -> Measurement:
    """Every kind, so many rounds each."""
    times = Stand(directory)
    measurement = Measurement(times.lease_s, times.heartbeat_s, say)
    if only != "stage":
        work = measure_controls(measurement, rounds, sessions, directory)
        await measurement.try_it(work, "control workers")
    if only != "control":
        await measure_stages(measurement, rounds, sessions, directory)
    return measurement


def tell(figures: Sequence[Figure]) -> list[str]:
    """The table."""
    lines = [f"{'':<34} rounds  samples    target    median       p99     worst"]
    for figure in figures:
        target = "" if figure.target_s is None else _ms(figure.target_s)
        met = "" if figure.target_s is None else "met" if figure.met else "MISSED"
        lines.append(
            f"{figure.kind:<34} {figure.rounds:>6} {len(figure.samples_s):>8} {target:>9} {_ms(figure.median_s):>9} "
            f"{_ms(figure.p99_s):>9} {_ms(figure.worst_s):>9}  {met}"
        )
    return lines


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.failover", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of each kind (default 3)")
    parser.add_argument("--sessions", type=int, default=SESSIONS, help=f"open at once (default {SESSIONS})")
    parser.add_argument("--keep", action="store_true", help="keep the logs")
    parser.add_argument("--only", choices=("control", "stage"), help="which kind of worker is struck")
    options = parser.parse_args(arguments)
    directory = Path(tempfile.mkdtemp(prefix="bargein-failover-"))
    began_s = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began_s:6.1f} s  {line}", flush=True)

    print(f"{options.rounds} rounds with {options.sessions} sessions; logs in {directory}", flush=True)
    measurement = asyncio.run(measure(options.rounds, options.sessions, options.only, directory, say))
    print("\n".join(("", *tell(measurement.figures))))
    if not options.keep:
        shutil.rmtree(directory, ignore_errors=True)
    far = [f for f in measurement.figures if f.target_s is not None and f.p99_s > FACTOR * f.target_s]
    for figure in far:
        print(f"{figure.kind}: p99 is more than {FACTOR:g} times the target")
    for failure in measurement.failures:
        print(f"FAILED  {failure}")
    return 1 if far or measurement.failures else 0


if __name__ == "__main__":
    # A signal ends the run through its `finally`s, so that nothing is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
