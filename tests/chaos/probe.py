"""Steady small commands on many sessions, and how long each waited for its answer.

Responsible for the figures of a failover run: every session sends a touch or a short append each 20 to 50 ms, without
waiting for the one before, so that a gap in service shows in what was sent during it. Leaves what happens to the
processes to `failover.py`. Talks to Redis. Units: `_s` seconds on this process's monotonic clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import random
import time
from dataclasses import dataclass, field
from typing import Any

import msgpack
from redis.asyncio import Redis
from redis.exceptions import RedisError

from control.store.keys import PartitionKeys, partition_of
from workers.cli.leaving import end_tasks

EVERY_S = (0.02, 0.05)
APPEND_EVERY = 6  # one command in so many is an append
TOGETHER_S = 0.001  # what is due within this goes in one write
OPEN_S = 20.0
LOST = (RedisError, OSError, TimeoutError)


@dataclass(slots=True)
class Ask:
    """A command: when it was sent and, once it is, answered. `code`: of a refusal."""

    op: str
    sent_s: float
    answered_s: float | None = None
    code: str | None = None


@dataclass(slots=True)
class Line:
    """One session: its commands in the order of sending, and how it ended, if it has."""

    session_id: str
    partition: int
    asks: dict[str, Ask] = field(default_factory=dict)
    read_to: bytes = b"0-0"
    opened: bool = False
    ended_s: float | None = None
    reason: str | None = None


class Probe:
    """`async with Probe(...)`: sessions are open inside, and the traffic runs."""

    def __init__(self, url: str, partitions: int, sessions: int, *, name: str = "p") -> None:
        self.lines: list[Line] = []
        for number in range(sessions):
            session_id = f"{name}{number}"
            self.lines.append(Line(session_id, partition_of(session_id, partitions)))
        self._redis = Redis.from_url(url, socket_timeout=5, socket_connect_timeout=2, protocol=3)
        self._streams = {PartitionKeys(line.partition).events(line.session_id).encode(): line for line in self.lines}
        self._choose = random.Random(name)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Probe:
        await self._send([(line, "open", f"{line.session_id}.open") for line in self.lines])
        self._tasks.append(asyncio.create_task(self._listen()))
        deadline_s = time.monotonic() + OPEN_S
        while not all(line.opened for line in self.lines):
            await asyncio.sleep(0.05)
            if time.monotonic() > deadline_s:
                closed = sum(not line.opened for line in self.lines)
                raise TimeoutError(f"{closed} of {len(self.lines)} sessions were not open after {OPEN_S:g} s")
        self._tasks.append(asyncio.create_task(self._ask_steadily()))
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(*self._tasks)
        await self._redis.aclose()

    def check(self) -> None:
        """Raise what has ended the traffic, if anything has."""
        for task in self._tasks:
            if task.done():
                task.result()

    # --- figures

    def find_first_answer_s(self, line: Line, after_s: float, op: str | None = None) -> float | None:
        """When a command (of that kind) that was sent after that was answered first, and not refused."""
        answers = [
            ask.answered_s
            for ask in line.asks.values()
            if ask.sent_s > after_s and ask.answered_s is not None and ask.code is None and op in (None, ask.op)
        ]
        return min(answers, default=None)

    def find_worst_s(self, line: Line, from_s: float, to_s: float) -> float:
        """The longest wait of what was sent in that time; what is unanswered waits until now."""
        now_s = time.monotonic()
        waits = [(a.answered_s or now_s) - a.sent_s for a in line.asks.values() if from_s <= a.sent_s <= to_s]
        return max(waits, default=0.0)

    # --- traffic

    async def _ask_steadily(self) -> None:
        due = [(time.monotonic() + self._choose.uniform(*EVERY_S), index) for index in range(len(self.lines))]
        heapq.heapify(due)
        count = 0
        while due:
            await asyncio.sleep(max(0.0, due[0][0] - time.monotonic()))
            now_s = time.monotonic()
            batch: list[tuple[Line, str, str]] = []
            while due and due[0][0] <= now_s + TOGETHER_S:
                _, index = heapq.heappop(due)
                line = self.lines[index]
                if line.ended_s is None:
                    count += 1
                    op = "append" if count % APPEND_EVERY == 0 else "touch"
                    batch.append((line, op, f"{line.session_id}.{count}"))
                    heapq.heappush(due, (now_s + self._choose.uniform(*EVERY_S), index))
            with contextlib.suppress(*LOST):
                await self._send(batch)

    async def _send(self, batch: list[tuple[Line, str, str]]) -> None:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for line, op, control_id in batch:
                pipeline.xadd(PartitionKeys(line.partition).commands, {"b": _body(line.session_id, op, control_id)})
            sent_s = time.monotonic()
            await pipeline.execute()
        # Only what the server has taken is waited for.
        for line, op, control_id in batch:
            line.asks.setdefault(control_id, Ask(op, sent_s)).sent_s = sent_s

    async def _listen(self) -> None:
        while True:
            names: dict[Any, Any] = {name: line.read_to for name, line in self._streams.items()}
            try:
                answer = await self._redis.xread(names, block=200)
            except LOST:
                await asyncio.sleep(0.01)
                continue
            now_s = time.monotonic()
            for name, batches in answer.items():
                for entries in batches:
                    for entry_id, fields in entries:
                        self._note(self._streams[name], fields, now_s)
                        self._streams[name].read_to = entry_id

    def _note(self, line: Line, fields: dict[bytes, bytes], now_s: float) -> None:
        if fields[b"t"] == b"output":
            return
        body = msgpack.unpackb(fields[b"b"])
        if fields[b"t"] == b"reply":
            # The answer may be here before the sender knows that it has sent.
            ask = line.asks.setdefault(body["control_id"], Ask(body["op"], now_s))
            if ask.answered_s is None:
                ask.answered_s, ask.code = now_s, body["code"]
        elif body["event"] == "opened":
            line.opened = True
        elif body["event"] in ("closed", "expired"):
            line.ended_s, line.reason = now_s, body.get("reason")


def _body(session_id: str, op: str, control_id: str) -> bytes:
    body: dict[str, Any] = {
        "v": 1,
        "op": op,
        "control_id": control_id,
        "session_id": session_id,
        "fence": {"incarnation": 1, "epoch": 0, "turn_id": 0, "response_seq": 0},
    }
    if op == "open":
        body["capabilities"] = {"input_modes": ["append_tokens"]}
    elif op == "touch":
        body["activity"] = "heartbeat"
    else:
        body |= {"mode": "append_tokens", "payload": [1]}
    packed: Any = msgpack.packb(body)
    return packed
