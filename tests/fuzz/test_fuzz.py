"""Some twenty thousand bodies through the decoder and the owner; and that the fuzzer would notice."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control.store.commits import COMMANDS_KEY, ORDERS_KEY, Batch
from control.wire import commands as wire
from control.wire.orders import RetryOrder, encode_order
from tests.fuzz.damage import Damage, Shot, make_shots
from tests.fuzz.findings import Findings
from tests.fuzz.grammar import Grammar, packed
from tests.fuzz.ground import LIMITS, PORTION, Ground
from tests.fuzz.orders import throw_orders
from tests.fuzz.served import LOAD, Served
from workers import entries, partition
from workers.partition import Partition

IN_MEMORY, ON_A_SERVER, ORDERS = 14_000, 4_000, 2_000


@pytest.fixture
def findings() -> Iterator[Findings]:
    findings = Findings(limits=LIMITS)
    log = logging.getLogger("bargein")
    log.addHandler(findings)
    yield findings
    log.removeHandler(findings)


def throw(findings: Findings, count: int, seed: int = 7) -> Ground:
    damage = make_shots(seed, findings.partitions)
    ground = Ground(findings, seed, damage.grammar.hear)
    shots = damage.shots()
    for _ in range(0, count, PORTION):
        ground.throw(itertools.islice(shots, PORTION))
    ground.rest()
    return ground


def test_every_body_is_answered_or_a_dead_letter(findings: Findings) -> None:
    throw(findings, IN_MEMORY)
    assert findings.notes == []
    # The mix is worth something only if all of it is there.
    seen = findings.seen
    ops = ("Open", "Append", "Cancel", "Update", "UnknownSignal", "Malformed", "Close", "Touch", "Resume")
    assert min(seen[name] for name in (*ops, "acks", "orders", "dead letters")) > IN_MEMORY // 200
    assert seen["replies: ok"] > IN_MEMORY // 10
    codes = ("invalid_argument", "stale_fence", "failed_precondition", "unsupported_version", "not_found")
    assert min(seen[f"replies: {code}"] for code in codes) > IN_MEMORY // 200


async def test_every_body_is_answered_or_a_dead_letter_on_a_real_server(findings: Findings, redis_url: str) -> None:
    damage = make_shots(11, 4)
    shots = damage.shots()
    async with Served(redis_url, findings, damage.grammar.hear) as served:
        for _ in range(0, ON_A_SERVER, LOAD):
            await served.throw(list(itertools.islice(shots, LOAD)))
    assert findings.notes == []


def test_every_stage_order_is_read_or_refused_with_a_reason(findings: Findings) -> None:
    throw_orders(findings, make_shots(3, 4), ORDERS)
    assert findings.notes == []
    assert min(findings.seen["orders"], findings.seen["orders refused"]) > ORDERS // 20


@settings(max_examples=15, derandomize=True, database=None)
@given(random=st.randoms(use_true_random=False))
def test_whatever_chance_decides_every_body_is_answered(random: Any) -> None:
    findings = Findings(limits=LIMITS)
    damage = Damage(Grammar(random, findings.partitions, sessions=2), large=False)
    ground = Ground(findings, 0, damage.grammar.hear)
    shots = damage.shots()
    for _ in range(3):
        ground.throw(itertools.islice(shots, 10))
    ground.rest()
    assert findings.notes == []


# --- nothing takes longer than its size -----------------------------------------------------------------------------

KIB = 1 << 10
HEAD = packed({"v": 1, "op": "open", "control_id": "c", "session_id": "s", "fence": {}})[1:]
LARGE: dict[str, Callable[[int], bytes]] = {
    "text": lambda size: _with("session_config", packed({"x": "ö" * (size // 2)})),
    "an id": lambda size: _with("token", packed("x" * size)),
    "an op": lambda size: packed({"v": 1, "session_id": "s", "op": "x" * size}),
    "a list": lambda size: _with("session_config", packed({"x": [0] * size})),
    "empty lists": lambda size: _with("session_config", packed({"x": [[]] * size})),
    "lists as keys": lambda size: _with(
        "session_config",
        b"\x81\xa1x\xdf"
        + (size // 6).to_bytes(4, "big")
        + b"".join(b"\x91\xce" + n.to_bytes(4, "big") + b"\x01" for n in range(size // 6)),
    ),
    "small maps": lambda size: _with("session_config", packed({"x": [{"a": 1}] * (size // 4)})),
    "many keys": lambda size: _with("session_config", packed({str(n): n for n in range(size // 8)})),
    "unknown keys": lambda size: (
        b"\xdf" + (size // 8).to_bytes(4, "big") + b"".join(packed(f"k{n:05}") + b"\x01" for n in range(size // 8))
    ),
    "one key again and again": lambda size: b"\xdf" + (size // 3).to_bytes(4, "big") + b"\xa1v\x01" * (size // 3),
    "deep nesting": lambda size: _with("x", b"\x91" * size + b"\x01"),
    "deep JSON": lambda size: b'{"session_id":"s","x":' + b"[" * size,
    "a number": lambda size: b'{"session_id":"s","v":' + b"9" * size + b"}",
    "escapes": lambda size: b'{"session_id":"s","x":"' + b"\\u00e9" * (size // 6) + b'"}',
    "blanks": lambda size: b"{" + b" " * size + b"}",
    "base64": lambda size: (
        b'{"v":1,"op":"append","control_id":"c","session_id":"s","mode":"m","payload_b64":"'
        + b"A" * size
        + b'","fence":{"incarnation":0,"epoch":0,"turn_id":0,"response_seq":0}}'
    ),
}


def _with(key: str, value: bytes) -> bytes:
    return b"\x86" + HEAD + packed(key) + value


@pytest.mark.parametrize("kind", LARGE)
def test_eight_times_the_size_takes_not_much_more_than_eight_times_as_long(kind: str, findings: Findings) -> None:
    def best_s(size: int) -> float:
        shot = Shot(COMMANDS_KEY, 0, [b"b", LARGE[kind](size)])
        return min(_time(findings, shot) for _ in range(5))

    assert best_s(512 * KIB) < 32 * best_s(64 * KIB) + 0.005
    assert findings.notes == []


def _time(findings: Findings, shot: Shot) -> float:
    began_s = time.thread_time()
    assert findings.decode(shot, "1-1") is not None
    return time.thread_time() - began_s


# --- it would notice ------------------------------------------------------------------------------------------------


def raise_on_a_nul(decode: Any) -> Any:
    def spoilt(body: bytes, *args: Any) -> Any:
        if body.endswith(b"\x00"):
            raise IndexError("planted")
        return decode(body, *args)

    return spoilt


def take_long(decode: Any) -> Any:
    def spoilt(body: bytes, *args: Any) -> Any:
        if b"\x91" * 9 in body:
            _busy(0.02)
        return decode(body, *args)

    return spoilt


def _busy(duration_s: float) -> None:
    until_s = time.thread_time() + duration_s
    while time.thread_time() < until_s:
        pass


def swallow_resumes(self: Partition, known: Any, command: Any) -> bool:
    return any(type(w.command) is type(command) for w in known.waiting)


def break_on_a_detach(step: Any) -> Any:
    def spoilt(scene: Any, session: Any, event: Any) -> Any:
        if getattr(event, "activity", "") == "detach":
            raise KeyError("planted")
        return step(scene, session, event)

    return spoilt


def raise_on_acks(decode: Any) -> Any:
    def spoilt(body: bytes) -> Any:
        if len(body) < 3:
            raise ValueError("planted")
        return decode(body)

    return spoilt


def say_twice(say: Any) -> Any:
    def spoilt(self: Batch, session_id: str, kind: str, body: bytes, *, listened: bool) -> None:
        say(self, session_id, kind, body, listened=listened)
        if b"playback_ack" in body:
            say(self, session_id, kind, body, listened=listened)

    return spoilt


def hide(_: Any) -> Any:
    return lambda *_, **__: None


PLANTED: dict[str, tuple[Any, str, Any, str]] = {
    "a decoder that raises": (entries, "decode_command", raise_on_a_nul, "the decoder raised"),
    "a decoder of acks that raises": (entries, "decode_ack", raise_on_acks, "the decoder raised"),
    "a decoder that stalls": (entries, "decode_command", take_long, "decoding"),
    "a waiting command that is swallowed": (Partition, "_is_waiting_twice", lambda _: swallow_resumes, "no reply"),
    "an entry that is never buried": (Batch, "bury", hide, "neither applied nor set aside"),
    "a reply that comes twice": (Batch, "_say", say_twice, "more replies than it was sent"),
    "a rule that raises": (partition, "step", break_on_a_detach, "internal"),
    "a configuration that can't be stored": (wire, "_require_plain", hide, "internal"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, findings: Findings, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, spoil, says = PLANTED[bug]
    monkeypatch.setattr(where, name, spoil(getattr(where, name)))
    for seed in range(20):
        throw(findings, 1_000, seed)
        if findings.count:
            break
    assert any(says in note for note in findings.notes)


def test_a_session_that_is_starved_is_found(findings: Findings, monkeypatch: pytest.MonkeyPatch) -> None:
    take = Partition.take_command

    def late(self: Partition, entry_id: str, received: Any, entered_ms: int, now_ms: int) -> None:
        if not received.command.session_id.startswith("quiet"):
            take(self, entry_id, received, entered_ms, now_ms)

    ground = Ground(findings)
    monkeypatch.setattr(Partition, "take_command", late)
    ground.throw([Shot(ORDERS_KEY, 0, [b"b", encode_order(RetryOrder("nobody"))])])
    ground.throw([])
    assert any("had to wait" in note for note in findings.notes)


def test_an_error_in_the_log_is_a_finding(findings: Findings) -> None:
    logging.getLogger("bargein.partition").error("planted")
    assert findings.count == 1


def test_a_seed_throws_the_same_again() -> None:
    first, second = (list(itertools.islice(make_shots(5, 4).shots(), 500)) for _ in range(2))
    assert first == second
    assert first != list(itertools.islice(make_shots(6, 4).shots(), 500))
    assert msgspec.msgpack.decode(packed({"a": 10**40})) == {"a": str(10**40)}
