"""Aborts: from the queue at once to the engine, and the word to the owner once the engine says that it is gone.

Responsible for I2 at this stage: `cleaned` is said only when the engine holds nothing of the requests any more, also
nothing of an input that was just going in. Leaves discarding inputs to `stage_intake.py`, sending the word to
`stage_acks.py`. Keeps I11: every order has a task of its own, so a stuck abort delays no other (S46).

There is one try a request at a time, which every order for it joins; the next order begins another. A try that the
engine did not confirm in time was given up, a try during which the engine reports the request dead has worked (S35).
"""

from __future__ import annotations

import asyncio
import logging
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from control.core.requests import request_id
from control.wire.commands import Unreadable
from control.wire.stage import CleanedAck, CleanupFailedAck, decode_abort
from stages.engine import EngineError
from workers.stage_acks import Queue
from workers.stage_lanes import Lane, LanePhase, Stop, look_at
from workers.stage_setup import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from control.store.queues import QueueEntry
    from control.wire.stage import AbortOrder, Ack
    from stages.engine import Engine
    from workers.stage_acks import AckOutbox
    from workers.stage_lanes import Lanes
    from workers.stage_stats import StageStats

log = logging.getLogger("bargein.stage")

# Once its request is gone, a submit under way should end by itself; after this it is cancelled.
_SUBMIT_GRACE_S = 0.1
_MESSAGE_LENGTH = 500

CLEANUP_ORDER: ContextVar[str] = ContextVar("cleanup_order", default="")
"""Inside `Engine.abort`: which order it belongs to, the same for all requests of one order. For logs and traces."""


