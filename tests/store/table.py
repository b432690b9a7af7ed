"""The table of keys in `control/store/keys.py`, read from its text: what may be in Redis, of which type, how long."""

from __future__ import annotations

import re
from dataclasses import dataclass

from redis.asyncio import Redis

from control.store import keys

# The table's words for a life time: the longest TTL in ms, or None where the key goes by being emptied or not at all.
LIVES_MS = {
    "for ever": None,
    "while any runs": None,
    "until nobody is placed on it": None,
    "while held": None,
    "until applied": None,
    "while open or closing": None,
    "until confirmed": None,
    "until released": None,
    "with the session": None,
    "with `stages`": None,
    "an hour past the session's end": None,  # a hash of many sessions; each field goes by its deadline
    "16 entries": None,
    "10,000 entries": None,
    "an hour past a beat": 3_600_000,
    "a day": 86_400_000,
    "a day past the end": 86_400_000,
    "a minute": 60_000,
    "10 minutes": 600_000,
    "a week": 7 * 86_400_000,
    "1,000 jobs": None,
    "5 minutes past the end": 300_000,
}
ALWAYS_END = {"a week", "a day", "a day past the end", "a minute", "10 minutes", "an hour past a beat"}
ENTRIES = {"16 entries": 16, "10,000 entries": 10_000 + 200}  # the second is trimmed to whole nodes


@dataclass(frozen=True)
class Row:
    name: str
    kind: str
    what: str
    writers: str
    lives: str

    @property
    def pattern(self) -> re.Pattern[str]:
        text = re.escape(self.name)
        for placeholder, stands_for in (
            ("{p}", r"\{\d+\}"),
            ("<id>", "[^{}]+"),
            ("<job>", "[^:]+"),
            ("<session>", ".+"),
            ("<worker>", ".+"),
            ("<stage>", "[a-z][a-z0-9_-]*"),
        ):
            text = text.replace(re.escape(placeholder), stands_for)
        return re.compile(text, re.DOTALL)


def rows() -> list[Row]:
    """Every row, in order."""
    found: list[Row] = []
    for line in (keys.__doc__ or "").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if len(cells) == 5 and cells[0].startswith("`"):
            found.append(Row(cells[0].strip("`"), *cells[1:]))
    return found


def find_row(key: str) -> Row | None:
    """The one row that a key is of; None if there is none. AssertionError where there are several."""
    matching = [row for row in rows() if row.pattern.fullmatch(key)]
    assert len(matching) <= 1, f"{key} is described by {[row.name for row in matching]}"
    return matching[0] if matching else None


async def find_undocumented(redis: Redis) -> list[str]:
    """What is wrong with the keys that are in Redis, by the table; empty if nothing is."""
    wrong: list[str] = []
    for raw in await redis.keys():
        key = raw.decode()
        row = find_row(key)
        if row is None:
            wrong.append(f"{key} is in no row")
            continue
        kind = (await redis.type(key)).decode()
        if kind != row.kind:
            wrong.append(f"{key} is a {kind}, not a {row.kind}")
        ttl_ms, longest_ms = await redis.pttl(key), LIVES_MS[row.lives]
        if ttl_ms != -1 and (longest_ms is None or ttl_ms > longest_ms):
            wrong.append(f"{key} expires in {ttl_ms} ms; the table says {row.lives}")
        if row.lives in ALWAYS_END and ttl_ms == -1:
            wrong.append(f"{key} never expires; the table says {row.lives}")
        if row.lives in ENTRIES and await redis.xlen(key) > ENTRIES[row.lives]:
            wrong.append(f"{key} has more than {row.lives}")
    return wrong
