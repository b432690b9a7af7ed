"""The sampling does nothing that the control workers' role may not do."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from bargein_client import AsyncBargein
from stages.pipeline import Pipeline
from tests.security.guarded import GuardedServer
from tests.system import RunningSystem
from tests.workers.control_bed import until
from tests.workers.metrics.scraped import read
from workers.control import ControlWorker
from workers.embedded import require_valkey_binary
from workers.metrics.control import ControlMetrics
from workers.stage import StageWorker

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def guarded() -> Iterator[GuardedServer]:
    with GuardedServer(require_valkey_binary()) as server:
        yield server


async def test_a_control_worker_samples_with_the_rights_of_its_role(guarded: GuardedServer) -> None:
    pipeline = Pipeline.example().model_copy(update={"max_sessions": 8})
    url = guarded.url_of("control")
    system = RunningSystem(url, pipeline)
    worker = ControlWorker(url, pipeline)
    system.controls = [worker]
    system.stages = [StageWorker(guarded.url_of("stage"), pipeline, n) for n in range(len(pipeline.stages))]
    async with system, AsyncBargein(guarded.url_of("producer")) as producer:
        session = await producer.open("call", input_modes=["append_audio_chunk"])
        await session.append(bytes(640))
        metrics = ControlMetrics(worker, pipeline, url, interval_s=0.1)
        task = asyncio.create_task(metrics.run())
        await until(lambda: metrics.sampler.rounds > 1 and metrics.sampler.written_s > 0)
        task.cancel()
        await asyncio.wait([task])
        shown = read(metrics.collect())
    assert shown["bargein_sessions", "phase=open"] == shown["bargein_admission_used"] == 1
    assert shown["bargein_slots_missing"] == shown["bargein_slots_unowned"] == 0
    assert shown.nonzero("bargein_redis_errors_total") == {}
    assert guarded.fetch_denials() == []
