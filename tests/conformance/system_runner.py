"""The traces on the whole system: a control worker and stage workers on a real server, with a scripted engine.

Only two things are not as in production: the clock can be moved on, and deadlines fire only when a trace's reaper
runs, since the reference collects nothing in between. Everything goes through Redis, acks of an operator's retry and
of a dead request too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from redis.asyncio import Redis

from control.core.requests import RequestName, request_id
from control.core.session import Phase, Session
from control.store.commits import decode_session
from control.store.keys import PartitionKeys, partition_of
from control.wire.events import decode_event
from control.wire.orders import RetryOrder, encode_order
from control.wire.stage import RequestFailedAck, encode
from stages.engine import Output
from stages.pipeline import Pipeline
from stages.policy import AppendPlan
from tests.conformance.core_runner import registered
from tests.conformance.script import (
    Advance,
    Early,
    Expire,
    FailNext,
    FailRequests,
    Operation,
    Pending,
    Retry,
    Send,
    TakeFailure,
    Tell,
    operations,
)
from tests.conformance.traces import Seen, plain_fence
from tests.workers.scripted import ScriptedEngine
from workers.clock import ServerClock
from workers.control import ControlWorker
from workers.holdings import Owned
from workers.owner import Owner
from workers.stage import StageWorker

PATIENCE_S = 20.0
PARTITIONS = 2
LONG_S = 2_000_000.0


class RecordedPolicy:
    """The policy of the recorded runs: it passes everything on, and a prompt is what it was told."""

    def configure_sampling_params(self, *, runtime_config: Mapping[str, Any], defaults: tuple[Any, ...]) -> Any:
        return tuple(dict(runtime_config) for _ in defaults)

    def plan_append(self, *, payload: Any, seq: int, turn_seq: int, final: bool, **rest: Any) -> AppendPlan:
        del rest
        return AppendPlan({"payload": payload, "seq": seq, "turn_seq": turn_seq, "final": final})

    def decide_output(self, *, stage_id: int, final_stage_id: int, output: Output) -> None:
        return None


class TraceClock(ServerClock):
    """Server time that a trace can move on, and that counts as steady from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms

    def is_settled(self, for_ms: float) -> bool:
        return True

    def elapsed_ms(self, since_ms: float) -> float:
        return super().elapsed_ms(since_ms) + LONG_S


class TraceOwner(Owner):
    """An owner that looks at the clock only for the session that the trace's reaper has come to."""

    expiring: str | None = None

    def expire(self, session_id: str) -> None:
        """Look at this session's deadlines now."""
        self.expiring = session_id
        self.wake()

    def _due_sessions(self, owned: Owned, now_ms: int, most: int) -> list[str]:
        del now_ms, most
        sid = self.expiring
        if sid is None or partition_of(sid, PARTITIONS) != owned.claim.partition:
            return []
        self.expiring = None
        return [sid]

    def _next_due_ms(self, owned: Owned) -> int | None:
        return None if self.expiring is None else 0


def pipeline_of(config: dict[str, Any]) -> Pipeline:
    """The pipeline that behaves as the reference was configured."""
    return Pipeline.model_validate(
        {
            "partitions": PARTITIONS,
            "max_sessions": config["max_sessions"],
            "policy": "tests.conformance.system_runner:RecordedPolicy" if config["extension"] else None,
            "session": {
                "idle_ttl_s": config["idle_ttl_s"],
                "disconnect_grace_s": config["disconnect_grace_s"],
                "completed_append_limit": config["completed_append_limit"],
                "cleanup_backoff_s": LONG_S,
                "cleanup_backoff_max_s": LONG_S,
                "append_timeout_s": PATIENCE_S,
                "cleanup_timeout_s": PATIENCE_S,
                "restart_after_s": LONG_S,
            },
            "control": {"heartbeat_s": 5.0},
            "stages": [{"name": f"stage{n}", "engine": "parrot"} for n in range(config["stage_count"])],
        }
    )


