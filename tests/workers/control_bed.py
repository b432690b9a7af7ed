"""Control workers on a real server, with the test in the part of producers, listeners and stages.

`Bed` holds the server's address, the pipeline and everything that runs. `Stage` is a stage worker played by hand: it
reads its queues and answers through the product's own acknowledgement, or does as it is told. `Caller` is a producer of
one session with its listener. Nothing here decides anything that the product decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Self

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from control.core.fence import Fence
from control.store import keys
from control.store.keys import PartitionKeys, partition_of
from control.store.link import LOST, Link, make_pool
from control.store.lives import Entry, beat, register_life
from control.store.publishing import Outgoing, Published, acknowledge, publish
from control.wire.events import decode_event
from control.wire.stage import AcceptedAck, Ack, CleanedAck, RejectedAck, decode_abort, decode_submission
from stages.pipeline import Pipeline, parse_pipeline
from workers.control import ControlWorker
from workers.ownership import rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from control.wire.stage import AbortOrder, SubmissionOrder

# Only ever reached by a test that fails.
PATIENCE_S = 30.0
HALF_EVENTS_BYTES = 512 * 1024
_ids = itertools.count(1)


async def until(holds: Callable[[], Any], within_s: float = PATIENCE_S) -> None:
    """Ask until it holds; what it returns may be awaitable."""
    deadline = time.monotonic() + within_s
    while True:
        answer = holds()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return
        assert time.monotonic() < deadline, f"not within {within_s:g} s"
        await asyncio.sleep(0.005)


def fence(epoch: int = 0, turn: int = 0, response: int = 0, incarnation: int = 0) -> Fence:
    return Fence(incarnation, epoch, turn, response)


def make_pipeline(*, stages: int = 1, capacity: int = 64, **sections: Any) -> Pipeline:
    """Quick clockwork; without stages also without a policy. `sections`: what else the file would say."""
    content: dict[str, Any] = {
        "partitions": 4,
        "control": {"lease_s": 0.6, "heartbeat_s": 0.6, "heartbeat_interval_s": 0.1},
        "stages": [{"name": f"stage{n}", "engine": "parrot", "capacity": capacity} for n in range(stages)],
    }
    if not stages:
        content["policy"] = None
    for name, section in sections.items():
        content[name] = {**content.get(name, {}), **section} if isinstance(section, dict) else section
    return parse_pipeline(content, "test")


def local(**sections: Any) -> Any:
    """A pipeline without stages: everything is answered by the owner."""
    return make_pipeline(stages=0, **sections)


class Caller:
    """A producer of one session, and its listener. `events`: everything read so far."""

    def __init__(self, bed: Bed, session_id: str) -> None:
        self.bed = bed
        self.session_id = session_id
        self.keys = bed.keys(session_id)
        self.events: list[tuple[str, int, dict[str, Any]]] = []
        self.incarnation = 0
        self._read_to = "0-0"

    async def send(self, op: str, *, at: Fence | None = None, payload: bytes | None = None, **body: Any) -> str:
        """A command; its control id."""
        at = at or fence(incarnation=self.incarnation)
        control_id = body.pop("control_id", None) or f"{op}-{next(_ids)}"
        entry_id = body.pop("entry_id", "*")
        whole = {"v": 1, "op": op, "control_id": control_id, "session_id": self.session_id, "fence": at, **body}
        fields: dict[Any, Any] = {"b": msgspec.msgpack.encode(whole)}
        if payload is not None:
            fields["p"] = payload
        await self.bed.redis.xadd(self.keys.commands, fields, id=entry_id)
        return control_id

    async def call(self, op: str, **more: Any) -> dict[str, Any]:
        """A command, and its reply."""
        return await self.reply(await self.send(op, **more))

    async def open(self, incarnation: int = 0, **more: Any) -> dict[str, Any]:
        self.incarnation = incarnation
        modes = ["append_tokens"] if self.bed.pipeline.stages else []
        return await self.call("open", capabilities={"input_modes": modes}, **more)

    async def append(self, at: Fence | None = None, payload: bytes = b"tokens", **more: Any) -> str:
        mode = "append_tokens" if self.bed.pipeline.stages else "turn_commit_only"
        return await self.send("append", at=at, payload=payload, mode=mode, **more)

    async def cancel(self, at: Fence, to: Fence, **more: Any) -> str:
        return await self.send("signal", at=at, event="barge_in", next_fence=to, **more)

    async def reply(self, control_id: str) -> dict[str, Any]:
        """The first reply to a command."""
        await until(lambda: self._has_reply(control_id))
        return self.find_reply(control_id)

    def find_reply(self, control_id: str) -> dict[str, Any]:
        return next(body for kind, _, body in self.events if kind == "reply" and body["control_id"] == control_id)

    async def heard(self, event: str) -> dict[str, Any]:
        """The first lifecycle event of that name."""
        await until(lambda: self._has_event(event))
        return next(body for kind, _, body in self.events if kind == "lifecycle" and body["event"] == event)

    async def listen(self) -> list[tuple[str, int, dict[str, Any]]]:
        """Read what is new."""
        read = await self.bed.redis.xread({self.keys.events(self.session_id): self._read_to})
        for _, entries in read or ():
            for entry_id, fields in entries:
                self._read_to = entry_id
                self.events.append((fields[b"t"].decode(), int(fields[b"n"]), decode_event(fields[b"b"])))
        return self.events

    def replies(self) -> Counter[str]:
        """How many replies each command has had so far."""
        return Counter(body["control_id"] for kind, _, body in self.events if kind == "reply")

    def codes(self) -> list[tuple[str, str | None]]:
        """Op and code of every reply so far."""
        return [(body["op"], body["code"]) for kind, _, body in self.events if kind == "reply"]

    def lifecycle(self) -> list[str]:
        return [body["event"] for kind, _, body in self.events if kind == "lifecycle"]

    async def _has_reply(self, control_id: str) -> bool:
        return control_id in {b["control_id"] for kind, _, b in await self.listen() if kind == "reply"}

    async def _has_event(self, event: str) -> bool:
        return event in {b["event"] for kind, _, b in await self.listen() if kind == "lifecycle"}


class Stage:
    """A stage worker played by hand.

    `submitted` and `aborted`: what it has taken and confirmed, in order, each once. `accepts` and `confirms` false: it
    leaves those in its queues; `refuse` set: it rejects with that code.
    """

    def __init__(self, bed: Bed, worker_id: str, stage_id: int, capacity: int) -> None:
        self.bed = bed
        self.worker_id = worker_id
        self.stage_id = stage_id
        self.capacity = capacity
        self.submitted: list[tuple[SubmissionOrder, bytes]] = []
        self.aborted: list[AbortOrder] = []
        self.seen_aborts: set[tuple[str, int, int]] = set()
        self.accepts = True
        self.confirms = True
        self.beats = True
        self.refuse: str | None = None
        self._link = Link(bed.pool)
        self._pulse = Link(bed.pool)
        self._publisher = Link(bed.pool)
        self._known: set[tuple[str, int, int]] = set()
        self._numbers: Counter[str] = Counter()
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self) -> Self:
        entry = Entry(stage_id=self.stage_id, stage=f"stage{self.stage_id}", capacity=self.capacity, engine="hand")
        await register_life(self.bed.redis, self.worker_id, entry)
        self.tasks = [asyncio.create_task(self._work()), asyncio.create_task(self._beat())]
        return self

    async def stop(self) -> None:
        """Gone from one moment to the next."""
        await end(*self.tasks)
        for link in (self._link, self._pulse, self._publisher):
            await link.close()

    def seqs(self, session_id: str) -> list[int]:
        return [order.seq for order, _ in self.submitted if order.session_id == session_id]

    async def say(self, session_id: str, request_id: str, at: Fence, text: str = "hello") -> Published:
        """Publish the request's next output."""
        number = self._numbers[request_id]
        body = msgspec.msgpack.encode({"kind": "text", "data": text, "seq": number})
        sent = Outgoing(session_id, request_id, at, number, body)
        keys = self.bed.keys(session_id)
        (code,) = await publish(self._publisher, keys, self.worker_id, [sent], HALF_EVENTS_BYTES)
        if code is Published.DELIVERED:
            self._numbers[request_id] += 1
        return code

    async def _work(self) -> None:
        every = range(self.bed.pipeline.partitions)
        names = [queue for p in every for queue in self._queues(PartitionKeys(p))]
        while True:
            with contextlib.suppress(*LOST, RedisError):
                answer = await self._link.call(
                    "XREAD", "COUNT", 64, "BLOCK", 20, "STREAMS", *names, *["0-0"] * len(names)
                )
                # Aborts first, as a stage worker does.
                for name, entries in sorted(answer or (), key=lambda each: b":aborts:" not in each[0]):
                    await self._answer(name.decode(), entries)
            await asyncio.sleep(0.002)

    def _queues(self, keys: PartitionKeys) -> tuple[str, str]:
        return keys.aborts(self.worker_id), keys.submissions(self.worker_id)

    async def _answer(self, name: str, entries: list[Any]) -> None:
        acks: list[Ack] = []
        done: list[str] = []
        keys = PartitionKeys(int(name.split("{")[1].split("}", maxsplit=1)[0]))
        for entry_id, raw in entries:
            fields = dict(zip(raw[::2], raw[1::2], strict=True))
            ack = self._take_abort(fields) if ":aborts:" in name else self._take_submission(fields)
            if ack is not None:
                acks.append(ack)
                done.append(entry_id.decode())
        if done:
            await acknowledge(self._link, keys, self.worker_id, acks, name, done)

    def _take_submission(self, fields: dict[bytes, bytes]) -> Ack | None:
        if not self.accepts:
            return None
        order = decode_submission(fields[b"b"])
        if self.refuse is not None:
            return RejectedAck(order.session_id, order.fence.incarnation, order.number, self.refuse, "not this one")
        known = (order.session_id, order.fence.incarnation, order.number)
        if known not in self._known:
            self._known.add(known)
            self.submitted.append((order, fields[b"p"]))
        return AcceptedAck(*known)

    def _take_abort(self, fields: dict[bytes, bytes]) -> Ack | None:
        order = decode_abort(fields[b"b"])
        self.seen_aborts.add((order.session_id, order.incarnation, order.number))
        if not self.confirms:
            return None
        self.aborted.append(order)
        return CleanedAck(order.session_id, order.incarnation, order.number, self.worker_id)

    async def _beat(self) -> None:
        while True:
            if self.beats:
                with contextlib.suppress(*LOST, RedisError):
                    await beat(self._pulse, self.worker_id, {})
            await asyncio.sleep(0.05)


