"""Stream entries as the control worker reads them: decoded, or with the reason why they can't be.

Responsible for an entry's fields and for its home partition. Leaves the body to `control/wire`. Pure. Says no by the
entry's `unreadable`, which becomes a dead letter (S54).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from control.store.commits import ACKS_KEY, COMMANDS_KEY, ORDERS_KEY
from control.store.keys import partition_of
from control.wire.commands import Received, Unreadable, decode_command
from control.wire.orders import decode_order
from control.wire.stage import decode_ack

if TYPE_CHECKING:
    from collections.abc import Callable

    from control.core import commands as c
    from control.wire.limits import Limits


@dataclass(slots=True)
class Entry:
    """One stream entry, decoded, or the reason why it can't be. `is_secret`: its body holds a session's token."""

    stream: int
    entry_id: str
    entered_ms: int
    session_id: str = ""
    received: Received | None = None
    event: c.Event | None = None
    unreadable: str | None = None
    is_secret: bool = False


Raw = tuple[int, list[Any]]
"""A stream's number and an entry as the client gives it."""


def in_order(read: dict[int, list[Any]]) -> deque[Raw]:
    """What one read has brought for a partition, acks first: they make room."""
    return deque((stream, raw) for stream in (ACKS_KEY, ORDERS_KEY, COMMANDS_KEY) for raw in read.get(stream, ()))


def id_of(raw: Raw) -> str:
    """The entry's id."""
    return raw[1][0].decode()


def decode_entry(number: int, raw: Raw, partitions: int, limits: Limits) -> Entry:
    """An entry of partition `number`."""
    stream, fields = raw
    if stream == COMMANDS_KEY:
        return _decode_command(number, fields, partitions, limits)
    return _decode_word(stream, fields, decode_ack if stream == ACKS_KEY else decode_order)


def _decode_command(number: int, raw: list[Any], partitions: int, limits: Limits) -> Entry:
    entry_id = raw[0].decode()
    entry = Entry(COMMANDS_KEY, entry_id, int(entry_id.partition("-")[0]))
    fields: list[bytes] = raw[1] or []
    names = fields[0::2]
    try:
        if names.count(b"b") != 1 or names.count(b"p") > 1:
            raise Unreadable("an entry needs one field b, and at most one p")
        values = dict(zip(names, fields[1::2], strict=True))
        received = decode_command(values[b"b"], values.get(b"p"), limits)
        session_id = received.command.session_id
        home = partition_of(session_id, partitions)
        if home != number:
            raise Unreadable(f"session {session_id!r} belongs to partition {home}, not to {number}")
    except Unreadable as reason:
        entry.unreadable = str(reason)
        # What can't be read may hold one anywhere.
        entry.is_secret = any(b"token" in value for value in fields)
        return entry
    entry.session_id, entry.received = session_id, received
    entry.is_secret = received.command.token is not None
    return entry


def _decode_word(stream: int, raw: list[Any], decode: Callable[[bytes], tuple[str, c.Event]]) -> Entry:
    entry_id = raw[0].decode()
    entry = Entry(stream, entry_id, int(entry_id.partition("-")[0]))
    fields: list[bytes] = raw[1] or []
    try:
        values = dict(zip(fields[0::2], fields[1::2], strict=True))
        entry.session_id, entry.event = decode(values.get(b"b", b""))
    except Unreadable as reason:
        entry.unreadable = str(reason)
    return entry
