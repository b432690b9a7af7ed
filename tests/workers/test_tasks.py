"""Ending tasks that lose cancellations, as redis-py's do before Python 3.12."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from workers.tasks import end_tasks, run_together

PATIENCE_S = 20.0


class Deaf:
    """Work that loses its first `losses` cancellations. `ended`: it has."""

    def __init__(self, losses: int) -> None:
        self.losses = losses
        self.ended = False

    async def work(self) -> None:
        try:
            while True:
                try:
                    await asyncio.sleep(3_600)
                except asyncio.CancelledError:
                    if not self.losses:
                        raise
                    self.losses -= 1
        finally:
            self.ended = True


async def until_begun() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_task_that_loses_cancellations_is_ended_all_the_same() -> None:
    deaf = Deaf(3)
    task = asyncio.create_task(deaf.work())
    await until_begun()
    await asyncio.wait_for(end_tasks(task), PATIENCE_S)
    assert task.cancelled()
    assert deaf.losses == 0


async def test_whoever_is_cancelled_while_ending_others_ends_them_first() -> None:
    deaf = Deaf(3)
    task = asyncio.create_task(deaf.work())
    await until_begun()
    ending = asyncio.create_task(end_tasks(task))
    await until_begun()
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(ending), PATIENCE_S)
    assert deaf.ended


@pytest.mark.parametrize("depth", [1, 2])
async def test_works_that_run_together_are_cancelled_again_through_whoever_joined_them(depth: int) -> None:
    """A TaskGroup hangs here for ever: it cancels once."""
    some = [Deaf(0), Deaf(1), Deaf(4)]

    def join(works: list[Any]) -> Any:
        return run_together(*works)

    work = join([deaf.work() for deaf in some])
    for _ in range(depth - 1):
        work = join([work])
    task = asyncio.create_task(work)
    await until_begun()
    await asyncio.wait_for(end_tasks(task), PATIENCE_S)
    assert task.cancelled()
    assert all(deaf.ended for deaf in some)


async def test_the_error_of_one_ends_the_others_and_is_raised() -> None:
    deaf = Deaf(2)

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("it broke")

    with pytest.raises(ValueError, match="it broke"):
        await asyncio.wait_for(run_together(deaf.work(), fail()), PATIENCE_S)
    assert deaf.ended


async def test_works_that_end_are_waited_for() -> None:
    done: list[int] = []

    async def add(number: int) -> None:
        await asyncio.sleep(0.001 * number)
        done.append(number)

    await run_together(add(2), add(1))
    assert done == [1, 2]
