"""All the sessions of a run: a producer each, and one listener for all of them.

Responsible for listening and for the tokens, which no two appends share. Leaves sending to `producer.py`, the record to
`accounts.py`. They speak to the server over the same network, without redis-py: they are not what is tested.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import msgspec

from control.store.keys import PartitionKeys, partition_of
from tests.sim.accounts import Account, Seen
from tests.sim.client import Client
from tests.sim.producer import Producer
from tests.sim.values import Failure

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.sim.world import World

KINDS = {b"reply": "reply", b"output": "output", b"lifecycle": "lifecycle"}


class Traffic:
    """All sessions of a run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.accounts = {name: Account(name) for name in world.plan.sessions}
        self.producers = [Producer(self, name, items) for name, items in world.plan.sessions.items()]
        self.tokens = itertools.count(1)

    def start(self) -> None:
        self.world.start(self._listen())
        for producer in self.producers:
            self.world.start(producer.live())

    @property
    def is_done(self) -> bool:
        return all(producer.done and not producer.open_ends for producer in self.producers)

    def stream(self, session_id: str) -> bytes:
        return self._keys(session_id).events(session_id).encode()

    def commands(self, session_id: str) -> bytes:
        return self._keys(session_id).commands.encode()

    def _keys(self, session_id: str) -> PartitionKeys:
        return PartitionKeys(partition_of(session_id, self.world.plan.pipeline.partitions))

    async def _listen(self) -> None:
        client = Client(self.world, "listener")
        names = {self.stream(session_id): account for session_id, account in self.accounts.items()}
        after = dict.fromkeys(names, b"0-0")
        while names:
            try:
                answer = await client.call(
                    b"XREAD", b"COUNT", b"200", b"BLOCK", b"2000", b"STREAMS", *after, *after.values()
                )
            except (ConnectionError, Failure):
                await asyncio.sleep(0.05)
                if self.world.lost_writes:
                    # Ids may be given again: readers start again from the beginning, and know what they have read.
                    self.world.note_reader_reset(after)
                continue
            for name, entries in answer or ():
                after[name] = entries[-1][0]
                self._note(names[name], entries)

    def _note(self, account: Account, entries: Iterable[Any]) -> None:
        for entry_id, fields in entries:
            values = dict(zip(fields[::2], fields[1::2], strict=True))
            body = msgspec.msgpack.decode(values[b"b"])
            at_ms = int(entry_id.partition(b"-")[0])
            account.note(Seen(KINDS[values[b"t"]], int(values[b"n"]), self.world.loop.now_s, at_ms, body))
