"""What happened in a run, for people: one line an event, in virtual time; and a digest of it, to compare two runs.

Responsible for reading what the product writes back into words. Leaves what is worth telling to whoever calls. Pure.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import msgspec

from control.store.commits import CommitStatus
from control.wire.stage import decode_ack, decode_submission
from tests.sim.loop import STARTS_S
from tests.sim.values import Failure

if TYPE_CHECKING:
    from tests.sim.commands import Args
    from tests.sim.loop import SimLoop

DULL = frozenset(
    ["join", "renew", "beat", "TIME", "HGETALL", "HMGET", "HLEN", "CLIENT", "XREAD", "read", "INFO", "TYPE"]
)
TOLD = ("op", "event", "control_id", "session_id", "ok", "code", "message", "reason", "seq", "data", "turn_end")
DULL_WRITES = frozenset({b"XDEL", b"PEXPIRE", b"PERSIST", b"ZADD", b"ZREM", b"HDEL"})


class Trace:
    """`lines` is filled only where `telling`; the digest always."""

    def __init__(self, loop: SimLoop, *, telling: bool) -> None:
        self.telling = telling
        self.lines: list[str] = []
        self.digest = 0
        self.commands = 0
        self._loop = loop

    def say(self, text: str) -> None:
        if self.telling:
            self.lines.append(f"{self._loop.now_s - STARTS_S:9.4f}  {text}")

    def note(self, role: str, label: str, args: Args, answer: Any, writes: list[tuple[Args, Any]]) -> None:
        """A command that the server has carried out."""
        self.commands += 1
        text = f"{self._loop.now_s:.6f}{role}{label}{answer!r}"
        self.digest = zlib.crc32(text.encode(), self.digest)
        if self.telling and not (label in DULL and not isinstance(answer, Failure)):
            self._tell(role, label, args, answer, writes)

    def _tell(self, role: str, label: str, args: Args, answer: Any, writes: list[tuple[Args, Any]]) -> None:
        found = [text for write, done in writes if (text := _say_write(write, done))]
        if label in ("commit", "publish", "acknowledge") or isinstance(answer, Failure):
            where = args[3].split(b"}")[0].split(b"{")[-1].decode() if len(args) > 3 else ""
            self.say(f"{role} {label} {{{where}}} {_say_answer(label, answer)}")
            for text in found:
                self.lines.append(f"{'':12}{text}")
        elif label == "slot":
            count = int(args[2])
            self.say(f"{role} slot {b' '.join(args[3 + count : 6 + count]).decode()} at {args[4].decode()}: {answer}")
        elif label == "acquire":
            self.say(f"{role} acquire {args[3].decode()}: {_say_answer(label, answer)}")
        elif found:
            self.say(f"{role} {label}: {'; '.join(found)}")


def _say_answer(label: str, answer: Any) -> str:
    if isinstance(answer, Failure):
        return answer.text[:120]
    if label == "commit":
        return f"{CommitStatus(answer[0]).name} revision {answer[1]} {answer[3].decode()}"
    if isinstance(answer, list):
        return str([each.decode() if isinstance(each, bytes) else each for each in answer])[:160]
    return str(answer)


def _say_write(write: Args, done: Any) -> str:
    name, key = write[0], write[1]
    if name in DULL_WRITES:
        return ""
    tail = key.split(b"}:")[-1].decode()
    if name == b"XADD":
        return f"{tail} {done.decode()}: {_say_entry(tail, write)}"
    if name == b"HSET" and tail in ("fences", "sessions", "fenced"):
        shown = write[2:] if tail == "fences" else write[2::2]
        return f"{tail} {b' '.join(shown).decode()}"
    if name == b"SADD":
        return f"{tail} + {b' '.join(write[2:]).decode()}"
    return "" if name in (b"HSET", b"RPUSH", b"HINCRBY", b"LTRIM", b"HSETNX") else f"{name.decode()} {tail}"


def _say_entry(tail: str, write: Args) -> str:
    at = next(i for i, part in enumerate(write[2:], 2) if part == b"*" or b"-" in part) + 1
    fields = dict(zip(write[at::2], write[at + 1 :: 2], strict=True))
    body = fields.get(b"b", b"")
    try:
        if tail == "acks":
            session_id, event = decode_ack(body)
            return f"{session_id} {event}"
        if tail.startswith("submissions"):
            order = decode_submission(body)
            numbers = f"number {order.number} seq {order.seq} resumed {order.resumed}"
            return f"{order.session_id} {_place(order.fence)} {numbers}"
        value = msgspec.msgpack.decode(body)
    except Exception as error:  # noqa: BLE001  this is for people only
        return f"unreadable: {error}"
    if isinstance(value, list):
        return str(value)
    if not isinstance(value, dict):
        return str(fields)[:120]
    kind = fields.get(b"t", b"").decode()
    shown = [kind] if kind else []
    shown += [f"{name}={value[name]}" for name in TOLD if value.get(name) not in (None, "")]
    shown += [
        f"{name}={'/'.join(map(str, value[name].values()))}" for name in ("fence", "next_fence") if value.get(name)
    ]
    return " ".join(shown)


def _place(fence: Any) -> str:
    return f"{fence.incarnation}/{fence.epoch}/{fence.turn_id}/{fence.response_seq}"
