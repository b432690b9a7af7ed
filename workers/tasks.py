"""Tasks that end for certain, on every Python that is supported.

Responsible for ending and for joining tasks that talk to Redis. Before Python 3.12 a cancellation that meets
`asyncio.wait_for` just as its work is done is lost, and redis-py sends every command through one. So whoever cancels
once may wait for ever: a task is cancelled until it has ended, by whoever ends it, however deep it is. That rules out
`asyncio.TaskGroup` here, which cancels its tasks once and passes over all later cancellations of its own.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

CANCEL_AGAIN_S = 0.05


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks until they have ended; what they raise is theirs. Cancelled meanwhile, it raises that at the end."""
    cancelled: asyncio.CancelledError | None = None
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
        except asyncio.CancelledError as error:
            cancelled = error
    for task in tasks:
        if not task.cancelled():
            task.exception()
    if cancelled is not None:
        raise cancelled


async def run_together(*works: Coroutine[Any, Any, None]) -> None:
    """Do all of them at once until the last has ended. Raises what the first of them raises; then all are ended."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await end_tasks(*tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()
