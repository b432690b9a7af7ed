"""A conversation with vLLM through the whole system: control worker, stage worker, engine, producer."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

from bargein_client import AsyncBargein, Lifecycle, Output
from bargein_client.errors import BargeinError, ResourceExhaustedError
from stages.pipeline import Pipeline, parse_pipeline
from stages.vllm_engine import VllmEngine
from tests.stages.vllm.bed import SEATS, core_holds, small_options
from tests.system import RunningSystem
from tests.workers.cli_process import Bargein, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bargein_client import AsyncSession

pytestmark = pytest.mark.vllm

HELLO = [72, 101, 108, 108, 111]


@pytest.fixture
def pipeline(tiny_model: Path) -> Pipeline:
    import_module("vllm")  # takes longer than a worker is waited for
    options = copy.deepcopy(small_options(tiny_model))
    sampling = options.pop("sampling")
    stage = {"name": "thinker", "engine": "vllm", "capacity": SEATS - 1, "sampling": sampling, "options": options}
    return parse_pipeline({"partitions": 2, "stages": [stage]}, "test")


def engine_of(system: RunningSystem) -> VllmEngine:
    engine = system.stages[0]._engine
    assert isinstance(engine, VllmEngine)
    return engine


async def events_until(session: AsyncSession, wanted: Callable[[Any], bool]) -> list[Any]:
    events: list[Any] = []
    async with asyncio.timeout(60):
        async for event in session.events():
            events.append(event)
            if wanted(event):
                break
    return events


async def open_soon(client: AsyncBargein) -> AsyncSession:
    """A new worker is known to the control workers a moment later."""
    async with asyncio.timeout(20):
        while True:
            try:
                return await client.open(input_modes=["append_tokens"])
            except ResourceExhaustedError:
                await asyncio.sleep(0.05)


def is_turn_end(event: Any) -> bool:
    return isinstance(event, Output) and event.turn_end


def said_in(events: list[Any]) -> list[int]:
    return [token for event in events if isinstance(event, Output) for token in event.data]


async def test_a_barge_in_in_the_middle_of_an_answer_frees_the_core_and_the_next_epoch_speaks(
    redis_url: str, pipeline: Pipeline
) -> None:
    async with RunningSystem(redis_url, pipeline) as system, AsyncBargein(redis_url) as client:
        engine = engine_of(system)
        long = {"sampling": {"max_tokens": 240}}
        session = await client.open(input_modes=["append_tokens"], runtime_config=long)
        for token in HELLO[:-1]:
            await session.append([token], mode="append_tokens")
        await session.append(HELLO[-1:], mode="append_tokens", final=True)
        heard = await events_until(session, lambda event: isinstance(event, Output))
        assert engine.load().running == 1
        assert (await session.interrupt()).ok
        assert engine.load().slots_used == 0
        assert await core_holds(engine) == 0
        wasted = len(said_in(heard))
        assert wasted < 240

        await session.append(HELLO, mode="append_tokens", final=True)
        heard = await events_until(session, is_turn_end)
        epochs = [event.fence.epoch for event in heard if isinstance(event, Output)]
        assert epochs == sorted(epochs)
        spoken = [event for event in heard if isinstance(event, Output) and event.fence.epoch == 1]
        assert len(said_in(spoken)) == 240
        assert (await session.close()).ok
        assert engine.load().slots_used == 0
        assert await core_holds(engine) == 0


async def test_a_barge_in_empties_a_thinker_a_talker_and_a_voice(redis_url: str, tiny_model: Path) -> None:
    """Two vLLMs and a torch module: tokens are the talker's prompt, its tokens are the voice's sound."""
    options = copy.deepcopy(small_options(tiny_model))
    sampling = {**options.pop("sampling"), "max_tokens": 100}
    model = {"engine": "vllm", "capacity": SEATS - 1, "sampling": sampling, "options": options}
    voice = {"module": "stages.modules.voice:Voice"}
    stages = [
        {"name": "thinker", **model},
        {"name": "talker", **model},
        {"name": "voice", "engine": "torch", "adapter": "stages.modules.spoken:voice_of", "options": voice},
    ]
    pipeline = parse_pipeline({"partitions": 2, "stages": stages}, "test")
    import_module("vllm")
    async with RunningSystem(redis_url, pipeline) as system, AsyncBargein(redis_url) as client:
        engines = [stage._engine for stage in system.stages]

        def held() -> list[int]:
            return [engine.load().slots_used if engine is not None else -1 for engine in engines]

        session = await client.open(input_modes=["append_tokens"])
        for epoch in range(3):
            await session.append(HELLO, mode="append_tokens", final=True)
            heard = await events_until(
                session, lambda event, epoch=epoch: isinstance(event, Output) and event.fence.epoch == epoch
            )
            assert heard[-1].kind == "audio"
            assert held() == [1, 1, 1]
            assert (await session.interrupt()).ok
            assert held() == [0, 0, 0], "all three have let go when the reply comes"
        await session.append(HELLO, mode="append_tokens", final=True)
        heard = await events_until(session, is_turn_end)
        epochs = [event.fence.epoch for event in heard if isinstance(event, Output)]
        assert epochs == sorted(epochs)
        assert (await session.close()).ok
        assert held() == [0, 0, 0]
        for engine in engines[:2]:
            assert isinstance(engine, VllmEngine)
            assert await core_holds(engine) == 0


async def test_i8_sampling_that_the_engine_would_refuse_leaves_a_session_that_can_go_on(
    redis_url: str, pipeline: Pipeline
) -> None:
    async with (
        RunningSystem(redis_url, pipeline),
        AsyncBargein(redis_url) as client,
        await client.open(input_modes=["append_tokens"], runtime_config={"sampling": {"temperature": -1.0}}) as session,
    ):
        with pytest.raises(BargeinError, match="temperature") as refused:
            await session.append(HELLO, mode="append_tokens", final=True)
        assert refused.value.code == "invalid_argument"


def test_s45_a_stage_worker_that_forked_its_core_leaves_when_it_is_told_to(
    redis_url: str, tiny_model: Path, tmp_path: Path
) -> None:
    """vLLM ends its core with a SIGTERM; one that is a fork must not pass that on to the worker's event loop."""
    options = small_options(tiny_model)
    assert options["fork"]
    stage = {"name": "thinker", "engine": "vllm", "capacity": SEATS - 1, "options": options}
    file = tmp_path / "pipeline.json"  # JSON is YAML
    file.write_text(json.dumps({"stages": [stage]}))
    with Bargein("stage", "--stage", "thinker", redis_url=redis_url, pipeline=file) as worker:
        assert wait_until(lambda: "takes sessions" in worker.log, 90), worker.log
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(60) == 0, worker.log
        assert "stage thinker has left" in worker.log


async def test_s41_a_killed_core_ends_its_sessions_within_a_second_and_the_next_ones_run(
    redis_url: str, pipeline: Pipeline
) -> None:
    async with RunningSystem(redis_url, pipeline) as system, AsyncBargein(redis_url) as client:
        worker = system.stages[0]
        first_life = worker.worker_id
        session = await client.open(input_modes=["append_tokens"], runtime_config={"sampling": {"max_tokens": 240}})
        await session.append(HELLO, mode="append_tokens", final=True)
        await events_until(session, lambda event: isinstance(event, Output))
        core = engine_of(system)._core
        assert core is not None
        killed_s = time.monotonic()
        os.kill(core.processes[0].pid or 0, signal.SIGKILL)
        events = await events_until(session, lambda event: isinstance(event, Lifecycle) and event.terminal)
        assert time.monotonic() - killed_s < 2.0, "a second, and one for a busy machine"
        assert events[-1].reason == "stage_lost"
        async with asyncio.timeout(60):
            assert await worker.wait_ready(other_than=first_life) != first_life
        async with await open_soon(client) as following:
            await following.append(HELLO, mode="append_tokens", final=True)
            assert len(said_in(await events_until(following, is_turn_end))) == 8
