"""Submissions: from the queue, one at a time for each request, into the engine.

Responsible for order within a request (I5), for what an input becomes (the policy's `plan_append` at the first stage,
the adapter later) and for the answer. Leaves the queue to `control/store/queues.py`, aborts to `stage_cleanup.py`,
sending the answer to `stage_acks.py`. Runs models through the engine. Keeps I7 and I11: requests don't wait for each
other, and a discarded input was never run (S34).

At the first stage no is a rejection, and the session goes on. Later there is nobody to reject to: the request fails.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from zlib import crc32

from control.core.rejections import Code
from control.wire.commands import Unreadable
from control.wire.stage import (
    AcceptedAck,
    RejectedAck,
    decode_payload,
    decode_submission,
    unpack_config,
)
from stages.engine import EngineRefusal, Submission
from stages.policy import DefaultPolicy, pass_through
from workers.stage_acks import Queue
from workers.stage_forward import unwrap_output
from workers.stage_lanes import Input, Lane, LanePhase, look_at
from workers.stage_threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from control.store.queues import QueueEntry
    from control.wire.stage import Ack
    from stages.engine import Engine
    from workers.stage_acks import AckOutbox
    from workers.stage_lanes import Lanes
    from workers.stage_setup import StageSetup
    from workers.stage_stats import StageStats

log = logging.getLogger("bargein.stage")

_MESSAGE_LENGTH = 500


class _Rejection(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Intake:
    """The inputs of one life. `fail(lane, message)` tells the owner that a request is lost and stops it."""

    def __init__(
        self,
        setup: StageSetup,
        engine: Engine,
        lanes: Lanes,
        acks: AckOutbox,
        stats: StageStats,
        *,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        fail: Callable[[Lane, str], None],
    ) -> None:
        self._setup = setup
        self._engine = engine
        self._lanes = lanes
        self._acks = acks
        self._stats = stats
        self._spawn = spawn
        self._fail = fail
        self._is_first = setup.stage_id == 0
        # What the project ships is quick; anything else may tokenize or encode for as long as it likes.
        self._is_quick = (
            type(setup.policy) is DefaultPolicy if self._is_first else cast("object", setup.adapter) is pass_through
        )

    def take(self, entry: QueueEntry) -> None:
        """An entry of the submissions' queue: to its lane, or away."""
        try:
            order = decode_submission(entry.body)
            if order.stage_id != self._setup.stage_id:
                raise Unreadable(f"it is for stage {order.stage_id}")
        except Unreadable as error:
            log.warning("entry %s of the submissions is dropped: %s", entry.entry_id, error)
            self._stats.unreadable += 1
            self._acks.put(entry.partition, Queue.SUBMISSIONS, (), (entry.entry_id,))
            return
        name = self._lanes.name_of(order)
        lane = self._lanes.find(name)
        if self._lanes.is_stopped(name) or (lane is not None and lane.phase is not LanePhase.OPEN):
            self._stats.discarded += 1
            self._acks.put(entry.partition, Queue.SUBMISSIONS, (), (entry.entry_id,))
            return
        if lane is None:
            lane = self._lanes.begin(name, entry.partition, order)
        item = Input(order, entry.payload, entry.entry_id)
        bound = self._setup.pipeline.session.max_waiting_bytes
        if lane.inputs and lane.input_bytes + len(entry.payload) > bound:
            lane.add(item)
            self._fail(lane, f"more than {bound} bytes of input wait at stage {self._setup.stage_id}")
            return
        lane.add(item)
        if lane.worker is None:
            lane.worker = self._spawn(self._work_off(lane), f"inputs of {name}")

    def discard_waiting(self, lane: Lane) -> None:
        """What waits in a stopped lane never runs; its owner has answered it already (S34)."""
        self._discard(lane, lane.take_all())

    async def _work_off(self, lane: Lane) -> None:
        try:
            while lane.inputs and lane.phase is LanePhase.OPEN:
                await self._run(lane, lane.take())
        finally:
            lane.worker = None
        # A request whose first input was refused is only reserved again: nobody will ever order its abort (D10).
        if lane.phase is LanePhase.OPEN and lane.is_idle:
            self._lanes.remove(lane.request_id)

    async def _run(self, lane: Lane, item: Input) -> None:
        order = item.order
        mark = (order.number, order.seq, crc32(item.payload))
        known = lane.find_answer(mark) if self._is_first else None
        if known is not None or (not self._is_first and order.seq <= lane.last_seq):
            self._stats.repeated += 1
            self._answer(lane, item, () if known is None else (known,))
            return
        try:
            self._read_config(lane, item)
            prompt = await self._make_prompt(lane, item)
            if lane.phase is not LanePhase.OPEN:
                self._discard(lane, [item])
                return
            await self._submit(lane, item, prompt)
        except _Rejection as no:
            if lane.phase is LanePhase.OPEN:
                self._reject(lane, item, no.code, str(no))
            else:
                self._discard(lane, [item])
            return
        if lane.phase is not LanePhase.OPEN:
            self._discard(lane, [item])
            return
        lane.taken = True
        lane.last_seq = order.seq
        self._stats.accepted += 1
        if not self._is_first:
            self._answer(lane, item, ())
            return
        ack = AcceptedAck(lane.session_id, lane.incarnation, order.number)
        lane.remember_answer(mark, ack)
        self._answer(lane, item, (ack,))

    def _read_config(self, lane: Lane, item: Input) -> None:
        order = item.order
        if order.resumed and not lane.taken and self._is_first:
            raise _Rejection(Code.FAILED_PRECONDITION, f"the request {lane.request_id} does not run here any more")
        if order.config:
            try:
                lane.unpacked = unpack_config(order.config)
            except Exception as error:
                raise _Rejection(Code.INTERNAL, f"the configuration can't be read: {_shorten(error)}") from error
            lane.config = order.config
            lane.generation = order.generation
        lane.route = order.route
        lane.traceparent = order.traceparent

    async def _make_prompt(self, lane: Lane, item: Input) -> Any:
        make = partial(self._plan if self._is_first else self._adapt, lane, item)
        try:
            if self._is_quick:
                return make()
            return await in_thread(make)
        except EngineRefusal as no:
            raise _Rejection(no.code, no.message) from no
        except (ValueError, TypeError, Unreadable) as error:
            raise _Rejection(Code.INVALID_ARGUMENT, _shorten(error)) from error
        except Exception as error:
            log.exception("making the prompt of an input of %s", lane.request_id)
            raise _Rejection(Code.FAILED_PRECONDITION, f"{type(error).__name__}: {_shorten(error)}") from error

    def _plan(self, lane: Lane, item: Input) -> Any:
        order = item.order
        session_config, runtime_config, sampling = lane.unpacked
        plan = self._setup.policy.plan_append(
            request_id=lane.request_id,
            session_id=lane.session_id,
            fence=order.fence,
            session_config=session_config,
            runtime_config=runtime_config,
            seq=order.seq,
            turn_seq=order.turn_seq,
            mode=order.mode,
            payload=decode_payload(item.payload, packed=order.packed),
            final=order.final,
            sampling=self._sampling(sampling),
        )
        return plan.prompt

    def _adapt(self, lane: Lane, item: Input) -> Any:
        order = item.order
        session_config, runtime_config, _ = lane.unpacked
        plan = self._setup.adapter(
            request_id=lane.request_id,
            session_id=lane.session_id,
            stage_id=self._setup.stage_id,
            fence=order.fence,
            seq=order.seq,
            output=unwrap_output(item),
            session_config=session_config,
            runtime_config=runtime_config,
        )
        return plan.prompt

    async def _submit(self, lane: Lane, item: Input, prompt: Any) -> None:
        """Give it to the engine. Returns once the engine has it, or once the request was stopped meanwhile."""
        order = item.order
        session_config, runtime_config, sampling = lane.unpacked
        submission = Submission(
            request_id=lane.request_id,
            session_id=lane.session_id,
            stage_id=self._setup.stage_id,
            fence=order.fence,
            seq=order.seq,
            turn_seq=order.turn_seq,
            mode=order.mode,
            prompt=prompt,
            final=order.final,
            sampling=self._sampling(sampling),
            session_config=session_config,
            runtime_config=runtime_config,
            config_generation=lane.generation,
            resumed=lane.taken,
        )
        lane.begin_turn(order.fence.key, order.mode)
        # A task of its own: an abort may have to end it without ending the lane.
        lane.submit = asyncio.ensure_future(self._engine.submit(submission))
        try:
            await asyncio.wait({lane.submit})
            answer = lane.submit
        finally:
            if not lane.submit.done():
                lane.submit.cancel()
            lane.submit.add_done_callback(look_at)
            lane.submit = None
        if lane.phase is not LanePhase.OPEN or answer.cancelled():
            return
        error = answer.exception()
        if isinstance(error, EngineRefusal):
            raise _Rejection(error.code, error.message)
        if error is not None:
            # Nobody knows what the engine has kept of it, so the whole request has to go (I7).
            log.error("submitting to %s", lane.request_id, exc_info=error)
            lane.taken = True
            self._fail(lane, f"the engine took an input and failed: {type(error).__name__}: {_shorten(error)}")

    def _reject(self, lane: Lane, item: Input, code: str, message: str) -> None:
        if not self._is_first:
            self._answer(lane, item, ())
            self._fail(lane, f"stage {self._setup.stage_id} refused its input ({code}): {message}")
            return
        order = item.order
        self._stats.rejected += 1
        ack = RejectedAck(lane.session_id, lane.incarnation, order.number, str(code), message)
        lane.remember_answer((order.number, order.seq, crc32(item.payload)), ack)
        self._answer(lane, item, (ack,))

    def _discard(self, lane: Lane, items: Sequence[Input]) -> None:
        if items:
            self._stats.discarded += len(items)
            self._acks.put(lane.partition, Queue.SUBMISSIONS, (), [item.entry_id for item in items])

    def _answer(self, lane: Lane, item: Input, acks: Sequence[Ack]) -> None:
        self._acks.put(lane.partition, Queue.SUBMISSIONS, acks, (item.entry_id,))

    def _sampling(self, sampling: Any) -> Any:
        if isinstance(sampling, list | tuple):
            elements = cast("Sequence[Any]", sampling)
            if len(elements) > self._setup.stage_id:
                return elements[self._setup.stage_id]
        return None


def _shorten(error: BaseException) -> str:
    return str(error)[:_MESSAGE_LENGTH] or type(error).__name__
