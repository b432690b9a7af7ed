"""The sender: batches, pacing, and trying again without losing, doubling or reordering anything."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ReadOnlyError

from control.store.link import Link, make_pool
from workers.stage_sending import Sender

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence


class Desk:
    """A sender whose server answers as it is told: `answers` holds an exception to raise, or one answer a place."""

    def __init__(self, **options: Any) -> None:
        self.pool = make_pool("redis://127.0.0.1:1/0")  # never connected: what is sent ends here
        self.sent: list[dict[str, list[Any]]] = []
        self.noted: list[tuple[str, list[Any]]] = []
        self.troubles: list[Exception] = []
        self.answers: deque[Any] = deque()
        self.gate = asyncio.Event()
        self.gate.set()
        self.news = asyncio.Event()
        self.sender: Sender[str, Any, str] = Sender(
            Link(self.pool),
            self._send,
            self._note,
            weigh=lambda _: 0.25,
            on_trouble=self.troubles.append,
            **options,
        )

    async def _send(self, batches: Sequence[tuple[str, Sequence[Any]]]) -> list[Any]:
        self.sent.append({place: list(items) for place, items in batches})
        self.news.set()
        await self.gate.wait()
        told = self.answers.popleft() if self.answers else {}
        if isinstance(told, Exception):
            raise told
        return [told.get(place, "fine") for place, _ in batches]

    def _note(self, place: str, items: Sequence[Any], answer: str) -> None:
        assert answer == "fine"
        self.noted.append((place, list(items)))
        self.news.set()

    def put(self, place: str, *items: Any) -> None:
        for item in items:
            self.sender.put(place, item)

    async def until_sent(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.sent) < count:
                self.news.clear()
                await self.news.wait()

    async def until_empty(self) -> None:
        async with asyncio.timeout(30):
            while not self.sender.is_empty:
                self.news.clear()
                await self.news.wait()


@contextlib.asynccontextmanager
async def running(desk: Desk) -> AsyncGenerator[None]:
    task = asyncio.ensure_future(desk.sender.run())
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await desk.pool.disconnect()


async def test_what_comes_while_a_write_is_on_its_way_goes_together_in_the_next() -> None:
    desk = Desk()
    async with running(desk):
        desk.gate.clear()
        desk.put("a", 1)
        await desk.until_sent(1)
        desk.put("a", 2, 3)
        desk.put("b", 4)
        desk.gate.set()
        await desk.until_empty()
    assert desk.sent == [{"a": [1]}, {"a": [2, 3], "b": [4]}]
    assert desk.noted == [("a", [1]), ("a", [2, 3]), ("b", [4])]


async def test_a_batch_is_bounded_and_keeps_the_order() -> None:
    desk = Desk()
    desk.put("a", *range(10))
    async with running(desk):
        await desk.until_empty()
    assert [each["a"] for each in desk.sent] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


async def test_after_a_lost_connection_the_same_is_sent_again_before_anything_newer() -> None:
    desk = Desk()
    desk.answers += [RedisConnectionError("gone"), TimeoutError("hung"), {}]
    desk.put("a", 1, 2)
    async with running(desk):
        await desk.until_sent(1)
        desk.put("a", 3)
        await desk.until_empty()
    assert desk.sent == [{"a": [1, 2]}, {"a": [1, 2]}, {"a": [1, 2]}, {"a": [3]}]
    assert len(desk.troubles) == 2


async def test_i11_an_error_answer_holds_up_its_own_place_alone() -> None:
    desk = Desk()
    desk.answers += [{"a": OutOfMemoryError("full")}]
    desk.put("a", 1)
    desk.put("b", 2)
    async with running(desk):
        await desk.until_sent(1)
        desk.put("b", 3)
        desk.put("a", 4)
        await desk.until_empty()
    assert desk.noted.index(("b", [3])) < desk.noted.index(("a", [1])) < desk.noted.index(("a", [4]))


async def test_a_server_that_has_become_a_replica_is_left() -> None:
    desk = Desk()
    closed = False

    class Closing(Link):
        async def close(self) -> None:
            nonlocal closed
            closed = True

    desk.sender._link = Closing(desk.pool)
    desk.answers += [{"a": ReadOnlyError("replica")}]
    desk.put("a", 1)
    async with running(desk):
        await desk.until_empty()
    assert closed


async def test_what_is_no_longer_wanted_is_not_sent_again() -> None:
    unwanted: set[int] = set()
    desk = Desk(is_wanted=lambda item: item not in unwanted)
    desk.answers += [{"a": OutOfMemoryError("full")}]
    desk.put("a", 1, 2)
    async with running(desk):
        await desk.until_sent(1)
        unwanted.add(1)
        desk.put("a", 3)
        await desk.until_empty()
    assert desk.sent == [{"a": [1, 2]}, {"a": [2]}, {"a": [3]}]


async def test_what_is_dropped_is_not_kept_in_memory() -> None:
    class Thing:
        pass

    desk = Desk()
    thing, other = Thing(), Thing()
    seen = weakref.ref(thing)
    desk.put("a", thing, other)
    desk.sender.drop("a", lambda item: item is not other)
    del thing
    gc.collect()
    assert seen() is None
    async with running(desk):
        await desk.until_empty()
    assert desk.sent == [{"a": [other]}]


async def test_the_first_after_a_pause_does_not_linger_and_a_full_batch_does_not_either() -> None:
    desk = Desk(linger_s=1000.0)
    async with running(desk):
        desk.put("a", 1)
        await desk.until_empty()
        desk.put("a", 2, 3, 4)
        desk.put("b", 5)
        await desk.until_empty()
    assert desk.sent == [{"a": [1]}, {"a": [2, 3, 4], "b": [5]}]
