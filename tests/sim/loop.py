"""An event loop without a world: time is a number that jumps to the next timer, connections lead into the simulation.

Responsible for the order in which callbacks run, for simulated processes (each callback belongs to the one that its
context names), and for ending or holding them: a killed process runs nothing more, not even a `finally`; a paused one
finds everything when it goes on that came meanwhile. Leaves the network to `network.py`. Pure but for asyncio itself.

Only what asyncio needs of a loop is here; the workers, redis-py and asyncio's own streams run on it unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections import deque
from contextvars import Context, ContextVar, copy_context
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

STARTS_S = 1000.0
# A process that runs so many callbacks without time passing will never let it pass.
HOT_STEPS = 60_000


class Stuck(Exception):
    """Nothing is left that could ever happen, or something happens without end."""


class Process:
    """A simulated operating system process. `steps` counts its callbacks; at `dies_at` it dies before the next one."""

    def __init__(self, name: str, loop: SimLoop) -> None:
        self.name = name
        self.loop = loop
        self.dead = False
        self.paused = False
        self.steps = 0
        self.dies_at = -1
        self.held: list[asyncio.Handle] = []
        self.held_timers: list[asyncio.Handle] = []
        self.wires: list[Any] = []
        self.on_death: list[Callable[[], None]] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.context = copy_context()
        self.context.run(PROCESS.set, self)

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `work` as this process."""
        return self.loop.create_task(work, context=self.context)

    def kill(self) -> None:
        """As by kill -9: nothing of it runs any more; the kernel closes its connections."""
        if self.dead:
            return
        self.dead = True
        self.held.clear()
        self.held_timers.clear()
        for wire in list(self.wires):
            wire.abandon()
        for hear in self.on_death:
            hear()

    def pause(self) -> None:
        """As by SIGSTOP."""
        self.paused = True

    def go_on(self) -> None:
        """As by SIGCONT: what came meanwhile is there, timers that are due come after it."""
        if self.paused:
            self.paused = False
            self.loop.take_back(self.held, self.held_timers)
            self.held, self.held_timers = [], []


PROCESS: ContextVar[Process | None] = ContextVar("sim_process", default=None)


class Input(asyncio.TimerHandle):
    """What comes in from a connection: an event loop that has slept looks at it before it looks at its timers."""

    __slots__ = ()


class SimFuture(asyncio.Future[Any]):
    """Hashed by its number, not by where it lies in memory: the order of a set of them is the same in every run."""

    def __init__(self, *, loop: SimLoop) -> None:
        super().__init__(loop=loop)
        self._number = loop.next_number()

    def __hash__(self) -> int:
        return self._number


class SimTask(asyncio.Task[Any]):
    """Hashed likewise."""

    def __init__(self, coroutine: Any, *, loop: SimLoop, context: Context | None) -> None:
        self._number = loop.next_number()
        super().__init__(coroutine, loop=loop, context=context)

    def __hash__(self) -> int:
        return self._number


class SimLoop(asyncio.BaseEventLoop):
    """`connect` makes connections; see the header."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = STARTS_S
        self.connect: Callable[[Process, Any, str, int], Any] | None = None
        self.crashes: list[str] = []
        self._queue: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._count = 0
        self._numbers = 0
        self._hot = 0
        self.is_disposing = False
        self._all: list[asyncio.Task[Any]] = []
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._note_exception)

    # What asyncio asks of a loop.

    def time(self) -> float:
        return self.now_s

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if not self.is_disposing:
            self._queue.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, list(args), self, context)
        self._schedule(handle, when)
        return handle

    def call_with_input_at(self, when: float, callback: Callable[..., Any], data: bytes, context: Context) -> None:
        """Bytes for a process."""
        self._schedule(Input(when, callback, [data], self, context), when)

    def _schedule(self, handle: asyncio.TimerHandle, when: float) -> None:
        if not self.is_disposing:
            self._count += 1
            heapq.heappush(self._timers, (when, self._count, handle))

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:  # type: ignore[override]
        process = PROCESS.get()
        assert process is not None, "a connection belongs to a process"
        assert self.connect is not None
        protocol = protocol_factory()
        transport = await self.connect(process, protocol, host, port)
        return transport, protocol

    def create_future(self) -> asyncio.Future[Any]:
        return SimFuture(loop=self)

    def next_number(self) -> int:
        """For what is hashed."""
        self._numbers += 1
        return self._numbers

    def take_back(self, handles: list[asyncio.Handle], timers: list[asyncio.Handle]) -> None:
        """What a paused process has to do, in its order."""
        self._queue.extend(handles)
        self._queue.extend(timers)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def _process_events(self, event_list: Any) -> None:
        pass

    def _make_task(self, loop: Any, coroutine: Any, context: Context | None = None) -> asyncio.Task[Any]:
        task = SimTask(coroutine, loop=loop, context=context)
        self._all.append(task)
        if len(self._all) > 4096:
            self._all = [each for each in self._all if not each.done()]
        return task

    def _note_exception(self, loop: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.crashes.append(f"{context.get('message')}: {error!r}")

    # One round.

    def _run_once(self) -> None:
        queue, timers = self._queue, self._timers
        if not queue:
            while timers and timers[0][2]._cancelled:
                heapq.heappop(timers)
            if not timers:
                raise Stuck("nothing is left to happen")
            if timers[0][0] > self.now_s:
                self.now_s = timers[0][0]
                self._hot = 0
        now_s = self.now_s
        while timers and timers[0][0] <= now_s:
            handle = heapq.heappop(timers)[2]
            if handle._cancelled:
                continue
            process = cast("Process | None", handle._context.get(PROCESS))
            if process is not None and process.paused:
                (process.held if type(handle) is Input else process.held_timers).append(handle)
            else:
                queue.append(handle)
        self._hot += len(queue)
        if self._hot > HOT_STEPS:
            raise Stuck(f"{HOT_STEPS} callbacks without time passing; next is {queue[0]!r}")
        for _ in range(len(queue)):
            handle = queue.popleft()
            if handle._cancelled:
                continue
            process = cast("Process | None", handle._context.get(PROCESS))
            if process is not None:
                if process.dead:
                    continue
                if process.paused:
                    process.held.append(handle)
                    continue
                process.steps += 1
                if process.steps == process.dies_at:
                    process.kill()
                    continue
            handle._run()

    # The end.

    def dispose(self) -> None:
        """Take everything down without running it: coroutines are closed, what they still want is not heard."""
        self.is_disposing = True
        self._queue.clear()
        self._timers.clear()
        asyncio.events._set_running_loop(self)
        try:
            for task in self._all:
                if not task.done():
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    coroutine = task.get_coro()
                    with contextlib.suppress(BaseException):
                        coroutine.close()  # type: ignore[union-attr]
                elif not task.cancelled():
                    task.exception()
        finally:
            asyncio.events._set_running_loop(None)
        self._all.clear()
        self.close()
