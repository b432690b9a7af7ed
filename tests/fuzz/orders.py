"""Spoilt stage orders: submissions, aborts and payloads through the decoders that a stage worker has.

Responsible for the decoders alone; what a stage worker does with an order is not told here. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from control.core.fence import Fence
from control.wire.commands import Unreadable
from control.wire.stage import AbortOrder, SubmissionOrder, decode_abort, decode_payload, decode_submission, encode
from tests.fuzz.grammar import packed

if TYPE_CHECKING:
    from tests.fuzz.damage import Damage
    from tests.fuzz.findings import Findings

FENCE = Fence(1, 2, 3, 4)


def throw_orders(findings: Findings, damage: Damage, count: int) -> None:
    """`count` orders, a third of each kind; anything but a value or `Unreadable` is a finding."""
    random, grammar = damage.random, damage.grammar
    for _ in range(count):
        session_id, number = random.choice(grammar.ids), random.randrange(1000)
        match random.randrange(3):
            case 0:
                config = packed(({}, {"a": grammar.value(2)}, None))
                route = ("ear-1", "mouth-1")
                order: Any = SubmissionOrder(
                    session_id, 0, FENCE, number, 1, 1, "append_tokens", False, True, 0, config, route, True
                )
                data, read = encode(order), decode_submission
            case 1:
                data, read = encode(AbortOrder(session_id, 1, 0, number, 1, (0, 2))), decode_abort
            case _:
                data, read = packed(grammar.value(4)), _decode_payload
        if random.random() < 0.9:
            data = damage.bytes_of(data)
        try:
            read(data)
            findings.seen["orders"] += 1
        except Unreadable as reason:
            findings.seen["orders refused"] += 1
            if not str(reason):
                findings.note(f"{read.__name__} gives no reason for {data!r}")
        except BaseException as error:  # noqa: BLE001  whatever it is, it is a finding
            findings.note(f"{read.__name__} raised {error!r} for {data!r}")


def _decode_payload(data: bytes) -> Any:
    return decode_payload(data, packed=True)
