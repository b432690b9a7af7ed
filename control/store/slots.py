"""Slots: who holds one at which stage worker, and at the limit of sessions.

Responsible for the arguments of `lua/slot.lua`. Leaves the choice of workers to the core, and when to ask to the owner,
only after the commit that records it. Pure. Keeps I9; a lower token changes nothing (S75).
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any

from control.core.scene import ADMISSION
from control.store import keys
from control.store.scripts import Script, script

if TYPE_CHECKING:
    from collections.abc import Sequence


class Slot(IntEnum):
    """What the script answers; it has the same numbers."""

    DONE = 0
    FULL = 1
    GONE = 2
    DRAINING = 3
    DEPOSED = 4


def read_slot(value: bytes) -> int | None:
    """The incarnation that holds a slot, as the script wrote it; None for what it did not write."""
    incarnation = value.partition(b" ")[0]
    return int(incarnation) if incarnation.isdigit() else None


def slot_call(
    what: str,
    holder: str,
    session_id: str,
    incarnation: int,
    *,
    partition: int,
    token_number: int,
    call_number: int,
    max_sessions: int | None,
) -> tuple[Script, Sequence[str], Sequence[Any]]:
    """A call for `Link.try_run_all`. `what`: take or free. `token_number`: that of the partition's owner.

    `call_number` rises with every call of one owner: a word that comes late, after its repetition, does nothing.
    """
    if holder == ADMISSION:
        names = (keys.ADMISSION_STATE, keys.ADMISSION_SLOTS, keys.ADMISSION_OWNERS)
        limit: int | str = max_sessions or 0
    else:
        names = (keys.worker_state(holder), keys.worker_slots(holder), keys.worker_owners(holder))
        limit = ""
    return script("slot"), names, (what, session_id, incarnation, token_number, limit, partition, call_number)
