"""A thread for a call that may take long, such as a policy's tokenizer.

Responsible for waiting for it on the event loop. Leaves what is called to the stage worker. One thread a call: a call
that hangs holds up no other (I11), and being a daemon not the process' end (S45).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    """What `call` returns or raises. Cancelled: the thread goes on, and nobody hears of it."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def conclude(settle: Callable[[], None]) -> None:
        if not answer.done():
            settle()

    def work() -> None:
        try:
            result = call()
        except StopIteration as error:  # a future refuses to carry it
            failure: BaseException = RuntimeError(f"StopIteration: {error}")
        except BaseException as error:  # noqa: BLE001  it is raised again, where it is waited for
            failure = error
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
                loop.call_soon_threadsafe(conclude, lambda: answer.set_result(result))
            return
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(conclude, lambda: answer.set_exception(failure))

    threading.Thread(target=work, name="plan", daemon=True).start()
    return await answer
