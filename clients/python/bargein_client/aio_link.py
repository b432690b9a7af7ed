"""The asynchronous shell's dealings with Redis: `Link` is one system, `Exchange` the traffic of one session.

Talks to Redis, and only that: what is sent and what comes in means something to conversation.py alone.
One task a session reads its event stream while there is something to hear. Commands of a session are added
one after another, in the order of the calls, so that a slow connection can't turn them round. Which server
has a key is aio_nodes.py's business.
Units: `_s` seconds, `_ms` milliseconds.
How it says no: a BargeinError. What passes (a lost connection, a full server) is waited out first.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

from bargein_client import protocol, transport
from bargein_client.aio_nodes import open_nodes
from bargein_client.errors import BargeinError, NotReadyError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    import redis.asyncio

    from bargein_client.conversation import Conversation
    from bargein_client.mailbox import Options
    from bargein_client.protocol import Command, Event, Reply

T = TypeVar("T")

RECANCEL_S = 0.05


class Link:
    """One Redis, the names of its keys, and patience with it."""

    def __init__(
        self,
        url_or_redis: str | redis.asyncio.Redis | redis.asyncio.RedisCluster,
        prefix: str,
        options: Options,
    ) -> None:
        self.options = options
        self._prefix = prefix
        self._partitions: int | None = None
        self._nodes = open_nodes(url_or_redis, options)

    async def load_partitions(self, wait_s: float) -> None:
        """Read the config, once; wait that long for a first worker to write it.

        Raises NotReadyError, UnsupportedVersionError, UnreachableError.
        """
        give_up_s = now_s() + wait_s
        pauses_s = self.options.pauses_s()
        while self._partitions is None:
            config = await self.patiently(self._fetch_config)
            try:
                self._partitions = protocol.require_partitions(config, self._prefix)
            except NotReadyError:
                pause_s = next(pauses_s)
                if now_s() + pause_s > give_up_s:
                    raise
                await asyncio.sleep(pause_s)

    def partition_of(self, session_id: str) -> int:
        """The partition of a session. Raises NotReadyError before `load_partitions`."""
        return protocol.partition_of(session_id, protocol.require_known(self._partitions))

    def events_key(self, session_id: str) -> str:
        """The stream that a session's events are read from."""
        return protocol.events_key(self._prefix, self.partition_of(session_id), session_id)

    async def fetch_last_event_id(self, key: str) -> str:
        """Where an event stream ends at present. One try."""
        return transport.last_id_of(await self._call(key, lambda redis: redis.xrevrange(key, count=1)))

    async def fetch_time_ms(self) -> int:
        """Redis' clock; of a cluster's nodes always of the same one. One try."""
        answer = await self._call(protocol.config_key(self._prefix), lambda redis: redis.time())
        return transport.time_ms_of(answer)

    async def add(self, command: Command) -> None:
        """Add a command to its partition's stream. One try."""
        key = protocol.commands_key(self._prefix, self.partition_of(command.session_id))
        await self._call(key, lambda redis: redis.xadd(key, command.fields))

    async def read(self, key: str, after: str, wait_s: float) -> list[transport.Entry]:
        """The entries of a stream after that one, or none after that wait. One try."""
        block_ms = transport.block_ms(wait_s, self._nodes.socket_timeout_s)
        count = transport.READ_COUNT
        answer = await self._call(key, lambda redis: redis.xread({key: after}, count=count, block=block_ms))
        return transport.entries_of(answer)

    async def patiently(self, call: Callable[[], Awaitable[T]], session_id: str | None = None) -> T:
        """The answer to a call, however often Redis is away meanwhile. Raises UnreachableError in the end."""
        give_up_s = now_s() + self.options.unreachable_after_s
        pauses_s = self.options.pauses_s()
        while True:
            try:
                return await call()
            except transport.FAILED as error:
                pause_s = next(pauses_s)
                if not transport.passes(error) or now_s() + pause_s > give_up_s:
                    raise transport.unreachable(error, session_id) from error
                await asyncio.sleep(pause_s)

    async def _fetch_config(self) -> dict[bytes, bytes]:
        key = protocol.config_key(self._prefix)
        return await self._call(key, lambda redis: redis.hgetall(key))

    async def _call(self, key: str, ask: Callable[[Any], Awaitable[T]]) -> T:
        return await _cancellable(self._nodes.call(key, ask))

    async def aclose(self) -> None:
        """Close the connections, if they are ours."""
        await self._nodes.aclose()


