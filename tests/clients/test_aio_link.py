"""What the asynchronous shell does about cancellations that get lost below it."""

from __future__ import annotations

import asyncio

import pytest

from bargein_client import aio_link


async def test_a_cancellation_that_was_lost_below_is_raised_all_the_same() -> None:
    reached, answered = asyncio.Event(), asyncio.Event()

    async def loses_it() -> str:
        reached.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            answered.set()
        return "answer"

    task = asyncio.create_task(aio_link._cancellable(loses_it()))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert answered.is_set()


async def test_an_answer_passes_if_nothing_was_cancelled() -> None:
    async def answers() -> str:
        return "answer"

    assert await aio_link._cancellable(answers()) == "answer"