class SystemRun:
    """One trace's system. `async with SystemRun(url, config) as run`, on an empty server."""

    def __init__(self, url: str, config: dict[str, Any]) -> None:
        self._redis = Redis.from_url(url)
        self._clock = TraceClock()
        self._pipeline = pipeline_of(config)
        self._control = ControlWorker(url, self._pipeline, make_clock=lambda: self._clock, owner=TraceOwner)
        owner = self._control.owners[0]
        assert isinstance(owner, TraceOwner)
        self._owner = owner
        self._engines = [ScriptedEngine() for _ in range(config["stage_count"])]
        self._policy = RecordedPolicy()
        self._stages = (
            [self._stage(url, number) for number in range(config["stage_count"])] if config["extension"] else []
        )
        self._keys = [PartitionKeys(p) for p in range(PARTITIONS)]
        self._tasks: list[asyncio.Task[None]] = []
        self._read: dict[str, str] = {}
        self._told = 0
        self._ever: set[str] = set()
        self._opened: list[str] = []
        self._early = Early()
        self._reserved: set[str] = set()

    def _stage(self, url: str, number: int) -> StageWorker:
        return StageWorker(url, self._pipeline, number, build_engine=lambda: self._engines[number], policy=self._policy)

    async def __aenter__(self) -> SystemRun:
        await self._redis.flushall()
        self._tasks = [asyncio.create_task(stage.run()) for stage in self._stages]
        for stage in self._stages:
            await stage.wait_ready()
        self._tasks.append(asyncio.create_task(self._control.run()))
        await self._until(lambda: len(self._control.owned) == PARTITIONS)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._control.stop()
        for task in self._tasks[:-1]:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._redis.aclose()
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def run(self, recorded: dict[str, Any]) -> Seen:
        """Do one step, and wait until the system has come to rest."""
        self._seen = Seen()
        closing = recorded.get("message", {}).get("op") == "close"
        steps = operations(recorded, self._early)
        answer: Any = None
        while True:
            try:
                answer = await self._do(steps.send(answer))
            except StopIteration:
                break
        await self._rest()
        await self._collect(closing=closing)
        return self._seen

    async def _do(self, operation: Operation) -> Any:
        match operation:
            case Send(message):
                await self._send(message)
            case Advance(ms):
                self._clock.ahead_ms += ms
            case FailNext(what, count):
                setattr(self._engines[0], what, count)
            case TakeFailure():
                failing = self._engines[0].fail_cleanups > 0
                self._engines[0].fail_cleanups -= failing
                return failing
            case Pending():
                return [sid for sid, session in await self._sessions() if session.cleanups]
            case Retry(session_ids):
                sessions = await self._sessions()
                for sid, session in sessions:
                    if session.cleanups and (session_ids is None or sid in session_ids):
                        await self._retry(sid, session)
            case FailRequests(names):
                for name in names:
                    await self._fail(name)
            case Expire():
                for sid, _ in await self._sessions():
                    self._owner.expire(sid)
                    await self._until(lambda: self._owner.expiring is None)
                    await self._rest()
            case Tell(event):
                self._seen.lifecycle.append(event)
        return None

    async def _send(self, message: dict[str, Any]) -> None:
        sid = message["session_id"]
        entry: dict[Any, Any] = {"b": msgspec.msgpack.encode({"v": 1, **message})}
        await self._redis.xadd(self._keys[partition_of(sid, PARTITIONS)].commands, entry)
        if message["op"] == "open" and sid not in self._opened:
            self._opened.append(sid)

    async def _retry(self, sid: str, session: Session) -> None:
        if session.phase is Phase.CLOSING and not session.requests and self._engines[0].fail_cleanups:
            # The reference asks its stage once more although nothing is registered; here no engine hears of it.
            self._engines[0].fail_cleanups -= 1
            return
        order: dict[Any, Any] = {"b": encode_order(RetryOrder(sid))}
        await self._redis.xadd(self._keys[partition_of(sid, PARTITIONS)].orders, order)
        await self._rest()

    async def _fail(self, name: RequestName) -> None:
        worker_id = self._stages[name.stage_id].worker_id
        assert worker_id is not None
        ack = RequestFailedAck(name.session_id, name.incarnation, name.epoch, worker_id, "died")
        entry: dict[Any, Any] = {"b": encode(ack)}
        await self._redis.xadd(self._keys[partition_of(name.session_id, PARTITIONS)].acks, entry)
        await self._rest()

    async def _rest(self) -> None:
        """Wait until nothing is on its way: no entry in any queue, no debt, no append or placement under way."""
        workers = [stage.worker_id or "" for stage in self._stages]
        streams = [name for k in self._keys for name in (k.commands, k.acks, k.orders)]
        streams += [name for k in self._keys for w in workers for name in (k.submissions(w), k.aborts(w))]
        async with asyncio.timeout(PATIENCE_S):
            while True:
                async with self._redis.pipeline(transaction=True) as pipe:
                    for name in streams:
                        pipe.xlen(name)
                    for k in self._keys:
                        pipe.hvals(k.sessions)
                    found = await pipe.execute()
                lengths, stored = found[: len(streams)], found[len(streams) :]
                quiet = not any(lengths) and self._control.is_quiet
                if quiet and not any(_is_busy(blob) for blobs in stored for blob in blobs):
                    return
                await asyncio.sleep(0.001)

    async def _collect(self, *, closing: bool) -> None:
        for sid in {*self._opened, *self._read, *(["s0", "s1", "s2"])}:
            await self._read_events(sid, closing=closing)
        engine = self._engines[0]
        for submission in engine.submitted[self._told :]:
            self._seen.submitted.append(
                {
                    "request_id": submission.request_id,
                    "fence": plain_fence(msgspec.to_builtins(submission.fence)),
                    "already_submitted": submission.resumed,
                    "config_generation": submission.config_generation,
                    "prompt": submission.prompt,
                }
            )
        self._told = len(engine.submitted)
        now: set[str] = set()
        for sid, session in await self._sessions():
            if session.phase is Phase.VACANT:
                continue
            self._seen.sessions[sid] = registered(sid, session)
            now |= {request_id(sid, session.fence.incarnation, r.epoch, 0) for r in session.requests}
        self._ever |= now | {s.request_id for s in engine.submitted}
        self._ever |= self._reserved
        self._reserved = set()
        self._seen.cleaned = self._ever - now

    async def _read_events(self, sid: str, *, closing: bool) -> None:
        name = self._keys[partition_of(sid, PARTITIONS)].events(sid)
        for entry_id, fields in await self._redis.xrange(name, f"({self._read.get(sid, '0')}"):
            self._read[sid] = entry_id.decode()
            body = decode_event(fields[b"b"])
            if fields[b"t"] == b"reply":
                self._seen.results.append(body)
                # An open reserves a request, which a close in the same step may release again.
                if body["op"] == "open" and body["ok"] and body["detail"]["request_id"]:
                    self._reserved = {*self._reserved, body["detail"]["request_id"]}
            elif fields[b"t"] == b"lifecycle" and body["event"] == "expired":
                (self._early.events if closing else self._seen.lifecycle).append(body)

    async def _sessions(self) -> list[tuple[str, Session]]:
        sessions: dict[str, Session] = {}
        for k in self._keys:
            states: dict[bytes, bytes] = await self._redis.hgetall(k.sessions)
            cleanups: dict[bytes, bytes] = await self._redis.hgetall(k.cleanups)
            for sid, blob in states.items():
                sessions[sid.decode()] = decode_session(blob, cleanups.get(sid))
        return [(sid, sessions[sid]) for sid in self._opened if sid in sessions]

    async def _until(self, condition: Any) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.001)


def _is_busy(blob: bytes) -> bool:
    session = decode_session(blob, None)
    return session.phase is Phase.OPENING or session.append is not None or bool(session.debts)
