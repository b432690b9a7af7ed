"""The stage worker: one process that runs one stage's engine on one device, one life after another.

Responsible for the engine's life, for beginning a new life under a new id when one is over, and for leaving in order.
Leaves everything within a life to `stage_life.py`. Talks to Redis, runs models. Keeps I2 over lives: an engine that may
still hold something of a former life is stopped and built anew before the next one begins.

Says no with `Unusable` (the server), `EngineConfigError`, `ImportPathError` and whatever else keeps a policy or an
engine from loading at the first start; later the same is tried again, with a growing pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from control.store import lives
from control.store.access import open_access
from control.store.link import LOST
from control.store.server import agree_on_config, check_server
from stages.engine import EngineConfigError, load_engine
from stages.policy import load_adapter, load_policy
from workers.stage_lanes import Lanes
from workers.stage_life import Ending, EndKind, StageLife
from workers.stage_setup import BUFFER_BYTES, CONNECTION_TIMEOUT_S, TOTAL_BUFFER_BYTES, Backoff, StageSetup
from workers.stage_stats import Progress, StageStats, StageTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from control.store.access import Access
    from stages.engine import Engine, Output
    from stages.pipeline import Pipeline
    from stages.policy import Adapter, ModelPolicy

log = logging.getLogger("bargein.stage")

GRACE_S = 30.0
_ENGINE_STOP_S = 30.0
_GOODBYE_S = 3.0
_RESTART_S = (0.5, 30.0)
# A life that has lasted so long was no part of a row of failures.
_PROVEN_S = 60.0
_ID_BYTES = 4


class _Port:
    """The engine's way to whichever life is current; between lives nobody listens."""

    def __init__(self) -> None:
        self.life: StageLife | None = None
        self.death: str | None = None

    def emit(self, output: Output) -> None:
        if self.life is not None:
            self.life.emit(output)

    def fail(self, request_id: str, message: str) -> None:
        if self.life is not None:
            self.life.fail(request_id, message)

    def died(self, message: str) -> None:
        self.death = message
        if self.life is not None:
            self.life.died(message)


