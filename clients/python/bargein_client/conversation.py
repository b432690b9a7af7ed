"""One session from the producer's side: which command says what, with which fence, and what a reply changes.

`Position` is the fence discipline; `Conversation` joins it with the outbox and the inbox of mailbox.py.
Pure: it builds commands and takes in entries of the event stream. Sending and reading are the neighbours'
(aio_link.py, sync_link.py), which therefore behave alike.
Units: `_s` seconds of a monotonic clock, `_ms` milliseconds.
How it says no: ValueError before anything has moved; a worker's refusal is a Reply with `ok` false.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from bargein_client.mailbox import Inbox, Options, Outbox
from bargein_client.protocol import (
    Activity,
    CancelKind,
    Command,
    Fence,
    InputMode,
    Lifecycle,
    Reply,
    SessionMode,
    build_command,
    decode_entry,
    require_token,
)

if TYPE_CHECKING:
    from collections.abc import Callable

# After the reply to a close, the session's last event may still be on its way for this long.
LINGER_S = 0.2


@dataclass(slots=True)
class Position:
    """Which fence a command carries. It never goes back, whatever a reply says.

    An interrupt moves to the next epoch and the next turn at once, without waiting for anybody; an input that
    ends a turn lets the *next input* begin a new one, so that until then the response to the old turn is
    still wanted. `response_seq` stays 0: this client asks for one response a turn.
    """

    fence: Fence
    turn_over: bool = False

    def for_input(self) -> Fence:
        """The fence of the next input. Nothing moves before `entered`."""
        return self.fence._replace(turn_id=self.fence.turn_id + 1, response_seq=0) if self.turn_over else self.fence

    def entered(self, fence: Fence, final: bool) -> None:
        """An input was built with this fence."""
        self.fence, self.turn_over = fence, final

    def interrupt(self) -> tuple[Fence, Fence]:
        """The fence that is cancelled and the one that follows it."""
        cancelled = self.fence
        self.fence = Fence(cancelled.incarnation, cancelled.epoch + 1, cancelled.turn_id + 1, 0)
        self.turn_over = False
        return cancelled, self.fence

    def catch_up(self, accepted: Fence | None) -> None:
        """Another producer of the same session may be further."""
        mine = self.fence
        if accepted is None or accepted.incarnation != mine.incarnation or accepted.epoch < mine.epoch:
            return
        if accepted.epoch > mine.epoch or accepted.turn_id > mine.turn_id:
            self.turn_over = False
        if accepted.epoch > mine.epoch:
            self.fence = accepted
        else:
            self.fence = Fence(*map(max, mine, accepted))


@dataclass(frozen=True, slots=True)
class Bookmark:
    """Where a session stands, in plain values: enough to go on in another process (`client.attach`).

    A session's token is not in it: whoever goes on must have it from elsewhere.
    """

    session_id: str
    fence: Fence
    lease_generation: int
    event_id: str
    event_n: int
    input_modes: tuple[str, ...]


class Conversation:
    """One life of one session. A method that is a command builds it and moves what it moves."""

    def __init__(
        self,
        session_id: str,
        incarnation: int,
        options: Options,
        *,
        event_id: str = "0-0",
        input_modes: tuple[str, ...] = (),
        token: str | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.session_id = session_id
        self.position = Position(Fence(incarnation))
        self.outbox = Outbox(options, chance)
        self.inbox = Inbox(incarnation, options.buffer_bytes, event_id)
        self.input_modes = input_modes
        self._token = require_token(token)
        self.detached = False
        # Of this attachment: raised only by this client's own open and resume. What the events say is no use
        # here, since it would let a gateway whose call was resumed elsewhere detach it there.
        self.lease_generation = 0
        self._detach_id: str | None = None
        self._close_answered = False

    @classmethod
    def at(cls, bookmark: Bookmark, options: Options, token: str | None = None) -> Conversation:
        """The session that somebody else opened, from where that client stood."""
        fence = Fence(*bookmark.fence)
        talk = cls(
            bookmark.session_id,
            fence.incarnation,
            options,
            event_id=bookmark.event_id,
            input_modes=tuple(bookmark.input_modes),
            token=token,
        )
        talk.position.fence = fence
        talk.inbox.last_n = bookmark.event_n
        talk.inbox.floor_epoch = fence.epoch
        talk.lease_generation = bookmark.lease_generation
        return talk

    def bookmark(self) -> Bookmark:
        """Where this client stands now; events not fetched yet are left to whoever goes on from it."""
        return Bookmark(
            self.session_id,
            self.position.fence,
            self.lease_generation,
            *self.inbox.taken_to,
            self.input_modes,
        )

    @property
    def finished(self) -> bool:
        """No event will come any more, or none is wanted."""
        return self.inbox.ended or self.detached

    @property
    def listening(self) -> bool:
        """Whether the event stream must be read."""
        return bool(self.outbox) or not self.finished

    def open(
        self, mode: SessionMode, session_config: dict[str, Any] | None, runtime_config: dict[str, Any] | None
    ) -> Command:
        """The command that begins this life."""
        return self._command(
            "open",
            session_mode=mode,
            capabilities={"input_modes": list(self.input_modes)},
            session_config=session_config or {},
            runtime_config=runtime_config or {},
        )

    def append(
        self,
        payload: Any,
        *,
        mode: InputMode | None,
        final: bool,
        operation_id: str | None,
        deadline_ms: int | None,
    ) -> Command:
        """One piece of input: bytes travel raw, anything else as a MessagePack value."""
        keys: dict[str, Any] = {"mode": mode or self._first_mode(), "final": final}
        keys |= _given(operation_id=operation_id, deadline_ms=deadline_ms)
        raw: bytes | None = None
        if isinstance(payload, bytes | bytearray | memoryview):
            raw = bytes(cast("bytes", payload))
        else:
            keys["payload"] = payload
        fence = self.position.for_input()
        try:
            command = self._build("append", fence, keys, raw)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"this payload cannot be written as MessagePack: {error}") from error
        self.position.entered(fence, final)
        return command

    def interrupt(self, kind: CancelKind) -> Command:
        """Everything of the present epoch is over, here and now; the model is told."""
        cancelled, following = self.position.interrupt()
        self.inbox.cancel_below(following.epoch)
        keys = {"event": kind, "next_fence": following._asdict()}
        return self._build("signal", cancelled, keys)

    def next_turn(self) -> None:
        """The next input begins a new turn, as if the last one had been final."""
        self.position.turn_over = True

    def update(self, session_config: dict[str, Any] | None, runtime_config: dict[str, Any] | None) -> Command:
        """Configs that replace the present ones; None keeps one as it is."""
        return self._command(
            "signal", event="session.update", session_config=session_config, runtime_config=runtime_config
        )

    def touch(self, activity: Activity) -> Command:
        """A sign of life. A detach names the attachment that it ends, so that it can't end a later one."""
        if activity != "detach":
            return self._command("touch", activity=activity)
        command = self._command("touch", activity=activity, expected_lease_generation=self.lease_generation)
        self._detach_id = command.control_id
        return command

    def resume(self, expected_generation: int | None) -> Command:
        """Attach again, if nobody else has since."""
        expected = self.lease_generation if expected_generation is None else expected_generation
        return self._command("resume", expected_lease_generation=expected)

    def close(self, reason: str) -> Command:
        """The end."""
        return self._command("close", reason=reason)

    def receive(self, entries: list[tuple[bytes, dict[bytes, bytes]]], now_s: float) -> list[Reply]:
        """What one read of the event stream brought. Returns the replies that settle commands of this client.

        A read that brought nothing ends a session whose close was answered: that was all there is.
        """
        if not entries and self._close_answered:
            self.inbox.ended = True
        return [
            reply
            for entry_id, fields in entries
            if (reply := self._receive_one(entry_id.decode(), fields, now_s)) is not None
        ]

    def _receive_one(self, entry_id: str, fields: dict[bytes, bytes], now_s: float) -> Reply | None:
        try:
            n, event = decode_entry(fields)
        except ValueError:
            self.inbox.event_id = entry_id  # read past, but uncounted, so that it shows as a gap
            return None
        size_bytes = len(fields[b"b"])
        self.inbox.put(entry_id, n, event, size_bytes)
        if isinstance(event, Lifecycle):
            self.position.catch_up(event.fence)
        if not isinstance(event, Reply):
            return None
        self.position.catch_up(event.accepted_fence)
        if not self.outbox.answered(event, now_s):
            return None
        if event.ok:
            self._succeeded(event)
        self.inbox.settled(event, size_bytes)
        return event

    def read_wait_s(self, now_s: float) -> float:
        """How long the next read of the event stream may block."""
        return min(LINGER_S, self.outbox.wait_s(now_s)) if self._close_answered else self.outbox.wait_s(now_s)

    def _succeeded(self, reply: Reply) -> None:
        if reply.op in ("open", "resume") and reply.lease_generation is not None:
            self.lease_generation = reply.lease_generation
        if reply.op == "resume" or reply.control_id == self._detach_id:
            self.detached = reply.op != "resume"
        self._close_answered = self._close_answered or reply.op == "close"

    def _first_mode(self) -> str:
        return self.input_modes[0] if self.input_modes else "turn_commit_only"

    def _command(self, op: str, **keys: Any) -> Command:
        return self._build(op, self.position.fence, _given(**keys))

    def _build(self, op: str, fence: Fence, keys: dict[str, Any], raw: bytes | None = None) -> Command:
        return build_command(op, self.session_id, fence, keys, raw, self._token)


def _given(**keys: Any) -> dict[str, Any]:
    return {name: value for name, value in keys.items() if value is not None}
