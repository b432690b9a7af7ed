"""A cleanup that stays unconfirmed ends with the engine that can't confirm it: no request is leaked for ever (I3)."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio import Redis

from bargein_client import AsyncBargein, Lifecycle, StageTimeoutError
from control.store import keys
from control.store.lives import fetch_lives
from stages.pipeline import Pipeline
from tests.system import RunningSystem
from tests.workers.scripted import ScriptedEngine
from workers.stage import StageWorker


class StuckOnce(ScriptedEngine):
    """An engine whose first life never lets go of a request that was aborted."""

    async def abort(self, request_id: str) -> None:
        if self.starts == 1:
            self.stuck.add(request_id)
        await super().abort(request_id)

    async def stop(self) -> None:
        self.stuck.clear()
        await super().stop()


def pipeline(restart_after_s: float) -> Pipeline:
    session = {
        "cleanup_timeout_s": 0.2,
        "cleanup_backoff_s": 0.1,
        "cleanup_backoff_max_s": 0.2,
        "restart_after_s": restart_after_s,
    }
    control = {"heartbeat_s": 0.5, "heartbeat_interval_s": 0.1}
    stages = [{"name": "only", "engine": "parrot"}]
    return Pipeline.model_validate({"partitions": 2, "session": session, "control": control, "stages": stages})


class System(RunningSystem):
    """One stage with an engine of the test's."""

    def __init__(self, url: str, described: Pipeline, engine: Any) -> None:
        super().__init__(url, described)
        self.stages = [StageWorker(url, described, 0, build_engine=lambda: engine)]


async def test_an_engine_that_never_lets_go_is_restarted_and_its_sessions_are_told(redis_url: str) -> None:
    engine = StuckOnce()
    async with System(redis_url, pipeline(0.6), engine) as system, AsyncBargein(redis_url) as client:
        first_life = system.stages[0].worker_id
        session = await client.open("Ada", input_modes=["append_tokens"])
        await session.append([1], mode="append_tokens")
        try:
            await session.interrupt()
        except StageTimeoutError as error:
            assert error.retryable  # noqa: PT017  it may also be confirmed by the restart, in time
        reasons = [e.reason async for e in session.events() if isinstance(e, Lifecycle) and e.terminal]
        assert reasons == ["stage_lost"]
        async with asyncio.timeout(10):
            assert await system.stages[0].wait_ready(first_life) != first_life
        assert (engine.starts, engine.stops) == (2, 1)
        again = await _open(client, "Bob")
        await again.append([1], mode="append_tokens")
        await again.close()
        async with Redis.from_url(redis_url) as redis:
            lives = await fetch_lives(redis)
            for life in lives:
                assert await redis.hlen(keys.worker_slots(life.worker_id)) == 0
            assert not [key async for key in redis.scan_iter("*:cleanups")]


async def test_an_engine_is_not_restarted_before_its_time(redis_url: str) -> None:
    engine = StuckOnce()
    async with System(redis_url, pipeline(60.0), engine) as system, AsyncBargein(redis_url) as client:
        session = await client.open("Ada", input_modes=["append_tokens"])
        await session.append([1], mode="append_tokens")
        with_timeouts = 0
        while with_timeouts < 3:
            try:
                await session.interrupt()
            except StageTimeoutError:
                with_timeouts += 1
            await session.append([1], mode="append_tokens")
        assert engine.starts == 1
        assert system.stages[0].is_ready
        for request_id in list(engine.stuck):
            engine.free(request_id)
        engine.starts = 2
        await session.close()


async def _open(client: AsyncBargein, session_id: str) -> Any:
    """Once the new life is known to placement."""
    async with asyncio.timeout(10):
        while True:
            try:
                return await client.open(session_id, input_modes=["append_tokens"])
            except Exception as error:
                if not getattr(error, "retryable", False):
                    raise
            await asyncio.sleep(0.05)
