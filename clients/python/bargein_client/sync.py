"""The synchronous producer: `Bargein` opens sessions, `Session` is one of them. aio.py's twin, for threads.

What a method sends is built by conversation.py; sync_link.py talks to Redis.
Units: `_s` seconds, `_ms` milliseconds.
How it says no: a BargeinError; ValueError for arguments that no worker would take.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from typing import TYPE_CHECKING, Any, Literal, Self, overload
from weakref import WeakSet

from bargein_client import protocol, transport
from bargein_client.conversation import Conversation
from bargein_client.errors import BargeinError, NoReplyError, UnreachableError
from bargein_client.mailbox import Options
from bargein_client.sync_link import Exchange, Link

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future
    from types import TracebackType

    import redis

    from bargein_client.conversation import Bookmark
    from bargein_client.protocol import Activity, CancelKind, Event, Fence, InputMode, Reply, SessionMode

REJOIN_S = 0.05


class Bargein:
    """A client of one Bargein system. Use it as a context manager, or call `close` at the end.

    Arguments as for `AsyncBargein`; a Redis client of the caller's is a `redis.Redis` or a
    `redis.RedisCluster`.
    """

    def __init__(
        self,
        url_or_redis: str | redis.Redis | redis.RedisCluster,
        prefix: str = "bargein",
        *,
        options: Options | None = None,
        config_wait_s: float = 0.0,
    ) -> None:
        self.options = options or Options()
        self._config_wait_s = config_wait_s
        self._link = Link(url_or_redis, prefix, self.options)
        self._exchanges: WeakSet[Exchange] = WeakSet()  # those that anybody still uses

    def connect(self) -> None:
        """Read `bargein:config`, once; as `AsyncBargein.connect`."""
        self._link.load_partitions(self._config_wait_s)

    def open(
        self,
        session_id: str | None = None,
        mode: SessionMode = "duplex",
        *,
        input_modes: Sequence[InputMode] = ("append_audio_chunk",),
        session_config: dict[str, Any] | None = None,
        runtime_config: dict[str, Any] | None = None,
        incarnation: int | None = None,
        token: str | None = None,
    ) -> Session:
        """Open a session and wait until it is placed; as `AsyncBargein.open`."""
        self.connect()
        identity, after, life = uuid.uuid4().hex, "0-0", incarnation or 0
        if session_id is not None:
            identity = protocol.require_session_id(session_id)
            key = self._link.events_key(identity)
            after = self._link.patiently(lambda: self._link.fetch_last_event_id(key))
            if incarnation is None:
                life = self._link.patiently(self._link.fetch_time_ms)
        modes = tuple(input_modes)
        talk = Conversation(identity, life, self.options, event_id=after, input_modes=modes, token=token)
        exchange = Exchange(self._link, talk)
        self._exchanges.add(exchange)
        try:
            exchange.ask(lambda: talk.open(mode, session_config, runtime_config))
        except BaseException as error:
            exchange.stop()
            if isinstance(error, NoReplyError | UnreachableError) or not isinstance(error, Exception):
                with contextlib.suppress(*transport.FAILED):  # the session's idle TTL ends it then
                    self._link.add(talk.close("client_close"))
            raise
        return Session(exchange)

    def attach(self, bookmark: Bookmark, token: str | None = None) -> Session:
        """A session that another process opened, from its `bookmark()` on; as `AsyncBargein.attach`."""
        exchange = Exchange(self._link, Conversation.at(bookmark, self.options, token))
        self._exchanges.add(exchange)
        return Session(exchange)

    def close(self) -> None:
        """Stop listening everywhere. Sessions stay open; what still waits here ends as UnreachableError."""
        readers = [reader for exchange in tuple(self._exchanges) if (reader := exchange.stop())]
        self._exchanges.clear()
        give_up_s = time.monotonic() + self._link.socket_timeout_s
        while any(reader.is_alive() for reader in readers) and time.monotonic() < give_up_s:
            self._link.interrupt_reads()  # again and again: one may just have been about to begin another read
            readers[0].join(REJOIN_S)
            readers = [reader for reader in readers if reader.is_alive()]
        self._link.close()

    def __enter__(self) -> Self:
        try:
            self.connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Session:
    """One life of one session. As a context manager it closes at the end. Every method as in `AsyncSession`.

    Threads may share it, so that one listens while another speaks. With `wait=False`, `append` and
    `interrupt` return when the command is in Redis, with a `concurrent.futures.Future` for the reply.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._talk = exchange.talk

    @property
    def session_id(self) -> str:
        """Its id."""
        return self._talk.session_id

    @property
    def fence(self) -> Fence:
        """The position that the next command carries, an input that begins a turn excepted."""
        return self._talk.position.fence

    @property
    def lease_generation(self) -> int:
        """The lease generation of this attachment."""
        return self._talk.lease_generation

    @property
    def dropped_locally(self) -> int:
        """Outputs that came before an interruption and were not handed out any more because of it."""
        return self._talk.inbox.dropped_locally

    @property
    def ended(self) -> bool:
        """Whether this life of the session is over, as far as has been read."""
        return self._talk.inbox.ended

    @overload
    def append(
        self,
        payload: Any,
        mode: InputMode | None = None,
        *,
        final: bool = False,
        operation_id: str | None = None,
        deadline_ms: int | None = None,
        wait: Literal[True] = True,
    ) -> Reply: ...

    @overload
    def append(
        self,
        payload: Any,
        mode: InputMode | None = None,
        *,
        final: bool = False,
        operation_id: str | None = None,
        deadline_ms: int | None = None,
        wait: Literal[False],
    ) -> Future[Reply]: ...

    def append(
        self,
        payload: Any,
        mode: InputMode | None = None,
        *,
        final: bool = False,
        operation_id: str | None = None,
        deadline_ms: int | None = None,
        wait: bool = True,
    ) -> Reply | Future[Reply]:
        """Give the model input; as `AsyncSession.append`."""
        future = self._exchange.send(
            lambda: self._talk.append(
                payload, mode=mode, final=final, operation_id=operation_id, deadline_ms=deadline_ms
            )
        )
        return future.result() if wait else future

    @overload
    def interrupt(self, kind: CancelKind = "barge_in", *, wait: Literal[True] = True) -> Reply: ...

    @overload
    def interrupt(self, kind: CancelKind = "barge_in", *, wait: Literal[False]) -> Future[Reply]: ...

    def interrupt(self, kind: CancelKind = "barge_in", *, wait: bool = True) -> Reply | Future[Reply]:
        """Stop the model; as `AsyncSession.interrupt`. Older output stops even while another thread sends."""
        with self._exchange.guard:
            command = self._talk.interrupt(kind)
        future = self._exchange.send(lambda: command)
        return future.result() if wait else future

    def next_turn(self) -> None:
        """Let the next append begin a new turn, as if the last one had been final. Sends nothing."""
        with self._exchange.guard:
            self._talk.next_turn()

    def update(
        self, *, session_config: dict[str, Any] | None = None, runtime_config: dict[str, Any] | None = None
    ) -> Reply:
        """Replace one config or both; what is left out stays."""
        return self._exchange.ask(lambda: self._talk.update(session_config, runtime_config))

    def touch(self, activity: Activity = "heartbeat") -> Reply:
        """Say that the session is still wanted."""
        return self._exchange.ask(lambda: self._talk.touch(activity))

    def heartbeat(self) -> Reply:
        """Keep an idle session from expiring."""
        return self.touch("heartbeat")

    def detach(self) -> Reply:
        """Let go, for a `resume` within the disconnect grace; as `AsyncSession.detach`."""
        return self.touch("detach")

    def resume(self, expected_generation: int | None = None) -> Reply:
        """Attach again; as `AsyncSession.resume`."""
        return self._exchange.ask(lambda: self._talk.resume(expected_generation))

    def close(self, reason: str = "client_close") -> Reply:
        """End the session; as `AsyncSession.close`."""
        return self._exchange.ask(lambda: self._talk.close(reason))

    def bookmark(self) -> Bookmark:
        """Where this client stands, for `client.attach` in another process."""
        with self._exchange.guard:
            return self._talk.bookmark()

    def events(self, *, replies: bool = False) -> Iterator[Event]:
        """What the session says; as `AsyncSession.events`. Other threads may send meanwhile."""
        return self._exchange.events(replies=replies)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if not self._talk.finished and not self._exchange.stopped:
                self.close()
        except BargeinError as refusal:
            if error is None and not transport.close_holds(refusal):
                raise
