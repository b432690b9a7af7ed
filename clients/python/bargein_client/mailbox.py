"""One session's post: `Outbox`, the commands whose reply is awaited, and `Inbox`, what came in.

Pure: time and chance are arguments, nothing is sent or read here.
Leaves which command to send to conversation.py, sending and reading to aio_link.py and sync_link.py.
Keeps I1 on this side too: an output below the cancelled epoch is never handed out, wherever it was at that
moment. What is kept for an application that does not fetch it is bounded.
Units: `_s` seconds of a monotonic clock, `_bytes` bytes.
How it says no: a command without a reply ends as lost; what can't be shown any more is shown as a Gap.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from bargein_client.protocol import Command, Event, Gap, Lifecycle, Output, Reply

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Workers remember a control_id for at least this long, so a re-send within it has no second effect.
REMEMBERED_S = 60.0
# What an event costs in memory beside its body, roughly.
EVENT_OVERHEAD_BYTES = 400
# How many lifecycle events are kept for a listener that fell too far behind.
TOLD_AFTER_SKIPPING = 64


@dataclass(frozen=True, slots=True)
class Options:
    """How patient a client is, and how much it keeps.

    `reply_timeout_s`: without a reply for this long a command is sent again, each time `growth` times later.
    `attempts`: how often it is sent in all.
    `retries`: how often a command whose reply says `retryable` is tried again; never an append, since later
    ones would have overtaken it.
    `unreachable_after_s`: how long Redis may be away before a command gives up.
    `buffer_bytes`: events kept for an application that does not fetch them.
    Raises ValueError if a re-send could come after the workers have forgotten the first.
    """

    reply_timeout_s: float = 6.0
    attempts: int = 3
    growth: float = 1.5
    jitter: float = 0.25
    retries: int = 0
    backoff_s: float = 0.05
    backoff_max_s: float = 2.0
    unreachable_after_s: float = 30.0
    buffer_bytes: int = 8 * 1024 * 1024

    def __post_init__(self) -> None:
        if self.reply_timeout_s <= 0 or self.attempts < 1 or self.retries < 0 or self.buffer_bytes < 1:
            raise ValueError("reply_timeout_s, attempts and buffer_bytes must be above 0, retries not below")
        last_send_s = sum(self.wait_s(sends, 1.0) for sends in range(1, self.attempts))
        if last_send_s > REMEMBERED_S:
            raise ValueError(
                f"the last of {self.attempts} sends could come {last_send_s:.0f} s after the first, "
                f"but workers remember a control_id for {REMEMBERED_S:.0f} s: lower either number"
            )

    def wait_s(self, sends: int, chance: float) -> float:
        """How long to wait for a reply after that many sends; `chance` is 0 to 1."""
        return self.reply_timeout_s * self.growth ** (sends - 1) * (1 + self.jitter * chance)

    def pause_s(self, failures: int, chance: float) -> float:
        """How long to pause after that many failures in a row: doubling, bounded, half of it by chance."""
        return min(self.backoff_s * 2 ** min(failures - 1, 30), self.backoff_max_s) * (0.5 + 0.5 * chance)

    def pauses_s(self) -> Iterator[float]:
        """The pauses between tries at something that fails, without end."""
        return (self.pause_s(failures, random.random()) for failures in itertools.count(1))


@dataclass(slots=True)
class _Awaited:
    command: Command
    retries_left: int
    sends: int = 0
    due_s: float | None = None


@dataclass(slots=True)
class Outbox:
    """The commands whose reply is still to come. One that is not sent yet is expected, but never due."""

    options: Options
    chance: Callable[[], float] = random.random
    _awaited: dict[str, _Awaited] = field(default_factory=dict[str, _Awaited])

    def __bool__(self) -> bool:
        return bool(self._awaited)

    def expect(self, command: Command) -> None:
        """Before the first send, since the reply may be faster than the send's own answer."""
        self._awaited[command.control_id] = _Awaited(command, self.options.retries)

    def sent(self, control_id: str, now_s: float) -> None:
        """After each send."""
        if awaited := self._awaited.get(control_id):
            awaited.sends += 1
            awaited.due_s = now_s + self.options.wait_s(awaited.sends, self.chance())

    def forget(self, control_id: str) -> None:
        """Nobody waits for this reply any more."""
        self._awaited.pop(control_id, None)

    def answered(self, reply: Reply, now_s: float) -> bool:
        """Whether this settles a command: False for one of somebody else, and for one that is tried again.

        An append is never tried again: later ones would have overtaken it, so the caller decides.
        """
        awaited = self._awaited.get(reply.control_id)
        if awaited is None:
            return False
        if not reply.ok and reply.retryable and awaited.retries_left > 0 and reply.op != "append":
            awaited.retries_left -= 1
            awaited.sends = 0
            failures = self.options.retries - awaited.retries_left
            awaited.due_s = now_s + self.options.pause_s(failures, self.chance())
            return False
        del self._awaited[reply.control_id]
        return True

    def due(self, now_s: float) -> tuple[list[Command], list[Command]]:
        """What to send again now, and what has been sent often enough and is lost."""
        due = [awaited for awaited in self._awaited.values() if awaited.due_s is not None and awaited.due_s <= now_s]
        lost = [awaited.command for awaited in due if awaited.sends >= self.options.attempts]
        for command in lost:
            del self._awaited[command.control_id]
        return [awaited.command for awaited in due if awaited.sends < self.options.attempts], lost

    def wait_s(self, now_s: float) -> float:
        """How long a blocking read may take, so that nothing is sent again much too late."""
        next_due_s = min((a.due_s for a in self._awaited.values() if a.due_s is not None), default=float("inf"))
        return min(self.options.reply_timeout_s / 2, max(0.0, next_due_s - now_s))


