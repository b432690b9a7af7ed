"""The asynchronous producer: `AsyncBargein` opens sessions, `AsyncSession` is one of them.

What a method sends is built by conversation.py; aio_link.py talks to Redis.
Units: `_s` seconds, `_ms` milliseconds.
How it says no: a BargeinError; ValueError for arguments that no worker would take.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from typing import TYPE_CHECKING, Any, Literal, Self, overload
from weakref import WeakSet

from bargein_client import protocol, transport
from bargein_client.aio_link import Exchange, Link
from bargein_client.conversation import Conversation
from bargein_client.errors import BargeinError, NoReplyError, UnreachableError
from bargein_client.mailbox import Options

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Sequence
    from types import TracebackType

    import redis.asyncio

    from bargein_client.conversation import Bookmark
    from bargein_client.protocol import (
        Activity,
        CancelKind,
        Command,
        Event,
        Fence,
        InputMode,
        Reply,
        SessionMode,
    )


class AsyncBargein:
    """A client of one Bargein system. Use it as an async context manager, or call `aclose` at the end.

    `url_or_redis`: a Redis URL, or a `redis.asyncio.Redis` or `RedisCluster` of the caller's, which stays
    open at the end; it must have a `socket_timeout` and must not decode answers. `config_wait_s`: how long to
    wait for a first worker to start on this Redis; 0 is not at all. `options`: patience, retries and bounds.
    """

    def __init__(
        self,
        url_or_redis: str | redis.asyncio.Redis | redis.asyncio.RedisCluster,
        prefix: str = "bargein",
        *,
        options: Options | None = None,
        config_wait_s: float = 0.0,
    ) -> None:
        self.options = options or Options()
        self._config_wait_s = config_wait_s
        self._link = Link(url_or_redis, prefix, self.options)
        self._exchanges: WeakSet[Exchange] = WeakSet()  # those that anybody still uses
        self._background: set[asyncio.Task[None]] = set()

    async def connect(self) -> None:
        """Read `bargein:config`, once; done by the first `open` otherwise.

        Raises NotReadyError if no worker has started yet, UnsupportedVersionError if they speak another
        protocol, UnreachableError.
        """
        await self._link.load_partitions(self._config_wait_s)

    async def open(
        self,
        session_id: str | None = None,
        mode: SessionMode = "duplex",
        *,
        input_modes: Sequence[InputMode] = ("append_audio_chunk",),
        session_config: dict[str, Any] | None = None,
        runtime_config: dict[str, Any] | None = None,
        incarnation: int | None = None,
        token: str | None = None,
    ) -> AsyncSession:
        """Open a session and wait until it is placed.

        `incarnation`: which life of this id it is; reopening an id needs a higher one than its last. Left
        out, it is 0 for an id that is made up here, and Redis' clock in ms for one of the caller's, so that
        each life is higher. `token`: a secret of 16 to 256 bytes that every command of this life has to show;
        this session sends it along, another producer needs it for `attach`. Raises ResourceExhaustedError
        (retryable) if no stage has a free slot, StaleFenceError for an incarnation that is over,
        FailedPreconditionError if the id lives with another token, InvalidCapabilityError,
        InvalidArgumentError, NoReplyError, UnreachableError. An open that is given up is closed again.
        """
        await self.connect()
        identity, after, life = uuid.uuid4().hex, "0-0", incarnation or 0
        if session_id is not None:
            identity = protocol.require_session_id(session_id)
            key = self._link.events_key(identity)
            after = await self._link.patiently(lambda: self._link.fetch_last_event_id(key))
            if incarnation is None:
                life = await self._link.patiently(self._link.fetch_time_ms)
        modes = tuple(input_modes)
        talk = Conversation(identity, life, self.options, event_id=after, input_modes=modes, token=token)
        exchange = Exchange(self._link, talk)
        self._exchanges.add(exchange)
        try:
            await exchange.ask(talk.open(mode, session_config, runtime_config))
        except BaseException as error:
            if isinstance(error, NoReplyError | UnreachableError) or not isinstance(error, Exception):
                self._in_background(self._say_goodbye(talk.close("client_close")))
            self._in_background(exchange.stop())
            raise
        return AsyncSession(exchange)

    def attach(self, bookmark: Bookmark, token: str | None = None) -> AsyncSession:
        """A session that another process opened, from where its `bookmark()` says; after `connect`.

        Sends nothing: call `resume` to take the session over. `token`: what the session was opened with, if it
        was; it is in no bookmark.
        """
        exchange = Exchange(self._link, Conversation.at(bookmark, self.options, token))
        self._exchanges.add(exchange)
        return AsyncSession(exchange)

    async def aclose(self) -> None:
        """Stop listening everywhere. Sessions stay open; what still waits here ends as UnreachableError."""
        try:
            await asyncio.gather(*(exchange.stop() for exchange in self._exchanges), *self._background)
        finally:
            await self._link.aclose()

    async def __aenter__(self) -> Self:
        try:
            await self.connect()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _say_goodbye(self, command: Command) -> None:
        with contextlib.suppress(*transport.FAILED):  # the session's idle TTL ends it then
            await self._link.add(command)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """For what must be done although the caller was cancelled."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


