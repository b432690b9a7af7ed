"""Reading the queues of one life of a stage worker, many partitions at once.

Responsible for the blocking read over many streams, for where each was read to, and for knowing an entry that is in
hand already. Leaves the entries' meaning to the stage worker, and deleting them to `lua/acknowledge.lua`. Talks to
Redis. Says no with redis-py's exceptions; after one, the next read begins at the streams' beginning (S51).

Reading changes nothing, and an entry stays until it is acknowledged. So a read from the beginning finds entries that
are in hand: those are recognised. The streams of one read must be in one slot on Redis Cluster, so there is a reader
for each group of partitions (`Access.groups`); `Queues` is all of them together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct

from control.store.reading import ReadSize

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from control.store.link import Link

_BEGINNING = "0-0"

# The most entries of each stream in one answer.
COUNT = 32


class QueueEntry(Struct, frozen=True):
    """An entry. `after`: an abort's field `a`, the last submission that was unread before it."""

    partition: int
    entry_id: str
    body: bytes
    payload: bytes
    after: str


class Reading(Struct, frozen=True):
    """What one read brought: new entries of the queues, and what stands in the queues that are only looked at."""

    entries: list[QueueEntry]
    seen: list[QueueEntry]


class QueueReader:
    """Reads a queue of each partition; with `glance`, looks at another queue of each in the same step.

    What stands in both queues at one moment is then in one answer, or was in an earlier one. Entries of `glance` are
    not kept in hand: they belong to another reader.
    """

    def __init__(
        self, link: Link, queues: Mapping[int, str], *, block_ms: int, glance: Mapping[int, str] | None = None
    ) -> None:
        """The queues' names by partition. The link's time-out must be above `block_ms` (S57)."""
        glance = glance or {}
        self._link = link
        self._names = [*glance.values(), *queues.values()]
        self._block_ms = block_ms
        self._last: list[str] = [_BEGINNING] * len(self._names)
        self._index = {name.encode(): position for position, name in enumerate(self._names)}
        # What is only looked at comes first, so that an abort is known before its submission.
        self._glances = len(glance)
        self._partition_at = [*glance, *queues]
        self._place = {partition: len(glance) + index for index, partition in enumerate(queues)}
        self._in_hand: dict[int, set[str]] = {partition: set() for partition in queues}
        self._finished: list[tuple[int, str]] = []
        self._full: set[int] = set()
        self._size = ReadSize(COUNT)
        self._begun = 0
        self._done = 0

    @property
    def partitions(self) -> Iterable[int]:
        """Those whose queues it reads."""
        return self._place

    @property
    def moment(self) -> int:
        """Now, for `has_read_since`."""
        return self._begun

    @property
    def in_hand(self) -> int:
        """How many entries were handed out and not finished."""
        return sum(len(ids) for ids in self._in_hand.values()) - len(self._finished)

    def has_read_to(self, partition: int, entry_id: str) -> bool:
        """Whether the partition's queue has been read up to this entry."""
        return _order(self._last[self._place[partition]]) >= _order(entry_id)

    def has_read_since(self, partition: int, moment: int) -> bool:
        """Whether everything that stood in the partition's queue at `moment` has been read, or deleted."""
        return self._done > moment and partition not in self._full

    def finish(self, partition: int, entry_ids: Iterable[str]) -> None:
        """These entries are deleted, and the server has said so."""
        self._finished += ((partition, entry_id) for entry_id in entry_ids)

    async def read(self) -> Reading:
        """Wait for entries, `block_ms` at most. Raises what the link raises, or `ResponseError`."""
        # An answer to what is asked from here on can't hold what was deleted before. Not sooner: the answer to an
        # earlier question might still be on its way.
        for partition, entry_id in self._finished:
            self._in_hand[partition].discard(entry_id)
        self._finished.clear()
        self._begun += 1
        try:
            found = await self._fetch()
        except BaseException:
            # After an error answer, too: a server that is a replica by now is asked for under its address again.
            self._last = [_BEGINNING] * len(self._names)
            await self._link.close()
            raise
        reading = Reading([], [])
        self._full.clear()
        for name, entries in found:
            self._take(self._index[name], entries, reading)
        self._size.note(entries for _, entries in found)
        self._done = self._begun
        return reading

    def _take(self, position: int, entries: list[Any], reading: Reading) -> None:
        self._last[position] = entries[-1][0].decode()
        partition = self._partition_at[position]
        if position < self._glances:
            reading.seen.extend(_entry(partition, entry_id, fields) for entry_id, fields in entries)
            return
        if len(entries) >= self._size.count:
            self._full.add(partition)
        in_hand = self._in_hand[partition]
        for entry_id, fields in entries:
            entry = _entry(partition, entry_id, fields)
            if entry.entry_id not in in_hand:
                in_hand.add(entry.entry_id)
                reading.entries.append(entry)

    async def _fetch(self) -> list[Any]:
        answer = await self._link.call(
            "XREAD", "COUNT", self._size.count, "BLOCK", self._block_ms, "STREAMS", *self._names, *self._last
        )
        return answer or []


class Queues:
    """The queues of every partition, whichever reader has them."""

    def __init__(self, readers: Sequence[QueueReader]) -> None:
        """Each partition belongs to one of the readers."""
        self.readers = readers
        self._reader_of = {partition: reader for reader in readers for partition in reader.partitions}

    def moment(self, partition: int) -> int:
        """See `QueueReader.moment`."""
        return self._reader_of[partition].moment

    def has_read_to(self, partition: int, entry_id: str) -> bool:
        """See `QueueReader.has_read_to`."""
        return self._reader_of[partition].has_read_to(partition, entry_id)

    def has_read_since(self, partition: int, moment: int) -> bool:
        """See `QueueReader.has_read_since`. `moment`: of the same partition."""
        return self._reader_of[partition].has_read_since(partition, moment)

    def finish(self, partition: int, entry_ids: Iterable[str]) -> None:
        """See `QueueReader.finish`."""
        self._reader_of[partition].finish(partition, entry_ids)


def _entry(partition: int, entry_id: bytes, fields: list[bytes] | None) -> QueueEntry:
    pairs = dict(zip(fields[::2], fields[1::2], strict=True)) if fields else {}
    return QueueEntry(
        partition,
        entry_id.decode(),
        pairs.get(b"b", b""),
        pairs.get(b"p", b""),
        pairs.get(b"a", _BEGINNING.encode()).decode(errors="replace"),
    )


def _order(entry_id: str) -> tuple[int, int]:
    """An entry id as it sorts; something that is none sorts first."""
    milliseconds, _, sequence = entry_id.partition("-")
    try:
        return int(milliseconds), int(sequence or 0)
    except ValueError:
        return 0, 0