class Bed:
    """`async with Bed(url) as bed`: see the header. `controls` and `stages`: what was started and not stopped."""

    def __init__(self, url: str, pipeline: Pipeline | None = None) -> None:
        self.url = url
        self.pipeline = pipeline or make_pipeline()
        self.pool = make_pool(url, timeout_s=5.0, name="test-bed")
        self.redis: Any = Redis(connection_pool=self.pool)
        self.controls: dict[ControlWorker, asyncio.Task[None]] = {}
        self.stages: list[Stage] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stage in self.stages:
            await stage.stop()
        await end(*self.controls.values())
        await self.redis.aclose()
        await self.pool.disconnect()
        for task in self.controls.values():
            if not task.cancelled():
                task.result()

    def keys(self, session_id: str) -> PartitionKeys:
        return PartitionKeys(partition_of(session_id, self.pipeline.partitions))

    def caller(self, session_id: str) -> Caller:
        return Caller(self, session_id)

    def callers_of(self, partition: int) -> Iterator[Caller]:
        """New callers, all of one partition."""
        for number in itertools.count():
            session_id = f"caller-{partition}-{number}"
            if partition_of(session_id, self.pipeline.partitions) == partition:
                yield self.caller(session_id)

    async def control(self, worker_id: str, kind: type[ControlWorker] = ControlWorker, *, whole: bool = True) -> Any:
        """A control worker; `whole`: wait until it owns every partition."""
        worker = kind(self.url, self.pipeline, worker_id=worker_id)
        self.controls[worker] = asyncio.create_task(worker.run())
        if whole:
            await self.until_owned(worker)
        return worker

    async def until_owned(self, *workers: ControlWorker) -> None:
        """Wait until these own every partition between them, each its share."""
        names = [worker.worker_id for worker in workers]
        shares: dict[str, list[int]] = {name: [] for name in names}
        for partition in range(self.pipeline.partitions):
            shares[str(rendezvous(partition, names))].append(partition)

        def is_shared_out() -> bool:
            for worker in workers:
                if self.controls[worker].done():
                    self.controls[worker].result()
            return all(worker.owned == shares[worker.worker_id] for worker in workers)

        await until(is_shared_out)

    async def stage(self, worker_id: str = "ear-1", stage_id: int = 0, capacity: int = 64) -> Stage:
        """A stage worker that everybody can be placed on."""
        stage = await Stage(self, worker_id, stage_id, capacity).start()
        self.stages.append(stage)
        await until(lambda: all(worker_id in seen(worker) for worker in self.controls))
        return stage

    async def crash(self, worker: ControlWorker) -> None:
        """The process is gone from one moment to the next: nothing is handed over."""
        await end(self.controls.pop(worker))

    async def leave(self, worker: ControlWorker) -> None:
        """Told to stop, it hands over."""
        worker.stop()
        await asyncio.wait_for(self.controls.pop(worker), PATIENCE_S)

    async def until_drained(self) -> None:
        """Wait until nothing waits to be applied."""

        async def is_empty() -> bool:
            lengths = [
                await self.redis.xlen(name)
                for p in range(self.pipeline.partitions)
                for name in (PartitionKeys(p).commands, PartitionKeys(p).acks)
            ]
            return not any(lengths)

        await until(is_empty)


def seen(worker: ControlWorker) -> set[str]:
    """The stage workers that a control worker would place sessions on."""
    return {life.worker_id for life in worker.observer.lives if life.state == "live"}


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel until they have ended: redis-py's client may lose a cancellation before Python 3.12."""
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=0.05)
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task


def numbers(caller: Caller) -> list[int]:
    """The events' numbers, those of strangers' replies aside."""
    return [n for _, n, _ in caller.events if n]


async def until_free(bed: Bed, worker_id: str = "ear-1") -> None:
    """Wait until nobody holds a slot there."""

    async def is_free() -> bool:
        return not await bed.redis.exists(keys.worker_slots(worker_id))

    await until(is_free)
