"""The model thread: where everything runs that may take long, so that the event loop never waits for it.

Responsible for running calls one after the other and for knowing how long the present one has taken. Leaves
to the engine what is called. A thread of its own and a daemon, not an executor's: a forward that hangs must
not keep the process from ending, and a device's context belongs to the thread that made it.
"""

import asyncio
import atexit
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

_EXIT_TIMEOUT_S = 5.0


class _Call:
    def __init__(self, work: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self.work = work
        self.loop = loop
        self.future: asyncio.Future[Any] = loop.create_future()

    def answer(self, value: Any, error: BaseException | None) -> None:
        try:
            self.loop.call_soon_threadsafe(self._resolve, value, error)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more

    def _resolve(self, value: Any, error: BaseException | None) -> None:
        if self.future.done():
            return  # the caller was cancelled meanwhile
        if error is None:
            self.future.set_result(value)
        else:
            self.future.set_exception(error)


class ModelThread:
    """Runs calls in order in one thread, which starts with the first of them."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._busy_since_s: float | None = None
        self._stopping = False

    async def call(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises. Cancelling the caller does not interrupt `work`."""
        if self._thread.ident is None:
            self._thread.start()
            atexit.register(self._leave)
        call = _Call(work, asyncio.get_running_loop())
        self._calls.put(call)
        return await call.future

    def busy_s(self) -> float:
        """How long the present call has been running, 0 if none is."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    async def stop(self, timeout_s: float) -> bool:
        """End the thread after its calls. False if one runs longer than `timeout_s`; it is left behind."""
        if self._thread.ident is None or self._stopping:
            return not self._thread.is_alive()
        self._stopping = True
        call = _Call(lambda: None, asyncio.get_running_loop())
        self._calls.put(call)
        self._calls.put(None)
        done, _ = await asyncio.wait({call.future}, timeout=timeout_s)
        if done:
            atexit.unregister(self._leave)
        return bool(done)

    def _leave(self) -> None:
        # A thread that the interpreter takes down inside C++ takes the process with it (SIGABRT).
        self._calls.put(None)
        self._thread.join(_EXIT_TIMEOUT_S)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._busy_since_s = time.monotonic()
            value: Any = None
            error: BaseException | None = None
            try:
                value = call.work()
            except BaseException as raised:  # noqa: BLE001  whatever it is, the caller has to see it
                error = raised
            # Idle again before anyone can know of the result.
            self._busy_since_s = None
            call.answer(value, error)
            del call, value, error  # an idle thread holds nothing of its last call
