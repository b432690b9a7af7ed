"""`python -m bench`: what a command costs, and how long a barge-in takes, against bare loops in the same run.

Prints ratios, since the machine decides the rest. The whole mix is what a session does: open, 8 appends each accepted
by a stage, barge-in, close; durable (append-only file, fsync every second), 100 sessions at a time.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from bench.core import core_cost_us
from control.store.keys import PartitionKeys, partition_of
from control.store.link import Link, make_pool
from workers.embedded import EmbeddedServer

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder().decode

SESSIONS = 100
APPENDS = 8
ROUNDS = 8
COMMANDS_A_SESSION = APPENDS + 3
# A command's inputs at the control worker: appends come back as accepted, the barge-in as cleaned, the open as placed.
INPUTS_A_SESSION = COMMANDS_A_SESSION + APPENDS + 1 + 1
OPEN_SESSIONS = 1_000
BARGE_INS = 400
BACKGROUND_APPENDS_A_S = 200

console = Console(width=None if sys.stdout.isatty() else 120)


class Child:
    """A process of the benchmark; `cpu_s` is what it has used so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: dict[str, float] = {}

    @property
    def cpu_s(self) -> float:
        """User and system time, from the kernel."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def collect(self) -> None:
        """Remember `name time` lines."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            name, _, at = line.decode().rpartition(" ")
            self.lines[name] = float(at)


@asynccontextmanager
async def child(*arguments: str, ready: bool = True) -> AsyncGenerator[Child]:
    """A Python module as a process, killed at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *arguments, stdout=asyncio.subprocess.PIPE, stderr=None
    )
    made = Child(process)
    reading = None
    try:
        if ready:
            assert process.stdout is not None
            assert (await process.stdout.readline()).strip() == b"ready"
            reading = asyncio.create_task(made.collect())
        yield made
    finally:
        if reading is not None:
            reading.cancel()
        process.kill()
        await process.wait()


def command(session_id: str, control_id: str, op: str, epoch: int = 0, **fields: Any) -> bytes:
    """A command's body."""
    fence = {"incarnation": 0, "epoch": epoch, "turn_id": 0, "response_seq": 0}
    return encode({"v": 1, "op": op, "session_id": session_id, "control_id": control_id, "fence": fence, **fields})


async def until(left: Callable[[], Awaitable[int]]) -> None:
    """Wait until nothing is left, 10 s at most."""
    async with asyncio.timeout(10):
        while await left():  # noqa: ASYNC110  nobody there could set an event
            await asyncio.sleep(0.005)


async def missing_lines(process: Child) -> int:
    """How many barge-ins have not come out at the other end."""
    return BARGE_INS - len(process.lines)


class Producer:
    """Sends commands of many sessions in one write and waits until a given number of replies has come."""

    def __init__(self, url: str, partitions: int) -> None:
        self.partitions = partitions
        pool = make_pool(url, name="bench")
        self.link, self.listener = Link(pool), Link(pool)
        self.positions: dict[str, str] = {}

    def entry(self, session_id: str, body: bytes, payload: bytes | None = None) -> tuple[Any, ...]:
        """The XADD of a command."""
        keys = PartitionKeys(partition_of(session_id, self.partitions))
        extra = () if payload is None else ("p", payload)
        return ("XADD", keys.commands, "*", "b", body, *extra)

    def events(self, session_id: str) -> str:
        """The session's events stream."""
        return PartitionKeys(partition_of(session_id, self.partitions)).events(session_id)

    async def all_ok(self, sessions: Sequence[str], replies: int) -> None:
        """Wait for so many good replies from every session."""
        missing = dict.fromkeys(sessions, replies)
        while missing:
            names = [self.events(s) for s in missing]
            by_name = dict(zip((n.encode() for n in names), missing, strict=True))
            last = [self.positions.get(s, "0-0") for s in missing]
            answer = await self.listener.call("XREAD", "BLOCK", 5000, "STREAMS", *names, *last)
            assert answer, f"no replies within 5 s, {len(missing)} sessions wait"
            for name, entries in answer:
                session_id = by_name[name]
                for entry_id, fields in entries:
                    self.positions[session_id] = entry_id.decode()
                    if fields[1] != b"reply":
                        continue
                    reply = decode(fields[5])
                    assert reply["ok"], reply
                    missing[session_id] -= 1
                if missing.get(session_id) == 0:
                    del missing[session_id]


