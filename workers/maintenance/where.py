"""Which sessions an operator means: `worker=thinker-*`, `idle>10m`, `id=call-*`, and so on, all of which must hold.

Responsible for reading such conditions and for whether a row of `control/store/inspect.py` fulfils them. Pure. Says no
with `WhereError`, which names what can be said.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from msgspec import Struct

if TYPE_CHECKING:
    from control.store.inspect import SessionRow

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_CONDITION = re.compile(r"\s*([a-z_]+)\s*(!=|=|>|<)\s*(.*?)\s*", re.DOTALL)
_LENGTH = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")

# What each is compared with, and how it reads.
TEXTS: dict[str, Callable[[SessionRow], Iterable[str]]] = {
    "id": lambda row: (row.session_id,),
    "worker": lambda row: row.route,
    "mode": lambda row: (row.session_mode,),
    "phase": lambda row: (row.phase,),
}
NUMBERS: dict[str, Callable[[SessionRow], int | None]] = {
    "partition": lambda row: row.partition,
    "cleanups": lambda row: row.cleanups,
}
TIMES: dict[str, Callable[[SessionRow], int | None]] = {
    "idle": lambda row: row.idle_ms,
    "detached": lambda row: row.detached_ms,
    "cleanup_age": lambda row: row.oldest_cleanup_ms,
}
AMOUNTS = {**NUMBERS, **TIMES}
HELP = (
    "id, worker, mode or phase with = or != and a pattern (*, ?, [ab]); partition or cleanups with =, !=, > or < and a "
    "whole number; idle, detached or cleanup_age with > or < and a length of time: 500ms, 30s, 10m, 2h, 1d"
)


class WhereError(ValueError):
    """A condition that can't be read."""


class Condition(Struct, frozen=True):
    """`value`: a pattern, a number, or a length of time in ms, by the field."""

    field: str
    operator: str
    value: str | int

    def holds(self, row: SessionRow) -> bool:
        """Whether the session is meant. What it hasn't (an attached one's `detached`) fulfils nothing."""
        if self.field in TEXTS:
            found = any(fnmatchcase(text, str(self.value)) for text in TEXTS[self.field](row))
            return found == (self.operator == "=")
        number = AMOUNTS[self.field](row)
        if number is None:
            return False
        value: Any = self.value
        return {"=": number == value, "!=": number != value, ">": number > value, "<": number < value}[self.operator]


def parse_where(texts: Iterable[str]) -> tuple[Condition, ...]:
    """The conditions. Raises `WhereError`."""
    return tuple(_parse(text) for text in texts)


def parse_length_ms(text: str) -> int:
    """A length of time in ms. Raises `WhereError`."""
    found = _LENGTH.fullmatch(text.strip())
    if found is None or found[2] not in _UNITS_MS:
        raise WhereError(f"{text!r} is no length of time; write 500ms, 30s, 10m, 2h or 1d")
    return round(float(found[1]) * _UNITS_MS[found[2]])


def is_meant(row: SessionRow, conditions: Iterable[Condition]) -> bool:
    """Whether all of them hold."""
    return all(condition.holds(row) for condition in conditions)


def _parse(text: str) -> Condition:
    found = _CONDITION.fullmatch(text)
    if found is None or not found[3]:
        raise WhereError(f"{text!r} is no condition; it must be {HELP}")
    field, operator, value = found.groups()
    if field in TEXTS and operator in {"=", "!="}:
        return Condition(field, operator, value)
    if field in NUMBERS and value.isascii() and value.isdecimal():
        return Condition(field, operator, int(value))
    if field in TIMES and operator in {">", "<"}:
        return Condition(field, operator, parse_length_ms(value))
    raise WhereError(f"{text!r} can't be asked; it must be {HELP}")
