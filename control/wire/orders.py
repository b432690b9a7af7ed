"""What operators and upkeep want of a partition's owner: orders, in a stream of their own.

Responsible for their bytes. Leaves what becomes of an order to the owner, which decides about it like about everything
else, so an order may come late, twice or about nobody (S62, S80). A stream of their own, since no producer and no stage
worker may give orders: an order asks for no session's token. Pure. Says no with `Unreadable`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from control.core import commands as c
from control.wire.commands import Unreadable

# Of what a session's listener is told: a word for programs, no sentence.
REASON = r"^[a-z][a-z0-9_]{0,63}\Z"
Reason = Annotated[str, Meta(pattern=REASON)]


class DismissOrder(Struct, frozen=True, gc=False, array_like=True, tag=1):
    """End this life of the session; its listener hears `closed` with this reason."""

    session_id: str
    incarnation: int
    reason: Reason


class RetryOrder(Struct, frozen=True, gc=False, array_like=True, tag=2):
    """Try the session's pending cleanups again now."""

    session_id: str


class LookOrder(Struct, frozen=True, gc=False, array_like=True, tag=3):
    """Look whether the session's time has come for something."""

    session_id: str


class SlotOrder(Struct, frozen=True, gc=False, array_like=True, tag=4):
    """Compare: `holder` has a slot for this life of the session, or has none."""

    session_id: str
    incarnation: int
    holder: str
    has_slot: bool


Order = DismissOrder | RetryOrder | LookOrder | SlotOrder

_encoder = msgspec.msgpack.Encoder()
_order = msgspec.msgpack.Decoder(Order)

encode_order = _encoder.encode


def decode_order(body: bytes) -> tuple[str, c.Event]:
    """The session id and the core's event of an order. Raises `Unreadable`."""
    try:
        order = _order.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Unreadable(f"no order: {error}") from error
    match order:
        case DismissOrder():
            return order.session_id, c.Dismissed(order.incarnation, order.reason)
        case RetryOrder():
            return order.session_id, c.RetryNow()
        case LookOrder():
            return order.session_id, c.Due()
        case SlotOrder():
            return order.session_id, c.Audited(order.holder, -1, order.incarnation, (), order.has_slot)
