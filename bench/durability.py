"""`python -m bench.durability`: what it costs that a commit survives more than the process that holds it.

The same traffic in each row: owners that commit 8 commands at a time (8 inputs removed, 8 states, 8 replies), once one
owner alone (latency) and once 16 at a time (throughput). Prints ratios to a server that persists nothing, since the
disk decides the rest; with WAIT and WAITAOF, each commit is followed by it in the same write. Not for CI.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from redis import Redis
from rich.console import Console
from rich.table import Table

from control.core import commands as c
from control.core import effects as e
from control.core.answers import Answers
from control.core.fence import Fence
from control.core.scene import Scene, Settings
from control.core.session import Session
from control.core.transitions import step
from control.store.commits import COMMANDS_KEY, Batch, read_outcome
from control.store.keys import PartitionKeys
from control.store.link import Link, make_pool
from control.store.scripts import script
from control.wire.stage import pack_config, unpack_config
from workers.embedded import ServerProcess, require_valkey_binary

SESSIONS = 8
OWNERS = 16
COMMITS, LEAST = 400, 5
RUN_S, WARM_S = 3.0, 0.5
HALF_EVENTS_BYTES = 512 * 1024
SETTINGS = Settings(stage_count=0, configure=None, pack_config=pack_config, unpack_config=unpack_config)

console = Console(width=None if sys.stdout.isatty() else 120)


@dataclass(frozen=True)
class Way:
    """One way to run the server. `after`: what follows each commit."""

    name: str
    fsync: str | None = None
    replica: bool = False
    after: tuple[str | int, ...] = ()


WAYS = (
    Way("no persistence"),
    Way("everysec", "everysec"),
    Way("always", "always"),
    Way("everysec, replica, min-replicas-to-write 1", "everysec", replica=True),
    Way("always, replica, min-replicas-to-write 1", "always", replica=True),
    Way("everysec, replica, WAIT 1", "everysec", replica=True, after=("WAIT", 1, 5000)),
    Way("always, replica, WAIT 1", "always", replica=True, after=("WAIT", 1, 5000)),
    Way("everysec, WAITAOF 1 0", "everysec", after=("WAITAOF", 1, 0, 5000)),
    Way("always, replica, WAITAOF 1 1", "always", replica=True, after=("WAITAOF", 1, 1, 5000)),
)


class Owner:
    """Owns a partition and commits what it decides, as a control worker does."""

    def __init__(self, link: Link, keys: PartitionKeys, after: Sequence[str | int]) -> None:
        self.link = link
        self._keys = keys
        self._after = [after] if after else []
        self._sessions: dict[str, Session | None] = {f"call-{n}": None for n in range(SESSIONS)}
        self._answers = {name: Answers() for name in self._sessions}
        self._token = ""
        self._revision = 0
        self._count = 0

    async def begin(self) -> None:
        """Take the partition and open the sessions."""
        answer = await self.link.run("acquire", [self._keys.owner], ["bench", 600_000, "r"])
        self._token, self._revision = answer[1].decode(), answer[2]
        await self.link.call("SCRIPT", "LOAD", script("commit").text)
        await self._commit([c.Open(control_id="open", session_id=s, fence=Fence(0, 0, 0, 0)) for s in self._sessions])

    async def append(self) -> float:
        """One commit of an append for each session; how long it took, in s."""
        self._count += 1
        fence = Fence(0, 0, 0, 0)
        return await self._commit(
            [
                c.Append(control_id=f"a{self._count}", session_id=s, fence=fence, mode="turn_commit_only")
                for s in self._sessions
            ]
        )

    async def _commit(self, events: Sequence[c.Open | c.Append]) -> float:
        adds = [("XADD", self._keys.commands, "*", "b", b"x" * 150) for _ in events]
        entries = await self.link.call_all(adds)
        batch = Batch(self._keys)
        for event, entry in zip(events, entries, strict=True):
            name = event.session_id
            answers = self._answers[name]
            scene = Scene(settings=SETTINGS, session_id=name, now_ms=1_000, answers=answers, choose_route=lambda: ())
            before = self._sessions[name]
            decision = step(scene, before, event)
            batch.add(name, before, decision)
            for effect in decision.effects:
                if isinstance(effect, e.Answer) and effect.remember is not None:
                    answers.remember(effect.remember)
            self._sessions[name] = decision.session
            batch.done(COMMANDS_KEY, entry.decode())
        names, argv = batch.arguments(self._token, self._revision, HALF_EVENTS_BYTES)
        commit: Any = ("EVALSHA", script("commit").sha, len(names), *names, *argv)
        began_s = time.perf_counter()
        answer, *_ = await self.link.call_all([commit, *self._after])
        took_s = time.perf_counter() - began_s
        outcome = read_outcome(answer)
        assert outcome.status == 0, outcome
        self._revision = outcome.revision
        return took_s


@contextmanager
def servers(way: Way) -> Generator[str]:
    """The URL of a fresh server that is run that way, its replica beside it."""
    words = [] if way.fsync is None else ["--appendfsync", way.fsync]
    words += ["--repl-diskless-sync-delay", "0"]
    with ExitStack() as stack:

        def start(*more: str) -> ServerProcess:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            server = ServerProcess(
                require_valkey_binary(), directory, persist=way.fsync is not None, args=[*words, *more]
            )
            server.start()
            stack.callback(server.kill)
            return server

        master = start()
        if way.replica:
            replica = start("--replicaof", "127.0.0.1", str(master.port))
            with Redis.from_url(replica.url) as client:
                while cast("Any", client.info("replication"))["master_link_status"] != "up":
                    time.sleep(0.02)
            with Redis.from_url(master.url) as client:
                client.config_set("min-replicas-to-write", 1)
        yield master.url


async def measure(url: str, way: Way) -> tuple[list[float], float]:
    """The latencies of one owner alone, in ms, and the commits a second of all of them at once."""
    pool = make_pool(url, timeout_s=10)
    owners = [Owner(Link(pool), PartitionKeys(n), way.after) for n in range(OWNERS)]
    for owner in owners:
        await owner.begin()
    warm_s = time.monotonic() + WARM_S
    while time.monotonic() < warm_s:
        await owners[0].append()
    alone_ms: list[float] = []
    until_s = time.monotonic() + 2 * RUN_S
    while len(alone_ms) < COMMITS and (time.monotonic() < until_s or len(alone_ms) < LEAST):
        alone_ms.append(await owners[0].append() * 1000)
    count, until_s = 0, time.monotonic() + RUN_S

    async def work(owner: Owner) -> None:
        nonlocal count
        while time.monotonic() < until_s:
            await owner.append()
            count += 1

    await asyncio.gather(*(work(owner) for owner in owners))
    for owner in owners:
        await owner.link.close()
    await pool.disconnect()
    return alone_ms, count / RUN_S


def flush_ms() -> float:
    """What it takes to write 4 KiB through to the disk, by the median."""
    took_s: list[float] = []
    with tempfile.TemporaryFile() as file:
        for _ in range(50):
            file.write(bytes(4096))
            file.flush()
            began_s = time.perf_counter()
            os.fsync(file.fileno())
            took_s.append(time.perf_counter() - began_s)
    return statistics.median(took_s) * 1000


def main() -> None:
    """Every way, and what it costs."""
    before_ms = flush_ms()
    table = Table("the server", "p50 ms", "p99 ms", "p50", "p99", "commits/s, 16 owners", "of the first")
    first: tuple[float, float, float] | None = None
    for way in WAYS:
        with servers(way) as url:
            alone_ms, rate = asyncio.run(measure(url, way))
        p50, p99 = statistics.median(alone_ms), statistics.quantiles(alone_ms, n=100)[98]
        first = first or (p50, p99, rate)
        table.add_row(
            way.name,
            f"{p50:.2f}",
            f"{p99:.2f}",
            f"{p50 / first[0]:.1f} x",
            f"{p99 / first[1]:.1f} x",
            f"{rate:.0f}",
            f"{rate / first[2]:.0%}",
        )
    console.print(table)
    console.print(f"a flush to the disk took {before_ms:.2f} ms before, {flush_ms():.2f} ms afterwards")


if __name__ == "__main__":
    main()
