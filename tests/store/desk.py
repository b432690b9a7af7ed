"""What the store suite works at: one partition in a store, and a desk to decide and commit at.

The store is fakeredis, Valkey or Redis 7.0, and is spoken to through a `Link`, as the product does; fakeredis gets the
scripts without their `#!lua` line, which it refuses. `Desk` keeps what an owner keeps: the token, the revision and each
session as it was last committed, so that a test is a list of decisions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import fakeredis
import msgspec
from redis.asyncio import Redis

from control.core import commands as c
from control.core import effects as e
from control.core.answers import Answers
from control.core.fence import Fence
from control.core.scene import Scene, Settings
from control.core.session import Session
from control.core.transitions import step
from control.store.commits import COMMANDS_KEY, Batch, CommitOutcome, PayloadSource, read_outcome
from control.store.keys import PartitionKeys
from control.store.link import Link
from control.store.scripts import Script, script
from control.wire.stage import pack_config, unpack_config
from tests.servers import RealServer

HALF_EVENTS_BYTES = 512 * 1024
SID = "caller"
KEYS = PartitionKeys(3)
STAGE = "ear-1"


class FakeLink(Link):
    """A link to fakeredis: the same scripts, without the line that it doesn't know."""

    def __init__(self, client: fakeredis.FakeAsyncRedis) -> None:
        self._client = client

    async def try_all(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        plain = {script(name).sha: script(name, plain=True) for name in ("commit", "publish", "acknowledge", "slot")}
        async with self._client.pipeline(transaction=False) as pipe:
            for name, *arguments in commands:
                if name == "EVALSHA":
                    pipe.execute_command("EVAL", plain[arguments[0]].text, *arguments[1:])
                else:
                    pipe.execute_command(name, *arguments)
            return await pipe.execute(raise_on_error=False)

    async def run(self, name: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        return await self._client.eval(script(name, plain=True).text, len(keys), *keys, *arguments)

    async def try_run_all(self, calls: Sequence[tuple[Script, Sequence[str], Sequence[Any]]]) -> list[Any]:
        return [await self.run(known.name, keys, arguments) for known, keys, arguments in calls]

    async def close(self) -> None:
        pass


class Store:
    """A store under test. `redis`: a client for looking, bytes in and out. `is_fake`: see the header."""

    def __init__(self, redis: Redis, link: Link, *, is_fake: bool, server: RealServer | None = None) -> None:
        self.redis: Any = redis  # its answers are looked at, not its types
        self.link = link
        self.is_fake = is_fake
        self._server = server

    @property
    def server(self) -> RealServer:
        assert self._server is not None
        return self._server

    async def run(self, name: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        return await self.link.run(name, keys, arguments)

    async def run_apart(self, name: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        """A script over a connection of its own, so that several calls can race."""
        call: Any = self.redis.eval(script(name, plain=self.is_fake).text, len(keys), *keys, *arguments)
        return await call

    async def acquire(self, keys: PartitionKeys = KEYS, worker: str = "control-a", lease_ms: int = 60_000) -> Desk:
        """Own a partition."""
        answer = await self.run("acquire", [keys.owner], [worker, lease_ms, "random"])
        assert answer[0] == 1
        return Desk(self, keys, answer[1].decode(), answer[2])

    async def now_ms(self) -> int:
        seconds, micros = await self.redis.time()
        return seconds * 1000 + micros // 1000

    async def dump(self) -> dict[bytes, Any]:
        """Everything that is stored, with what can be compared."""
        found: dict[bytes, Any] = {}
        for key in await self.redis.keys():
            kind = (await self.redis.type(key)).decode()
            match kind:
                case "hash":
                    value: Any = await self.redis.hgetall(key)
                case "stream":
                    value = await self.redis.xrange(key)
                case "list":
                    value = await self.redis.lrange(key, 0, -1)
                case "zset":
                    value = await self.redis.zrange(key, 0, -1, withscores=True)
                case "set":
                    value = await self.redis.smembers(key)
                case _:
                    value = await self.redis.get(key)
            found[key] = (kind, value)
        return found

    async def events(self, session_id: str = SID, keys: PartitionKeys = KEYS) -> list[tuple[str, int, dict[str, Any]]]:
        """What the session's listener reads: type, n, body."""
        entries = await self.redis.xrange(keys.events(session_id))
        return [(f[b"t"].decode(), int(f[b"n"]), msgspec.msgpack.decode(f[b"b"])) for _, f in entries]


class Desk:
    """What an owner decides with, and commits. `sessions`: as they were last committed."""

    def __init__(self, store: Store, keys: PartitionKeys, token: str, revision: int) -> None:
        self.store = store
        self.keys = keys
        self.token = token
        self.revision = revision
        self.batch = Batch(keys)
        self.sessions: dict[str, Session | None] = {}
        self.answers: dict[str, Answers] = {}
        self.settings = settings()

    def decide(
        self, event: c.Event, session_id: str = SID, *, now_ms: int = 1_000, payload: PayloadSource | None = None
    ) -> e.Decision:
        """Decide an event with the core and put it into the batch."""
        scene = Scene(
            settings=self.settings,
            session_id=session_id,
            now_ms=now_ms,
            answers=self.answers.setdefault(session_id, Answers()),
            choose_route=lambda: (STAGE,) * self.settings.stage_count,
        )
        before = self.sessions.get(session_id)
        decision = step(scene, before, event)
        self.batch.add(session_id, before, decision, payload)
        for effect in decision.effects:
            if isinstance(effect, e.Answer) and effect.remember is not None:
                self.answers[session_id].remember(effect.remember)
        self.sessions[session_id] = decision.session
        return decision

    def open(self, session_id: str = SID, incarnation: int = 0) -> None:
        """Open a session, once the slots of its last life are given back; its own are taken at once."""
        last = self.sessions.get(session_id)
        for debt in () if last is None else last.debts:
            self.decide(c.DebtPaid(debt.incarnation, debt.holder), session_id)
        self.decide(command(c.Open, session_id, fence(incarnation), capabilities=CAPABLE), session_id)
        if self.settings.configure is not None:
            self.decide(c.Placed(incarnation, 1), session_id)

    async def commit(
        self, *, token: str | None = None, revision: int | None = None, half: int = HALF_EVENTS_BYTES
    ) -> Any:
        """Send the batch; its outcome. The next batch is empty."""
        names, argv = self.batch.arguments(
            self.token if token is None else token, self.revision if revision is None else revision, half
        )
        self.batch = Batch(self.keys)
        return await self.send(names, argv)

    async def send(self, names: list[str], argv: list[Any]) -> CommitOutcome:
        outcome = read_outcome(await self.store.run("commit", names, argv))
        if outcome.status == 0:
            self.revision = outcome.revision
        return outcome

    async def must_commit(self, *, half: int = HALF_EVENTS_BYTES) -> CommitOutcome:
        outcome = await self.commit(half=half)
        assert outcome.status == 0, outcome
        return outcome

    async def producer(self, payload: bytes | None = None, body: bytes = b"body") -> str:
        """An entry in the commands; its id."""
        fields: dict[Any, Any] = {"b": body} if payload is None else {"b": body, "p": payload}
        return (await self.store.redis.xadd(self.keys.commands, fields)).decode()

    def done(self, entry_id: str) -> None:
        self.batch.done(COMMANDS_KEY, entry_id)


async def until(holds: Callable[[], Awaitable[object]], within_s: float = 20.0) -> None:
    """Ask until it holds; only a failing test waits to the end."""
    deadline = time.monotonic() + within_s
    while not await holds():
        assert time.monotonic() < deadline, f"not within {within_s:g} s"
        await asyncio.sleep(0.005)


CAPABLE = c.Capabilities(input_modes=["append_tokens", "turn_commit_only"])
_ids = iter(range(1_000_000))


def fence(incarnation: int = 0, epoch: int = 0, turn: int = 0, response: int = 0) -> Fence:
    return Fence(incarnation, epoch, turn, response)


def command(kind: Any, session_id: str = SID, at: Fence | None = None, **fields: Any) -> Any:
    """A command with a control id of its own."""
    return kind(
        **{"control_id": f"c{next(_ids)}", "session_id": session_id, "fence": fence() if at is None else at, **fields}
    )


def settings(*, policy: bool = True, stages: int = 1, limit: bool = False) -> Settings:
    return Settings(
        stage_count=stages,
        configure=(lambda _: (None,) * stages) if policy else None,
        pack_config=pack_config,
        unpack_config=unpack_config,
        limit_sessions=limit,
    )
