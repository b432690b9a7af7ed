"""Sending what waits for a partition: in order, in few writes, until the server has taken it.

Responsible for batches, for pacing and for trying again: after a lost connection everything that was on its way, after
an error answer (memory full, server read-only, S53) that partition's part alone, so that none waits for another. Leaves
what is sent to its users, the acks and the outputs. Talks to Redis through their links: one a group of partitions, so
that on a cluster a node that is away holds up its own partitions alone. Sends anew what may have arrived: their
scripts, or the owners, know it then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from redis.exceptions import ReadOnlyError, RedisError

from control.store.link import LOST, Link
from workers.stage_setup import Backoff

log = logging.getLogger("bargein.stage")

Place = TypeVar("Place", bound="Hashable")
Item = TypeVar("Item")
Answer = TypeVar("Answer")

_RETRY_S = (0.02, 1.0)
_RECONNECT_S = (0.02, 2.0)


Links = Mapping[tuple[int, ...], Link]
"""A connection for each group of partitions (`Access.groups`)."""


class _Line(Generic[Item]):
    """What waits for one place. `in_hand` was sent at least once, or is about to be."""

    __slots__ = ("backoff", "in_hand", "retry_s", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[Item] = deque()
        self.in_hand: list[Item] = []
        self.retry_s = 0.0
        self.backoff = Backoff(*_RETRY_S)


class Sender(Generic[Place, Item, Answer]):
    """`send` gets a batch a place and returns an answer each, `note` hears of each batch that was answered.

    `weigh`: an item's share of `most`, the bound of one batch. `linger_s`: two writes begin at least so far apart, so
    an item waits that long at most for company, and the first after a pause not at all. `is_wanted`: asked before an
    item is sent. `on_trouble` hears of each failed try.
    """

    def __init__(
        self,
        link: Link,
        send: Callable[[Sequence[tuple[Place, Sequence[Item]]]], Awaitable[Sequence[Answer | RedisError]]],
        note: Callable[[Place, Sequence[Item], Answer], None],
        *,
        weigh: Callable[[Item], float],
        most: float = 1.0,
        linger_s: float = 0.0,
        is_wanted: Callable[[Item], bool] = lambda _: True,
        on_trouble: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        self._link = link
        self._send = send
        self._note = note
        self._weigh = weigh
        self._most = most
        self._linger_s = linger_s
        self._is_wanted = is_wanted
        self._on_trouble = on_trouble
        self._lines: dict[Place, _Line[Item]] = {}
        self._weight = 0.0
        self._news = asyncio.Event()
        self._last_s = float("-inf")

    @property
    def is_empty(self) -> bool:
        """Whether the server has answered to everything."""
        return not self._lines

    def put(self, place: Place, item: Item) -> None:
        """One more to send."""
        line = self._lines.get(place)
        if line is None:
            line = self._lines[place] = _Line()
            self._news.set()
        line.waiting.append(item)
        before, self._weight = self._weight, self._weight + self._weigh(item)
        if before < self._most <= self._weight:
            self._news.set()

    def drop(self, place: Place, is_unwanted: Callable[[Item], bool]) -> None:
        """Forget what waits there; what is on its way is not sent again."""
        line = self._lines.get(place)
        if line is not None:
            self._weight -= sum(self._weigh(item) for item in line.waiting if is_unwanted(item))
            line.waiting = deque(item for item in line.waiting if not is_unwanted(item))

    async def run(self) -> None:
        """Send until cancelled."""
        backoff, loop = Backoff(*_RECONNECT_S), asyncio.get_running_loop()
        while True:
            await self._until_due()
            self._last_s = loop.time()
            due = self._pick(self._last_s)
            if not due:
                continue
            try:
                answers = await self._send([(place, line.in_hand) for place, line in due])
            except LOST as error:
                self._on_trouble(error)
                log.warning("no connection (%s); trying again", error)
                await asyncio.sleep(backoff.next_s())
                continue
            backoff.reset()
            await self._conclude(due, answers)

    async def _until_due(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            now_s, wait_s = loop.time(), None
            if self._lines:
                wait_s = min(line.retry_s for line in self._lines.values()) - now_s
                if self._weight < self._most:
                    wait_s = max(wait_s, self._last_s + self._linger_s - now_s)
                if wait_s <= 0:
                    return
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._news.wait()

    def _pick(self, now_s: float) -> list[tuple[Place, _Line[Item]]]:
        due: list[tuple[Place, _Line[Item]]] = []
        for place, line in list(self._lines.items()):
            if line.retry_s > now_s:
                continue
            line.in_hand = [item for item in line.in_hand if self._is_wanted(item)]
            if not line.in_hand:
                self._fill(line)
            if line.in_hand:
                due.append((place, line))
            else:
                del self._lines[place]
        return due

    def _fill(self, line: _Line[Item]) -> None:
        weight = 0.0
        while line.waiting and weight < self._most:
            item = line.waiting.popleft()
            weight += self._weigh(item)
            if self._is_wanted(item):
                line.in_hand.append(item)
        self._weight = max(0.0, self._weight - weight)

    async def _conclude(self, due: list[tuple[Place, _Line[Item]]], answers: Sequence[Answer | RedisError]) -> None:
        now_s, lost_master = asyncio.get_running_loop().time(), False
        for (place, line), answer in zip(due, answers, strict=True):
            if isinstance(answer, RedisError):
                line.retry_s = now_s + line.backoff.next_s()
                lost_master = lost_master or isinstance(answer, ReadOnlyError)
                self._on_trouble(answer)
                log.warning("partition %s: %s; trying again", place, answer)
                continue
            items, line.in_hand = line.in_hand, []
            line.backoff.reset()
            line.retry_s = 0.0
            if not line.waiting:
                del self._lines[place]
            self._note(place, items, answer)
        if lost_master:
            await self._link.close()  # a replica by now: the address may lead to the new master


class Senders(Generic[Place, Item, Answer]):
    """The senders of all groups of partitions."""

    def __init__(self, senders: Mapping[tuple[int, ...], Sender[Place, Item, Answer]]) -> None:
        self._senders = list(senders.values())
        self._sender_of = {number: sender for numbers, sender in senders.items() for number in numbers}

    def at(self, partition: int) -> Sender[Place, Item, Answer]:
        """The partition's sender."""
        return self._sender_of[partition]

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        """What has to run; each until cancelled."""
        return [sender.run() for sender in self._senders]

    @property
    def is_empty(self) -> bool:
        """Whether the server has taken everything."""
        return all(sender.is_empty for sender in self._senders)
