"""What a stage worker does in a partition: publish outputs, forward them, and acknowledge.

Responsible for the arguments of `lua/publish.lua` and `lua/acknowledge.lua`, many partitions in one write. Leaves the
check against the fence to the scripts (I1), when to call them to the stage worker. Talks to Redis through the link it
is given. An error answer for one partition stands in its place; the others have theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from redis.exceptions import RedisError

from control.store.scripts import Script, script
from control.wire.stage import Ack, encode

if TYPE_CHECKING:
    from control.core.fence import Fence
    from control.store.keys import PartitionKeys
    from control.store.link import Link

# The scripts spread these out on Lua's stack, which holds some thousands.
MAX_OUTPUTS = 1000
MAX_ENTRIES = 1000


class Published(IntEnum):
    """What became of an output; the script has the same numbers."""

    DELIVERED = 0
    DUPLICATE = 1
    DROPPED = 2  # an older turn or response of a live epoch: the request runs on
    STOP = 3  # the request, its session or this worker's life is over: stop it at once
    UNDELIVERABLE = 4  # the key of its stream holds something else (S78)


class Outgoing(Struct, frozen=True):
    """One output on its way. `number` counts from 0 by request id; `next_worker` set: input for that worker instead."""

    session_id: str
    request_id: str
    fence: Fence
    number: int
    body: bytes
    next_worker: str | None = None
    payload: bytes = b""


class Acknowledgement(Struct, frozen=True):
    """Acks for a partition's owner, and the entries of one `queue` there that are done with."""

    keys: PartitionKeys
    queue: str
    acks: Sequence[Ack] = ()
    entry_ids: Sequence[str] = ()


async def publish_all(
    link: Link,
    worker_id: str,
    half_events_bytes: int,
    batches: Sequence[tuple[PartitionKeys, Sequence[Outgoing]]],
) -> list[list[Published] | RedisError]:
    """Deliver outputs, a batch a partition, each in one step and in order; what became of each.

    1 to `MAX_OUTPUTS` outputs a batch. An error answer means that nothing of its batch was done.
    """
    calls = [_publish_call(keys, worker_id, outputs, half_events_bytes) for keys, outputs in batches]
    answers = await link.try_run_all(calls)
    return [answer if isinstance(answer, RedisError) else [Published(code) for code in answer] for answer in answers]


async def acknowledge_all(
    link: Link, worker_id: str, acknowledgements: Sequence[Acknowledgement]
) -> list[bool | RedisError]:
    """Tell the owners, and drop the queue entries that this is about. False: this life of the worker is over."""
    calls: list[_Call] = []
    for each in acknowledgements:
        if len(each.entry_ids) > MAX_ENTRIES:
            raise ValueError(f"{len(each.entry_ids)} entries in one acknowledgement; at most {MAX_ENTRIES}")
        argv: list[Any] = [worker_id, len(each.acks), *(encode(ack) for ack in each.acks), *each.entry_ids]
        calls.append((script("acknowledge"), [each.keys.acks, each.keys.fenced, each.queue], argv))
    answers = await link.try_run_all(calls)
    return [answer if isinstance(answer, RedisError) else answer == 1 for answer in answers]


async def publish(
    link: Link, keys: PartitionKeys, worker_id: str, outputs: Sequence[Outgoing], half_events_bytes: int
) -> list[Published]:
    """As `publish_all` for one partition. Raises the error answer."""
    answer = (await publish_all(link, worker_id, half_events_bytes, [(keys, outputs)]))[0]
    if isinstance(answer, RedisError):
        raise answer
    return answer


async def acknowledge(
    link: Link, keys: PartitionKeys, worker_id: str, acks: Sequence[Ack], queue: str, entry_ids: Sequence[str]
) -> bool:
    """As `acknowledge_all` for one partition. Raises the error answer."""
    answer = (await acknowledge_all(link, worker_id, [Acknowledgement(keys, queue, acks, entry_ids)]))[0]
    if isinstance(answer, RedisError):
        raise answer
    return answer


_Call = tuple[Script, list[str], list[Any]]


def _publish_call(keys: PartitionKeys, worker_id: str, outputs: Sequence[Outgoing], half_events_bytes: int) -> _Call:
    if not 1 <= len(outputs) <= MAX_OUTPUTS:
        raise ValueError(f"{len(outputs)} outputs in one batch; 1 to {MAX_OUTPUTS} are allowed")
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
    return script("publish"), [*fixed, *streams], argv