class AsyncSession:
    """One life of one session. As an async context manager it closes at the end.

    Every command waits for its reply and returns it, or raises a BargeinError. With `wait=False`, `append`
    and `interrupt` return when the command is in Redis, with a future for the reply; a failure that nobody
    looks at there shows in `events(replies=True)`.
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
    async def append(
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
    async def append(
        self,
        payload: Any,
        mode: InputMode | None = None,
        *,
        final: bool = False,
        operation_id: str | None = None,
        deadline_ms: int | None = None,
        wait: Literal[False],
    ) -> asyncio.Future[Reply]: ...

    async def append(
        self,
        payload: Any,
        mode: InputMode | None = None,
        *,
        final: bool = False,
        operation_id: str | None = None,
        deadline_ms: int | None = None,
        wait: bool = True,
    ) -> Reply | asyncio.Future[Reply]:
        """Give the model input: bytes as they are, anything else as a MessagePack value.

        `mode`: the session's first input mode if left out. `final` ends the user's turn; the next append
        begins another, and what is left of the response to the old one is dropped by then. `operation_id`: a
        name of the caller's under which this input counts once. `deadline_ms`: refused as `timeout` if no
        worker has come to it by then. Raises StaleFenceError if an interrupt overtook it, StageTimeoutError
        or FailedPreconditionError if its epoch is lost (go on with `interrupt`), ResourceExhaustedError if
        too many are queued, PayloadTooLargeError, NotFoundError.
        """
        command = self._talk.append(payload, mode=mode, final=final, operation_id=operation_id, deadline_ms=deadline_ms)
        return await self._exchange.ask(command) if wait else await self._exchange.send(command)

    @overload
    async def interrupt(self, kind: CancelKind = "barge_in", *, wait: Literal[True] = True) -> Reply: ...

    @overload
    async def interrupt(self, kind: CancelKind = "barge_in", *, wait: Literal[False]) -> asyncio.Future[Reply]: ...

    async def interrupt(self, kind: CancelKind = "barge_in", *, wait: bool = True) -> Reply | asyncio.Future[Reply]:
        """Stop the model. From this call on no older output comes out of `events`, and appends belong to what
        follows.

        The fence moves to the next epoch and the next turn. The reply comes when every stage has let go of
        the old requests; StageTimeoutError and CleanupFailedError (both retryable) mean that one has not yet,
        the interrupt holds.
        """
        command = self._talk.interrupt(kind)
        return await self._exchange.ask(command) if wait else await self._exchange.send(command)

    def next_turn(self) -> None:
        """Let the next append begin a new turn, as if the last one had been final. Sends nothing."""
        self._talk.next_turn()

    async def update(
        self, *, session_config: dict[str, Any] | None = None, runtime_config: dict[str, Any] | None = None
    ) -> Reply:
        """Replace one config or both; what is left out stays."""
        return await self._exchange.ask(self._talk.update(session_config, runtime_config))

    async def touch(self, activity: Activity = "heartbeat") -> Reply:
        """Say that the session is still wanted."""
        return await self._exchange.ask(self._talk.touch(activity))

    async def heartbeat(self) -> Reply:
        """Keep an idle session from expiring."""
        return await self.touch("heartbeat")

    async def detach(self) -> Reply:
        """Let go, for a `resume` within the disconnect grace. `events` ends once what has come is handed out.

        Raises FailedPreconditionError if the session has been resumed elsewhere since: it is not this
        client's any more.
        """
        return await self.touch("detach")

    async def resume(self, expected_generation: int | None = None) -> Reply:
        """Attach again and become the one that speaks for the session; `events` goes on where it was.

        `expected_generation`: the lease generation that must still hold; this attachment's own if left out.
        Raises FailedPreconditionError or InvalidArgumentError otherwise; the error's `lease_generation` is
        the present one.
        """
        return await self._exchange.ask(self._talk.resume(expected_generation))

    async def close(self, reason: str = "client_close") -> Reply:
        """End the session. Closing one that has ended is ok.

        StageTimeoutError and CleanupFailedError (both retryable) mean that a stage has not let go yet; the
        close holds.
        """
        return await self._exchange.ask(self._talk.close(reason))

    def bookmark(self) -> Bookmark:
        """Where this client stands, for `client.attach` in another process."""
        return self._talk.bookmark()

    def events(self, *, replies: bool = False) -> AsyncIterator[Event]:
        """What the session says, until its terminal event, a detach or the client's end; one reader at a
        time.

        Yields Output, Lifecycle, Gap if events are missing, and with `replies` the Reply to each command of
        this client. After an `interrupt`, or an `interrupted` that somebody else caused, no older Output is
        yielded. Raises UnreachableError if Redis refuses for good; a broken connection is waited out.
        """
        return self._exchange.events(replies=replies)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if not self._talk.finished and not self._exchange.stopped:
                await self.close()
        except BargeinError as refusal:
            if error is None and not transport.close_holds(refusal):
                raise
