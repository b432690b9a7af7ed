"""Ways to spoil what is right: in values, in bytes, in an entry's fields.

Responsible for the mix of a run: some of what `grammar.py` says goes through unspoilt. Pure, and decided by the seed
alone. A `Shot` is one stream entry; its bytes may be anything, as those of a hostile producer may.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from control.store.commits import ACKS_KEY, COMMANDS_KEY, ORDERS_KEY
from tests.fuzz.grammar import NUMBERS, Body, Grammar, in_json, packed

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
KEYS = (
    "v", "op", "control_id", "session_id", "fence", "expected_lease_generation", "traceparent", "deadline_ms", "token",
    "session_mode", "capabilities", "session_config", "runtime_config", "mode", "payload", "payload_b64", "final",
    "operation_id", "expected_epoch", "event", "next_fence", "reason", "activity", "x",
)  # fmt: skip
PARTS = ("incarnation", "epoch", "turn_id", "response_seq", "y")
STRANGE: tuple[Any, ...] = (
    *NUMBERS,
    10**40,
    1.5,
    -0.0,
    float("nan"),
    float("inf"),
    True,
    None,
    "",
    "x",
    "\x00",
    "\ud7ff\ue000",
    "1",
    "open",
    "s" * 129,
    "ö" * 65,
    "t" * 300,
    b"",
    b"s1",
    b"\xff\xfe",
    [],
    [[]],
    {},
    {"": {}},
    {"incarnation": 1},
    [1, 2, 3, 4],
    msgspec.msgpack.Ext(5, b"ext"),
    msgspec.msgpack.Ext(-1, b"\x00" * 4),  # a timestamp
    msgspec.msgpack.Ext(-1, b"\xff" * 12),
    msgspec.msgpack.Ext(-1, b"odd"),
)
# Heads of MessagePack values, most of which promise far more than follows.
HEADS = (
    b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01", b"\xde\xff\xff", b"\xdc\xff\xff", b"\xda\xff\xff", b"\xd9\xff", b"\xc4\xff",
    b"\xc1", b"\xc7\x00\x05", b"\xd4\x05\x00", b"\xd6\xff\x00\x00\x00\x00", b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x01",
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff", b"\xd3\x80\x00\x00\x00\x00\x00\x00\x00", b"\xa2\xff\xfe",
    b"\xa3\xed\xa0\x80", b"\xa4\xf8\x88\x80\x80", b"\x00", b"\x81\xa1x", b"\x91", b"\xc0", b"\xca\x7f\xc0\x00\x00",
)  # fmt: skip
JSON_BITS = (
    b"\\ud800", b"\\u0000", b"\x00", b"\xff", b"NaN", b"1e999", b"-1", b"9" * 400, b"[" * 50, b"{" * 50, b"}}", b'"',
    b"\\", b",", b"/**/", b"\xef\xbb\xbf", b"'", b"\xed\xa0\x80", b"1.0", b"0x10", b"null", b"{}", b"[]",
)  # fmt: skip
# Each makes its body larger than the limit, or a little smaller and laborious.
FILLERS: tuple[Callable[[], Any], ...] = (
    lambda: "x" * MIB,
    lambda: "ö" * (MIB // 2),
    lambda: [0] * MIB,
    lambda: ["x"] * (MIB // 2),
    lambda: {str(n): n for n in range(180_000)},
    lambda: {str(n): n for n in range(90_000)},
    lambda: [[]] * (MIB - 1000),
    lambda: [{}, 0] * (MIB // 2 - 1000),
)


@dataclass(slots=True)
class Shot:
    """An entry for one of a partition's input streams; `fields`: names and values in turn."""

    stream: int
    partition: int
    fields: list[bytes]


