"""How a long-lived process ends: the first SIGTERM or SIGINT asks it to, a second one doesn't ask (S45).

Responsible for the signals and for the time that leaving may take. Leaves what leaving means (handing partitions over,
finishing requests) to the workers. The loop must run in the main thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

from workers.cli.endings import Status
from workers.tasks import end_tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

log = logging.getLogger("bargein.process")

SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def run_until_told(
    work: Coroutine[Any, Any, None], stop: Callable[[], object], grace_s: float, slack_s: float = 0.0
) -> None:
    """Do `work` until it ends or a signal comes; then call `stop` and give it `grace_s` and the `slack_s` to end.

    Raises what `work` raises. Where it had to be cut short the process ends here, with status 1.
    """
    loop = asyncio.get_running_loop()
    told = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if told.is_set():
            leave_at_once(128 + number)
        log.info("%s: leaving within %g s; once more leaves at once", number.name, grace_s)
        told.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    task = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(told.wait())
    try:
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        if told.is_set():
            stop()
            await asyncio.wait([task], timeout=grace_s + slack_s)
            if not task.done():
                # What hasn't ended by now may not heed a cancellation either.
                log.error("not finished within %g s; leaving all the same", grace_s + slack_s)
                leave_at_once(Status.REFUSED)
        task.result()
    finally:
        await end_tasks(task, waiting)
        for number in SIGNALS:
            loop.remove_signal_handler(number)


async def run_until_interrupted(work: Coroutine[Any, Any, None]) -> None:
    """Do `work` until it ends, or until a SIGINT, which is no error. Raises what `work` raises."""
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    loop.add_signal_handler(signal.SIGINT, told.set)
    task = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(told.wait())
    try:
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        await end_tasks(task, waiting)
        loop.remove_signal_handler(signal.SIGINT)


def leave_at_once(status: int) -> NoReturn:
    """End this process without another step."""
    sys.stderr.flush()
    os._exit(status)
