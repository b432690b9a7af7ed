"""`python -m tests.fuzz [--bodies N] [--seed N]`: a million bodies for the decoder and the owner.

Three quarters go through the real decoder and the real partitions in memory, a fifth through a control worker on a real
server, the rest are stage orders. Prints how far it is, every finding with the entry that led to it, what became of the
bodies, and last `N bodies, N findings`; exit status 1 if there are any.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import sys
import time

from tests.fuzz.damage import make_shots
from tests.fuzz.findings import Findings
from tests.fuzz.ground import LIMITS, PORTION, Ground
from tests.fuzz.orders import throw_orders
from tests.fuzz.served import LOAD, Served
from tests.servers import ValkeyServer

REST_EVERY = 20_000
TELL_EVERY_S = 10.0
SERVED, ORDERS = 0.20, 0.05


class Progress:
    """A line now and then."""

    def __init__(self, bodies: int, findings: Findings) -> None:
        """`bodies`: how many there will be."""
        self._bodies = bodies
        self._findings = findings
        self._began_s = self._told_s = time.monotonic()

    def tell(self, done: int) -> None:
        """So far."""
        now_s = time.monotonic()
        if now_s - self._told_s >= TELL_EVERY_S:
            self._told_s = now_s
            rate = done / (now_s - self._began_s)
            print(f"{done} of {self._bodies} bodies, {rate:.0f}/s, {self._findings.count} findings", flush=True)


def fuzz_memory(findings: Findings, seed: int, bodies: int, progress: Progress) -> None:
    """Through the decoder and partitions in memory."""
    findings.limits = LIMITS
    damage = make_shots(seed, findings.partitions)
    ground = Ground(findings, seed, damage.grammar.hear)
    shots = damage.shots()
    for done in range(0, bodies, PORTION):
        ground.throw(itertools.islice(shots, min(PORTION, bodies - done)))
        if done % REST_EVERY < PORTION:
            ground.rest()
        progress.tell(done)
    ground.rest()


async def fuzz_server(findings: Findings, seed: int, bodies: int, progress: Progress, before: int, url: str) -> float:
    """Through a control worker on a real server. How long the quiet sessions waited at most, in s."""
    damage = make_shots(seed + 1, findings.partitions)
    shots = damage.shots()
    async with Served(url, findings, damage.grammar.hear) as served:
        for done in range(0, bodies, LOAD):
            await served.throw(list(itertools.islice(shots, min(LOAD, bodies - done))))
            progress.tell(before + done)
        return served.slowest_s


def run(bodies: int, seed: int) -> Findings:
    """Everything, one after the other."""
    findings = Findings()
    log = logging.getLogger("bargein")
    log.addHandler(findings)
    log.propagate = False
    log.setLevel(logging.ERROR)
    served, orders = int(bodies * SERVED), int(bodies * ORDERS)
    memory = bodies - served - orders
    progress = Progress(bodies, findings)
    began_s = time.monotonic()
    fuzz_memory(findings, seed, memory, progress)
    memory_s = time.monotonic() - began_s
    throw_orders(findings, make_shots(seed + 2, findings.partitions), orders)
    began_s = time.monotonic()
    with ValkeyServer() as server:
        waited_s = asyncio.run(fuzz_server(findings, seed, served, progress, memory + orders, server.url))
    served_s = time.monotonic() - began_s
    for what, count in sorted(findings.seen.items()):
        print(f"{count:9} {what}")
    print(f"in memory {memory} in {memory_s:.0f} s, on a server {served} in {served_s:.0f} s, orders {orders}")
    print(f"slowest to decode: {findings.slowest_s * 1000:.1f} ms ({findings.slowest})")
    print(f"quiet sessions waited at most {waited_s:.2f} s behind {LOAD} others")
    log.removeHandler(findings)
    return findings


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Bodies for the decoder and the owner")
    parser.add_argument("--bodies", type=int, default=1_000_000, help="how many (default: a million)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed throws the same bodies at the decoder")
    options = parser.parse_args()
    findings = run(options.bodies, options.seed)
    for note in findings.notes:
        print("FINDING", note)
    print(f"{options.bodies} bodies, {findings.count} findings")
    return 1 if findings.count else 0


if __name__ == "__main__":
    sys.exit(main())