async def whole_mix(url: str, partitions: int, worker: Child) -> tuple[float, float]:
    """CPU µs of the worker's process a command, and commands a second."""
    producer = Producer(url, partitions)
    cpu_s = started = 0.0
    for round_ in range(ROUNDS + 1):
        if round_ == 1:  # the first one warms up
            cpu_s, started = worker.cpu_s, time.monotonic()
        sessions = [f"mix-{partitions}-{round_}-{n}" for n in range(SESSIONS)]
        capabilities = {"input_modes": ["append_tokens"]}
        await producer.link.call_all(
            [producer.entry(s, command(s, "o", "open", capabilities=capabilities)) for s in sessions]
        )
        await producer.all_ok(sessions, 1)
        for n in range(APPENDS):
            bodies = [(s, command(s, f"a{n}", "append", mode="append_tokens")) for s in sessions]
            await producer.link.call_all([producer.entry(s, b, b"\x93\x01\x02\x03") for s, b in bodies])
        await producer.all_ok(sessions, APPENDS)
        after = {"incarnation": 0, "epoch": 1, "turn_id": 1, "response_seq": 0}
        await producer.link.call_all(
            [producer.entry(s, command(s, "b", "signal", event="barge_in", next_fence=after)) for s in sessions]
        )
        await producer.all_ok(sessions, 1)
        close = [(s, command(s, "c", "close", epoch=1)) for s in sessions]
        closes = [encode({**decode(b), "fence": after}) for _, b in close]
        await producer.link.call_all([producer.entry(s, b) for (s, _), b in zip(close, closes, strict=True)])
        await producer.all_ok(sessions, 1)
    commands = ROUNDS * SESSIONS * COMMANDS_A_SESSION
    elapsed_s = time.monotonic() - started
    return (worker.cpu_s - cpu_s) / commands * 1e6, commands / elapsed_s


async def bare_loop(url: str) -> float:
    """CPU µs of the bare loop for an input."""
    async with child("bench.bare", "loop", url) as worker:
        producer = Producer(url, 1)
        inputs, cpu_s = 0, 0.0
        for round_ in range(ROUNDS + 1):
            if round_ == 1:
                inputs, cpu_s = 0, worker.cpu_s
            for n in range(COMMANDS_A_SESSION):
                bodies = [command(f"bare-{s}", f"{n}", "append", mode="append_tokens") for s in range(SESSIONS)]
                await producer.link.call_all([("XADD", "bare:in", "*", "b", body) for body in bodies])
                inputs += SESSIONS
            await until(lambda: producer.link.call("XLEN", "bare:in"))
        return (worker.cpu_s - cpu_s) / inputs * 1e6


async def barge_ins(url: str, partitions: int, stage: Child) -> list[float]:
    """ms from a producer's XADD to the abort at the stage, with open sessions and appends in the background."""
    producer, background = Producer(url, partitions), Producer(url, partitions)
    capabilities = {"input_modes": ["append_tokens"]}
    others = [f"open-{n}" for n in range(OPEN_SESSIONS)]
    timed = [f"timed-{n}" for n in range(BARGE_INS)]
    for group in (others, timed):
        for at in range(0, len(group), SESSIONS):
            part = group[at : at + SESSIONS]
            opens = [producer.entry(s, command(s, "o", "open", capabilities=capabilities)) for s in part]
            await producer.link.call_all(opens)
            await producer.all_ok(part, 1)
    for at in range(0, BARGE_INS, SESSIONS):
        part = timed[at : at + SESSIONS]
        appends = [producer.entry(s, command(s, "a", "append", mode="append_tokens"), b"\x90") for s in part]
        await producer.link.call_all(appends)
        await producer.all_ok(part, 1)

    async def keep_appending() -> None:
        n = 0
        while True:
            session_id = others[n % len(others)]
            body = command(session_id, f"a{n}", "append", mode="append_tokens")
            await background.link.call(*background.entry(session_id, body, bytes(640)))
            n += 1
            await asyncio.sleep(1 / BACKGROUND_APPENDS_A_S)

    noise = asyncio.create_task(keep_appending())
    sent: dict[str, float] = {}
    after = {"incarnation": 0, "epoch": 1, "turn_id": 1, "response_seq": 0}
    for session_id in timed:
        body = command(session_id, "b", "signal", event="barge_in", next_fence=after)
        sent[session_id] = time.monotonic()
        await producer.link.call(*producer.entry(session_id, body))
        await asyncio.sleep(0.01)
    await until(lambda: missing_lines(stage))
    noise.cancel()
    return [(stage.lines[s] - at) * 1000 for s, at in sent.items()]


