"""Orders of operators and upkeep: bytes to events, and what is none."""

from __future__ import annotations

import msgspec
import pytest

from control.core import commands as c
from control.wire.commands import Unreadable
from control.wire.orders import DismissOrder, LookOrder, Order, RetryOrder, SlotOrder, decode_order, encode_order

ORDERS: list[tuple[Order, c.Event]] = [
    (DismissOrder("s1", 3, "worker_drained"), c.Dismissed(3, "worker_drained")),
    (RetryOrder("s1"), c.RetryNow()),
    (LookOrder("s1"), c.Due()),
    (SlotOrder("s1", 3, "ear", True), c.Audited("ear", -1, 3, (), True)),
]


@pytest.mark.parametrize(("order", "event"), ORDERS)
def test_an_order_is_an_event_of_its_session(order: Order, event: c.Event) -> None:
    assert decode_order(encode_order(order)) == ("s1", event)


def test_every_kind_of_order_has_a_tag_of_its_own() -> None:
    tags = [msgspec.msgpack.decode(encode_order(order))[0] for order, _ in ORDERS]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize("reason", ["", "Has Spaces", "x" * 65, "1st", "a\nb", "a\n", None, 7])
def test_a_reason_is_a_word(reason: object) -> None:
    """A session's listener is told it, so nothing else gets through."""
    with pytest.raises(Unreadable):
        decode_order(msgspec.msgpack.encode([1, "s1", 3, reason]))
