"""The only module that knows arq: the operators' jobs and the upkeep on its queue.

Responsible for what travels on the queue (a job's id, never Python objects), for one run at a time over all maintenance
processes, and for going on after a process, the server or arq itself has lost its place. Leaves what a job does to
`steps.py` and `upkeep.py`, its record to `record.py`. Talks to the Redis of the jobs.

arq polls, and it uses the clocks of the machines: nothing that is urgent depends on it. It knows no Redis Cluster. An
error of Redis ends its worker, which is started again here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import msgspec
from arq import Retry, cron, func
from arq.connections import ArqRedis
from arq.constants import in_progress_key_prefix
from arq.worker import Worker
from msgspec.structs import replace
from redis.exceptions import RedisError

from control.store.link import LOST
from workers.maintenance.record import MOST, JobState
from workers.maintenance.steps import STEPS
from workers.maintenance.upkeep import UPKEEP, Duty
from workers.tasks import end_tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from redis.asyncio import ConnectionPool

    from workers.maintenance.record import Job
    from workers.maintenance.steps import Site

log = logging.getLogger("bargein.maintenance")

QUEUE = "arq:bargein"
RESUME = "resume_jobs"
STEP_S = 0.5
# A try is short, and so is arq's lock on a job: what a killed process held, or one that lost its server, is free soon.
TRY_S, TIMEOUT_S, LOCK_S = 10.0, 20.0, 30.0
DUTY_TIMEOUT_S = 600.0
EXPIRES_S = 7 * 86_400
RETRY_S = (0.5, 10.0)
_ENDLESS = 10**9


class _Worker(Worker):
    """arq's, which says when it last polled."""

    polled: Callable[[], None]

    async def heart_beat(self) -> None:
        await super().heart_beat()
        self.polled()


def open_queue(pool: ConnectionPool) -> ArqRedis:
    """The queue behind `pool`."""
    return ArqRedis(
        cast("Any", pool),
        # Not pickle, arq's own choice: whoever can write to the queue could run anything.
        job_serializer=_encode,
        job_deserializer=_decode,
        default_queue_name=QUEUE,
    )


async def submit(queue: ArqRedis, job_id: str) -> None:
    """Put a job that has a record on the queue, unless it is there."""
    await queue.enqueue_job("run_job", job_id, _job_id=job_id, _expires=EXPIRES_S)