class Exchange:
    """The traffic of one session: commands out in order, events in, each reply to whoever waits for it."""

    def __init__(self, link: Link, talk: Conversation) -> None:
        self.talk = talk
        self.stopped = False
        self._link = link
        self._key = link.events_key(talk.session_id)
        self._order = asyncio.Lock()
        self._news = asyncio.Event()
        self._replies: dict[str, asyncio.Future[Reply]] = {}
        self._failure: BargeinError | None = None
        self._reader: asyncio.Task[None] | None = None

    async def ask(self, command: Command) -> Reply:
        """Send a command and wait for its reply.

        Raises the error that the reply stands for, NoReplyError, UnreachableError.
        """
        return await (await self.send(command))

    async def send(self, command: Command) -> asyncio.Future[Reply]:
        """Send a command; the future is its reply. Raises UnreachableError."""
        if self.stopped:
            raise UnreachableError(transport.STOPPED, session_id=self.talk.session_id)
        control_id = command.control_id
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda done: self._over(control_id, done))
        self._replies[control_id] = future
        self.talk.outbox.expect(command)
        self._listen()
        try:
            async with self._order:
                await self._link.patiently(lambda: self._link.add(command), command.session_id)
        except BaseException:
            future.cancel()
            raise
        self.talk.outbox.sent(control_id, now_s())
        return future

    async def events(self, *, replies: bool) -> AsyncIterator[Event]:
        """What there is to hear, until there is no more. Raises UnreachableError if Redis refuses."""
        while True:
            event = self.talk.inbox.take(replies=replies)
            if event is not None:
                yield event
                continue
            if self.stopped or self.talk.finished:
                return
            if self._failure is not None:
                raise self._failure
            self._listen()
            self._news.clear()
            await self._news.wait()

    async def stop(self) -> None:
        """Stop listening, without a word to the system."""
        self.stopped = True
        self._fail(UnreachableError(transport.STOPPED, session_id=self.talk.session_id))
        while self._reader is not None and not self._reader.done():
            self._reader.cancel()  # again and again: see _cancellable
            await asyncio.wait([self._reader], timeout=RECANCEL_S)

    def _over(self, control_id: str, future: asyncio.Future[Reply]) -> None:
        self._replies.pop(control_id, None)
        self.talk.outbox.forget(control_id)
        if not future.cancelled():
            future.exception()  # looked at: an append without wait may well be one that nobody asks about

    def _listen(self) -> None:
        if self._reader is None or self._reader.done():
            self._failure = None
            self._reader = asyncio.create_task(self._read(), name=f"bargein-events-{self.talk.session_id}")

    async def _read(self) -> None:
        try:
            await self._read_while_listening()
        except Exception as error:
            self._fail(transport.unreachable(error, self.talk.session_id))
            if not isinstance(error, transport.FAILED):
                raise
        finally:
            self._news.set()

    async def _read_while_listening(self) -> None:
        pauses_s = self._link.options.pauses_s()
        broken = False
        while True:
            await self._resend()
            if not self.talk.listening:
                return
            inbox = self.talk.inbox
            try:
                if broken:
                    inbox.rewind(await self._link.fetch_last_event_id(self._key))
                entries = await self._link.read(self._key, inbox.event_id, self.talk.read_wait_s(now_s()))
            except transport.FAILED as error:
                if not transport.passes(error):
                    raise
                broken = True
                await asyncio.sleep(next(pauses_s))
                continue
            if broken:
                broken, pauses_s = False, self._link.options.pauses_s()
            for reply in self.talk.receive(entries, now_s()):
                self._settle(reply.control_id, reply if reply.ok else protocol.error_of(reply))
            self._news.set()

    async def _resend(self) -> None:
        again, lost = self.talk.outbox.due(now_s())
        for command in lost:
            self._settle(command.control_id, transport.no_reply(command, self._link.options))
        for command in again:
            with contextlib.suppress(*transport.FAILED):  # the read that follows meets the same error
                await self._link.add(command)
            self.talk.outbox.sent(command.control_id, now_s())

    def _settle(self, control_id: str, outcome: Reply | BargeinError) -> None:
        future = self._replies.get(control_id)
        if future is None or future.done():
            return
        if isinstance(outcome, BargeinError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _fail(self, error: BargeinError) -> None:
        self._failure = error
        for control_id in tuple(self._replies):
            self._settle(control_id, error)
        self._news.set()


async def _cancellable(call: Awaitable[T]) -> T:
    """The call's answer, or CancelledError if the task was cancelled meanwhile.

    Under Python 3.11 redis-py may lose a cancellation: asyncio.wait_for, which it sends with, returns if it is
    cancelled in the moment in which what it waits for is done.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    answer = await call
    if task and task.cancelling() > before:
        raise asyncio.CancelledError
    return answer


def now_s() -> float:
    """The running loop's monotonic clock."""
    return asyncio.get_running_loop().time()
