"""Calls on every partition of a system, and what their event streams must look like afterwards.

Responsible for the traffic and for judging the streams: numbers without a gap, replies to every command and only one
to each, appends counted once, nothing older than the last interruption, one beginning and one end (I1, I4, I5, I10).
Talks to Redis through the product's own client, and reads the streams directly.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import msgspec
from redis import Redis

from bargein_client import AsyncBargein, AsyncSession, Options, Reply
from control.store.keys import PartitionKeys, partition_of

PARTITIONS = 16
FRAME = bytes(640)
PATIENT = Options(unreachable_after_s=40.0)
PATIENCE_S = 40.0


def names(count: int, partitions: Sequence[int] = range(PARTITIONS)) -> list[str]:
    """Session ids, `count` for each of the partitions."""
    found: dict[int, list[str]] = {partition: [] for partition in partitions}
    number = 0
    while any(len(ids) < count for ids in found.values()):
        session_id = f"call-{number}"
        ids = found.get(partition_of(session_id, PARTITIONS))
        if ids is not None and len(ids) < count:
            ids.append(session_id)
        number += 1
    return [session_id for ids in found.values() for session_id in ids]


class Call:
    """One session: it speaks, is interrupted, and speaks again. `replied_s`: when its commands were answered."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.keys = PartitionKeys(partition_of(session_id, PARTITIONS))
        self.replies: list[Reply] = []
        self.replied_s: list[float] = []

    def longest_s(self, since_s: float) -> float:
        """The longest time between two replies since a moment."""
        times = [at for at in self.replied_s if at >= since_s]
        return max(later - earlier for earlier, later in pairwise(times))

    async def run(self, client: AsyncBargein, over: asyncio.Event, pause_s: float) -> None:
        session = await client.open(self.session_id, incarnation=1)
        listening = asyncio.create_task(self._listen(session))
        while not over.is_set():
            first = await session.append(FRAME, wait=False)
            self._note(await session.append(FRAME, final=True))
            self._note(await first)
            await asyncio.sleep(pause_s)
            self._note(await session.interrupt())
        self._note(await session.close())
        await listening

    async def _listen(self, session: AsyncSession) -> None:
        async for _ in session.events():
            pass

    def _note(self, reply: Reply) -> None:
        assert reply.ok
        self.replies.append(reply)
        self.replied_s.append(time.monotonic())


class Traffic:
    """All calls, and the tasks that make them."""

    def __init__(self, calls: list[Call], running: list[asyncio.Task[None]]) -> None:
        self.calls = calls
        self._running = running

    def of(self, partitions: Sequence[int]) -> list[Call]:
        """The calls of some partitions."""
        return [call for call in self.calls if call.keys.partition in partitions]

    def replies_since(self, since_s: float) -> dict[str, int]:
        """How many commands of each call were answered since."""
        return {call.session_id: sum(at >= since_s for at in call.replied_s) for call in self.calls}

    async def until_all_replied(self, times: int = 2) -> float:
        """Wait until each call has had so many more replies; how long that took. Raises what ended a call."""
        began_s = time.monotonic()
        while any(count < times for count in self.replies_since(began_s).values()):
            late = [name for name, count in self.replies_since(began_s).items() if count < times]
            assert time.monotonic() - began_s < PATIENCE_S, f"no replies to {late}"
            ended, _ = await asyncio.wait(self._running, timeout=0.01, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
                raise AssertionError("a call has ended")
        return time.monotonic() - began_s


@asynccontextmanager
async def traffic(url: str, count: int = 1, pause_s: float = 0.05) -> AsyncGenerator[Traffic]:
    """`count` calls a partition, from one client; at the end each is closed."""
    over = asyncio.Event()
    calls = [Call(session_id) for session_id in names(count)]
    async with AsyncBargein(url, options=PATIENT) as client, asyncio.timeout(110):
        running = [asyncio.create_task(call.run(client, over, pause_s)) for call in calls]
        try:
            under_way = Traffic(calls, running)
            await under_way.until_all_replied(1)
            yield under_way
            over.set()
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


def judge(call: Call, where: Redis) -> list[str]:
    """What is wrong with a closed call's stream; empty if nothing is. `where`: a client of the server that has it."""
    entries: Any = where.xrange(call.keys.events(call.session_id))
    said = [(fields[b"t"].decode(), int(fields[b"n"]), msgspec.msgpack.decode(fields[b"b"])) for _, fields in entries]
    wrong: list[str] = []
    numbers = [n for _, n, _ in said]
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        wrong.append(f"numbers: {numbers}")
    epoch = 0
    outputs: set[tuple[str, int, int]] = set()
    for kind, n, body in said:
        if kind == "lifecycle" and body["event"] == "interrupted":
            epoch = body["fence"]["epoch"]
        if kind == "output":
            if body["fence"]["epoch"] < epoch:
                wrong.append(f"I1: output {n} of epoch {body['fence']['epoch']} after epoch {epoch} began")
            name = (body["request_id"], body["stage_id"], body["seq"])
            if name in outputs:
                wrong.append(f"output {name} twice")
            outputs.add(name)
    answers: dict[str, list[tuple[Any, ...]]] = {}
    for kind, _, body in said:
        if kind == "reply":
            answers.setdefault(body["control_id"], []).append((body["ok"], body["code"], body["detail"]))
    wrong += [
        f"I4: {name} was answered {found}" for name, found in answers.items() if any(a != found[0] for a in found)
    ]
    appends: dict[int, list[int]] = {}
    for reply in call.replies:
        if reply.op == "append":
            assert reply.fence is not None
            appends.setdefault(reply.fence.epoch, []).append(reply.detail["seq"])
    wrong += [f"I5: epoch {e} counted {found}" for e, found in appends.items() if sorted(found) != [1, 2]]
    events = [body["event"] for kind, _, body in said if kind == "lifecycle"]
    ends = [body for kind, _, body in said if kind == "lifecycle" and body["event"] in {"closed", "expired"}]
    if [end["reason"] for end in ends] != ["client_close"] or events[-1] != "closed":
        wrong.append(f"I10: ended with {ends}, after {events[-4:]}")
    return [f"{call.session_id}: {each}" for each in wrong]
