"""The store model against a real server: the same commands, the same answers."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import redis

from control.store import keys
from control.store.keys import PartitionKeys
from control.store.scripts import SCRIPTS, script
from tests.sim.commands import COMMANDS
from tests.sim.loop import SimLoop
from tests.sim.scripting import compile_script, run_script
from tests.sim.server import Session, SimServer, encode
from tests.sim.store import Store
from tests.sim.values import Failure, Status

if TYPE_CHECKING:
    from collections.abc import Iterator

NOW_US = 1_700_000_000_000_000
KEYS = [b"H1", b"S1", b"Z1", b"L1", b"X1", b"X2", b"R1", b"none"]
FIELDS = [b"f", b"g", b"h"]
# What the clock decides, or chance, is compared by its kind only.
TIMED = {b"TIME", b"PTTL"}


def _plain(value: Any) -> Any:
    if isinstance(value, Status):
        return bytes(value)
    if isinstance(value, Failure | redis.ResponseError):
        # redis-py takes `ERR` off.
        first = str(value).split()[0]
        return first if first.isupper() else "ERR"
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _draw(choose: random.Random) -> list[bytes]:
    """A command with arguments that often make sense."""
    name = choose.choice(sorted(COMMANDS.keys() - {b"FLUSHALL"}))
    # Mostly of the right type, so that something happens.
    key = name[:1] + choose.choice(b"12").to_bytes() if choose.random() < 0.8 else choose.choice(KEYS)
    field = choose.choice(FIELDS)
    number = b"%d" % choose.randint(-2, 6)
    entry = b"%d-%d" % (choose.randint(1, 6), choose.randint(0, 3))
    match name:
        case b"HSET":
            return [name, key, field, number, choose.choice(FIELDS), b"x"]
        case b"HSETNX" | b"HINCRBY":
            return [name, key, field, number]
        case b"HGET" | b"HDEL" | b"SISMEMBER" | b"SADD" | b"ZREM" | b"ZSCORE" | b"RPUSH":
            return [name, key, field]
        case b"HMGET":
            return [name, key, *FIELDS]
        case b"HSCAN":
            return [name, key, b"0", b"COUNT", b"100"]
        case b"ZADD":
            return [name, key, number, field]
        case b"ZRANGE":
            return [name, key, number, b"%d" % choose.randint(-2, 3), *choose.choice(([], [b"WITHSCORES"]))]
        case b"ZREMRANGEBYSCORE":
            return [name, key, b"-inf", number]
        case b"LRANGE" | b"LTRIM":
            return [name, key, number, b"%d" % choose.randint(-3, 4)]
        case b"XADD":
            bound = choose.choice(([], [], [b"MAXLEN", b"3"], [b"MAXLEN", b"=", b"2"]))
            return [name, key, *bound, entry, b"b", field]
        case b"XRANGE" | b"XREVRANGE":
            ends = choose.choice(([b"-", b"+"], [entry, b"+"], [entry, entry], [b"2", b"4"]))
            if name == b"XREVRANGE":
                ends.reverse()
            return [name, key, *ends, *choose.choice(([], [b"COUNT", b"1"], [b"COUNT", b"2"]))]
        case b"XDEL":
            return [name, key, entry]
        case b"XTRIM":
            return [name, key, *choose.choice(([b"MAXLEN", b"2"], [b"MINID", entry]))]
        case b"PEXPIRE":
            return [name, key, b"1000000"]
        case b"SET":
            return [name, key, field, *choose.choice(([], [b"EX", b"100"]))]
        case b"TIME":
            return [name]
        case b"DEL" | b"UNLINK" | b"EXISTS":
            return [name, key, choose.choice(KEYS)]
        case _:
            return [name, key]


@pytest.mark.parametrize("seed", range(12))
def test_the_model_answers_as_a_real_server_does(redis_url: str, seed: int) -> None:
    choose = random.Random(seed)
    store = Store(lambda: NOW_US)
    with redis.Redis.from_url(redis_url, single_connection_client=True) as client:
        client.response_callbacks.clear()
        done: list[list[bytes]] = []
        for _ in range(600):
            args = _draw(choose)
            done.append(args)
            real = _ask(client, args)
            try:
                ours: Any = store.run(args)
            except Failure as no:
                ours = no
            if args[0] in TIMED:
                assert type(_plain(ours)) is type(_plain(real)), args
                continue
            if args[0] == b"SMEMBERS" and isinstance(real, list):
                real = sorted(real)
            assert _plain(ours) == _plain(real), f"after {done[-6:]}"


def _ask(client: redis.Redis, args: list[bytes]) -> Any:
    try:
        return client.execute_command(*args)
    except redis.ResponseError as error:
        return error


class _Both:
    """A real server and the model, given the same script calls; the model's clock is the server's of the moment."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._now_us = 0
        self.store = Store(lambda: self._now_us)

    def run(self, name: str, names: list[str], argv: list[Any]) -> Any:
        known = script(name)
        compiled = compile_script(known.text, known.sha)
        texts = [str(each).encode() if not isinstance(each, bytes) else each for each in argv]
        seconds, micros = self._client.execute_command("TIME")
        self._now_us = int(seconds) * 1_000_000 + int(micros)
        real = _ask(
            self._client, [b"EVAL", known.text.encode(), b"%d" % len(names), *(n.encode() for n in names), *texts]
        )
        try:
            ours = run_script(self.store, compiled, [n.encode() for n in names], texts, full=False)
        except Failure as no:
            ours = no
        assert _shape(ours) == _shape(real), name
        return ours

    def put(self, *args: str) -> None:
        """A command to both."""
        assert self.store.run([arg.encode() for arg in args]) is not None
        self._client.execute_command(*args)

    def dump(self, key: str) -> tuple[Any, Any]:
        """A hash in both."""
        return self.store.peek(key.encode()) or {}, dict(_pairs(self._client.execute_command("HGETALL", key)))


