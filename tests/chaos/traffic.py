"""The clients of a chaos run: producers that open, speak, interrupt and close, and one listener for all their sessions.

Responsible for the history that the checker judges. Leaves the faults to `faults.py`. Talks to Redis, directly and not
through the client library, so that everything that was sent and seen is in the record.

A command whose XADD has no answer is sent again until one comes, before anything later of that session: so the order of
`History.sent` is that of the stream. One without a reply for `RESEND_S` is sent again with the same control_id.
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

RESEND_S = 3.0
AGAIN_S = 0.3
LINGER_S = 10.0
SPOKEN_S = 12.0  # after the faults, whatever was accepted must have been said
LOST = (RedisError, OSError, TimeoutError)
KIND = {b"reply": "reply", b"output": "output", b"lifecycle": "lifecycle"}


class Traffic:
    """All sessions of the run. `histories` is in the order of their opening."""

    def __init__(self, url: str, partitions: int, seed: int) -> None:
        self.histories: dict[str, History] = {}
        self.began_s = time.monotonic()
        self.stopping = asyncio.Event()  # no new sessions and no new input: the faults are over
        self.stopped_s = 0.0
        self.answers = 0
        self.errors: list[BaseException] = []  # of our own making
        self._partitions = partitions
        self._seed = seed
        self._numbers = itertools.count(1)
        self._tokens = itertools.count(1)
        self._redis = Redis.from_url(url, socket_timeout=5, socket_connect_timeout=2, protocol=3)
        self._listening: dict[str, tuple[History, bytes]] = {}
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
        return sum(
            1
            for history in self.histories.values()
            for control_id in history.sent
            if (history.session_id, control_id) not in self._replied
        )

    def stop(self) -> None:
        """No new sessions; those that live are heard out and closed."""
        self.stopped_s = self.now_s
        self.stopping.set()

    async def produce(self, place: int) -> None:
        """One session after another, until told to stop."""
        choose = random.Random(f"{self._seed}/{place}")
        await asyncio.sleep(choose.random() * 2)
        while not self.stopping.is_set():
            session = _Session(self, f"s{next(self._numbers)}", choose)
            await session.live()
            self.follow(self._leave(session.history))

    async def _leave(self, history: History) -> None:
        """Listen for a while to what may not come any more."""
        await asyncio.sleep(LINGER_S)
        self._listening.pop(self._stream(history), None)

    # --- listening

    async def listen(self) -> None:
        """Read every session's stream until cancelled."""
        while True:
            if not self._listening:
                await asyncio.sleep(0.02)
                continue
            try:
                answer = await self._redis.xread(
                    {name: after for name, (_, after) in self._listening.items()}, count=500, block=100
                )
            except LOST:
                await asyncio.sleep(0.05)
                continue
            for name, batches in answer.items():
                for entries in batches:
                    await self._note(name.decode(), entries)

    async def _note(self, name: str, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> None:
        history, after = self._listening.get(name, (None, b""))
        if history is None:
            return
        last = next((entry.n for entry in reversed(history.seen) if entry.n), 0)
        now_s = self.now_s
        for entry_id, fields in entries:
            entry = Seen(KIND[fields[b"t"]], int(fields[b"n"]), now_s, msgpack.unpackb(fields[b"b"]))
            if entry.n > last + 1 and not history.trimmed:
                history.trimmed = await self._is_cut(name, after)
            last = entry.n or last
            after = entry_id
            history.seen.append(entry)
            if entry.kind == "reply":
                self.answers += 1
                self._replied[history.session_id, entry.body["control_id"]] = entry.body
        self._listening[name] = (history, after)
        self._news[history.session_id].set()

    async def _is_cut(self, name: str, after: bytes) -> bool:
        """Whether what came after `after` is gone because the session has ended: the stream begins later than that."""
        while True:
            try:
                first = await self._redis.xrange(name, count=1)
            except LOST:
                await asyncio.sleep(0.1)
                continue
            return not first or tuple(map(int, first[0][0].split(b"-"))) > tuple(map(int, after.split(b"-")))

    def listen_to(self, history: History) -> None:
        name = self._stream(history)
        self.histories[history.session_id] = history
        self._news[history.session_id] = asyncio.Event()
        self._listening[name] = (history, b"0-0")

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

    async def push(self, history: History, sent: Sent, fields: dict[Any, Any]) -> None:
        """XADD until it is answered."""
        name = PartitionKeys(partition_of(history.session_id, self._partitions)).commands
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
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._redis.aclose()


class _Session:
    """One session's producer."""

    def __init__(self, traffic: Traffic, session_id: str, choose: random.Random) -> None:
        self._traffic = traffic
        self._choose = choose
        self.history = History(session_id)
        self._epoch = 0
        self._count = 0
        self._append_ids: list[str] = []

    async def live(self) -> None:
        """From open to close, or to whatever end it has."""
        traffic, choose, history = self._traffic, self._choose, self.history
        traffic.listen_to(history)
        opening = await self._send("open")
        if choose.random() < 0.03:  # S1: gave up while it was opening
            await self._send("close")
            await self._until(self._all_answered)
            if (self._reply(opening) or {})["ok"] and not history.ended:
                # It was refused at first, closed as such, and tried again with success.
                await self._send("close")
                await self._until(self._all_answered)
            return
        await self._until(lambda: self._is_final(opening) or history.ended)
        reply = traffic.find_reply(history.session_id, opening)
        if reply is None or not reply["ok"]:
            return
        for _ in range(choose.randint(5, 40)):
            if history.ended or traffic.stopping.is_set():
                break
            await self._act()
        if history.ended:
            if choose.random() < 0.3:
                await self._send("close")
        else:
            if traffic.stopping.is_set() or choose.random() < 0.3:
                await self._hear_out()
            await self._send("close")
        await self._until(self._all_answered)

    async def _act(self) -> None:
        choose = self._choose
        what = choose.random()
        if self._epoch_lost() or what < 0.15:
            cancelled = await self._send("signal", next_epoch=self._epoch + 1)
            self._epoch += 1
            if choose.random() < 0.5:
                await self._until(lambda: self._is_final(cancelled))
        elif what < 0.85:
            await self._room_for_an_append()
            if not self._epoch_lost():
                self._append_ids.append(await self._send("append"))
        elif what < 0.90:
            await self._send("touch")
        await asyncio.sleep(choose.uniform(0.05, 0.6))

    async def _room_for_an_append(self) -> None:
        """At most three of them may be waited for."""
        await self._until(
            lambda: sum(1 for one in self._append_ids if self._reply(one) is None) < 3 or self._epoch_lost()
        )

    async def _hear_out(self) -> None:
        """Let everything be said that was accepted; the checker looks whether it was. No input comes after it."""
        await self._until(self._all_answered)
        if self._epoch_lost():
            return
        expected = self._expected()
        traffic = self._traffic
        while self._said() < expected and not self.history.ended:
            if traffic.stopping.is_set() and traffic.now_s > traffic.stopped_s + SPOKEN_S:
                break
            await traffic.wait_news(self.history.session_id, 0.5)
        if not self.history.ended and not self._epoch_lost():
            self.history.settled_epoch = self._epoch

    def _expected(self) -> int:
        sent = (one for one in self.history.sent.values() if one.op == "append" and one.epoch == self._epoch)
        return sum(len(one.tokens) for one in sent if (self._reply(one.control_id) or {}).get("ok"))

    def _said(self) -> int:
        seen = (one for one in self.history.seen if one.kind == "output" and one.epoch == self._epoch)
        return sum(len(one.body["data"]) for one in seen)

    def _epoch_lost(self) -> bool:
        """Whether the current epoch takes no more input."""
        return any(
            one.kind == "lifecycle" and one.body["event"] == "epoch_lost" and one.epoch == self._epoch
            for one in self.history.seen
        )

    def _reply(self, control_id: str) -> dict[str, Any] | None:
        return self._traffic.find_reply(self.history.session_id, control_id)

    def _is_final(self, control_id: str) -> bool:
        """Whether there is nothing to wait for: a reply that isn't to be tried again. An append never is."""
        reply = self._reply(control_id)
        if reply is None:
            return False
        return not reply["retryable"] or reply["op"] in ("append", "touch")

    def _all_answered(self) -> bool:
        return all(self._is_final(control_id) for control_id in self.history.sent)

    async def _until(self, holds: Any) -> None:
        while not holds():
            await self._traffic.wait_news(self.history.session_id, 0.5)

    async def _send(self, op: str, *, next_epoch: int | None = None) -> str:
        self._count += 1
        control_id = f"{self.history.session_id}.{self._count}"
        sent = Sent(control_id, op, self._epoch, self._traffic.now_s, next_epoch=next_epoch)
        body: dict[str, Any] = {
            "v": 1,
            "op": op,
            "control_id": control_id,
            "session_id": self.history.session_id,
            "fence": _fence(self._epoch),
        }
        fields: dict[Any, Any] = {}
        if op == "open":
            body["capabilities"] = {"input_modes": ["append_tokens"]}
        elif op == "append":
            count = self._choose.randint(1, 10)
            sent.tokens = tuple(next(self._traffic._tokens) for _ in range(count))
            body["mode"] = "append_tokens"
            if self._choose.random() < 0.5:
                fields["p"] = msgpack.packb(list(sent.tokens))
            else:
                body |= {"payload": list(sent.tokens), "operation_id": f"op-{control_id}"}
        elif op == "signal":
            body |= {"event": "barge_in", "next_fence": _fence(next_epoch or 0)}
        elif op == "touch":
            body["activity"] = "heartbeat"
        fields["b"] = msgpack.packb(body)
        self.history.sent[control_id] = sent
        await self._traffic.push(self.history, sent, fields)
        if self._choose.random() < 0.03:  # delivered twice, as a producer that lost patience would
            sent.deliveries += 1
            await self._traffic.push(self.history, sent, fields)
        self._traffic.follow(self._see_through(sent, fields))
        return control_id

    async def _see_through(self, sent: Sent, fields: dict[Any, Any]) -> None:
        """Send it again while no reply comes, and while the reply says so."""
        sent_s = self._traffic.now_s
        while not self._is_final(sent.control_id):
            reply = self._reply(sent.control_id)
            wait_s = RESEND_S if reply is None else AGAIN_S
            if self._traffic.now_s - sent_s >= wait_s:
                if reply is not None:
                    self._traffic._replied.pop((self.history.session_id, sent.control_id), None)
                sent.deliveries += 1
                await self._traffic.push(self.history, sent, fields)
                sent_s = self._traffic.now_s
            await asyncio.sleep(0.1)


def _fence(epoch: int) -> dict[str, int]:
    return {"incarnation": 1, "epoch": epoch, "turn_id": epoch, "response_seq": 0}
