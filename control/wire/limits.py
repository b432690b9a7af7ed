"""How much a producer may send. Responsible for the sizes only; `commands.py` enforces them. Pure. Bytes, UTF-8."""

from __future__ import annotations

from msgspec import Struct

MIB = 1 << 20

# A token of fewer bytes could be guessed.
TOKEN_MIN_BYTES = 16


class Limits(Struct, frozen=True, kw_only=True):
    """All configurable; the defaults are the wire protocol's."""

    session_id_bytes: int = 128
    control_id_bytes: int = 128
    token_bytes: int = 256
    body_bytes: int = MIB
    payload_bytes: int = MIB
    waiting_appends: int = 32
    waiting_bytes: int = 4 * MIB
    events_bytes: int = MIB
    dead_letter_bytes: int = 4096
