"""Redis' data types as the store model keeps them, and what its commands answer with.

Responsible for streams and their ids, sorted sets and the reply types; hashes, sets, lists, strings are Python's own.
Leaves commands and expiry to `store.py`. Pure.
"""

from __future__ import annotations


class Status(bytes):
    """A simple string."""


class Failure(Exception):
    """An error reply."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


OK = Status(b"OK")
WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"
OOM = "OOM command not allowed when used memory > 'maxmemory'."

EntryId = tuple[int, int]
LAST_ID: EntryId = (2**63, 2**63)


def read_id(text: bytes, missing: int = 0) -> EntryId:
    """An entry id; `missing`: the sequence of an id that has none."""
    ms, dash, number = text.partition(b"-")
    try:
        return int(ms), int(number) if dash else missing
    except ValueError:
        raise Failure("ERR Invalid stream ID specified as stream command argument") from None


def write_id(entry_id: EntryId) -> bytes:
    return b"%d-%d" % entry_id


class Stream:
    """Entries by id, in order. `last`: the highest id that was ever given."""

    __slots__ = ("entries", "last")

    def __init__(self) -> None:
        self.entries: dict[EntryId, list[bytes]] = {}
        self.last: EntryId = (0, 0)

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, wanted: bytes, fields: list[bytes], now_ms: int) -> EntryId:
        """Append an entry; `wanted` is `*` or an id."""
        if wanted == b"*":
            entry_id = (now_ms, 0) if now_ms > self.last[0] else (self.last[0], self.last[1] + 1)
        else:
            entry_id = read_id(wanted)
            if entry_id <= self.last:
                raise Failure(
                    "ERR The ID specified in XADD is equal or smaller than the target stream top item"
                    if entry_id != (0, 0)
                    else "ERR The ID specified in XADD must be greater than 0-0"
                )
        self.entries[entry_id] = fields
        self.last = entry_id
        return entry_id

    def after(self, entry_id: EntryId, count: int) -> list[list[object]]:
        """Up to `count` entries behind `entry_id`, as XREAD answers."""
        if not self.entries or self.last <= entry_id:
            return []
        return self.between((entry_id[0], entry_id[1] + 1), LAST_ID, count)

    def between(self, first: EntryId, last: EntryId, count: int = -1) -> list[list[object]]:
        if first == last:
            fields = self.entries.get(first)
            return [] if fields is None or count == 0 else [[write_id(first), fields]]
        found: list[list[object]] = []
        for entry_id, fields in self.entries.items():
            if first <= entry_id <= last:
                if len(found) == count:
                    break
                found.append([write_id(entry_id), fields])
        return found

    def backwards(self, first: EntryId, last: EntryId, count: int = -1) -> list[list[object]]:
        found: list[list[object]] = []
        for entry_id in reversed(self.entries):
            if first <= entry_id <= last:
                if len(found) == count:
                    break
                found.append([write_id(entry_id), self.entries[entry_id]])
        return found

    def keep(self, most: int) -> int:
        """Cut to the newest `most`; how many went."""
        gone = list(self.entries)[: max(0, len(self.entries) - most)]
        for entry_id in gone:
            del self.entries[entry_id]
        return len(gone)

    def cut_before(self, first: EntryId) -> int:
        gone = [entry_id for entry_id in self.entries if entry_id < first]
        for entry_id in gone:
            del self.entries[entry_id]
        return len(gone)


class Sorted:
    """A sorted set."""

    __slots__ = ("scores",)

    def __init__(self) -> None:
        self.scores: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self.scores)

    def in_order(self) -> list[tuple[float, bytes]]:
        return sorted((score, member) for member, score in self.scores.items())


KINDS: dict[type, Status] = {
    dict: Status(b"hash"),
    set: Status(b"set"),
    list: Status(b"list"),
    Stream: Status(b"stream"),
    Sorted: Status(b"zset"),
    bytes: Status(b"string"),
}


def write_number(number: float) -> bytes:
    """As Redis prints a score."""
    return b"%d" % number if number == int(number) and abs(number) < 2**63 else repr(number).encode()


def read_score(text: bytes) -> float:
    if text in (b"-inf", b"+inf", b"inf"):
        return float(text)
    try:
        return float(text)
    except ValueError:
        raise Failure("ERR min or max is not a float") from None
