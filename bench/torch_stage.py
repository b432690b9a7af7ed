"""`python -m bench.torch_stage --device cuda`: how many live sessions one torch stage serves, and how soon it lets go.

Responsible for driving the torch engine as a stage worker does, through its contract, without Redis: so it runs where
only torch and the project's few compiled packages are. Sessions stream speech in real time; between two steps of the
load some are interrupted and begin anew. Runs models. Exit status 1 if an abort was not confirmed or left something.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from control.core.fence import Fence
from control.core.requests import request_id
from stages.engine import Submission
from stages.torch_engine import TorchEngine

if TYPE_CHECKING:
    from stages.engine import Output

FRAME_S = 0.020
FRAME = bytes(640)
INTERRUPTED = 0.2  # of the sessions, in each step
STEPS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
LATE_MS = 2 * 1000 * FRAME_S  # an answer that comes later than this is a gap in the speech


@dataclass
class Ear:
    """The engine's port: when each output came, by request."""

    came_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    troubles: list[str] = field(default_factory=list[str])

    def emit(self, output: Output) -> None:
        """See `EnginePort`."""
        self.came_s.setdefault(output.request_id, []).append(time.perf_counter())

    def fail(self, request_id: str, message: str) -> None:
        """See `EnginePort`."""
        self.troubles.append(f"{request_id}: {message}")

    def died(self, message: str) -> None:
        """See `EnginePort`."""
        self.troubles.append(message)


@dataclass
class Session:
    """A caller: streams a frame every 20 ms, and is interrupted when told to."""

    name: str
    engine: TorchEngine
    epoch: int = 0
    sent_s: list[float] = field(default_factory=list[float])

    @property
    def request_id(self) -> str:
        """Of the epoch that it is in."""
        return request_id(self.name, 0, self.epoch, 0)

    async def say(self) -> None:
        """Another frame."""
        submission = Submission(
            request_id=self.request_id,
            session_id=self.name,
            stage_id=0,
            fence=Fence(0, self.epoch, 0, 0),
            seq=len(self.sent_s) + 1,
            turn_seq=len(self.sent_s) + 1,
            mode="append_audio_chunk",
            prompt=FRAME,
            final=False,
            resumed=bool(self.sent_s),
        )
        self.sent_s.append(time.perf_counter())
        await self.engine.submit(submission)

    async def interrupt(self) -> float:
        """Abort and begin anew; how long the abort took, in ms."""
        began_s = time.perf_counter()
        await self.engine.abort(self.request_id)
        took_ms = (time.perf_counter() - began_s) * 1000
        self.epoch += 1
        self.sent_s = []
        return took_ms


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else 0.0


async def step(engine: TorchEngine, ear: Ear, count: int, seconds: float) -> dict[str, float]:
    """`count` sessions for so long; the figures."""
    sessions = [Session(f"step{count}-{number}", engine) for number in range(count)]
    missed, aborts_ms, tasks = engine.load().missed_ticks, list[float](), list[asyncio.Task[float]]()
    began_s = time.perf_counter()
    waits_ms: list[float] = []
    for tick in range(int(seconds / FRAME_S)):
        due_s = began_s + tick * FRAME_S
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        for number, session in enumerate(sessions):
            # Spread over the run, a few at a time, in the middle of their speech.
            if session.sent_s and (tick * 7 + number) % int(1 / INTERRUPTED * seconds / FRAME_S) == 0:
                waits_ms += _waits_ms(session, ear)
                tasks.append(asyncio.create_task(session.interrupt()))
        if tasks:
            aborts_ms += await asyncio.gather(*tasks)
            tasks.clear()
        for session in sessions:
            await session.say()
    await asyncio.sleep(4 * FRAME_S)
    load = engine.load()
    for session in sessions:
        waits_ms += _waits_ms(session, ear)
        aborts_ms.append(await session.interrupt())
    lasted_s = time.perf_counter() - began_s
    return {
        "sessions": count,
        "frames": len(waits_ms) / lasted_s,
        "p50": percentile(waits_ms, 0.5),
        "p99": percentile(waits_ms, 0.99),
        "missed": load.missed_ticks - missed,
        "gaps": sum(wait > LATE_MS for wait in waits_ms),
        "abort50": percentile(aborts_ms, 0.5),
        "abort99": percentile(aborts_ms, 0.99),
        "memory": load.memory_bytes / 1e6,
        "left": engine.load().slots_used,
    }


def _waits_ms(session: Session, ear: Ear) -> list[float]:
    came_s = ear.came_s.pop(session.request_id, [])
    return [(came - sent) * 1000 for sent, came in zip(session.sent_s, came_s, strict=False)]


async def run(options: argparse.Namespace) -> int:
    """The exit status."""
    engine = TorchEngine(
        {
            "module": "bench.talker:Talker",
            "module_options": {"hidden": options.hidden, "layers": options.layers},
            "device": options.device,
            "num_threads": options.threads,
            "budget_ms": 0.8 * 1000 * FRAME_S,
            "max_batch": 4096,
        }
    )
    ear = Ear()
    await engine.start(ear)
    print(f"{options.device}, {options.layers} layers of {options.hidden}; frames of {FRAME_S * 1000:g} ms", flush=True)
    head = "sessions  frames/s  latency p50 / p99 ms  missed ticks  gaps  abort p50 / p99 ms  state MB"
    print(head, flush=True)
    status, most = 0, 0
    for count in STEPS:
        if count > options.most:
            break
        told: dict[str, Any] = await step(engine, ear, count, options.seconds)
        print(
            f"{count:8d}  {told['frames']:8.0f}  {told['p50']:11.2f} / {told['p99']:6.2f}  {told['missed']:12.0f}  "
            f"{told['gaps']:4.0f}  {told['abort50']:9.2f} / {told['abort99']:6.2f}  {told['memory']:8.2f}",
            flush=True,
        )
        if told["left"]:
            print(f"{told['left']} requests were left after their aborts")
            status = 1
        if told["gaps"] > 0.01 * told["frames"] * options.seconds:
            break
        most = count
    await engine.stop()
    for trouble in ear.troubles[:5]:
        print(f"trouble: {trouble}")
        status = 1
    print(f"{most} sessions at once without gaps in their speech")
    return status


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.torch_stage", description=__doc__)
    parser.add_argument("--device", default="cpu", help="as torch writes it: cpu, cuda, cuda:1")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each step (default 4)")
    parser.add_argument("--most", type=int, default=4096, help="sessions in the last step")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
