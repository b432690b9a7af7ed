"""Outputs on their way to listeners and to the next stage.

Responsible for the buffer and its bounds, and for what follows from the publish script's word on each output. Leaves
making outputs ready to `stage_forward.py`, sending to `stage_sending.py`, stopping and failing requests to the life.
Keeps part of I1: what the script calls stopped is stopped, and a silenced request's outputs are not sent any more.
An output that was sent twice has the same number, and the script takes it once.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct

from control.store.publishing import Published, publish_all
from workers.stage_forward import Parcel
from workers.stage_lanes import Lane
from workers.stage_sending import Sender, Senders

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from redis.exceptions import RedisError

    from control.store.keys import PartitionKeys
    from control.store.link import Link
    from control.store.publishing import Outgoing
    from workers.stage_sending import Links
    from workers.stage_setup import StageSetup
    from workers.stage_stats import StageStats

# In one call: a call holds up the server.
_BATCH_OUTPUTS = 64
_BATCH_BYTES = 1024 * 1024
# What an output costs here beside its bytes.
_OUTPUT_BYTES = 512


class _Buffered(Struct, frozen=True):
    lane: Lane
    parcel: Parcel
    size_bytes: int


class Outbox:
    """The outputs of one life. `on_stop`: the script wants the request stopped; `on_broken`: it can't go on."""

    def __init__(
        self,
        links: Links,
        worker_id: str,
        keys: Sequence[PartitionKeys],
        setup: StageSetup,
        stats: StageStats,
        *,
        on_stop: Callable[[Lane], None],
        on_broken: Callable[[Lane, str], None],
        on_trouble: Callable[[Exception], None],
    ) -> None:
        self._worker_id = worker_id
        self._keys = keys
        self._setup = setup
        self._stats = stats
        self._on_stop = on_stop
        self._on_broken = on_broken
        self._total_bytes = 0
        self._senders: Senders[int, _Buffered, list[Published]] = Senders(
            {
                numbers: Sender(
                    link,
                    partial(self._send, link),
                    self._note,
                    weigh=lambda each: max(1 / _BATCH_OUTPUTS, each.size_bytes / _BATCH_BYTES),
                    linger_s=setup.linger_s,
                    is_wanted=lambda each: not each.lane.silent,
                    on_trouble=on_trouble,
                )
                for numbers, link in links.items()
            }
        )
        self.loops = self._senders.loops

    @property
    def is_empty(self) -> bool:
        """Whether the script has judged everything."""
        return self._senders.is_empty

    @property
    def total_bytes(self) -> int:
        """What is buffered."""
        return self._total_bytes

    def put(self, lane: Lane, parcel: Parcel) -> bool:
        """Buffer an output. False: the buffer is full, and the output is not in it."""
        size_bytes = _OUTPUT_BYTES + len(parcel.outgoing.body) + len(parcel.outgoing.payload)
        # An empty buffer takes an output of any size; else one that is larger than the bound could never be sent.
        if lane.buffered_bytes and (
            lane.buffered_bytes + size_bytes > self._setup.request_buffer_bytes
            or self._total_bytes + size_bytes > self._setup.total_buffer_bytes
        ):
            return False
        lane.buffered_bytes += size_bytes
        self._total_bytes += size_bytes
        self._senders.at(lane.partition).put(lane.partition, _Buffered(lane, parcel, size_bytes))
        return True

    def silence(self, lane: Lane) -> None:
        """Nothing of this request is sent any more."""
        if not lane.silent:
            lane.silent = True
            if lane.buffered_bytes:
                self._senders.at(lane.partition).drop(lane.partition, lambda each: each.lane is lane)
            self._total_bytes -= lane.buffered_bytes
            lane.buffered_bytes = 0

    async def _send(
        self, link: Link, batches: Sequence[tuple[int, Sequence[_Buffered]]]
    ) -> Sequence[list[Published] | RedisError]:
        calls: list[tuple[PartitionKeys, list[Outgoing]]] = [
            (self._keys[partition], [each.parcel.outgoing for each in items]) for partition, items in batches
        ]
        return await publish_all(link, self._worker_id, self._setup.half_events_bytes, calls)

    def _note(self, partition: int, items: Sequence[_Buffered], codes: list[Published]) -> None:
        del partition
        stats = self._stats
        for each, code in zip(items, codes, strict=True):
            lane, parcel = each.lane, each.parcel
            if not lane.silent:
                lane.buffered_bytes -= each.size_bytes
                self._total_bytes -= each.size_bytes
            match code:
                case Published.DELIVERED | Published.DUPLICATE:
                    lane.sent_generation = max(lane.sent_generation, parcel.generation)
                    if code is Published.DUPLICATE:
                        stats.outputs_duplicate += 1
                    elif parcel.outgoing.next_worker is None:
                        stats.outputs_delivered += 1
                    else:
                        stats.outputs_forwarded += 1
                case Published.DROPPED:
                    stats.outputs_dropped += 1
                case Published.STOP:
                    stats.outputs_stopped += 1
                    self._on_stop(lane)
                case Published.UNDELIVERABLE:
                    self._on_broken(lane, "an output can't be delivered: its stream's key holds something else")
