"""The torch engine on features, hidden states that pass from stage to stage, and on a budget for its forwards."""

from __future__ import annotations

import sys
from array import array
from typing import Any

import pytest

from bargein_client import AsyncBargein, Output
from stages.engine import EngineConfigError, EngineRefusal
from stages.pipeline import parse_pipeline
from stages.policy import AppendPlan
from stages.tensors import PackedTensor
from stages.torch_engine import TorchEngine
from tests.stages.ear import Ear, input_for, joined, request_name
from tests.system import RunningSystem

ONE = request_name("one")
MODULES = "tests.stages.faulty_modules"

pytestmark = pytest.mark.torch


def rows(*values: tuple[float, ...]) -> PackedTensor:
    flat = [number for row in values for number in row]
    return PackedTensor("float32", (len(values), len(values[0])), array("f", flat).tobytes())


async def started(module: str, **options: Any) -> tuple[TorchEngine, Ear]:
    engine, ear = TorchEngine({"module": f"{MODULES}:{module}", **options}), Ear()
    await engine.start(ear)
    return engine, ear


def take_tensor(*, output: Any, **_: Any) -> AppendPlan:
    """An adapter: the hidden states as they are."""
    assert isinstance(output.data, PackedTensor)
    return AppendPlan(output.data)


async def test_tokens_become_features_of_their_own_memory() -> None:
    engine, ear = await started("Widening")
    await engine.submit(input_for(ONE, [5, 6, 7, 8, 9], turn=0))
    first, last = await ear.turn_ends(ONE)
    assert (first.kind, first.data.shape, last.data.shape) == ("data", (4, 2), (1, 2))
    assert first.data.torch().tolist() == [[5, 0], [6, 1], [7, 2], [8, 3]]
    assert last.data.torch().tolist() == [[9, 4]]
    assert len(first.data.data) == 4 * 2 * 4
    await engine.stop()


async def test_features_come_in_frames_and_a_turns_rest_is_cut_in_proportion() -> None:
    engine, ear = await started("Narrowing")
    await engine.submit(input_for(ONE, rows((1, 2), (3, 4), (5, 6)), turn=0))
    assert joined(await ear.turn_ends(ONE)) == [3, 7, 11]
    await engine.stop()


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (rows((1, 2, 3)), "has 3 numbers; this stage takes 2"),
        (PackedTensor("int64", (1, 2), bytes(16)), "features are float32 of two dimensions"),
        (PackedTensor("float32", (2,), bytes(8)), "features are float32 of two dimensions"),
        ([1, 2], "takes features, not tokens"),
    ],
)
async def test_i7_features_of_another_form_are_refused(prompt: Any, says: str) -> None:
    engine, _ = await started("Narrowing")
    with pytest.raises(EngineRefusal, match=says) as refused:
        await engine.submit(input_for(ONE, prompt))
    assert refused.value.code == "invalid_argument"
    assert engine.load().slots_used == 0
    await engine.stop()


async def test_a_module_that_says_other_than_it_should_is_refused_at_start() -> None:
    engine = TorchEngine({"module": f"{__name__}:flat_features"})
    with pytest.raises(EngineConfigError, match=r"not a tensor \[1, out, features\]"):
        await engine.start(Ear())


def flat_features() -> Any:
    from tests.stages.faulty_modules import Counting  # noqa: PLC0415  needs torch

    module = Counting()
    module.output_kind = "features"  # type: ignore[attr-defined]
    return module


async def test_hidden_states_pass_from_stage_to_stage_and_a_barge_in_empties_both(redis_url: str) -> None:
    content = {
        "partitions": 2,
        "stages": [
            {"name": "thinker", "engine": "torch", "options": {"module": f"{MODULES}:Widening"}},
            {
                "name": "talker",
                "engine": "torch",
                "adapter": f"{__name__}:take_tensor",
                "options": {"module": f"{MODULES}:Narrowing"},
            },
        ],
    }
    async with (
        RunningSystem(redis_url, parse_pipeline(content, "test")) as system,
        AsyncBargein(redis_url) as client,
        await client.open(input_modes=["append_tokens"]) as session,
    ):
        await session.append([10, 20, 30, 40, 50], mode="append_tokens", final=True)
        said: list[int] = []
        async for event in session.events():
            if isinstance(event, Output):
                said += event.data
                if event.turn_end:
                    break
        assert said == [10, 21, 32, 43, 54]
        await session.interrupt()
        assert [stage.lanes.request_ids() for stage in system.stages] == [[], []]


async def test_a_tensor_is_not_for_listeners_and_ends_its_session_with_a_word(redis_url: str) -> None:
    content = {
        "partitions": 2,
        "stages": [{"name": "thinker", "engine": "torch", "options": {"module": f"{MODULES}:Widening"}}],
    }
    async with RunningSystem(redis_url, parse_pipeline(content, "test")), AsyncBargein(redis_url) as client:
        session = await client.open(input_modes=["append_tokens"])
        await session.append([1], mode="append_tokens", final=True)
        async for event in session.events():
            if getattr(event, "event", "") == "closed":
                assert getattr(event, "reason", "") == "request_failed"
                break


async def test_a_budget_splits_what_would_take_too_long_and_counts_what_did() -> None:
    engine, ear = await started("Slow", budget_ms=10)
    names = [request_name(f"s{number}") for number in range(24)]
    for round_ in range(4):
        for name in names:
            await engine.submit(input_for(name, bytes(320), turn=round_, resumed=round_ > 0))
        for name in names:
            await ear.turn_ends(name, round_ + 1)
    batches = sys.modules[MODULES].LATEST[-1].batches[2:]
    assert batches[0] > 5, "it can't know before it has tried"
    assert max(batches[-8:]) <= 5
    assert engine.load().missed_ticks >= 1
    await engine.stop()


async def test_what_the_states_hold_is_told_and_is_nothing_after_the_aborts() -> None:
    engine, ear = await started("Counting")
    assert engine.load().memory_bytes == 0
    for name in (ONE, request_name("two")):
        await engine.submit(input_for(name, bytes(320)))
        await ear.turn_ends(name)
    assert engine.load().memory_bytes == 2 * 4 * (1 + 7919 + 6)
    await engine.abort(ONE)
    assert engine.load().memory_bytes == 4 * (1 + 7919 + 6)
    await engine.stop()