async def bare_relay(url: str) -> list[float]:
    """The same through a bare relay."""
    async with child("bench.bare", "relay", url), child("bench.bare", "sink", url) as sink:
        producer = Producer(url, 1)
        sent: dict[str, float] = {}
        for n in range(BARGE_INS):
            sent[f"r{n}"] = time.monotonic()
            await producer.link.call("XADD", "bare:relay", "*", "b", f"r{n}")
            await asyncio.sleep(0.01)
        await until(lambda: missing_lines(sink))
        return [(sink.lines[s] - at) * 1000 for s, at in sent.items()]


@asynccontextmanager
async def system(partitions: int) -> AsyncGenerator[tuple[str, Child, Child]]:
    """A fresh server, one stage, one control worker that owns everything."""
    with tempfile.TemporaryDirectory() as directory:
        server = EmbeddedServer()
        url = await server.start(Path(directory), persist=True)
        try:
            async with (
                child("bench.stage", url, str(partitions), "bench-stage") as stage,
                child("bench.worker", url, str(partitions)) as worker,
            ):
                yield url, stage, worker
        finally:
            await server.stop()


async def main() -> None:
    table = Table("what", "measured", "ratio")
    with console.status("starting") as status:

        def now(what: str) -> None:
            status.update(what)
            if not console.is_terminal:
                print(f"measuring {what} ...", file=sys.stderr, flush=True)

        now("the core alone")
        table.add_row("core alone, µs a command", f"{core_cost_us():.1f}", "")
        async with system(1) as (url, _, worker):
            now("the whole mix in 1 partition")
            one_us, one_rate = await whole_mix(url, 1, worker)
            now("a bare loop")
            bare_us = await bare_loop(url)
        async with system(16) as (url, _, worker):
            now("the whole mix in 16 partitions")
            many_us, many_rate = await whole_mix(url, 16, worker)
        async with system(16) as (url, stage, _):
            now("barge-ins, 1,000 sessions open")
            times = await barge_ins(url, 16, stage)
            now("a bare relay")
            relayed = await bare_relay(url)
    inputs = INPUTS_A_SESSION / COMMANDS_A_SESSION
    table.add_row("bare loop, CPU µs an input", f"{bare_us:.1f}", "1")
    table.add_row("1 partition, CPU µs an input", f"{one_us / inputs:.1f}", f"{one_us / inputs / bare_us:.2f} of bare")
    table.add_row("1 partition, CPU µs a command", f"{one_us:.1f}", "")
    table.add_row("16 partitions, CPU µs a command", f"{many_us:.1f}", f"{many_us / one_us:.2f} of 1 partition")
    table.add_row("commands a second, 1 and 16 partitions", f"{one_rate:,.0f}   {many_rate:,.0f}", "")
    for name, at in (("p50", 0.50), ("p99", 0.99)):
        ours, bare = _quantile(times, at), _quantile(relayed, at)
        table.add_row(
            f"barge-in, XADD to the abort at the stage, {name} ms", f"{ours:.2f}", f"{ours / bare:.2f} of relay"
        )
    table.add_row(
        "bare two-hop relay, p50 and p99 ms", f"{_quantile(relayed, 0.5):.2f}   {_quantile(relayed, 0.99):.2f}", "1"
    )
    console.print(table)


def _quantile(values: list[float], at: float) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[round(at * 100) - 1]


if __name__ == "__main__":
    asyncio.run(main())
