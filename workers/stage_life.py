"""One life of a stage worker: from the moment it is registered until it is over, for whatever reason.

Responsible for the connections, the readers and what the engine says, and for joining intake, cleanup, outbox and
heartbeat. Leaves the engine's own life and what follows an end to `stage.py`. Talks to Redis, runs models. Keeps I6's
counterpart for stages: once the server says that the life is over, nothing more of it is tried (S40).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from enum import Enum
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from redis.exceptions import RedisError

from control.store import lives
from control.store.access import example_key
from control.store.keys import worker_state
from control.store.link import LOST
from control.store.queues import QueueReader, Queues
from control.wire.stage import RequestFailedAck
from workers.stage_acks import AckOutbox, Queue
from workers.stage_audit import Audit
from workers.stage_cleanup import Cleanups
from workers.stage_forward import wrap_output
from workers.stage_heartbeat import Heartbeat
from workers.stage_intake import Intake
from workers.stage_lanes import Lane, LanePhase, Lanes
from workers.stage_outbox import Outbox
from workers.stage_setup import Backoff
from workers.stage_stats import Progress, StageStats, StageTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from control.store.access import Access
    from control.store.queues import Reading
    from stages.engine import Engine, Output
    from workers.stage_setup import StageSetup

log = logging.getLogger("bargein.stage")

_TASKS_END_S = 5.0
_CANCEL_AGAIN_S = 0.05
_DRAIN_LOOK_S = 0.05


class EndKind(Enum):
    """`LEFT`: on purpose. `FENCED`: someone else said so. `ENGINE_LOST`: it died or hangs. `BROKEN`: a bug here."""

    LEFT = "left"
    FENCED = "fenced"
    ENGINE_LOST = "engine_lost"
    BROKEN = "broken"


class Ending(Struct, frozen=True):
    """Why a life is over."""

    kind: EndKind
    message: str = ""


class StageLife:
    """Built for a registered worker id; `run` returns when the life is over. Is the engine's port meanwhile."""

    def __init__(
        self,
        worker_id: str,
        setup: StageSetup,
        engine: Engine,
        access: Access,
        times: StageTimes | None = None,
    ) -> None:
        """`times` outlive the life."""
        self.worker_id = worker_id
        self.stats = StageStats()
        self.lanes = Lanes(setup.stage_id)
        self._setup = setup
        self._redis = access.redis
        self._over: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        groups = access.groups(setup.pipeline.partitions)
        inputs, aborts, acks, outputs = ({g: access.link(example_key(g)) for g in groups} for _ in range(4))
        beats = access.link(worker_state(worker_id))
        self._links = [*inputs.values(), *aborts.values(), *acks.values(), *outputs.values(), beats]
        keys = setup.partition_keys()
        abort_names = {group: {p: keys[p].aborts(worker_id) for p in group} for group in groups}
        self._submissions = Queues(
            [
                QueueReader(
                    inputs[group],
                    {p: keys[p].submissions(worker_id) for p in group},
                    block_ms=setup.block_ms,
                    glance=abort_names[group],
                )
                for group in groups
            ]
        )
        self._aborts = Queues(
            [QueueReader(aborts[group], abort_names[group], block_ms=setup.block_ms) for group in groups]
        )
        self._acks = AckOutbox(
            acks,
            worker_id,
            keys,
            on_done=self._finish,
            on_over=lambda: self.end(EndKind.FENCED, "a partition's owner has fenced it"),
            on_trouble=self._note_trouble,
        )
        self._outbox = Outbox(
            outputs,
            worker_id,
            keys,
            setup,
            self.stats,
            on_stop=self._stop,
            on_broken=self._fail,
            on_trouble=self._note_trouble,
        )
        self._intake = Intake(setup, engine, self.lanes, self._acks, self.stats, spawn=self._spawn, fail=self._fail)
        self._heartbeat = Heartbeat(
            beats,
            worker_id,
            engine,
            setup,
            figures=self._figures,
            is_reading=self._is_reading,
            on_engine_lost=self.died,
            on_over=lambda message: self.end(EndKind.FENCED, message),
            on_trouble=self._note_trouble,
            times=times or StageTimes(),
        )
        self._cleanups = Cleanups(
            worker_id,
            engine,
            self.lanes,
            self._acks,
            self.stats,
            timeout_s=setup.abort_timeout_s,
            spawn=self._spawn,
            silence=self._silence,
            note_gone=self._heartbeat.note_gone,
            note_sent=self._heartbeat.note_sent,
            note_cleaned=self._heartbeat.note_cleaned,
            give_up_engine=self.died,
        )
        self._audit = Audit(access.redis, worker_id, setup, self.lanes, self._acks)
        now_s = asyncio.get_running_loop().time()
        self._read_s = dict.fromkeys((*self._submissions.readers, *self._aborts.readers), now_s)

    @property
    def is_ready(self) -> bool:
        """Whether it takes sessions and makes progress: both readers, the engine, the heartbeat."""
        return not self._over.done() and not self._heartbeat.draining and self._heartbeat.is_good

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs here and everything has been said."""
        return not len(self.lanes) and self._acks.is_empty and self._outbox.is_empty

    def progress(self) -> Progress:
        """How it is going; for health checks and metrics, which look from another thread. Call it on the loop."""
        beat = self._heartbeat
        return Progress(
            is_over=self._over.done(),
            draining=beat.draining,
            is_healthy=beat.is_healthy,
            beaten_s=beat.beaten_s,
            read_s=self._last_read_s,
            limit_s=beat.limit_s,
            load=beat.load,
            requests=len(self.lanes),
            submissions=sum(reader.in_hand for reader in self._submissions.readers),
            aborts=sum(reader.in_hand for reader in self._aborts.readers),
            buffered_bytes=self._outbox.total_bytes,
        )

    async def run(self) -> Ending:
        """Work until the life is over. Cancelled: end as a crash would, without a word."""
        for reader in self._aborts.readers:
            self._spawn(self._read(reader, self._take_aborts), "aborts")
        for reader in self._submissions.readers:
            self._spawn(self._read(reader, self._take_submissions), "submissions")
        for loop in self._acks.loops():
            self._spawn(loop, "acks")
        for loop in self._outbox.loops():
            self._spawn(loop, "outputs")
        self._spawn(self._heartbeat.run(), "heartbeat")
        self._spawn(self._audit.run(), "audit")
        try:
            return await self._over
        finally:
            await self._close()

    def end(self, kind: EndKind, message: str = "") -> None:
        """The life is over; only the first word counts."""
        if not self._over.done():
            self._over.set_result(Ending(kind, message))

    async def leave(self, grace_s: float) -> None:
        """Take nothing new, serve what is there until it is done or `grace_s` have passed, then end."""
        self._heartbeat.drain()
        deadline_s = asyncio.get_running_loop().time() + grace_s
        while asyncio.get_running_loop().time() < deadline_s:
            with contextlib.suppress(RedisError, *LOST):
                if self.is_idle and await lives.count_slots(self._redis, self.worker_id) == 0:
                    break
            await asyncio.sleep(_DRAIN_LOOK_S)
        self.end(EndKind.LEFT)

    # What the engine says (`EnginePort`).

    def emit(self, output: Output) -> None:
        """See `EnginePort.emit`."""
        lane = self.lanes.find(output.request_id)
        if lane is None or lane.phase is not LanePhase.OPEN or self._over.done():
            self.stats.outputs_late += 1
            return
        try:
            parcel = wrap_output(self._setup, lane, output)
        except Exception as error:
            log.exception("an output of %s", lane.request_id)
            self._fail(lane, f"an output can't be published: {type(error).__name__}: {error}")
            return
        if not self._outbox.put(lane, parcel):
            self._fail(lane, "the server has taken no outputs for too long; the buffer is full")

    def fail(self, request_id: str, message: str) -> None:
        """See `EnginePort.fail`. During an abort it is what the abort wanted (S35, S37)."""
        lane = self.lanes.find(request_id)
        if lane is None:
            return
        if lane.gone is not None:
            if not lane.gone.done():
                lane.gone.set_result(None)
            return
        self._intake.discard_waiting(lane)
        self.lanes.remove(request_id)
        self.lanes.entomb(request_id)
        if lane.phase is not LanePhase.FAILED:
            lane.phase = LanePhase.FAILED
            self._tell_failure(lane, message)

    def died(self, message: str) -> None:
        """See `EnginePort.died`."""
        self.end(EndKind.ENGINE_LOST, message)

    # Requests that can't go on.

    def _fail(self, lane: Lane, message: str) -> None:
        if lane.phase is LanePhase.OPEN:
            lane.phase = LanePhase.FAILED
            self._tell_failure(lane, message)
            self._cleanups.stop(lane)

    def _stop(self, lane: Lane) -> None:
        if lane.phase is LanePhase.OPEN and self.lanes.find(lane.request_id) is lane:
            self._cleanups.stop(lane)

    def _tell_failure(self, lane: Lane, message: str) -> None:
        log.warning("request %s is lost: %s", lane.request_id, message)
        self.stats.failed += 1
        ack = RequestFailedAck(lane.session_id, lane.incarnation, lane.epoch, self.worker_id, message[:500])
        self._acks.put(lane.partition, Queue.SUBMISSIONS, (ack,))

    def _silence(self, lane: Lane) -> None:
        self._outbox.silence(lane)
        self._intake.discard_waiting(lane)

    # Reading.

    async def _read(self, reader: QueueReader, take: Callable[[Reading], None]) -> None:
        # No longer than a heartbeat: whoever doesn't read doesn't beat, and would be lost after every outage (S71).
        backoff = Backoff(0.02, self._setup.pipeline.control.heartbeat_interval_s)
        while True:
            try:
                reading = await reader.read()
            except LOST as error:
                self._note_trouble(error)
                log.warning("reading for %s: no connection (%s); trying again", self.worker_id, error)
                await asyncio.sleep(backoff.next_s())
                continue
            except RedisError as error:
                if _is_broken(error):
                    raise
                self._note_trouble(error)
                log.warning("reading for %s: %s; trying again", self.worker_id, error)
                await asyncio.sleep(backoff.next_s())
                continue
            backoff.reset()
            self._read_s[reader] = asyncio.get_running_loop().time()
            take(reading)

    def _take_aborts(self, reading: Reading) -> None:
        for entry in reading.entries:
            self._cleanups.take(entry, self._submissions.moment(entry.partition))

    def _take_submissions(self, reading: Reading) -> None:
        for entry in reading.seen:
            self._cleanups.foresee(entry, self._submissions.moment(entry.partition))
        for entry in reading.entries:
            self._intake.take(entry)
        self.lanes.forget_stops(self._submissions, asyncio.get_running_loop().time())

    def _finish(self, queue: Queue, partition: int, entry_ids: Sequence[str]) -> None:
        queues = self._aborts if queue is Queue.ABORTS else self._submissions
        queues.finish(partition, entry_ids)

    def _is_reading(self, within_s: float) -> bool:
        return asyncio.get_running_loop().time() - self._last_read_s < within_s

    @property
    def _last_read_s(self) -> float:
        """Since when not a queue of one of the two kinds has been read.

        On a cluster some readers' node may be away: no fault of this worker's, which serves the others' sessions.
        """
        kinds = (self._submissions.readers, self._aborts.readers)
        return min(max(self._read_s[reader] for reader in readers) for readers in kinds)

    def _figures(self) -> dict[str, int]:
        held = {"requests": len(self.lanes), "buffered_bytes": self._outbox.total_bytes}
        return {**self.stats.figures(), **held}

    # Tasks.

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine, name=f"{self.worker_id}: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("%s", task.get_name(), exc_info=error)
            self.end(EndKind.BROKEN, f"{task.get_name()}: {type(error).__name__}: {error}")

    def _note_trouble(self, error: Exception) -> None:
        if isinstance(error, LOST):
            self.stats.reconnects += 1
        else:
            self.stats.retries += 1

    async def _close(self) -> None:
        """End every task and connection. A task that doesn't end is left behind, with the engine that holds it."""
        self._cleanups.close()
        deadline_s = asyncio.get_running_loop().time() + _TASKS_END_S
        tasks = set(self._tasks)
        while tasks and asyncio.get_running_loop().time() < deadline_s:
            # More than once: on Python 3.11 a `wait_for` inside redis-py may swallow a cancellation.
            for task in tasks:
                task.cancel()
            _, tasks = await asyncio.wait(tasks, timeout=_CANCEL_AGAIN_S)
        for task in tasks:
            log.error("%s doesn't end", task.get_name())
        for link in self._links:
            await link.close()


def _is_broken(error: RedisError) -> bool:
    """Whether no retry can help: the name of a queue holds something else."""
    return str(error).startswith("WRONGTYPE")
