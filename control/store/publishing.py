"""What a stage worker does in a partition: publish outputs, forward them, and acknowledge.

Responsible for the arguments of `lua/publish.lua` and `lua/acknowledge.lua`. Leaves the check against the fence to the
scripts (I1), when to call them to the stage worker. Talks to Redis through the link it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from control.store.scripts import script
from control.wire.stage import Ack, encode

if TYPE_CHECKING:
    from control.core.fence import Fence
    from control.store.keys import PartitionKeys
    from control.store.link import Link


class Published(IntEnum):
    """What became of an output; the script has the same numbers."""

    DELIVERED = 0
    DUPLICATE = 1
    DROPPED = 2  # an older turn or response of a live epoch: the request runs on
    STOP = 3  # the request, its session or this worker's life is over: stop it at once


class Outgoing(Struct, frozen=True):
    """One output on its way. `number` counts from 0 by request id; `next_worker` set: input for that worker instead."""

    session_id: str
    request_id: str
    fence: Fence
    number: int
    body: bytes
    next_worker: str | None = None
    payload: bytes = b""


async def publish(
    link: Link, keys: PartitionKeys, worker_id: str, outputs: Sequence[Outgoing], half_events_bytes: int
) -> list[Published]:
    """Deliver outputs of one partition in one step, in order; what became of each."""
    positions: dict[str, int] = {}
    streams: list[str] = []
    argv: list[Any] = [worker_id, half_events_bytes]
    for output in outputs:
        forwarded = output.next_worker is not None
        key = keys.submissions(output.next_worker or "") if forwarded else keys.events(output.session_id)
        position = positions.get(key)
        if position is None:
            streams.append(key)
            position = positions[key] = 5 + len(streams)
        fence = output.fence
        argv += (
            output.session_id,
            position,
            "submissions" if forwarded else "events",
            output.request_id,
            fence.incarnation,
            fence.epoch,
            fence.turn_id,
            fence.response_seq,
            output.number,
            output.body,
            output.payload,
        )
    fixed = (keys.fences, keys.marks, keys.heard, keys.outputs, keys.fenced)
    answer = await link.run_all([(script("publish"), [*fixed, *streams], argv)])
    return [Published(code) for code in answer[0]]


async def acknowledge(
    link: Link, keys: PartitionKeys, worker_id: str, acks: Sequence[Ack], queue: str, entry_ids: Sequence[str]
) -> bool:
    """Tell the owner, and drop the queue entries that this is about. False: this life of the worker is over."""
    argv: list[Any] = [worker_id, len(acks), *(encode(ack) for ack in acks), *entry_ids]
    answer = await link.run_all([(script("acknowledge"), [keys.acks, keys.fenced, queue], argv)])
    return answer[0] == 1
