"""What a producer and a stage could well send: commands and acks that are right, or only a little off.

Responsible for the plain material that `damage.py` then spoils, and for the pool of session ids. It follows its
sessions by the replies that it is told of, so that many commands are accepted and the owner gets into every state.
Pure: decided by the seed and by what it hears.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import Any
from zlib import crc32

import msgspec

from control.core.fence import MAX_COMPONENT
from control.store.keys import partition_of
from control.wire.orders import DismissOrder, LookOrder, Order, RetryOrder, SlotOrder, encode_order
from control.wire.stage import (
    AcceptedAck,
    CleanedAck,
    CleanupFailedAck,
    RejectedAck,
    RequestFailedAck,
    encode,
)

WORKERS = ("ear-1", "ear-2", "nobody")
MODES = ("append_tokens", "append_audio_chunk", "turn_commit_only", "rollback_to_checkpoint", "telepathy")
EVENTS = ("barge_in", "input.cancel", "response.cancel", "session.update", "session.update", "sneeze")
ACTIVITIES = ("heartbeat", "attach", "detach", "playback_ack", "wave")
TOKENS = (None, None, "a token of some length", "another token, ünlike")
NUMBERS = (0, 1, 2, -1, MAX_COMPONENT, MAX_COMPONENT + 1, 2**63, 2**64 - 1, -(2**63))
# A few ids are as odd as they may be.
ODD_IDS = ("ö" * 64, "call {0}:*", "\u202e\u200d", "'\"\\", "🎙" * 32, "s" * 128)

Body = dict[str, Any]


@dataclass(slots=True)
class Shadow:
    """Where a session roughly stands. `token`: what each of its lives asks for."""

    token: str | None
    alive: bool = False
    incarnation: int = 0
    epoch: int = 0
    turn_id: int = 0
    generation: int = 0
    number: int = 1


class Grammar:
    """`ids`: the sessions that are spoken to; those of `kept` are left in peace."""

    def __init__(self, random: Random, partitions: int, sessions: int = 60) -> None:
        """`sessions`: how many ids there are, about."""
        self.random = random
        self.partitions = partitions
        self.ids = [*ODD_IDS, *(f"call-{n}" for n in range(sessions))]
        self._shadows = {
            session_id: Shadow(TOKENS[crc32(session_id.encode()) // partitions % len(TOKENS)])
            for session_id in self.ids
        }
        self._last = 0

    def home(self, session_id: str) -> int:
        """Where a session's commands belong."""
        return partition_of(session_id, self.partitions)

    def hear(self, reply: Body) -> None:
        """A reply was published: where the session stands now."""
        shadow, fence = self._shadows.get(reply["session_id"]), reply["accepted_fence"]
        if shadow is None:
            return
        if fence is not None:
            shadow.incarnation, shadow.epoch, shadow.turn_id = fence["incarnation"], fence["epoch"], fence["turn_id"]
            shadow.generation = reply["lease_generation"]
            shadow.alive = "is closing" not in reply["message"]
        elif reply["code"] == "not_found" or (reply["op"] == "close" and reply["ok"]):
            shadow.alive = False

    def command(self) -> tuple[Body, bytes | None]:
        """A body, and the payload beside it if there is one."""
        random = self.random
        session_id = random.choice(self.ids)
        shadow = self._shadows[session_id]
        self._last += 1
        body: Body = {
            "v": 1,
            "op": "",
            "control_id": f"c{self._last if random.random() < 0.97 else random.randint(1, self._last)}",
            "session_id": session_id,
            "fence": {},
        }
        op = random.choices(_OPS, _ALIVE if shadow.alive else _VACANT)[0]
        payload = getattr(self, "_" + op)(body, shadow)
        if not body["fence"]:
            body["fence"] = self._fence(shadow)
        token = shadow.token if random.random() < 0.96 else random.choice(TOKENS)
        if token is not None:
            body["token"] = token
        if random.random() < 0.04:
            body["expected_lease_generation"] = random.choice((0, 1, 2, shadow.generation))
        if random.random() < 0.04:
            body["deadline_ms"] = random.choice((0, 1, 10_000, MAX_COMPONENT))
        if random.random() < 0.04:
            body["traceparent"] = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        return body, payload

    def ack(self) -> tuple[str, bytes]:
        """A session, and a stage's word about it."""
        random = self.random
        session_id = random.choice(self.ids)
        shadow = self._shadows[session_id]
        incarnation = max(0, shadow.incarnation - random.choice((0, 0, 0, 1)))
        number = random.choice((1, 2, 3, shadow.number, *NUMBERS)) if random.random() < 0.5 else shadow.number
        worker = random.choice(WORKERS)
        match random.randrange(7):
            case 0 | 1:
                word: Any = AcceptedAck(session_id, incarnation, number)
            case 2:
                word = RejectedAck(session_id, incarnation, number, random.choice(("timeout", "nonsense")), "no")
            case 3 | 4:
                word = CleanedAck(session_id, incarnation, number, worker)
            case 5:
                word = CleanupFailedAck(session_id, incarnation, number, 1, worker, random.random() < 0.5, "stuck")
            case _:
                word = RequestFailedAck(session_id, incarnation, shadow.epoch, worker, "out of memory")
        return session_id, encode(word)

    def order(self) -> tuple[str, bytes]:
        """A session, and what an operator or upkeep wants of it."""
        random = self.random
        session_id = random.choice(self.ids)
        incarnation = max(0, self._shadows[session_id].incarnation - random.choice((0, 0, 1)))
        match random.randrange(4):
            case 0:
                word: Order = DismissOrder(session_id, incarnation, random.choice(("operator_close", "worker_drained")))
            case 1:
                word = RetryOrder(session_id)
            case 2:
                word = LookOrder(session_id)
            case _:
                word = SlotOrder(session_id, incarnation, random.choice(WORKERS), random.random() < 0.5)
        return session_id, encode_order(word)

    # ---- by op

    def _open(self, body: Body, shadow: Shadow) -> None:
        random = self.random
        body["op"] = "open"
        if not shadow.alive:
            shadow.incarnation += 1
            shadow.epoch = shadow.turn_id = shadow.generation = 0
        if random.random() < 0.9:
            body["capabilities"] = {"input_modes": ["append_tokens", *random.sample(MODES[:4], 2)]}
        if random.random() < 0.1:
            body["session_mode"] = random.choice(("duplex", "turn", "mime"))
        if random.random() < 0.05:
            body["capabilities"] = {"input_modes": random.sample(MODES, 2), "implementation_level": "mine"}
        self._configs(body)

    def _append(self, body: Body, shadow: Shadow) -> bytes | None:
        random = self.random
        body["op"] = "append"
        body["mode"] = random.choice(MODES) if random.random() < 0.1 else "append_tokens"
        shadow.number += 1
        if random.random() < 0.2:
            body["final"] = True
            shadow.turn_id += 1
        if random.random() < 0.1:
            body["operation_id"] = f"say{random.randint(1, 9)}"
        if random.random() < 0.1:
            body["expected_epoch"] = shadow.epoch
        if random.random() < 0.5:
            return random.randbytes(random.randint(0, 24))
        body["payload"] = self.value(2)
        return None

    def _signal(self, body: Body, shadow: Shadow) -> None:
        random = self.random
        body["op"] = "signal"
        body["event"] = random.choice(EVENTS)
        body["fence"] = self._fence(shadow)
        if body["event"] != "session.update" and random.random() < 0.95:
            shadow.epoch += random.choice((1, 1, 1, 1, 2))
            shadow.turn_id += 1
            shadow.number += 1
            body["next_fence"] = self._fence(shadow)
        self._configs(body)

    def _close(self, body: Body, shadow: Shadow) -> None:
        body["op"] = "close"
        if self.random.random() < 0.5:
            body["reason"] = self.random.choice(("client_close", "open_rollback", "bored", ""))

    def _touch(self, body: Body, shadow: Shadow) -> None:
        body["op"] = "touch"
        body["activity"] = self.random.choice(ACTIVITIES)

    def _resume(self, body: Body, shadow: Shadow) -> None:
        body["op"] = "resume"
        body["expected_lease_generation"] = shadow.generation
        shadow.generation += 1

    def _fence(self, shadow: Shadow) -> Body:
        random = self.random
        fence = {
            "incarnation": shadow.incarnation,
            "epoch": shadow.epoch,
            "turn_id": shadow.turn_id,
            "response_seq": 0,
        }
        if random.random() < 0.05:
            name = random.choice(tuple(fence))
            fence[name] = max(0, fence[name] + random.choice((-1, 1, 2, MAX_COMPONENT)))
        return fence

    def _configs(self, body: Body) -> None:
        random = self.random
        for name in ("session_config", "runtime_config"):
            if random.random() < 0.25:
                body[name] = {random.choice("abc"): self.value(3) for _ in range(random.randint(0, 3))}

    def value(self, levels: int) -> Any:
        """Any plain value, as configurations and payloads hold them."""
        random = self.random
        match random.randrange(8 if levels else 6):
            case 0:
                return random.choice((None, True, False, "", b"", [], {}))
            case 1:
                return random.choice(NUMBERS) if random.random() < 0.97 else 10**40
            case 2:
                return random.choice((0.5, -0.0, 1e300, float("nan"), float("inf")))
            case 3:
                return random.choice(("text", "ö" * 40, "\x00\n", "x" * 300))
            case 4:
                return random.randbytes(random.randint(0, 9))
            case 5:
                return random.randint(0, 1000)
            case 6:
                return [self.value(levels - 1) for _ in range(random.randint(0, 4))]
            case _:
                return {random.choice("abcdef"): self.value(levels - 1) for _ in range(random.randint(0, 3))}


_OPS = ("open", "append", "signal", "close", "touch", "resume")
_ALIVE = (2, 40, 20, 3, 18, 6)
_VACANT = (70, 6, 6, 6, 6, 6)


def in_json(body: Body) -> bytes:
    """A body as JSON; what JSON hasn't got is spelled out."""
    return json.dumps(body, default=repr).encode()


def packed(body: Any) -> bytes:
    """A body as MessagePack, what has no place in that as text."""
    try:
        return msgspec.msgpack.encode(body)
    except (OverflowError, TypeError, msgspec.MsgspecError):
        return msgspec.msgpack.encode(json.loads(json.dumps(body, default=repr), parse_int=str))
