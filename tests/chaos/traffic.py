"""The clients of a chaos run: one listener for all sessions, and the way of their commands into Redis.

Responsible for the history that the checker judges. Leaves what a producer says to `session.py`, the faults to
`faults.py`. Talks to Redis, directly and not through the client library, so that everything that was sent and seen is
in the record.

A command whose XADD has no answer is sent again until one comes, before anything later of that session: so the order of
`History.sent` is that of the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from typing import Any

import msgpack
from redis.asyncio import Redis
from redis.exceptions import RedisError

from control.store.keys import PartitionKeys, partition_of
from tests.chaos.history import History, Seen, Sent
from tests.chaos.session import Producer
from workers.cli.leaving import end_tasks

LINGER_S = 10.0
LOST = (RedisError, OSError, TimeoutError)
KIND = {b"reply": "reply", b"output": "output", b"lifecycle": "lifecycle"}
Entries = list[tuple[bytes, dict[bytes, bytes]]]


class Traffic:
    """All sessions of the run. `histories` is in the order of their opening."""

    def __init__(self, url: str, partitions: int, seed: int) -> None:
        self.histories: dict[str, History] = {}
        self.began_s = time.monotonic()
        self.stopping = asyncio.Event()  # no new sessions and no new input: the faults are over
        self.stopped_s = 0.0
        self.answers = 0
        self.errors: list[BaseException] = []  # of our own making
        self.tokens = itertools.count(1)
        self._partitions = partitions
        self._seed = seed
        self._numbers = itertools.count(1)
        self._redis = Redis.from_url(url, socket_timeout=5, socket_connect_timeout=2, protocol=3)
        self._listening: set[str] = set()
        self._read_to: dict[str, bytes] = {}
        self._sessions: dict[str, History] = {}  # by the name of their stream
        self._deaf = asyncio.Event()
        self._news: dict[str, asyncio.Event] = {}
        self._replied: dict[tuple[str, str], dict[str, Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.began_s

    @property
    def commands(self) -> int:
        return sum(len(history.sent) for history in self.histories.values())

    @property
    def unanswered(self) -> int:
        """Commands without any reply."""
        return self.commands - len(self._replied)

    def stop(self) -> None:
        """No new sessions; those that live are heard out and closed."""
        self.stopped_s = self.now_s
        self.stopping.set()

    async def produce(self, place: int) -> None:
        """One session after another, until told to stop."""
        choose = random.Random(f"{self._seed}/{place}")
        await asyncio.sleep(choose.random() * 2)
        while not self.stopping.is_set():
            producer = Producer(self, f"s{next(self._numbers)}", choose)
            self._listen_to(producer.history)
            await producer.live()
            self.follow(self._leave(producer.history))

    async def _leave(self, history: History) -> None:
        """Listen for a while to what may not come any more."""
        await asyncio.sleep(LINGER_S)
        self._listening.discard(self._stream(history))

    # --- listening

    async def listen(self) -> None:
        """Read every session's stream until `catch_up`."""
        while not self._deaf.is_set():
            if not self._listening:
                await asyncio.sleep(0.02)
                continue
            try:
                answer = await self._redis.xread({n: self._read_to[n] for n in self._listening}, count=500, block=100)
            except LOST:
                await asyncio.sleep(0.05)
                continue
            for name, batches in answer.items():
                for entries in batches:
                    await self._note(name.decode(), entries)

    async def catch_up(self, listening: asyncio.Future[None]) -> None:
        """End the listening, then read every stream to its end; nothing is written any more by now."""
        self._deaf.set()
        await listening
        for name in self._sessions:
            while True:
                try:
                    entries = await self._redis.xrange(name, b"(" + self._read_to[name], b"+", count=500)
                except LOST:
                    await asyncio.sleep(0.1)
                    continue
                if not entries:
                    break
                await self._note(name, entries)

    async def _note(self, name: str, entries: Entries) -> None:
        history = self._sessions[name]
        last = next((entry.n for entry in reversed(history.seen) if entry.n), 0)
        missed = False
        now_s = self.now_s
        for entry_id, fields in entries:
            entry = Seen(KIND[fields[b"t"]], int(fields[b"n"]), now_s, msgpack.unpackb(fields[b"b"]))
            begins = entry.n == 1 and history.find_life() is None
            if entry.n and entry.n != last + 1 and not begins and await self._is_cut(name, self._read_to[name]):
                missed = True
                if (life := history.find_life()) is not None:
                    history.trimmed.add(life)
            if missed and entry.kind != "reply":
                history.trimmed.add(entry.incarnation)
                missed = False
            last = entry.n or last
            self._read_to[name] = entry_id
            history.seen.append(entry)
            if entry.kind == "reply":
                self.answers += 1
                self._replied[history.session_id, entry.body["control_id"]] = entry.body
        self._news[history.session_id].set()

    async def _is_cut(self, name: str, after: bytes) -> bool:
        """Whether what came after `after` is gone because a life has ended: the stream begins later than that."""
        while True:
            try:
                first = await self._redis.xrange(name, count=1)
            except LOST:
                await asyncio.sleep(0.1)
                continue
            return not first or tuple(map(int, first[0][0].split(b"-"))) > tuple(map(int, after.split(b"-")))

    def _listen_to(self, history: History) -> None:
        name = self._stream(history)
        self.histories[history.session_id] = self._sessions[name] = history
        self._news[history.session_id] = asyncio.Event()
        self._read_to[name] = b"0-0"
        self._listening.add(name)

    def _stream(self, history: History) -> str:
        return PartitionKeys(partition_of(history.session_id, self._partitions)).events(history.session_id)

    def find_reply(self, session_id: str, control_id: str) -> dict[str, Any] | None:
        """The last reply, if any has come."""
        return self._replied.get((session_id, control_id))

    async def wait_news(self, session_id: str, timeout_s: float) -> None:
        """Until the session's listener has seen something, or the time is over."""
        event = self._news[session_id]
        event.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), timeout_s)

    # --- sending

    async def push(self, session_id: str, sent: Sent, fields: dict[Any, Any]) -> None:
        """XADD until it is answered."""
        name = PartitionKeys(partition_of(session_id, self._partitions)).commands
        while True:
            try:
                await self._redis.xadd(name, fields)
            except LOST:
                sent.deliveries += 1
                await asyncio.sleep(0.1)
                continue
            return

    def follow(self, work: Any) -> None:
        """Run it beside; `close` ends it."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.errors.append(error)

    async def close(self) -> None:
        await end_tasks(*self._tasks)
        await self._redis.aclose()