class Cleanups:
    """The aborts of one life.

    `silence(lane)`: no output of it may go out any more, none of its waiting inputs may run. `note_gone(request id,
    entry id)`: an order's request is gone. `note_sent(entry id)`, `note_cleaned(entry id)`: the engine is asked for all
    of an order's requests, and holds none of them any more. `give_up_engine(why)`: an order has waited for too long,
    the life must end.
    """

    def __init__(
        self,
        worker_id: str,
        engine: Engine,
        lanes: Lanes,
        acks: AckOutbox,
        stats: StageStats,
        *,
        timeout_s: float,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        silence: Callable[[Lane], None],
        note_gone: Callable[[str, str], None],
        note_sent: Callable[[str], None],
        note_cleaned: Callable[[str], None],
        give_up_engine: Callable[[str], None],
    ) -> None:
        self._worker_id = worker_id
        self._engine = engine
        self._lanes = lanes
        self._acks = acks
        self._stats = stats
        self._timeout_s = timeout_s
        self._spawn = spawn
        self._silence = silence
        self._note_gone = note_gone
        self._note_sent = note_sent
        self._note_cleaned = note_cleaned
        self._give_up_engine = give_up_engine
        self._tries: dict[str, asyncio.Task[None]] = {}

    def take(self, entry: QueueEntry, moment: int) -> None:
        """An entry of the aborts' queue. `moment`: of the submissions' reader."""
        order = self._mark(entry, moment)
        if order is None:
            self._stats.unreadable += 1
            self._acks.put(entry.partition, Queue.ABORTS, (), (entry.entry_id,))
            return
        self._stats.aborts += 1
        token = CLEANUP_ORDER.set(f"{entry.partition}/{entry.entry_id}")
        try:
            tries = {name: self._try(name) for name in _names(order)}
            self._spawn(self._await_confirmation(order, entry, tries), f"abort {entry.entry_id}")
        finally:
            CLEANUP_ORDER.reset(token)

    def foresee(self, entry: QueueEntry, moment: int) -> None:
        """The submissions' reader has seen this abort: what it reads from now on must not run."""
        self._mark(entry, moment)

    def stop(self, lane: Lane) -> None:
        """Stop a request without an order, and try until it is gone: nobody else will ask for that."""
        if lane.phase is LanePhase.OPEN:
            lane.phase = LanePhase.STOPPED
        self._silence(lane)
        self._lanes.entomb(lane.request_id)
        self._spawn(self._stop(lane.request_id), f"stopping {lane.request_id}")

    def close(self) -> None:
        """The life is over: nobody waits for the tries any more."""
        for task in self._tries.values():
            task.cancel()

    def _mark(self, entry: QueueEntry, moment: int) -> AbortOrder | None:
        try:
            order = decode_abort(entry.body)
        except Unreadable as error:
            log.warning("entry %s of the aborts is dropped: %s", entry.entry_id, error)
            return None
        stop = Stop(entry.partition, entry.after, moment, asyncio.get_running_loop().time())
        for name in _names(order):
            self._lanes.stop(name, stop)
            lane = self._lanes.find(name)
            if lane is not None:
                if lane.phase is LanePhase.OPEN:
                    lane.phase = LanePhase.STOPPED
                self._silence(lane)
        return order

    async def _await_confirmation(
        self, order: AbortOrder, entry: QueueEntry, tries: dict[str, asyncio.Task[None]]
    ) -> None:
        failures: list[BaseException] = []
        self._note_sent(entry.entry_id)  # the tries have begun before this task
        if tries:
            # Shielded: a try belongs to every order that has joined it.
            results = await asyncio.gather(
                *(self._outcome(name, entry, each) for name, each in tries.items()), return_exceptions=True
            )
            failures = [each for each in results if isinstance(each, BaseException)]
        ack: Ack
        if failures:
            # "No" says more than silence does.
            told = next((each for each in failures if not isinstance(each, TimeoutError)), failures[0])
            self._stats.cleanup_failed += 1
            if order.restart:
                self._give_up_engine(f"session {order.session_id!r} still can't be cleaned up: {told}")
            ack = CleanupFailedAck(
                order.session_id,
                order.incarnation,
                order.number,
                order.attempt,
                self._worker_id,
                isinstance(told, TimeoutError),
                str(told)[:_MESSAGE_LENGTH] or type(told).__name__,
            )
        else:
            self._stats.cleaned += 1
            self._note_cleaned(entry.entry_id)
            ack = CleanedAck(order.session_id, order.incarnation, order.number, self._worker_id)
        self._acks.put(entry.partition, Queue.ABORTS, (ack,), (entry.entry_id,))

    async def _outcome(self, name: str, entry: QueueEntry, each: asyncio.Task[None]) -> None:
        await asyncio.shield(each)
        self._note_gone(name, entry.entry_id)

    async def _stop(self, name: str) -> None:
        backoff = Backoff(0.5, 30.0)
        while self._lanes.find(name) is not None:
            try:
                await asyncio.shield(self._try(name))
            except Exception as error:  # noqa: BLE001  whatever it says, the request is still there
                log.warning("%s can't be stopped yet: %s", name, error)
                await asyncio.sleep(backoff.next_s())

    def _try(self, name: str) -> asyncio.Task[None]:
        """The try that is under way, or a new one."""
        task = self._tries.get(name)
        if task is None:
            task = self._tries[name] = asyncio.ensure_future(self._abort(name))
            task.add_done_callback(lambda done: self._end_try(name, done))
        return task

    def _end_try(self, name: str, task: asyncio.Task[None]) -> None:
        self._tries.pop(name, None)
        if not task.cancelled():
            task.exception()  # looked at, also where nobody waits for it any more

    async def _abort(self, name: str) -> None:
        """Returns once the engine holds nothing of it. Raises TimeoutError, EngineError or what the engine raised."""
        deadline_s = asyncio.get_running_loop().time() + self._timeout_s
        lane = self._lanes.find(name)
        gone = None
        if lane is not None:
            gone = lane.gone = asyncio.get_running_loop().create_future()
        try:
            await self._ask_engine(name, deadline_s, gone)
            # What is just going in might come after the abort in the engine; nothing follows it.
            if lane is not None and lane.submit is not None:
                await self._end_submit(lane.submit, name, deadline_s)
                await self._ask_engine(name, deadline_s, gone)
        finally:
            if lane is not None:
                lane.gone = None
        self._lanes.remove(name)

    async def _ask_engine(self, name: str, deadline_s: float, gone: asyncio.Future[None] | None) -> None:
        asked = asyncio.ensure_future(self._engine.abort(name))
        try:
            left_s = max(0.0, deadline_s - asyncio.get_running_loop().time())
            waiting: set[asyncio.Future[None]] = {asked} if gone is None else {asked, gone}
            await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if gone is not None and gone.done():
                return
            if not asked.done():
                raise TimeoutError(f"the engine has not confirmed the abort of {name} in {self._timeout_s:g} s")
            if asked.cancelled():
                raise EngineError(f"the engine has given up the abort of {name}")
            asked.result()
        finally:
            # A cancelled abort may be asked for again; whether it ends at all is not waited for.
            if not asked.done():
                asked.cancel()
            asked.add_done_callback(look_at)

    async def _end_submit(self, submit: asyncio.Task[None], name: str, deadline_s: float) -> None:
        await asyncio.wait({submit}, timeout=_SUBMIT_GRACE_S)
        if not submit.done():
            submit.cancel()
            left_s = max(_SUBMIT_GRACE_S, deadline_s - asyncio.get_running_loop().time())
            await asyncio.wait({submit}, timeout=left_s)
        if not submit.done():
            raise TimeoutError(f"an input of {name} is still going into the engine")


def _names(order: AbortOrder) -> list[str]:
    return [
        request_id(order.session_id, order.incarnation, epoch, order.stage_id) for epoch in dict.fromkeys(order.epochs)
    ]