@dataclass(slots=True)
class Runner:
    """Runs jobs and upkeep until `stop`. `ran(name, outcome, found, seconds)` hears of each try."""

    pool: ConnectionPool
    site: Site
    ran: Callable[[str, str, int, float], None]
    note_trouble: Callable[[bool], None]
    polled_s: float = float("-inf")
    _queue: ArqRedis | None = field(default=None, init=False)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    @property
    def duties(self) -> tuple[Duty, ...]:
        """All upkeep, that of the jobs themselves too."""
        return (*UPKEEP, Duty(RESUME, self.resume, {"second": 30}, "{} jobs were lost and go on"))

    async def run(self) -> None:
        """Work until told to stop; a job that is under way goes on elsewhere, or at the next start."""
        queue = self._queue = open_queue(self.pool)
        wait_s = RETRY_S[0]
        while not self._stopping.is_set():
            began_s = time.monotonic()
            try:
                await self._work(queue)
            except (RedisError, *LOST) as error:
                self.note_trouble(isinstance(error, LOST))
                if time.monotonic() - began_s > RETRY_S[1]:
                    wait_s = RETRY_S[0]
                log.warning("maintenance: Redis: %s; trying again in %g s", error, wait_s)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._stopping.wait()
                wait_s = min(2 * wait_s, RETRY_S[1])

    def stop(self) -> None:
        """Return from `run` soon."""
        self._stopping.set()

    async def _work(self, queue: ArqRedis) -> None:
        worker = _Worker(
            functions=[func(cast("Any", self._run_job), name="run_job", max_tries=_ENDLESS, keep_result=0)],
            cron_jobs=[
                cron(
                    cast("Any", self._on_duty(duty)),
                    name=duty.name,
                    timeout=DUTY_TIMEOUT_S,
                    keep_result=0,
                    max_tries=1,
                    **duty.when,
                )
                for duty in self.duties
            ],
            redis_pool=queue,
            queue_name=QUEUE,
            handle_signals=False,
            job_timeout=TIMEOUT_S,
            job_serializer=_encode,
            job_deserializer=_decode,
            log_results=False,
            health_check_interval=10,
        )
        worker.polled = self._note_poll
        worker.in_progress_timeout_s = LOCK_S  # else the longest time-out of all
        working = asyncio.ensure_future(worker.main())
        told = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({working, told}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            try:
                await end_tasks(told, working)
            finally:
                tasks = list(worker.tasks.values())
                worker.handle_sig(signal.SIGTERM)  # cancels what runs; arq puts it back
                found = await asyncio.gather(working, *tasks, return_exceptions=True)
        for error in found:
            if isinstance(error, Exception):
                raise error

    def _note_poll(self) -> None:
        self.polled_s = time.monotonic()

    # ---- jobs

    async def _run_job(self, context: dict[str, Any], job_id: str) -> None:
        del context
        until_s = time.monotonic() + TRY_S
        while True:
            began_s = time.monotonic()
            try:
                over = await self._take_step(job_id)
            except (RedisError, *LOST) as error:
                self.note_trouble(isinstance(error, LOST))
                log.warning("job %s: Redis: %s; trying again", job_id, error)
                raise Retry(defer=RETRY_S[1] / 2) from None
            if over is None:
                return
            self.ran(job_id.partition("-")[0], "step", 0, time.monotonic() - began_s)
            if over:
                return
            if time.monotonic() > until_s:
                raise Retry(defer=STEP_S)
            await asyncio.sleep(STEP_S)

    async def _take_step(self, job_id: str) -> bool | None:
        """Whether the job is over now; None if it was before."""
        store = self.site.jobs
        job = await store.find(job_id)
        if job is None or job.is_over:
            return None
        if await store.is_cancelled(job_id):
            job = replace(job, state=JobState.CANCELLED, message=f"cancelled; {job.message}")
        else:
            job = await self._step(job)
        job = await store.save(job)
        if job.is_over:
            log.info("job %s: %s: %s", job_id, job.state, job.message)
        return job.is_over

    async def _step(self, job: Job) -> Job:
        try:
            return await STEPS[job.kind](self.site, job)
        except (RedisError, *LOST):
            raise
        except Exception as error:
            # A bug, or arguments that nobody could have given with this version's command line.
            log.exception("job %s", job.job_id)
            return replace(
                job, state=JobState.FAILED, message=f"{type(error).__name__}: {error}; see maintenance's log"
            )

    async def resume(self, site: Site) -> int:
        """Jobs that arq has lost, to a server that lost its last second or to a time-out, go on the queue again."""
        assert self._queue is not None
        lost = 0
        for job in await site.jobs.list(MOST):
            if not job.is_over and await self._queue.zscore(QUEUE, job.job_id) is None:
                await submit(self._queue, job.job_id)
                lost += 1
        return lost

    # ---- upkeep

    def _on_duty(self, duty: Duty) -> Callable[[dict[str, Any]], Coroutine[Any, Any, None]]:
        async def work(context: dict[str, Any]) -> None:
            assert self._queue is not None
            # Unlike a job's, its lock lasts as long as it may itself: nobody has to go on with it.
            lock = in_progress_key_prefix + context["job_id"]
            await self._queue.pexpire(lock, round(1000 * DUTY_TIMEOUT_S))
            await self.do(duty)

        return work

    async def do(self, duty: Duty) -> None:
        """A duty, once."""
        began_s = time.monotonic()
        try:
            found = await duty.work(self.site)
        except (RedisError, *LOST) as error:
            self.note_trouble(isinstance(error, LOST))
            self.ran(duty.name, "failed", 0, time.monotonic() - began_s)
            log.warning("%s: Redis: %s; not done this time", duty.name, error)
        except Exception:
            self.ran(duty.name, "failed", 0, time.monotonic() - began_s)
            log.exception("%s: not done this time", duty.name)
        else:
            self.ran(duty.name, "ok", found, time.monotonic() - began_s)
            if found:
                log.info("%s: %s", duty.name, duty.says.format(found))


def _encode(value: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode(value, enc_hook=repr)


def _decode(data: bytes) -> dict[str, Any]:
    return msgspec.msgpack.decode(data)
