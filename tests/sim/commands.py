"""The commands of the store model: what each does and answers.

Responsible for the commands that the product uses, and for which of them write. Leaves keys, expiry and everything
around a command to `store.py` and `server.py`. Pure. They say no with `Failure`, as Redis does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.sim.values import (
    KINDS,
    LAST_ID,
    OK,
    Failure,
    Sorted,
    Stream,
    read_id,
    read_score,
    write_id,
    write_number,
)

if TYPE_CHECKING:
    from tests.sim.store import Store

Args = list[bytes]


# Hashes.


def _hset(store: Store, args: Args) -> int:
    values = store.make(args[1], dict)
    if len(args) < 4 or len(args) % 2:
        raise IndexError
    before = len(values)
    values.update(zip(args[2::2], args[3::2], strict=True))
    return len(values) - before


def _hsetnx(store: Store, args: Args) -> int:
    values = store.make(args[1], dict)
    if args[2] in values:
        return 0
    values[args[2]] = args[3]
    return 1


def _hget(store: Store, args: Args) -> bytes | None:
    return (store.find(args[1], dict) or {}).get(args[2])


def _hmget(store: Store, args: Args) -> list[bytes | None]:
    values = store.find(args[1], dict) or {}
    return [values.get(name) for name in args[2:]]


def _hgetall(store: Store, args: Args) -> list[bytes]:
    return [part for pair in (store.find(args[1], dict) or {}).items() for part in pair]


def _hdel(store: Store, args: Args) -> int:
    values = store.find(args[1], dict)
    if values is None:
        return 0
    gone = sum(values.pop(name, None) is not None for name in args[2:])
    if not values:
        store.drop(args[1])
    return gone


def _hkeys(store: Store, args: Args) -> list[bytes]:
    return list(store.find(args[1], dict) or ())


def _hlen(store: Store, args: Args) -> int:
    return len(store.find(args[1], dict) or ())


def _hscan(store: Store, args: Args) -> list[Any]:
    """All in one portion, as Redis does with a small hash."""
    return [b"0", _hgetall(store, args)]


def _hincrby(store: Store, args: Args) -> int:
    values = store.make(args[1], dict)
    try:
        number = int(values.get(args[2], b"0")) + int(args[3])
    except ValueError:
        raise Failure("ERR hash value is not an integer") from None
    values[args[2]] = b"%d" % number
    return number


# Sets and sorted sets.


def _sadd(store: Store, args: Args) -> int:
    members = store.make(args[1], set)
    before = len(members)
    members.update(args[2:])
    return len(members) - before


def _sismember(store: Store, args: Args) -> int:
    return int(args[2] in (store.find(args[1], set) or ()))


def _smembers(store: Store, args: Args) -> list[bytes]:
    return sorted(store.find(args[1], set) or ())


def _zadd(store: Store, args: Args) -> int:
    scores = store.make(args[1], Sorted).scores
    before = len(scores)
    for i in range(2, len(args), 2):
        scores[args[i + 1]] = read_score(args[i])
    return len(scores) - before


def _zrem(store: Store, args: Args) -> int:
    found = store.find(args[1], Sorted)
    if found is None:
        return 0
    gone = sum(found.scores.pop(member, None) is not None for member in args[2:])
    if not found.scores:
        store.drop(args[1])
    return gone


def _zrange(store: Store, args: Args) -> list[bytes]:
    found = store.find(args[1], Sorted)
    pairs = [] if found is None else found.in_order()
    pairs = pairs[_slice(args[2], args[3], len(pairs))]
    if len(args) > 4 and args[4].upper() == b"WITHSCORES":
        return [part for score, member in pairs for part in (member, write_number(score))]
    return [member for _, member in pairs]


def _zscore(store: Store, args: Args) -> bytes | None:
    found = store.find(args[1], Sorted)
    score = None if found is None else found.scores.get(args[2])
    return None if score is None else write_number(score)


def _zcard(store: Store, args: Args) -> int:
    return len(store.find(args[1], Sorted) or ())


def _zremrangebyscore(store: Store, args: Args) -> int:
    found = store.find(args[1], Sorted)
    low, high = read_score(args[2]), read_score(args[3])
    if found is None:
        return 0
    gone = [member for member, score in found.scores.items() if low <= score <= high]
    return _zrem(store, [b"", args[1], *gone])


# Lists.


def _rpush(store: Store, args: Args) -> int:
    values = store.make(args[1], list)
    values.extend(args[2:])
    return len(values)


def _lrange(store: Store, args: Args) -> list[bytes]:
    values: list[bytes] = store.find(args[1], list) or []
    return values[_slice(args[2], args[3], len(values))]


def _ltrim(store: Store, args: Args) -> bytes:
    values: list[bytes] | None = store.find(args[1], list)
    if values is not None:
        values[:] = values[_slice(args[2], args[3], len(values))]
        if not values:
            store.drop(args[1])
    return OK


def _llen(store: Store, args: Args) -> int:
    return len(store.find(args[1], list) or ())


def _slice(first: bytes, last: bytes, length: int) -> slice:
    start, stop = int(first), int(last)
    start = max(0, start + length) if start < 0 else start
    stop = stop + length if stop < 0 else stop
    return slice(start, max(start, stop + 1))


# Streams.


def _xadd(store: Store, args: Args) -> bytes:
    stream, at, most = store.find(args[1], Stream), 2, None
    if args[at].upper() == b"MAXLEN":
        at += 2 if args[at + 1] in (b"~", b"=") else 1
        # Redis trims `~` to whole nodes; the model never trims more than it must, so `~` keeps a hundred more.
        most = int(args[at]) + (100 if args[at - 1] == b"~" else 0)
        at += 1
    fields = args[at + 1 :]
    if not fields or len(fields) % 2:
        raise IndexError
    fresh = stream is None
    stream = Stream() if stream is None else stream
    entry_id = stream.add(args[at], fields, store.now_ms)
    if fresh:
        store.db[args[1]] = stream
    if most is not None:
        stream.keep(most)
    store.added.add(args[1])
    return write_id(entry_id)


def _xlen(store: Store, args: Args) -> int:
    return len(store.find(args[1], Stream) or ())


def _xrange(store: Store, args: Args) -> list[Any]:
    stream = store.find(args[1], Stream)
    count = int(args[5]) if len(args) > 4 else -1
    return [] if stream is None else stream.between(_first(args[2]), _last(args[3]), count)


def _xrevrange(store: Store, args: Args) -> list[Any]:
    stream = store.find(args[1], Stream)
    count = int(args[5]) if len(args) > 4 else -1
    return [] if stream is None else stream.backwards(_first(args[3]), _last(args[2]), count)


def _first(text: bytes) -> tuple[int, int]:
    return (0, 0) if text == b"-" else read_id(text)


def _last(text: bytes) -> tuple[int, int]:
    return LAST_ID if text == b"+" else read_id(text, 2**63)


def _xdel(store: Store, args: Args) -> int:
    stream = store.find(args[1], Stream)
    wanted = [read_id(text) for text in args[2:]]
    if stream is None:
        return 0
    return sum(stream.entries.pop(entry_id, None) is not None for entry_id in wanted)


def _xtrim(store: Store, args: Args) -> int:
    stream = store.find(args[1], Stream)
    bound = args[-1]
    if stream is None:
        return 0
    return stream.keep(int(bound)) if args[2].upper() == b"MAXLEN" else stream.cut_before(read_id(bound))


# Keys and the rest.


def _type(store: Store, args: Args) -> bytes:
    value = store.peek(args[1])
    return KINDS[type(value)] if value is not None else type(OK)(b"none")


def _pexpire(store: Store, args: Args) -> int:
    if store.peek(args[1]) is None:
        return 0
    store.expiry[args[1]] = store.now_ms + int(args[2])
    return 1


def _persist(store: Store, args: Args) -> int:
    return int(store.peek(args[1]) is not None and store.expiry.pop(args[1], None) is not None)


def _pttl(store: Store, args: Args) -> int:
    if store.peek(args[1]) is None:
        return -2
    due_ms = store.expiry.get(args[1])
    return -1 if due_ms is None else due_ms - store.now_ms


def _del(store: Store, args: Args) -> int:
    return sum(store.peek(key) is not None and store.drop(key) for key in args[1:])


def _exists(store: Store, args: Args) -> int:
    return sum(store.peek(key) is not None for key in args[1:])


def _set(store: Store, args: Args) -> bytes:
    store.drop(args[1])
    store.db[args[1]] = args[2]
    for i in range(3, len(args)):
        if args[i].upper() == b"EX":
            store.expiry[args[1]] = store.now_ms + 1000 * int(args[i + 1])
    return OK


def _get(store: Store, args: Args) -> bytes | None:
    return store.find(args[1], bytes)


def _time(store: Store, args: Args) -> list[bytes]:
    now_us = store.now_us()
    return [b"%d" % (now_us // 1_000_000), b"%d" % (now_us % 1_000_000)]


def _flushall(store: Store, args: Args) -> bytes:
    store.db.clear()
    store.expiry.clear()
    return OK


READS = {
    b"HGET": _hget, b"HMGET": _hmget, b"HGETALL": _hgetall, b"HKEYS": _hkeys, b"HLEN": _hlen,
    b"HSCAN": _hscan,
    b"SISMEMBER": _sismember, b"SMEMBERS": _smembers, b"ZRANGE": _zrange, b"ZSCORE": _zscore, b"ZCARD": _zcard,
    b"LRANGE": _lrange, b"LLEN": _llen, b"XLEN": _xlen, b"XRANGE": _xrange, b"XREVRANGE": _xrevrange,
    b"TYPE": _type, b"PTTL": _pttl, b"EXISTS": _exists, b"GET": _get, b"TIME": _time,
}  # fmt: skip
FREEING = {
    b"HDEL": _hdel, b"ZREM": _zrem, b"ZREMRANGEBYSCORE": _zremrangebyscore, b"LTRIM": _ltrim, b"XDEL": _xdel,
    b"XTRIM": _xtrim, b"PEXPIRE": _pexpire, b"PERSIST": _persist, b"DEL": _del, b"UNLINK": _del,
    b"FLUSHALL": _flushall,
}  # fmt: skip
GROWING = {
    b"HSET": _hset, b"HSETNX": _hsetnx, b"HINCRBY": _hincrby, b"SADD": _sadd, b"ZADD": _zadd, b"RPUSH": _rpush,
    b"XADD": _xadd, b"SET": _set,
}  # fmt: skip
"""What Redis refuses when its memory is full."""

COMMANDS: dict[bytes, tuple[Callable[[Store, Args], Any], bool]] = {
    **{name: (work, False) for name, work in READS.items()},
    **{name: (work, True) for name, work in (FREEING | GROWING).items()},
}