class StageWorker:
    """Runs stage `stage_id` of `pipeline`. `run` until `stop`; cancelling `run` is a crash: no goodbye.

    `build_engine`, `policy` and `adapter` are for tests and for embedding; they come from the pipeline file otherwise.
    `abort_timeout_s`: how long the engine may take to confirm an abort; None: the session's `cleanup_timeout_s`.
    """

    def __init__(
        self,
        redis_url: str,
        pipeline: Pipeline,
        stage_id: int,
        *,
        build_engine: Callable[[], Engine] | None = None,
        policy: ModelPolicy | None = None,
        adapter: Adapter | None = None,
        abort_timeout_s: float | None = None,
        linger_s: float = 0.005,
        request_buffer_bytes: int = BUFFER_BYTES,
        total_buffer_bytes: int = TOTAL_BUFFER_BYTES,
    ) -> None:
        if not 0 <= stage_id < len(pipeline.stages):
            raise ValueError(f"stage {stage_id}: the pipeline has {len(pipeline.stages)} stages, counted from 0")
        stage = pipeline.stages[stage_id]
        if policy is None:
            if pipeline.policy is None:
                raise ValueError("policy: null; a pipeline without a policy sends nothing to its stages")
            policy = load_policy(pipeline.policy, pipeline.sampling_defaults)
        self._url = redis_url
        self._build_engine = build_engine or (lambda: load_engine(stage.engine, stage.options))
        self._setup = StageSetup(
            pipeline=pipeline,
            stage_id=stage_id,
            policy=policy,
            adapter=adapter or load_adapter(stage.adapter),
            abort_timeout_s=abort_timeout_s or pipeline.session.cleanup_timeout_s,
            linger_s=linger_s,
            request_buffer_bytes=request_buffer_bytes,
            total_buffer_bytes=total_buffer_bytes,
        )
        self._engine: Engine | None = None
        self._port = _Port()
        self._life: StageLife | None = None
        self._living = asyncio.Event()
        self._leaving = asyncio.Event()
        self._ended = asyncio.Event()
        self._grace_s = 0.0
        self._is_new = True
        # For metrics: what came before, and what is being counted; always a pair, since another thread looks.
        self._counted = (StageStats(), StageStats())
        self.times = StageTimes()
        self.endings = dict.fromkeys(EndKind, 0)

    @property
    def worker_id(self) -> str | None:
        """The id of the current life; None between lives."""
        return None if self._life is None else self._life.worker_id

    @property
    def stats(self) -> StageStats:
        """The current life's counters."""
        return StageStats() if self._life is None else self._life.stats

    @property
    def totals(self) -> StageStats:
        """What all lives have counted together."""
        before, now = self._counted
        return before.plus(now)

    @property
    def is_leaving(self) -> bool:
        """Whether it was told to."""
        return self._leaving.is_set()

    def progress(self) -> Progress | None:
        """How the current life is going; None between lives. Call it on the loop."""
        return None if self._life is None else self._life.progress()

    @property
    def lanes(self) -> Lanes:
        """What the current life knows of its requests; for looking only."""
        return Lanes(self._setup.stage_id) if self._life is None else self._life.lanes

    @property
    def is_ready(self) -> bool:
        """Whether it takes sessions and makes progress."""
        return self._life is not None and self._life.is_ready

    @property
    def slack_s(self) -> float:
        """What leaving may take at most beyond its grace: letting go of requests, the goodbye, the engine's stop."""
        return self._setup.abort_timeout_s + _GOODBYE_S + _ENGINE_STOP_S

    async def wait_ready(self, other_than: str | None = None) -> str:
        """Wait for a life (with another id than `other_than`); its id."""
        while self._life is None or self._life.worker_id == other_than:
            self._living.clear()
            await self._living.wait()
        return self._life.worker_id

    async def run(self) -> None:
        """Live until `stop`. Raises what the header names."""
        access = open_access(self._url, timeout_s=CONNECTION_TIMEOUT_S, name=f"bargein-{self._setup.stage.name}")
        backoff = Backoff(*_RESTART_S)
        try:
            await check_server(access.redis, self._url)
            await agree_on_config(access.redis, self._setup.pipeline.partitions)
            while not self._leaving.is_set():
                begun_s = asyncio.get_running_loop().time()
                ending = await self._live_once(access)
                if ending.kind is EndKind.LEFT:
                    break
                if asyncio.get_running_loop().time() - begun_s > _PROVEN_S or ending.kind is EndKind.FENCED:
                    backoff.reset()
                pause_s = 0.0 if ending.kind is EndKind.FENCED else backoff.next_s()
                log.warning(
                    "a life of stage %s is over (%s): %s", self._setup.stage.name, ending.kind.value, ending.message
                )
                await self._pause(pause_s)
        finally:
            await self._drop_engine()
            await access.close()
            self._ended.set()

    def request_stop(self, grace_s: float = GRACE_S) -> None:
        """Leave: no new sessions, what is there may end within `grace_s`; then `run` returns. Returns at once."""
        self._grace_s = grace_s
        self._leaving.set()

    async def stop(self, grace_s: float = GRACE_S) -> None:
        """As `request_stop`, and wait until `run` has ended."""
        self.request_stop(grace_s)
        await self._ended.wait()

    async def _live_once(self, access: Access) -> Ending:
        """Begin a life and see it to its end."""
        engine = await self._require_engine()
        if engine is None:
            return Ending(EndKind.LEFT)
        stage = self._setup.stage
        worker_id = f"{stage.name}-{secrets.token_hex(_ID_BYTES)}"
        entry = lives.Entry(
            stage_id=self._setup.stage_id, stage=stage.name, capacity=stage.capacity, engine=engine.name
        )
        try:
            # Again in each life: a server that has lost everything has lost this, too (S50).
            await agree_on_config(access.redis, self._setup.pipeline.partitions)
            await lives.register_life(access.redis, worker_id, entry)
        except (RedisError, *LOST) as error:
            return Ending(EndKind.BROKEN, f"it can't be registered: {error}")
        life = self._life = self._port.life = StageLife(worker_id, self._setup, engine, access, self.times)
        self._counted = (self.totals, life.stats)
        if self._port.death is not None:
            life.died(self._port.death)
        self._living.set()
        log.info("stage worker %s takes sessions", worker_id)
        leave = asyncio.ensure_future(self._leave_when_asked(life))
        try:
            ending = await life.run()
        finally:
            leave.cancel()
            self._life = self._port.life = None
        self.endings[ending.kind] += 1
        await self._bury(life, ending, access, engine)
        return ending

    async def _leave_when_asked(self, life: StageLife) -> None:
        await self._leaving.wait()
        log.info("stage worker %s takes no more sessions and leaves within %g s", life.worker_id, self._grace_s)
        await life.leave(self._grace_s)

    async def _bury(self, life: StageLife, ending: Ending, access: Access, engine: Engine) -> None:
        """Nothing of the life is left behind, neither in the engine nor in the index of workers."""
        if ending.kind is EndKind.LEFT:
            await self._empty_engine(engine, life.lanes.request_ids())
        if ending.kind is not EndKind.FENCED:
            try:
                async with asyncio.timeout(_GOODBYE_S):
                    await lives.say_goodbye(access.redis, life.worker_id)
            except (RedisError, *LOST) as error:
                log.warning("stage worker %s could not say goodbye: %s", life.worker_id, error)
        if ending.kind is EndKind.ENGINE_LOST:
            await self._drop_engine()
        elif ending.kind is not EndKind.LEFT:
            await self._empty_engine(engine, life.lanes.request_ids())

    async def _require_engine(self) -> Engine | None:
        """The engine, started; None if `stop` came before it was. Only the first start may fail for good."""
        backoff = Backoff(*_RESTART_S)
        while self._engine is None:
            try:
                self._port.death = None
                engine = self._engine = self._build_engine()
                await self._unless_leaving(engine.start(self._port))
                self._check_capacity(engine)
            except Exception:
                await self._drop_engine()
                if self._is_new:
                    raise
                log.exception("the engine of stage %s doesn't start", self._setup.stage.name)
                await self._pause(backoff.next_s())
            if self._leaving.is_set():
                return None
        self._is_new = False
        return self._engine

    def _check_capacity(self, engine: Engine) -> None:
        """Some engines know how many requests they can hold, and none may be placed there that it can't."""
        limit, stage = getattr(engine, "capacity_limit", None), self._setup.stage
        if limit is not None and stage.capacity > limit:
            raise EngineConfigError(
                f"stage {stage.name}: capacity is {stage.capacity}, and its engine {engine.name} holds at most {limit}"
            )

    async def _empty_engine(self, engine: Engine, request_ids: Iterable[str]) -> None:
        """Abort what a life has left; an engine that can't confirm it is stopped and built anew."""
        tasks = [asyncio.ensure_future(engine.abort(request_id)) for request_id in request_ids]
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=self._setup.abort_timeout_s)
        for task in late:
            task.cancel()
        if late or any(task.cancelled() or task.exception() is not None for task in tasks if task.done()):
            log.warning("the engine of stage %s still holds requests of a former life", self._setup.stage.name)
            await self._drop_engine()

    async def _drop_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is None:
            return
        try:
            async with asyncio.timeout(_ENGINE_STOP_S):
                await engine.stop()
        except Exception:
            log.exception("the engine of stage %s doesn't stop", self._setup.stage.name)

    async def _unless_leaving(self, start: Coroutine[Any, Any, None]) -> None:
        starting, leaving = asyncio.ensure_future(start), asyncio.ensure_future(self._leaving.wait())
        try:
            await asyncio.wait({starting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
        finally:
            leaving.cancel()
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await starting

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._leaving.wait()
