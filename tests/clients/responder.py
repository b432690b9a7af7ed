"""A control worker that does as it is told: it reads the command streams and answers as the wire protocol says.

A task over a real server, for tests of producers. It knows just enough of sessions (fence, lease generation, life,
numbers of events) to answer well; it has no stages, so a test says itself what the model says (`speak`).
It remembers control ids, so a re-sent command has one effect and the same reply. `withhold` keeps replies back,
`refuse` answers with an error. Everything that came in is in `entries`, everything that had an effect in `effects`.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import msgpack
import redis.asyncio
from redis.exceptions import RedisError, ResponseError

PARTITIONS = 4
NAME = "responder"


class Entry(NamedTuple):
    """One entry of a command stream, as it came."""

    partition: int
    body: dict[str, Any]
    payload: bytes | None


@dataclass
class Life:
    """What is known of one session."""

    fence: dict[str, int]
    generation: int = 0
    n: int = 0
    appends: int = 0
    open: bool = True


@dataclass
class Responder:
    url: str
    partitions: int = PARTITIONS
    entries: list[Entry] = field(default_factory=list)
    effects: list[dict[str, Any]] = field(default_factory=list)
    lives: dict[str, Life] = field(default_factory=dict)
    _withheld: Counter[str] = field(default_factory=Counter)
    _refusals: dict[str, list[tuple[str, bool]]] = field(default_factory=lambda: defaultdict(list))
    _answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _publishing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def __aenter__(self) -> Self:
        self._redis = redis.asyncio.Redis.from_url(self.url, client_name=NAME, socket_timeout=10)
        await self._redis.hset("bargein:config", mapping={"protocol": 1, "partitions": self.partitions})
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        while not self._task.done():  # under Python 3.11 redis-py may lose a cancellation
            self._task.cancel()
            await asyncio.wait([self._task], timeout=0.05)
        await self._redis.aclose()
        with contextlib.suppress(asyncio.CancelledError):
            self._task.result()

    # --- what a test says -------------------------------------------------------------------------------------

    def withhold(self, op: str, times: int) -> None:
        """The next commands of this kind have their effect, but no reply."""
        self._withheld[op] += times

    def refuse(self, op: str, code: str, *, retryable: bool = False, times: int = 1) -> None:
        """The next commands of this kind get this error, and no effect."""
        self._refusals[op] += [(code, retryable)] * times

    async def speak(self, session_id: str, data: Any, *, epoch: int | None = None, kind: str = "audio") -> None:
        """An output of the model, of the present epoch or another."""
        life = self.lives[session_id]
        fence = life.fence if epoch is None else {**life.fence, "epoch": epoch}
        output = {
            "session_id": session_id,
            "request_id": f"r{fence['epoch']}",
            "stage_id": 1,
            "fence": fence,
            "seq": life.n,
            "kind": kind,
            "data": data,
            "turn_end": False,
            "metadata": {},
        }
        await self._publish(session_id, "output", output)

    async def tell(self, session_id: str, event: str, **keys: Any) -> None:
        """A lifecycle event."""
        life = self.lives[session_id]
        told = {"event": event, "reason": None, "fence": life.fence, "lease_generation": life.generation}
        await self._publish(session_id, "lifecycle", told | keys)

    def lose(self, session_id: str, count: int) -> None:
        """So many events are numbered and never seen, as if the stream had been cut."""
        self.lives[session_id].n += count

    async def expire(self, session_id: str) -> None:
        """The session's idle TTL ran out."""
        self.lives[session_id].open = False
        await self.tell(session_id, "expired", reason="idle_ttl")

    async def until_seen(self, op: str, times: int = 1) -> list[Entry]:
        """Wait until that many commands of this kind have come in; all of them."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.of(op)) >= times)
        return self.of(op)

    def of(self, op: str) -> list[Entry]:
        """The commands of this kind that have come in. A cancel is a `signal`."""
        return [entry for entry in self.entries if entry.body["op"] == op]

    def events_key(self, session_id: str) -> str:
        """The stream that a session's listener reads."""
        partition = zlib.crc32(session_id.encode()) % self.partitions
        return f"bargein:{{{partition}}}:events:{session_id}"

    async def kill_producers(self) -> None:
        """Cut every connection to the server but our own."""
        for client in await self._redis.client_list():
            if client["name"] != NAME:
                await self._redis.client_kill_filter(_id=client["id"])

    async def connections_made(self) -> int:
        """How many connections the server has seen."""
        return (await self._redis.info("stats"))["total_connections_received"]

    # --- what it does itself ----------------------------------------------------------------------------------

    async def _run(self) -> None:
        streams: dict[Any, Any] = {f"bargein:{{{p}}}:commands": "0-0" for p in range(self.partitions)}
        while True:
            try:
                answer = await self._redis.xread(streams, block=1000)
            except RedisError:
                continue
            for key, entries in answer:
                name = key.decode()
                for entry_id, fields in entries:
                    streams[name] = entry_id.decode()
                    await self._take(int(name.split("{")[1].split("}")[0]), fields)

    async def _take(self, partition: int, fields: dict[bytes, bytes]) -> None:
        body = msgpack.unpackb(fields[b"b"])
        async with self._changed:
            self.entries.append(Entry(partition, body, fields.get(b"p")))
            self._changed.notify_all()
        reply = self._answers.get(body["control_id"])
        told: list[dict[str, Any]] = []
        if reply is None:
            reply, told = self._decide(body)
            if not reply["retryable"]:
                self._answers[body["control_id"]] = reply
        for keys in told:
            await self.tell(body["session_id"], **keys)
        if self._withheld[body["op"]] > 0:
            self._withheld[body["op"]] -= 1
            return
        await self._publish(body["session_id"], "reply", reply)

    def _decide(self, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        op, session_id, fence = body["op"], body["session_id"], body["fence"]
        life = self.lives.get(session_id)
        refusals = self._refusals[op]
        code, retryable = refusals.pop(0) if refusals else (self._why_not(op, life, body), False)
        told: list[dict[str, Any]] = []
        detail: dict[str, Any] = {}
        if code is None:
            self.effects.append(body)
            if op == "open":
                life = self.lives[session_id] = Life(fence)
                told = [{"event": "opened"}]
                detail = {"supported": True, "session_mode": body["session_mode"]}
            elif life is not None:
                detail, told = self._apply(op, life, body)
        known = life is not None and life.open
        return {
            "control_id": body["control_id"],
            "op": op,
            "session_id": session_id,
            "ok": code is None,
            "code": code,
            "message": "" if code is None else f"scripted {code}",
            "retryable": retryable,
            "fence": fence,
            "accepted_fence": life.fence if life and known else None,
            "lease_generation": life.generation if life and known else None,
            "detail": detail,
        }, told

    @staticmethod
    def _why_not(op: str, life: Life | None, body: dict[str, Any]) -> str | None:
        fence, generation = body["fence"], body.get("expected_lease_generation")
        if op == "open":
            stale = life is not None and fence["incarnation"] <= life.fence["incarnation"]
            return "stale_fence" if stale else None
        if life is None or not life.open:
            return None if op == "close" else "not_found"
        if fence["incarnation"] != life.fence["incarnation"] or fence["epoch"] < life.fence["epoch"]:
            return "stale_fence"
        if generation is not None and generation != life.generation:
            return "failed_precondition"
        return None

    @staticmethod
    def _apply(op: str, life: Life, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        cancelled = life.fence
        if op == "signal" and body["event"] != "session.update":
            life.fence = body["next_fence"]
            return {"event": body["event"]}, [{"event": "interrupted", "cancelled_fence": cancelled}]
        if op == "append":
            life.fence, life.appends = body["fence"], life.appends + 1
            return {"seq": life.appends, "mode": body["mode"]}, []
        if op == "resume":
            life.generation += 1
        if op == "close" and life.open:
            life.open = False
            return {"reason": body["reason"]}, [{"event": "closed", "reason": body["reason"]}]
        return {}, []

    async def _publish(self, session_id: str, kind: str, body: dict[str, Any]) -> None:
        life = self.lives.get(session_id)
        n = 1
        # One at a time: on two connections the later number may get there first, and the client would see a gap.
        async with self._publishing:
            if life is not None:
                life.n += 1
                n = life.n
            fields: dict[Any, Any] = {"t": kind, "n": n, "b": msgpack.packb(body)}
            with contextlib.suppress(ResponseError):  # a test may have spoilt the key
                await self._redis.xadd(self.events_key(session_id), fields)
