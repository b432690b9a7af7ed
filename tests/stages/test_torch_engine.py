"""The torch engine: batches, culprits, states and threads."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from array import array
from pathlib import Path
from typing import Any

import pytest

from stages.engine import EngineConfigError, EngineRefusal
from stages.torch_engine import TorchEngine
from tests.stages.ear import Ear, input_for, joined, request_name

ONE, TWO = request_name("one"), request_name("two")
FRAME = 160
POISON = (12_345).to_bytes(2, "little")
MODULES = "tests.stages.faulty_modules"

needs_torch = pytest.mark.torch


def silence(frames: int) -> bytes:
    return bytes(2 * FRAME * frames)


def poisoned_frame() -> bytes:
    return POISON + bytes(2 * FRAME - 2)


def samples(data: Any) -> list[int]:
    return list(array("h", data))


async def started(module: str, **options: Any) -> tuple[TorchEngine, Ear]:
    engine, ear = TorchEngine({"module": f"{MODULES}:{module}", **options}), Ear()
    await engine.start(ear)
    return engine, ear


def latest() -> Any:
    return sys.modules[MODULES].LATEST[-1]


@needs_torch
async def test_state_is_kept_from_frame_to_frame_and_from_turn_to_turn() -> None:
    engine, ear = await started("Counting")
    await engine.submit(input_for(ONE, silence(2), turn=0))
    await engine.submit(input_for(ONE, silence(1), turn=1, resumed=True))
    outputs = await ear.turn_ends(ONE, 2)
    assert [samples(output.data) for output in outputs] == [[n] * FRAME for n in range(3)]
    assert [output.turn_end for output in outputs] == [False, True, True]
    assert outputs[0].metadata == {"sample_rate_hz": 16_000}
    await engine.stop()


@needs_torch
async def test_requests_that_are_ready_together_share_one_forward() -> None:
    engine, ear = await started("Counting")
    names = [request_name(f"s{number}") for number in range(20)]
    for name in names:
        await engine.submit(input_for(name, silence(3)))
    for name in names:
        assert samples(joined(await ear.turn_ends(name))) == [0] * FRAME + [1] * FRAME + [2] * FRAME
    assert latest().batches == [1, 2, 20, 20, 20], "two tries on silence, then three ticks"
    await engine.stop()


@needs_torch
async def test_a_batch_is_bounded_and_nobody_is_left_out() -> None:
    engine, ear = await started("Counting", max_batch=8)
    names = [request_name(f"s{number}") for number in range(20)]
    for name in names:
        await engine.submit(input_for(name, silence(3)))
    for name in names:
        await ear.turn_ends(name)
    assert latest().batches[2:] == [8, 8, 8, 8, 8, 8, 8, 4]
    heard = [output.request_id for output in ear.outputs]
    assert heard[:20] == names, "nobody's second frame goes before another's first"
    await engine.stop()


@needs_torch
async def test_input_is_cut_into_frames_however_it_comes() -> None:
    engine, ear = await started("Counting")
    sound = bytes(range(256)) * 5  # four frames
    pieces = [sound[:1], sound[1:333], sound[333:1279], sound[1279:]]
    for index, piece in enumerate(pieces):
        await engine.submit(input_for(ONE, piece, final=index == 3, seq=index + 1, resumed=index > 0))
    await engine.submit(input_for(TWO, sound))
    assert joined(await ear.turn_ends(ONE)) == joined(await ear.turn_ends(TWO))
    await engine.stop()


@needs_torch
async def test_the_end_of_a_turn_is_padded_for_the_module_and_cut_for_the_listener() -> None:
    engine, ear = await started("Counting")
    await engine.submit(input_for(ONE, silence(1) + bytes(2 * 40), turn=0))
    await engine.submit(input_for(ONE, silence(1), turn=1, resumed=True))
    outputs = await ear.turn_ends(ONE, 2)
    assert [len(output.data) // 2 for output in outputs] == [FRAME, 40, FRAME]
    assert samples(outputs[2].data) == [2] * FRAME, "the padded frame counted"
    await engine.stop()


@needs_torch
async def test_output_of_another_length_is_cut_in_proportion() -> None:
    engine, ear = await started("Doubling")
    await engine.submit(input_for(ONE, [1, 2, 3, 4, 5, 6], mode="append_tokens"))
    outputs = await ear.turn_ends(ONE)
    assert [samples(output.data) for output in outputs] == [[1, 1, 2, 2, 3, 3, 4, 4], [5, 5, 6, 6]]
    assert {output.kind for output in outputs} == {"audio"}
    await engine.stop()


@needs_torch
async def test_tokens_become_tokens() -> None:
    engine, ear = await started("Reversing")
    await engine.submit(input_for(ONE, {"tokens": [1, 2, 3, 4]}, mode="append_tokens"))
    assert joined(await ear.turn_ends(ONE)) == [-1, -2, -3, -4]
    with pytest.raises(EngineRefusal, match="takes tokens, not audio"):
        await engine.submit(input_for(TWO, b"ab"))
    await engine.stop()


@needs_torch
async def test_an_unfinished_turn_is_heard_but_not_ended_when_the_next_begins() -> None:
    engine, ear = await started("Counting")
    await engine.submit(input_for(ONE, silence(1) + bytes(3), turn=0, final=False))
    await engine.submit(input_for(ONE, silence(1), turn=1, resumed=True))
    outputs = await ear.turn_ends(ONE)
    assert [(each.fence.turn_id, len(each.data), each.turn_end) for each in outputs] == [
        (0, 2 * FRAME, False),
        (0, 2, False),
        (1, 2 * FRAME, True),
    ]
    await engine.stop()


@needs_torch
async def test_half_a_sample_at_the_end_is_refused_and_changes_nothing() -> None:
    engine, ear = await started("Counting")
    await engine.submit(input_for(ONE, b"abc", final=False))
    with pytest.raises(EngineRefusal, match="half a sample"):
        await engine.submit(input_for(ONE, b"", resumed=True))
    await engine.submit(input_for(ONE, b"d", resumed=True))
    assert joined(await ear.turn_ends(ONE)) == b"abcd"
    await engine.stop()


@needs_torch
@pytest.mark.parametrize("module", ["Poisonable", "NotANumber"])
async def test_s42_a_frame_that_the_module_cannot_compute_fails_its_request_only(module: str) -> None:
    engine, ear = await started(module)
    names = [request_name(f"s{number}") for number in range(6)]
    culprit = names[3]
    for name in names:
        sound = silence(2) + (poisoned_frame() if name == culprit else silence(1)) + silence(2)
        await engine.submit(input_for(name, sound))
    for name in names:
        if name != culprit:
            outputs = await ear.turn_ends(name)
            assert [samples(output.data)[0] for output in outputs] == [0, 1, 2, 3, 4], "no frame ran twice"
    assert list(ear.failed) == [culprit]
    assert len(ear.heard(culprit)) == 2
    assert engine.load().slots_used == 5
    assert engine.healthy()
    assert not ear.deaths
    await engine.abort(culprit)
    with pytest.raises(EngineRefusal, match="does not run"):
        await engine.submit(input_for(culprit, silence(1), resumed=True))
    await engine.stop()


@needs_torch
async def test_a_lone_culprit_does_not_kill_the_engine() -> None:
    engine, ear = await started("Poisonable")
    await engine.submit(input_for(ONE, poisoned_frame()))
    await ear.until(lambda: ear.failed)
    assert "poison" in ear.failed[ONE]
    await engine.submit(input_for(TWO, silence(1)))
    await ear.turn_ends(TWO)
    assert not ear.deaths
    await engine.stop()


@needs_torch
async def test_s41_a_module_that_fails_even_on_silence_is_the_engines_death() -> None:
    engine, ear = await started("BreaksForGood")
    await engine.submit(input_for(TWO, silence(1)))
    await ear.turn_ends(TWO)
    await engine.submit(input_for(ONE, poisoned_frame()))
    await ear.until(lambda: ear.deaths)
    assert len(ear.deaths) == 1
    assert "device-side fault" in ear.deaths[0]
    assert not engine.healthy()
    assert engine.load().slots_used == 0
    with pytest.raises(EngineRefusal):
        await engine.submit(input_for(request_name("three"), silence(1)))
    await engine.abort(ONE)
    await engine.stop()


@pytest.fixture
def gate() -> Any:
    """The gate of `Gated`, closed; opened after the test, whatever happened."""
    pytest.importorskip("torch")
    from tests.stages.faulty_modules import Gated  # noqa: PLC0415  needs torch

    Gated.entered.clear()
    Gated.gate.clear()
    yield Gated
    Gated.gate.set()


@needs_torch
async def test_an_abort_waits_for_the_forward_that_holds_the_request_and_no_longer(gate: Any) -> None:
    engine, ear = await started("Gated")
    await engine.submit(input_for(ONE, poisoned_frame()))
    await asyncio.to_thread(gate.entered.wait)
    await engine.submit(input_for(TWO, silence(1)))
    await engine.abort(TWO)  # not in the forward: nothing to wait for
    abort = asyncio.create_task(engine.abort(ONE))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not abort.done(), "the forward still holds it"
    assert engine.load().slots_used == 1
    gate.gate.set()
    await abort
    assert engine.load().slots_used == 0
    assert not ear.outputs
    assert not ear.failed
    await engine.stop()


@needs_torch
async def test_an_abort_that_is_not_confirmed_in_time_says_so_and_can_be_repeated(gate: Any) -> None:
    engine, ear = await started("Gated", abort_timeout_ms=30, hang_after_ms=60)
    await engine.submit(input_for(ONE, poisoned_frame()))
    await asyncio.to_thread(gate.entered.wait)
    with pytest.raises(TimeoutError, match="forward"):
        await engine.abort(ONE)
    assert engine.load().slots_used == 1
    with pytest.raises(EngineRefusal, match="being aborted"):
        await engine.submit(input_for(ONE, silence(1), resumed=True))
    while engine.healthy():  # noqa: ASYNC110  an engine is asked how it is, it doesn't tell
        await asyncio.sleep(0.01)
    gate.gate.set()
    await engine.abort(ONE)
    assert engine.load().slots_used == 0
    assert engine.healthy()
    assert not ear.outputs
    await engine.stop()


@needs_torch
async def test_input_that_comes_during_a_forward_waits_for_the_next(gate: Any) -> None:
    engine, ear = await started("Gated")
    await engine.submit(input_for(ONE, poisoned_frame(), final=False))
    await asyncio.to_thread(gate.entered.wait)
    await engine.submit(input_for(ONE, silence(1), resumed=True))
    await engine.submit(input_for(TWO, silence(1)))
    await asyncio.sleep(0.05)
    gate.gate.set()
    assert len(await ear.turn_ends(ONE)) == 2
    await ear.turn_ends(TWO)
    assert latest().batches[2:] == [1, 2]
    assert engine.load().tick_late_ms >= 40
    await engine.stop()


@needs_torch
async def test_an_aborted_requests_state_is_gone_from_memory() -> None:
    import torch  # noqa: PLC0415  needs torch

    def states() -> list[torch.Tensor]:
        gc.collect()
        # Counting's state has a tensor of 7919 elements, which no other tensor has.
        return [each for each in gc.get_objects() if type(each) is torch.Tensor and each.shape[-1:] == (7919,)]

    engine, ear = await started("Counting")
    names = [request_name(f"s{number}") for number in range(8)]
    for name in names:
        await engine.submit(input_for(name, silence(3)))
    for name in names:
        await ear.turn_ends(name)
    await engine.abort(names[0])
    sizes = [each.untyped_storage().nbytes() for each in states()]
    assert sizes == [7919 * 4] * 7, "and none of the others is a window on a batch, which would keep it"
    await asyncio.gather(*(engine.abort(name) for name in names))
    assert not states()
    await engine.stop()


@needs_torch
async def test_ticks_keep_their_distance_and_gather_what_comes_meanwhile() -> None:
    engine, ear = await started("Counting", tick_ms=40)
    loop = asyncio.get_running_loop()
    begun = loop.time()
    names = [request_name(f"s{number}") for number in range(3)]
    for name in names:
        await engine.submit(input_for(name, silence(4)))
        await asyncio.sleep(0.001)
    for name in names:
        await ear.turn_ends(name)
    assert loop.time() - begun > 0.1
    assert max(latest().batches[3:]) == 3
    await engine.stop()


@needs_torch
async def test_the_model_thread_ends_with_the_engine() -> None:
    engine, _ = await started("Counting")
    assert any(thread.name == "torch-engine" for thread in threading.enumerate())
    await engine.stop()
    for thread in threading.enumerate():
        if thread.name == "torch-engine":
            thread.join(10)
    assert not any(thread.name == "torch-engine" for thread in threading.enumerate())


@needs_torch
async def test_more_requests_or_input_than_allowed_is_refused() -> None:
    engine, ear = await started("Counting", max_requests=1, max_backlog_frames=3)
    with pytest.raises(EngineRefusal) as refusal:
        await engine.submit(input_for(ONE, silence(4)))
    assert refusal.value.code == "resource_exhausted"
    await engine.submit(input_for(ONE, silence(3)))
    with pytest.raises(EngineRefusal) as refusal:
        await engine.submit(input_for(TWO, silence(1)))
    assert (refusal.value.code, refusal.value.retryable) == ("resource_exhausted", True)
    await ear.turn_ends(ONE)
    await engine.stop()


@needs_torch
@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("WithoutFrame", "frame_samples is None"),
        ("WithoutState", "no method initial_state"),
        ("GrowingState", "initial_state.. gives"),
        ("ForgetsTheBatch", r"not a tensor \[2, out\]"),
        ("ReturnsNoState", "did not return a tuple"),
        ("KeepsAnObject", "a state holds a object"),
        ("not_a_module", "not a torch.nn.Module"),
        ("Missing", "has no 'Missing'"),
    ],
)
async def test_a_module_that_breaks_its_contract_is_refused_at_start(module: str, message: str) -> None:
    engine = TorchEngine({"module": f"{MODULES}:{module}"})
    with pytest.raises(EngineConfigError, match=message):
        await engine.start(Ear())
    await engine.stop()


@needs_torch
async def test_wrong_module_options_and_devices_are_refused_at_start() -> None:
    for options, message in (
        ({"module_options": {"colour": 1}}, "colour"),
        ({"device": "abacus"}, "abacus"),
    ):
        engine = TorchEngine({"module": f"{MODULES}:Counting", **options})
        with pytest.raises(EngineConfigError, match=message):
            await engine.start(Ear())
        await engine.stop()


async def test_a_missing_torch_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "stages.torch_batch", raising=False)
    engine = TorchEngine({"module": f"{MODULES}:Counting"})
    with pytest.raises(EngineConfigError, match="extra `torch`"):
        await engine.start(Ear())
    await engine.stop()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "module: is missing"),
        ({"module": "a:B", "threads": 2}, "threads: unknown option; allowed are module, module_options"),
        ({"module": "a:B", "num_threads": 0}, "num_threads: Expected `int` >= 1"),
        ({"module": "a:B", "tick_ms": -1}, "tick_ms: Expected `float` >= 0"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineConfigError, match=message):
        TorchEngine(options)


async def test_an_engine_that_is_not_started_takes_nothing() -> None:
    engine = TorchEngine({"module": f"{MODULES}:Counting"})
    assert not engine.healthy()
    with pytest.raises(EngineRefusal, match="not running"):
        await engine.submit(input_for(ONE, silence(1)))
    await engine.stop()


LEAVES_DURING_A_FORWARD = """
import asyncio
from stages.engine import load_engine
from tests.stages.ear import Ear, input_for, request_name

async def main():
    engine, ear = load_engine("torch", {"module": "stages.modules.voice:Voice"}), Ear()
    await engine.start(ear)
    await engine.submit(input_for(request_name(), bytes(640 * 1000)))
    await ear.until(lambda: ear.outputs)

asyncio.run(main())
"""


@needs_torch
def test_a_process_that_ends_during_a_forward_ends_in_order() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LEAVES_DURING_A_FORWARD],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