class Damage:
    """`shots`: an endless row of entries."""

    def __init__(self, grammar: Grammar, *, acks: float = 0.12, large: bool = True) -> None:
        """`acks`: the share of what no producer sends. `large`: also bodies about the limit."""
        self.grammar = grammar
        self.random = grammar.random
        self._acks = acks
        self._large = large
        self._former = [packed(grammar.command()[0]) for _ in range(8)]
        self._spoil: tuple[Callable[[bytes], bytes], ...] = (
            self._overwrite,
            self._cut,
            self._double,
            self._insert_head,
            self._splice,
            self._flip_bits,
            self._end_early,
            self._append_bytes,
        )

    def shots(self) -> Iterator[Shot]:
        """Entries, one after the other."""
        random = self.random
        while True:
            yield self._word() if random.random() < self._acks else self._command()

    # ---- entries

    def _command(self) -> Shot:
        random = self.random
        body, payload = self.grammar.command()
        home = self.grammar.home(body["session_id"])
        data = self._body(body)
        if random.random() < 0.01:
            home = random.randrange(self.grammar.partitions)
        fields = [b"b", data] if payload is None else [b"b", data, b"p", payload]
        if random.random() < 0.02:
            fields = self._fields(data)
        return Shot(COMMANDS_KEY, home, fields)

    def _word(self) -> Shot:
        random = self.random
        stream = ORDERS_KEY if random.random() < 0.2 else ACKS_KEY
        session_id, word = self.grammar.order() if stream == ORDERS_KEY else self.grammar.ack()
        if random.random() < 0.6:
            word = self.bytes_of(word)
        fields = self._fields(word) if random.random() < 0.03 else [b"b", word]
        return Shot(stream, self.grammar.home(session_id), fields)

    def _fields(self, data: bytes) -> list[bytes]:
        return self.random.choice(
            (
                [b"c", data],
                [b"", b""],
                [b"b", data, b"b", data],
                [b"b", b"", b"b", data],
                [b"b", data, b"p", b"1", b"p", b"2"],
                [b"p", b"1", b"b", data],
                [b"b", data, b"x", data, b"\xff\x00", b""],
                [b"B", data],
                [b"b", b"", b"p", b""],
                [b"p", data],
                [data[:50], data, b"b", data],
            )
        )

    # ---- bodies

    def _body(self, body: Body) -> bytes:
        random = self.random
        chance = random.random()
        if chance < 0.40:  # as it is
            data = in_json(body) if random.random() < 0.3 else packed(body)
            if len(self._former) < 64:
                self._former.append(data)
            else:
                self._former[random.randrange(64)] = data
            return data
        if chance < 0.70:
            self._change_values(body)
            return in_json(body) if random.random() < 0.35 else self._pack(body)
        if chance < 0.97:
            return self.bytes_of(packed(body) if random.random() < 0.7 else in_json(body))
        if chance < 0.9995 or not self._large:
            return self._deep(body) if random.random() < 0.5 else random.randbytes(random.randint(0, 60))
        return self._large_body(body)

    def bytes_of(self, data: bytes) -> bytes:
        """The bytes spoilt in one to three places."""
        for _ in range(self.random.choice((1, 1, 2, 3))):
            data = self.random.choice(self._spoil)(data)
        return data

    def _change_values(self, body: Body) -> None:
        random = self.random
        for _ in range(random.choice((1, 1, 2, 3))):
            key = random.choice(KEYS) if random.random() < 0.4 else random.choice(list(body) or ["x"])
            inner = body.get(key)
            match random.randrange(5):
                case 0:
                    body.pop(key, None)
                case 1 if isinstance(inner, dict):
                    part: str = random.choice(PARTS)
                    body[key] = {**inner, part: random.choice(STRANGE)}
                case 2 if isinstance(inner, dict):
                    body[key] = {k: v for k, v in inner.items() if random.random() < 0.7}
                case 3:
                    body[key] = [body.get(random.choice(KEYS))]
                case _:
                    body[key] = random.choice(STRANGE)

    def _pack(self, body: Body) -> bytes:
        """By hand, so that keys can come twice and in any order, and need be no text."""
        random = self.random
        pairs = list(body.items())
        random.shuffle(pairs)
        if random.random() < 0.3 and pairs:
            pairs.insert(random.randrange(len(pairs)), (random.choice(KEYS), random.choice(STRANGE)))
            pairs.append(random.choice(pairs))
        parts = [packed(key) + packed(value) for key, value in pairs]
        if random.random() < 0.1:
            parts.append(packed(random.choice((1, None, b"b", 2.5, [1]))) + packed(1))
        count = len(parts) + (random.choice((0, 0, 0, -1, 1, 200)) if random.random() < 0.1 else 0)
        return b"\xde" + max(0, count).to_bytes(2, "big") + b"".join(parts)

    def _deep(self, body: Body) -> bytes:
        random = self.random
        levels = random.choice((10, 63, 64, 65, 500, 1100, 5000))
        key = random.choice(("session_config", "payload", "x", "fence", "v", "token", "capabilities", "session_id"))
        if random.random() < 0.5:
            inner = random.choice((b"\x91", b"\x81\xa1x")) * levels + b"\x01"
            rest = {k: v for k, v in body.items() if k != key}
            whole = b"".join(packed(k) + packed(v) for k, v in rest.items())
            return bytes([0x80 + len(rest) + 1]) + whole + packed(key) + b"\x81\xa1x" + inner
        opened, closed = random.choice(((b"[", b"]"), (b'{"x":', b"}")))
        inner = opened * levels + b"1" + closed * (levels if random.random() < 0.8 else 0)
        return in_json(body)[:-1] + b', "' + key.encode() + b'": {"x": ' + inner + b"}}"

    def _large_body(self, body: Body) -> bytes:
        random = self.random
        filler = random.choice(
            ("x" * MIB, "ö" * (MIB // 2), [0] * MIB, ["x"] * (MIB // 2), {str(n): n for n in range(90_000)})
        )
        key = random.choice(("session_config", "payload", "x", "token", "op", "control_id", "session_id", "event"))
        body[key] = {"x": filler} if key == "session_config" else filler
        return packed(body) if random.random() < 0.7 else in_json(body)

    # ---- bytes

    def _place(self, data: bytes) -> int:
        return self.random.randrange(len(data) + 1)

    def _overwrite(self, data: bytes) -> bytes:
        at = self._place(data)
        return data[:at] + bytes([self.random.randrange(256)]) + data[at + 1 :]

    def _flip_bits(self, data: bytes) -> bytes:
        spoilt = bytearray(data)
        for _ in range(self.random.randint(1, 4)):
            if spoilt:
                spoilt[self.random.randrange(len(spoilt))] ^= 1 << self.random.randrange(8)
        return bytes(spoilt)

    def _cut(self, data: bytes) -> bytes:
        at = self._place(data)
        return data[:at] + data[at + self.random.randint(1, 12) :]

    def _double(self, data: bytes) -> bytes:
        at = self._place(data)
        return data[:at] + data[at : at + 12] + data[at:]

    def _insert_head(self, data: bytes) -> bytes:
        at = self._place(data)
        bits = JSON_BITS if data[:1] == b"{" else HEADS
        return data[:at] + self.random.choice(bits) + data[at + self.random.choice((0, 0, 1, 4)) :]

    def _splice(self, data: bytes) -> bytes:
        other = self.random.choice(self._former)
        return data[: self._place(data)] + other[self._place(other) :]

    def _end_early(self, data: bytes) -> bytes:
        return data[: self._place(data)]

    def _append_bytes(self, data: bytes) -> bytes:
        return data + self.random.choice((b"\x00", b"}", b" ", b"\n{}", data[:20], b"\xc0"))


def make_shots(seed: int, partitions: int, **changes: Any) -> Damage:
    """The row of a seed."""
    return Damage(Grammar(Random(seed), partitions), **changes)