class _Kept(NamedTuple):
    event: Event
    size_bytes: int
    # The stream's position just before it: where to read on for somebody who has not seen it.
    before: tuple[str, int]


@dataclass(slots=True)
class Inbox:
    """What the application gets to see of one life of the session, and whether more will come."""

    incarnation: int
    limit_bytes: int
    event_id: str = "0-0"
    last_n: int = 0
    floor_epoch: int = 0
    dropped_locally: int = 0
    ended: bool = False
    _kept: deque[_Kept] = field(default_factory=deque[_Kept])
    _kept_bytes: int = 0

    def put(self, entry_id: str, n: int, event: Reply | Output | Lifecycle | None, size_bytes: int) -> None:
        """One entry of the stream, in its order. Lives before this one are skipped; a later one ends it."""
        before = (self.event_id, self.last_n)
        self.event_id = entry_id
        life = _life_of(event)
        if self.ended:
            return
        if life is None:
            # Unsigned (a reply that knows no session, an unknown type): of this life if its number says so.
            self.last_n += n == self.last_n + 1
        elif life > self.incarnation:
            self._keep(Gap(None), 0, before)
            self.ended = True
        elif life == self.incarnation:
            if n > self.last_n + 1:
                self._keep(Gap(n - self.last_n - 1), 0, before)
            self.last_n = n
            if isinstance(event, Lifecycle):
                self.ended = event.terminal
                if event.event == "interrupted":
                    self.cancel_below(event.fence.epoch)
            if isinstance(event, Output | Lifecycle):
                self._keep(event, size_bytes, before)

    def settled(self, reply: Reply, size_bytes: int) -> None:
        """A reply to a command of this client, for those who want to see them among the events."""
        self._keep(reply, size_bytes, (self.event_id, self.last_n))

    def cancel_below(self, epoch: int) -> None:
        """No output of an older epoch is handed out from now on."""
        self.floor_epoch = max(self.floor_epoch, epoch)

    def take(self, *, replies: bool) -> Event | None:
        """The next event, or None if there is none at present."""
        while self._kept:
            event, size_bytes, _ = self._kept.popleft()
            self._kept_bytes -= size_bytes
            if isinstance(event, Output) and event.fence.epoch < self.floor_epoch:
                self.dropped_locally += 1
            elif replies or not isinstance(event, Reply):
                return event
        return None

    def rewind(self, last_id: str) -> str:
        """Where to read on after a lost connection, given where the stream ends now.

        A server that failed over or lost its data may have fewer events than were read here.
        """
        if _numbers(last_id) < _numbers(self.event_id):
            self.event_id = last_id
        return self.event_id

    @property
    def taken_to(self) -> tuple[str, int]:
        """The stream's position (event id and number) after the last event that was handed out."""
        return self._kept[0].before if self._kept else (self.event_id, self.last_n)

    def _keep(self, event: Event, size_bytes: int, before: tuple[str, int]) -> None:
        self._kept.append(_Kept(event, size_bytes + EVENT_OVERHEAD_BYTES, before))
        self._kept_bytes += size_bytes + EVENT_OVERHEAD_BYTES
        if self._kept_bytes > self.limit_bytes:
            self._skip_to_now()

    def _skip_to_now(self) -> None:
        """A listener that far behind wants the present. Only how the session itself fared is kept for it."""
        told = [kept for kept in self._kept if isinstance(kept.event, Lifecycle)][-TOLD_AFTER_SKIPPING:]
        missing = sum(kept.event.missing or 0 if isinstance(kept.event, Gap) else 1 for kept in self._kept)
        gap = _Kept(Gap(missing - len(told), local=True), EVENT_OVERHEAD_BYTES, self.taken_to)
        self._kept = deque([gap, *told])
        self._kept_bytes = sum(kept.size_bytes for kept in self._kept)


def _life_of(event: Reply | Output | Lifecycle | None) -> int | None:
    """Which life of the session an event belongs to; None if it does not say."""
    fence = event.accepted_fence if isinstance(event, Reply) else event.fence if event else None
    return fence.incarnation if fence else None


def _numbers(event_id: str) -> tuple[int, int]:
    millis, _, sequence = event_id.partition("-")
    return int(millis), int(sequence)
