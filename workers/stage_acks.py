"""Acks on their way to the partitions' owners, together with the queue entries that they are about.

Responsible for both going in one step (S20). Leaves what is said to intake and cleanup, sending and trying again to
`stage_sending.py`: an ack whose answer was lost is sent again, and owners ignore one that they know. An answer that
this life is over ends the life.
"""

from __future__ import annotations

from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct

from control.store.publishing import Acknowledgement, acknowledge_all
from workers.stage_sending import Sender, Senders

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from redis.exceptions import RedisError

    from control.store.keys import PartitionKeys
    from control.store.link import Link
    from control.wire.stage import Ack
    from workers.stage_sending import Links

# Words in one call: a call holds up the server.
_BATCH = 256


class Queue(Enum):
    """The two queues of a life in each partition."""

    SUBMISSIONS = "submissions"
    ABORTS = "aborts"


class _Word(Struct, frozen=True):
    acks: tuple[Ack, ...]
    entry_ids: tuple[str, ...]


_Place = tuple[int, Queue]


class AckOutbox:
    """Everything that waits to be acknowledged. `on_done` hears which entries are gone, `on_over` that the life is."""

    def __init__(
        self,
        links: Links,
        worker_id: str,
        keys: Sequence[PartitionKeys],
        *,
        on_done: Callable[[Queue, int, Sequence[str]], None],
        on_over: Callable[[], None],
        on_trouble: Callable[[Exception], None],
    ) -> None:
        self._worker_id = worker_id
        self._keys = keys
        self._on_done = on_done
        self._on_over = on_over
        self._senders: Senders[_Place, _Word, bool] = Senders(
            {
                numbers: Sender(
                    link, partial(self._send, link), self._note, weigh=lambda _: 1 / _BATCH, on_trouble=on_trouble
                )
                for numbers, link in links.items()
            }
        )
        self.loops = self._senders.loops

    @property
    def is_empty(self) -> bool:
        """Whether the server has confirmed everything."""
        return self._senders.is_empty

    def put(self, partition: int, queue: Queue, acks: Sequence[Ack] = (), entry_ids: Sequence[str] = ()) -> None:
        """Say `acks` to the partition's owner and delete the entries, in one step."""
        self._senders.at(partition).put((partition, queue), _Word(tuple(acks), tuple(entry_ids)))

    async def _send(self, link: Link, batches: Sequence[tuple[_Place, Sequence[_Word]]]) -> Sequence[bool | RedisError]:
        calls: list[Acknowledgement] = []
        for (partition, queue), words in batches:
            keys = self._keys[partition]
            name = keys.aborts(self._worker_id) if queue is Queue.ABORTS else keys.submissions(self._worker_id)
            acks = [ack for word in words for ack in word.acks]
            calls.append(Acknowledgement(keys, name, acks, _entries(words)))
        return await acknowledge_all(link, self._worker_id, calls)

    def _note(self, place: _Place, words: Sequence[_Word], answer: bool) -> None:
        partition, queue = place
        if answer:
            self._on_done(queue, partition, _entries(words))
        else:
            self._on_over()


def _entries(words: Sequence[_Word]) -> list[str]:
    return [entry_id for word in words for entry_id in word.entry_ids]
