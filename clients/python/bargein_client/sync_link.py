"""The synchronous shell's dealings with Redis: aio_link.py's twin, for threads.

Talks to Redis, and only that: what is sent and what comes in means something to conversation.py alone.
One daemon thread a session reads its event stream while there is something to hear. Threads may share a
session: `guard` protects its state and is never held while Redis is waited for, `_order` keeps its commands
in the order of their fences. Which server has a key is sync_nodes.py's business.
Units: `_s` seconds, `_ms` milliseconds.
How it says no: a BargeinError. What passes (a lost connection, a full server) is waited out first.
"""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from bargein_client import protocol, transport
from bargein_client.errors import BargeinError, NotReadyError, UnreachableError
from bargein_client.sync_nodes import open_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import redis

    from bargein_client.conversation import Conversation
    from bargein_client.mailbox import Options
    from bargein_client.protocol import Command, Event, Reply

T = TypeVar("T")


class Link:
    """One Redis, the names of its keys, and patience with it."""

    def __init__(self, url_or_redis: str | redis.Redis | redis.RedisCluster, prefix: str, options: Options) -> None:
        self.options = options
        self._prefix = prefix
        self._partitions: int | None = None
        self._nodes = open_nodes(url_or_redis, options)

    def load_partitions(self, wait_s: float) -> None:
        """Read the config, once; wait that long for a first worker to write it.

        Raises NotReadyError, UnsupportedVersionError, UnreachableError.
        """
        give_up_s = time.monotonic() + wait_s
        pauses_s = self.options.pauses_s()
        key = protocol.config_key(self._prefix)
        while self._partitions is None:
            config = self.patiently(lambda: self._nodes.call(key, lambda redis: redis.hgetall(key)))
            try:
                self._partitions = protocol.require_partitions(config, self._prefix)
            except NotReadyError:
                pause_s = next(pauses_s)
                if time.monotonic() + pause_s > give_up_s:
                    raise
                time.sleep(pause_s)

    def partition_of(self, session_id: str) -> int:
        """The partition of a session. Raises NotReadyError before `load_partitions`."""
        return protocol.partition_of(session_id, protocol.require_known(self._partitions))

    def events_key(self, session_id: str) -> str:
        """The stream that a session's events are read from."""
        return protocol.events_key(self._prefix, self.partition_of(session_id), session_id)

    def fetch_last_event_id(self, key: str) -> str:
        """Where an event stream ends at present. One try."""
        return transport.last_id_of(self._nodes.call(key, lambda redis: redis.xrevrange(key, count=1)))

    def fetch_time_ms(self) -> int:
        """Redis' clock; of a cluster's nodes always of the same one. One try."""
        key = protocol.config_key(self._prefix)
        return transport.time_ms_of(self._nodes.call(key, lambda redis: redis.time()))

    def add(self, command: Command) -> None:
        """Add a command to its partition's stream. One try."""
        key = protocol.commands_key(self._prefix, self.partition_of(command.session_id))
        self._nodes.call(key, lambda redis: redis.xadd(key, command.fields))

    def read(self, key: str, after: str, wait_s: float) -> list[transport.Entry]:
        """The entries of a stream after that one, or none after that wait. One try."""
        block_ms = transport.block_ms(wait_s, self.socket_timeout_s)
        count = transport.READ_COUNT
        answer = self._nodes.call(key, lambda redis: redis.xread({key: after}, count=count, block=block_ms))
        return transport.entries_of(answer)

    @property
    def socket_timeout_s(self) -> float:
        """After how long without a word a connection counts as dead."""
        return self._nodes.socket_timeout_s

    def patiently(self, call: Callable[[], T], session_id: str | None = None) -> T:
        """The answer to a call, however often Redis is away meanwhile. Raises UnreachableError in the end."""
        give_up_s = time.monotonic() + self.options.unreachable_after_s
        pauses_s = self.options.pauses_s()
        while True:
            try:
                return call()
            except transport.FAILED as error:
                pause_s = next(pauses_s)
                if not transport.passes(error) or time.monotonic() + pause_s > give_up_s:
                    raise transport.unreachable(error, session_id) from error
                time.sleep(pause_s)

    def interrupt_reads(self) -> None:
        """Wake readers that are blocked, if the connections are ours."""
        self._nodes.interrupt()

    def close(self) -> None:
        """Close the connections, if they are ours."""
        self._nodes.close()