def _pairs(flat: list[bytes]) -> list[tuple[bytes, bytes]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _shape(value: Any) -> Any:
    """Without what the clock has made: its milliseconds and whatever holds them."""
    if isinstance(value, list):
        return [_shape(each) for each in value]
    if isinstance(value, bytes) and value[:3] == b"1" + value[1:3] and value[:13].isdigit():
        return "a time"
    return "a time" if isinstance(value, int) and value > 10**12 else _plain(value)


def test_the_scripts_do_in_the_model_what_they_do_on_a_real_server(redis_url: str) -> None:
    known = PartitionKeys(0)
    with redis.Redis.from_url(redis_url, single_connection_client=True) as client:
        client.response_callbacks.clear()
        both = _Both(client)
        assert both.run("acquire", [known.owner], ["one", 5000, "aa"])[0] == 1
        assert both.run("acquire", [known.owner], ["two", 5000, "bb"])[0] == 0
        assert both.run("renew", [known.owner], ["nobody's", 5000]) == 0
        assert both.run("handling", [known.owner], ["nobody's", "2/1-1"]) == 0
        both.run("join", [keys.CONTROLS], ["one", 5000])
        both.run("join", [keys.CONTROLS], ["one", 0])
        worker = [keys.worker_state("w"), keys.worker_slots("w"), keys.worker_owners("w")]
        beats = [worker[0], keys.worker_drain("w")]
        assert both.run("beat", beats, [1000, "running", 3]) == 0
        both.put("HSET", worker[0], "state", "live")
        assert both.run("beat", beats, [1000, "running", 3]) == 1
        both.put("SET", beats[1], "1")
        assert both.run("beat", beats, [1000, "state", "live"]) == -2
        assert both.dump(worker[0])[1][b"state"] == b"draining"
        both.put("UNLINK", *beats)
        for _ in range(2):
            both.run("slot", worker, ["take", "s", 1, 7, 2, 0])
        both.run("slot", worker, ["take", "t", 1, 6, 2, 0])
        both.run("slot", worker, ["free", "s", 2, 7, "", 0])
        both.run("slot", worker, ["free", "s", 1, 8, "", 0])
        both.run("end_life", worker[:1], [""])
        both.run("acknowledge", [known.acks, known.fenced, known.submissions("w")], ["w", 2, b"x", b"y", "1-1"])
        publish = [known.fences, known.marks, known.heard, known.outputs, known.fenced, known.events("s")]
        both.run("publish", publish, ["w", 100, "s", 6, "events", "r", 1, 0, 0, 0, 0, b"body", b""])
        assert both.run("commit", [known.owner] * 13, ["nobody's", 0, 100, ""])[0] == 1
        for name in (keys.worker_slots("w"), known.marks):
            ours, real = both.dump(name)
            assert ours == real


def test_every_script_of_the_product_compiles() -> None:
    for name in SCRIPTS:
        compile_script(script(name).text, script(name).sha)


@pytest.fixture
def server() -> Iterator[SimServer]:
    loop = SimLoop()
    yield SimServer(loop)
    loop.close()


def _session(server: SimServer, answers: list[Any]) -> Session:
    return server.open_session("test", answers.append)


def test_a_blocked_reader_is_answered_when_an_entry_comes_and_when_it_is_unblocked(server: SimServer) -> None:
    heard: list[Any] = []
    reader, other = _session(server, heard), _session(server, [])
    wait = [b"XREAD", b"BLOCK", b"0", b"STREAMS", b"x", b"0-0"]
    reader.request(list(wait))
    assert heard == []
    other.request([b"XADD", b"x", b"5-0", b"b", b"1"])
    assert heard == [[[b"x", [[b"5-0", [b"b", b"1"]]]]]]
    reader.request([*wait[:-1], b"5-0"])
    other.request([b"CLIENT", b"UNBLOCK", b"%d" % reader.number])
    assert heard[1:] == [None]


def test_a_full_server_refuses_what_grows_and_runs_what_may_run_then(server: SimServer) -> None:
    server.full = True
    heard: list[Any] = []
    session = _session(server, heard)
    session.request([b"HSET", b"h", b"f", b"v"])
    known = script("join")
    session.request([b"EVAL", known.text.encode(), b"1", b"controls", b"me", b"1000"])
    assert isinstance(heard[0], Failure)
    assert heard[1][-1] == b"me"
    session.request([b"EVAL", script("publish").text.encode(), b"0"])
    assert encode(heard[2]).startswith(b"-OOM")
