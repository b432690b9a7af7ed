"""A stage worker on a real server, with the test in the part of the partitions' owners and of the listeners."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Self

import msgspec
from redis.asyncio import Redis

from control.core.fence import Fence
from control.core.requests import request_id
from control.store import keys
from control.store.keys import PartitionKeys, partition_of
from control.store.lives import Life, fetch_lives
from control.wire.events import decode_event
from control.wire.stage import AbortOrder, Ack, SubmissionOrder, encode, pack_config
from stages.pipeline import Pipeline
from tests.workers.scripted import PATIENCE_S, ScriptedEngine
from workers.stage import StageWorker

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from types import TracebackType

    from stages.engine import Engine

_ack = msgspec.msgpack.Decoder(Ack)

AT_START = Fence(1, 0, 0, 0)
CONFIG = pack_config({"voice": "low"}, {"speed": 2}, ({"temperature": 0.5}, {"pitch": 3}))


def pipeline(stages: int = 1, **sections: dict[str, Any]) -> Pipeline:
    """A pipeline of scripted engines with a quick heartbeat."""
    content: dict[str, Any] = {
        "partitions": 3,
        "control": {"heartbeat_s": 2.0, "heartbeat_interval_s": 0.1},
        "stages": [{"name": f"stage{n}", "engine": "parrot", "capacity": 4} for n in range(stages)],
    }
    for name, section in sections.items():
        content[name] = {**content.get(name, {}), **section}
    return Pipeline.model_validate(content)


def fence(epoch: int = 0, turn: int = 0, response: int | None = None, incarnation: int = 1) -> Fence:
    return Fence(incarnation, epoch, turn, turn if response is None else response)


def name_of(session_id: str, epoch: int = 0, stage_id: int = 0, incarnation: int = 1) -> str:
    return request_id(session_id, incarnation, epoch, stage_id)


def record(accepted: Fence, offered: Fence | None = None, floor: int = 0) -> str:
    """A fence record as the commit writes it."""
    ahead = offered or accepted
    return (
        f"{accepted.incarnation} {floor} {accepted.epoch} {accepted.turn_id} {accepted.response_seq} "
        f"{ahead.epoch} {ahead.turn_id} {ahead.response_seq}"
    )


async def eventually(check: Callable[[], Awaitable[object]]) -> None:
    """Look until it is true: for what tells nobody, such as an XDEL."""
    async with asyncio.timeout(PATIENCE_S):
        while not await check():  # noqa: ASYNC110  nobody sets an event
            await asyncio.sleep(0.005)


class StageBed:
    """`async with StageBed(url) as bed`: a worker that runs, and everything around it."""

    def __init__(
        self, url: str, engine: Engine | None = None, *, stage_id: int = 0, stages: int = 1, **options: Any
    ) -> None:
        self.url = url
        self.redis = Redis.from_url(url)
        self.pipeline: Pipeline = options.pop("pipeline", None) or pipeline(stages)
        self.stage_id = stage_id
        self.engine: Any = engine or ScriptedEngine()
        self.builds = 0
        self.worker = StageWorker(url, self.pipeline, stage_id, build_engine=self._build, **options)
        self.worker_id = ""
        self._task: asyncio.Task[None] | None = None
        self._read: dict[str, str] = {}
        self._unread: dict[str, list[Any]] = {}

    def _build(self) -> Engine:
        self.builds += 1
        return self.engine

    async def __aenter__(self) -> Self:
        self._task = asyncio.ensure_future(self.worker.run())
        self.worker_id = await self.next_life()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        if self.worker.is_leaving:
            # Cut short while it closes its connections, it would leave some of them open.
            await asyncio.wait({self._task}, timeout=PATIENCE_S)
        if not self._task.done():
            self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self.redis.aclose()

    async def next_life(self, other_than: str | None = None) -> str:
        async with asyncio.timeout(PATIENCE_S):
            ready = asyncio.ensure_future(self.worker.wait_ready(other_than))
            assert self._task is not None
            await asyncio.wait({ready, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if self._task.done():
                ready.cancel()
                self._task.result()
            return await ready

    async def crash(self) -> None:
        """The process is gone from one moment to the next."""
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def keys(self, session_id: str) -> PartitionKeys:
        return PartitionKeys(partition_of(session_id, self.pipeline.partitions))

    async def set_fence(
        self, session_id: str, accepted: Fence = AT_START, offered: Fence | None = None, floor: int = 0
    ) -> None:
        await self.redis.hset(self.keys(session_id).fences, session_id, record(accepted, offered, floor))

    def submission(
        self, session_id: str, payload: Any = b"\1\0", at: Fence = AT_START, *, number: int = 1, **more: Any
    ) -> tuple[str, dict[Any, Any]]:
        """A queue and an entry for it, as the commit or an earlier stage writes it."""
        packed = not isinstance(payload, bytes)
        fields: dict[str, Any] = {
            "session_id": session_id,
            "stage_id": self.stage_id,
            "fence": at,
            "number": number,
            "seq": number,
            "turn_seq": number,
            "mode": "append_audio_chunk" if isinstance(payload, bytes) else "append_tokens",
            "final": True,
            "resumed": number > 1,
            "generation": 0,
            "config": CONFIG if number == 1 else b"",
            "route": tuple(self.worker_id if n == self.stage_id else f"other{n}" for n in range(2)),
            "packed": packed,
            **more,
        }
        queue = self.keys(session_id).submissions(self.worker_id)
        return queue, {"b": encode(SubmissionOrder(**fields)), "p": encode(payload) if packed else payload}

    async def submit(self, session_id: str, *args: Any, **more: Any) -> str:
        """As the commit does it: the entry's id."""
        queue, entry = self.submission(session_id, *args, **more)
        return (await self.redis.xadd(queue, entry)).decode()

    async def abort(
        self,
        session_id: str,
        *epochs: int,
        number: int = 100,
        attempt: int = 1,
        incarnation: int = 1,
        after: str | None = None,
    ) -> str:
        """As the commit does it: the floor rises, and the abort names the last unread submission."""
        await self.set_fence(session_id, Fence(incarnation, max(epochs, default=0) + 1, 0, 0), floor=max(epochs) + 1)
        queue, entry = self.abort_entry(session_id, *epochs, number=number, attempt=attempt, incarnation=incarnation)
        if after is None:
            last = await self.redis.xrevrange(self.keys(session_id).submissions(self.worker_id), count=1)
            after = last[0][0].decode() if last else "0-0"
        entry["a"] = after
        return (await self.redis.xadd(queue, entry)).decode()

    def abort_entry(
        self, session_id: str, *epochs: int, number: int = 100, attempt: int = 1, incarnation: int = 1
    ) -> tuple[str, dict[Any, Any]]:
        order = AbortOrder(session_id, incarnation, self.stage_id, number, attempt, tuple(epochs))
        return self.keys(session_id).aborts(self.worker_id), {"b": encode(order)}

    async def next_acks(self, session_id: str, count: int = 1) -> list[Any]:
        """The next acks in the session's partition, in order, each once."""
        return [_ack.decode(fields[b"b"]) for fields in await self.next_entries(self.keys(session_id).acks, count)]

    async def next_ack(self, session_id: str) -> Any:
        return (await self.next_acks(session_id))[0]

    async def acks(self, session_id: str) -> list[Any]:
        """All acks in the session's partition."""
        return [_ack.decode(fields[b"b"]) for _, fields in await self.redis.xrange(self.keys(session_id).acks)]

    async def next_events(self, session_id: str, count: int = 1) -> list[dict[str, Any]]:
        """The next events of the session's listener, decoded, with `n`."""
        entries = await self.next_entries(self.keys(session_id).events(session_id), count)
        return [{**decode_event(fields[b"b"]), "n": int(fields[b"n"])} for fields in entries]

    async def next_entries(self, stream: str, count: int) -> list[dict[bytes, bytes]]:
        """Wait for the next entries of any stream."""
        unread = self._unread.setdefault(stream, [])
        async with asyncio.timeout(PATIENCE_S):
            while len(unread) < count:
                found = await self.redis.xread({stream: self._read.get(stream, "0-0")}, block=500)
                for _, entries in found:
                    unread += [fields for _, fields in entries]
                    self._read[stream] = entries[-1][0].decode()
        taken, unread[:] = unread[:count], unread[count:]
        return taken

    async def length(self, stream: str) -> int:
        return await self.redis.xlen(stream)

    async def until_running(self, *session_ids: str) -> None:
        """Wait until the engine has the sessions' first requests."""
        for session_id in session_ids:
            name = name_of(session_id)
            await self.engine.until(lambda name=name: name in self.engine.running)

    async def start(self, *session_ids: str, **more: Any) -> None:
        """Sessions whose first request runs."""
        for session_id in session_ids:
            await self.set_fence(session_id)
            await self.submit(session_id, **more)
        await self.until_running(*session_ids)
        await self.until_drained(*session_ids)

    async def the_life(self, worker_id: str | None = None) -> Life:
        """The worker's record."""
        [life] = [each for each in await fetch_lives(self.redis) if each.worker_id == (worker_id or self.worker_id)]
        return life

    async def until_life(self, wanted: Callable[[Life], bool]) -> None:
        """Wait until its record looks so."""

        async def look() -> bool:
            return wanted(await self.the_life())

        await eventually(look)

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for something that no stream and no engine tells of."""

        async def check() -> object:
            return condition()

        await eventually(check)

    async def until_empty(self, *queues: str) -> None:
        """Wait until these streams hold nothing more."""
        for queue in queues:
            await eventually(lambda queue=queue: self._is_empty(queue))

    async def _is_empty(self, queue: str) -> bool:
        return await self.length(queue) == 0

    async def until_drained(self, *session_ids: str) -> None:
        """Wait until the worker's queues hold nothing more for these sessions' partitions."""
        of = [self.keys(session_id) for session_id in session_ids]
        await self.until_empty(*(each.submissions(self.worker_id) for each in of))
        await self.until_empty(*(each.aborts(self.worker_id) for each in of))

    async def take_slots(self, *session_ids: str) -> None:
        """Sessions take their slots."""
        for session_id in session_ids:
            await self.redis.hset(keys.worker_slots(self.worker_id), session_id, "1 1")


def by_session(outputs: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """What each session heard, in order."""
    heard: dict[str, list[Any]] = {}
    for output in outputs:
        heard.setdefault(output["session_id"], []).append(output["data"])
    return heard