class Exchange:
    """The traffic of one session: commands out in order, events in, each reply to whoever waits for it."""

    def __init__(self, link: Link, talk: Conversation) -> None:
        self.talk = talk
        self.stopped = False
        self.guard = threading.Condition()
        self._link = link
        self._key = link.events_key(talk.session_id)
        self._order = threading.Lock()
        self._replies: dict[str, Future[Reply]] = {}
        self._failure: BargeinError | None = None
        self._reader: threading.Thread | None = None

    def ask(self, build: Callable[[], Command]) -> Reply:
        """Send a command and wait for its reply.

        Raises the error that the reply stands for, NoReplyError, UnreachableError.
        """
        return self.send(build).result()

    def send(self, build: Callable[[], Command]) -> Future[Reply]:
        """Send a command; the future is its reply. Raises UnreachableError.

        `build` is called when its turn has come, so that commands go out in the order of their fences.
        """
        future: Future[Reply] = Future()
        future.set_running_or_notify_cancel()
        with self._order:
            with self.guard:
                if self.stopped:
                    raise UnreachableError(transport.STOPPED, session_id=self.talk.session_id)
                command = build()
                self._replies[command.control_id] = future
                self.talk.outbox.expect(command)
                self._listen()
            try:
                self._link.patiently(lambda: self._link.add(command), command.session_id)
            except BaseException:
                with self.guard:
                    self._replies.pop(command.control_id, None)
                    self.talk.outbox.forget(command.control_id)
                raise
            with self.guard:
                self.talk.outbox.sent(command.control_id, time.monotonic())
        return future

    def events(self, *, replies: bool) -> Iterator[Event]:
        """What there is to hear, until there is no more. Raises UnreachableError if Redis refuses."""
        while (event := self._await_event(replies=replies)) is not None:
            yield event

    def stop(self) -> threading.Thread | None:
        """Stop listening, without a word to the system. Returns the reader, if it has to end yet."""
        with self.guard:
            self.stopped = True
            reader = self._reader
        self._fail(UnreachableError(transport.STOPPED, session_id=self.talk.session_id))
        return reader

    def _await_event(self, *, replies: bool) -> Event | None:
        with self.guard:
            while (event := self.talk.inbox.take(replies=replies)) is None:
                if self.stopped or self.talk.finished:
                    return None
                if self._failure is not None:
                    raise self._failure
                self._listen()
                self.guard.wait()
        return event

    def _listen(self) -> None:
        """Under the guard, as is the reader's end, so that neither misses the other."""
        if self._reader is None:
            self._failure = None
            name = f"bargein-events-{self.talk.session_id}"
            self._reader = threading.Thread(target=self._read, name=name, daemon=True)
            self._reader.start()

    def _read(self) -> None:
        try:
            self._read_while_listening()
        except Exception as error:
            # A pool that was closed under a read may look like anything.
            if not self.stopped:
                self._end_reading()
                self._fail(transport.unreachable(error, self.talk.session_id))
                if not isinstance(error, transport.FAILED):
                    raise

    def _read_while_listening(self) -> None:
        pauses_s = self._link.options.pauses_s()
        broken = False
        while True:
            self._resend()
            with self.guard:
                if self.stopped or not self.talk.listening:
                    self._end_reading()
                    return
                after, wait_s = self.talk.inbox.event_id, self.talk.read_wait_s(time.monotonic())
            try:
                if broken:
                    last_id = self._link.fetch_last_event_id(self._key)
                    with self.guard:
                        after = self.talk.inbox.rewind(last_id)
                entries = self._link.read(self._key, after, wait_s)
            except transport.FAILED as error:
                if self.stopped or not transport.passes(error):
                    raise
                broken = True
                time.sleep(next(pauses_s))
                continue
            if broken:
                broken, pauses_s = False, self._link.options.pauses_s()
            with self.guard:
                settled = self.talk.receive(entries, time.monotonic())
                self.guard.notify_all()
            for reply in settled:
                self._settle(reply.control_id, reply if reply.ok else protocol.error_of(reply))

    def _end_reading(self) -> None:
        with self.guard:
            self._reader = None
            self.guard.notify_all()

    def _resend(self) -> None:
        with self.guard:
            again, lost = self.talk.outbox.due(time.monotonic())
        for command in lost:
            self._settle(command.control_id, transport.no_reply(command, self._link.options))
        for command in again:
            with contextlib.suppress(*transport.FAILED):  # the read that follows meets the same error
                self._link.add(command)
            with self.guard:
                self.talk.outbox.sent(command.control_id, time.monotonic())

    def _settle(self, control_id: str, outcome: Reply | BargeinError) -> None:
        with self.guard:
            future = self._replies.pop(control_id, None)
        if future is None:
            return
        if isinstance(outcome, BargeinError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _fail(self, error: BargeinError) -> None:
        with self.guard:
            self._failure = error
            waiting = tuple(self._replies)
            self.guard.notify_all()
        for control_id in waiting:
            self._settle(control_id, error)
