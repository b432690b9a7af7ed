"""The engine conformance suite: what `stages/engine.py` says an engine guarantees, asked of every engine.

Your own engine passes through the same questions:

    BARGEIN_ENGINE=package.module:Class BARGEIN_ENGINE_OPTIONS='{"model": "..."}' \
    BARGEIN_ENGINE_INPUT=tokens make test ARGS=tests/stages/test_engine_contract.py

`BARGEIN_ENGINE_INPUT` is what its prompts are: `audio` (bytes, 16 kHz s16le; the default) or `tokens`.
"""

from __future__ import annotations

import asyncio
import json
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from msgspec import Struct

from stages.engine import Engine, EngineRefusal, Output, load_engine
from tests.stages.ear import Ear, input_for, request_name
from tests.stages.vllm.tiny_model import QUICK, make_tiny_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


pytestmark = pytest.mark.asyncio(loop_scope="module")


class Candidate(Struct):
    """An engine under test. `speech`: half a second, in frames of 20 ms (audio) or a token each (tokens)."""

    label: str
    engine: str
    options: dict[str, Any]
    input_kind: str

    def speech(self, voice: int = 1) -> Any:
        if self.input_kind == "audio":
            return b"".join((voice * 100 + n % 80).to_bytes(2, "little") for n in range(8_000))
        return [voice + n for n in range(25)]

    def pieces(self, voice: int = 1) -> list[Any]:
        speech = self.speech(voice)
        cut = len(speech) // 4 * 2 + 1  # in the middle of a frame and, for audio, of a sample
        return [speech[:cut], speech[cut:]]

    @property
    def nothing(self) -> Any:
        return b"" if self.input_kind == "audio" else []

    @property
    def mode(self) -> str:
        return "append_audio_chunk" if self.input_kind == "audio" else "append_tokens"


CANDIDATES = [
    Candidate("parrot-fast", "parrot", {"pace": "fast"}, "audio"),
    # Twenty times as quick as speech, so that the suite is.
    Candidate("parrot-paced", "parrot", {"frame_ms": 1, "sample_rate_hz": 320_000}, "audio"),
    Candidate("parrot-stream", "parrot", {"pace": "fast", "reply": "stream"}, "tokens"),
    Candidate("parrot-slow-abort", "parrot", {"pace": "fast", "abort_delay_ms": 20}, "audio"),
    Candidate("torch", "torch", {"module": "stages.modules.voice:Voice"}, "audio"),
    Candidate("torch-ticks", "torch", {"module": "stages.modules.voice:Voice", "tick_ms": 2}, "audio"),
    # It asks its core nothing meanwhile: a test counts the loop's tasks.
    Candidate("vllm", "vllm", {**QUICK, "watch_every_ms": 3_000_000, "hang_after_ms": 3_600_000}, "tokens"),
]

MARKS = {
    "torch": [pytest.mark.torch],
    "vllm": [
        pytest.mark.vllm,
        pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM isn't installed (make test-vllm)"),
        pytest.mark.filterwarnings("ignore"),  # vLLM's own and its dependencies'
    ],
}

if "BARGEIN_ENGINE" in os.environ:
    CANDIDATES.append(
        Candidate(
            "yours",
            os.environ["BARGEIN_ENGINE"],
            json.loads(os.environ.get("BARGEIN_ENGINE_OPTIONS", "{}")),
            os.environ.get("BARGEIN_ENGINE_INPUT", "audio"),
        )
    )


@pytest.fixture(params=[pytest.param(each, id=each.label, marks=MARKS.get(each.engine, [])) for each in CANDIDATES])
def candidate(request: pytest.FixtureRequest) -> Candidate:
    if request.param.engine != "vllm":
        return request.param
    model = str(request.getfixturevalue("contract_model"))
    return Candidate(request.param.label, "vllm", {**request.param.options, "model": model}, request.param.input_kind)


@pytest.fixture(scope="session")
def contract_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture
def ear() -> Ear:
    return Ear()


class Switchboard:
    """The port of an engine that serves one test after another."""

    def __init__(self) -> None:
        self.ear = Ear()

    def emit(self, output: Output) -> None:
        self.ear.emit(output)

    def fail(self, request_id: str, message: str) -> None:
        self.ear.fail(request_id, message)

    def died(self, message: str) -> None:
        self.ear.died(message)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[dict[str, tuple[Engine, Switchboard]]]:
    """Engines that take seconds to start, and so do for all tests."""
    running: dict[str, tuple[Engine, Switchboard]] = {}
    yield running
    for engine, _ in running.values():
        await engine.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(
    candidate: Candidate, ear: Ear, running: dict[str, tuple[Engine, Switchboard]]
) -> AsyncIterator[Engine]:
    """The candidate, started and empty."""
    if candidate.engine != "vllm":
        engine = load_engine(candidate.engine, candidate.options)
        await engine.start(ear)
        yield engine
        await engine.stop()
        return
    if candidate.label not in running:
        running[candidate.label] = load_engine(candidate.engine, candidate.options), Switchboard()
        await running[candidate.label][0].start(running[candidate.label][1])
    engine, board = running[candidate.label]
    board.ear = ear
    yield engine
    held: Any = engine
    await asyncio.gather(*(engine.abort(name) for name in list(held._requests)))
    board.ear = Ear()


async def run_past(engine: Engine, candidate: Candidate, ear: Ear, name: str = "past") -> None:
    """Let the engine work for as long as another request's whole turn: what was to come has come."""
    other = request_name(name)
    await engine.submit(input_for(other, candidate.speech(), mode=candidate.mode))
    await ear.turn_ends(other)
    await engine.abort(other)


async def test_a_turn_is_answered_once_and_under_its_fence(engine: Engine, candidate: Candidate, ear: Ear) -> None:
    one = request_name()
    await engine.submit(input_for(one, candidate.speech(), turn=3, mode=candidate.mode))
    outputs = await ear.turn_ends(one)
    await run_past(engine, candidate, ear)
    assert ear.heard(one) == outputs
    assert [output.turn_end for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {(output.fence.turn_id, output.fence.response_seq) for output in outputs} == {(3, 3)}
    assert sum(len(output.data) for output in outputs) > 0


async def test_a_request_lives_through_several_turns(engine: Engine, candidate: Candidate, ear: Ear) -> None:
    one = request_name()
    for turn in range(4):
        await engine.submit(
            input_for(one, candidate.speech(turn + 1), turn=turn, resumed=turn > 0, mode=candidate.mode)
        )
        outputs = await ear.turn_ends(one, turn + 1)
        assert outputs[-1].turn_end
        assert outputs[-1].fence.turn_id == turn
    assert ear.ends(one) == 4
    assert not ear.failed


async def test_turns_of_one_fence_are_all_answered(engine: Engine, candidate: Candidate, ear: Ear) -> None:
    one = request_name()
    for number in range(3):
        await engine.submit(input_for(one, candidate.speech(), resumed=number > 0, mode=candidate.mode))
    await ear.turn_ends(one, 3)
    await run_past(engine, candidate, ear)
    assert ear.ends(one) == 3


async def test_a_turn_may_come_in_pieces_and_ends_with_the_last(engine: Engine, candidate: Candidate, ear: Ear) -> None:
    one, two = request_name("a"), request_name("b")
    first, second = candidate.pieces()
    if candidate.input_kind == "audio":
        await engine.submit(input_for(one, first, final=False, mode=candidate.mode))
        await engine.submit(input_for(one, second, seq=2, resumed=True, mode=candidate.mode))
    else:
        await engine.submit(input_for(one, [*first, *second], mode=candidate.mode))
    await engine.submit(input_for(two, candidate.speech(), mode=candidate.mode))
    await ear.turn_ends(one)
    await ear.turn_ends(two)
    assert sum(len(output.data) for output in ear.heard(one)) == sum(len(output.data) for output in ear.heard(two))


async def test_an_empty_final_input_ends_the_turn(engine: Engine, candidate: Candidate, ear: Ear) -> None:
    one = request_name()
    await engine.submit(input_for(one, candidate.speech(), final=False, mode=candidate.mode))
    await engine.submit(input_for(one, candidate.nothing, seq=2, resumed=True, mode=candidate.mode))
    outputs = await ear.turn_ends(one)
    assert outputs[-1].turn_end


async def test_a_turn_without_any_input_ends_too(engine: Engine, candidate: Candidate, ear: Ear) -> None:
    one = request_name()
    await engine.submit(input_for(one, None, mode="turn_commit_only"))
    outputs = await ear.turn_ends(one)
    assert [(output.turn_end, len(output.data)) for output in outputs] == [(True, 0)]


async def test_outputs_never_go_back_to_an_older_fence(engine: Engine, candidate: Candidate, ear: Ear) -> None:
    one = request_name()
    for turn in range(5):
        await engine.submit(
            input_for(
                one,
                candidate.speech(),
                turn=turn,
                resumed=turn > 0,
                final=turn % 2 == 0,
                mode=candidate.mode,
            )
        )
        await asyncio.sleep(0)
    await ear.until(lambda: any(each.turn_end and each.fence.turn_id == 4 for each in ear.heard(one)))
    turns = [output.fence.turn_id for output in ear.heard(one)]
    assert turns == sorted(turns)
    unfinished = {output.fence.turn_id for output in ear.heard(one) if output.turn_end}
    assert unfinished <= {0, 2, 4}, "only a final input is answered with a turn's end"


async def test_s33_an_abort_of_an_unknown_request_returns_at_once(
    engine: Engine, candidate: Candidate, ear: Ear
) -> None:
    await engine.abort(request_name("never"))
    await engine.abort(request_name("never"))
    await run_past(engine, candidate, ear)
    assert not ear.heard(request_name("never"))


async def test_an_abort_while_speaking_silences_at_once(engine: Engine, candidate: Candidate, ear: Ear) -> None:
    one = request_name()
    await engine.submit(input_for(one, candidate.speech(), mode=candidate.mode))
    await ear.until(lambda: ear.heard(one))
    await engine.abort(one)
    heard = len(ear.heard(one))
    assert engine.load().slots_used == 0
    await run_past(engine, candidate, ear)
    assert len(ear.heard(one)) == heard
    assert not ear.failed


async def test_an_abort_before_the_first_output_leaves_silence(engine: Engine, candidate: Candidate, ear: Ear) -> None:
    one = request_name()
    await engine.submit(input_for(one, candidate.speech(), mode=candidate.mode))
    await engine.abort(one)
    heard = len(ear.heard(one))
    await run_past(engine, candidate, ear)
    assert len(ear.heard(one)) == heard


async def test_an_abort_in_the_middle_of_a_turn_drops_what_was_heard(
    engine: Engine, candidate: Candidate, ear: Ear
) -> None:
    one = request_name()
    await engine.submit(input_for(one, candidate.speech(), final=False, mode=candidate.mode))
    await engine.abort(one)
    heard = len(ear.heard(one))
    assert engine.load().slots_used == 0
    await run_past(engine, candidate, ear)
    assert len(ear.heard(one)) == heard


async def test_s34_an_abort_during_a_submit_wins(engine: Engine, candidate: Candidate, ear: Ear) -> None:
    one = request_name()
    submit = asyncio.create_task(engine.submit(input_for(one, candidate.speech(), mode=candidate.mode)))
    await asyncio.sleep(0)
    await engine.abort(one)
    await asyncio.wait({submit})
    assert isinstance(submit.exception(), EngineRefusal | None)
    heard = len(ear.heard(one))
    await run_past(engine, candidate, ear)
    assert len(ear.heard(one)) == heard
    assert engine.load().slots_used == 0


async def test_s35_an_abort_at_the_turns_end_is_confirmed_once(engine: Engine, candidate: Candidate, ear: Ear) -> None:
    one = request_name()
    await engine.submit(input_for(one, candidate.speech(), mode=candidate.mode))
    await ear.turn_ends(one)
    assert engine.load().slots_used == 1, "a request stays until it is aborted"
    await engine.abort(one)
    assert engine.load().slots_used == 0
    await run_past(engine, candidate, ear)
    assert ear.ends(one) == 1


async def test_an_abort_may_come_twice_and_at_the_same_time(engine: Engine, candidate: Candidate, ear: Ear) -> None:
    one = request_name()
    await engine.submit(input_for(one, candidate.speech(), mode=candidate.mode))
    await asyncio.gather(engine.abort(one), engine.abort(one), engine.abort(one))
    heard = len(ear.heard(one))
    assert engine.load().slots_used == 0
    await engine.abort(one)
    await run_past(engine, candidate, ear)
    assert len(ear.heard(one)) == heard


async def test_an_abort_that_was_cancelled_may_be_repeated(engine: Engine, candidate: Candidate, ear: Ear) -> None:
    one = request_name()
    await engine.submit(input_for(one, candidate.speech(), mode=candidate.mode))
    abort = asyncio.create_task(engine.abort(one))
    await asyncio.sleep(0)
    abort.cancel()
    await asyncio.wait({abort})
    await engine.abort(one)
    heard = len(ear.heard(one))
    assert engine.load().slots_used == 0
    await run_past(engine, candidate, ear)
    assert len(ear.heard(one)) == heard


async def test_an_abort_touches_no_other_request(engine: Engine, candidate: Candidate, ear: Ear) -> None:
    names = [request_name(f"s{number}") for number in range(6)]
    for name in names:
        await engine.submit(input_for(name, candidate.speech(), mode=candidate.mode))
    await asyncio.gather(*(engine.abort(name) for name in names[::2]))
    for name in names[1::2]:
        await ear.turn_ends(name)
    lengths = {sum(len(output.data) for output in ear.heard(name)) for name in names[1::2]}
    assert len(lengths) == 1
    assert engine.load().slots_used == 3


async def test_a_request_id_that_runs_is_not_taken_again(engine: Engine, candidate: Candidate, ear: Ear) -> None:
    one = request_name()
    await engine.submit(input_for(one, candidate.speech(), mode=candidate.mode))
    with pytest.raises(EngineRefusal) as refusal:
        await engine.submit(input_for(one, candidate.speech(), mode=candidate.mode))
    assert refusal.value.code == "failed_precondition"
    await ear.turn_ends(one)
    await run_past(engine, candidate, ear)
    assert ear.ends(one) == 1


async def test_more_input_for_a_request_that_does_not_run_is_refused(
    engine: Engine, candidate: Candidate, ear: Ear
) -> None:
    one = request_name()
    with pytest.raises(EngineRefusal) as refusal:
        await engine.submit(input_for(one, candidate.speech(), resumed=True, mode=candidate.mode))
    assert refusal.value.code == "failed_precondition"
    assert engine.load().slots_used == 0
    await run_past(engine, candidate, ear)
    assert not ear.heard(one)


async def test_a_refused_first_input_keeps_nothing(engine: Engine, candidate: Candidate, ear: Ear) -> None:
    one = request_name()
    with pytest.raises(EngineRefusal) as refusal:
        await engine.submit(input_for(one, object(), mode=candidate.mode))
    assert refusal.value.code == "invalid_argument"
    assert not refusal.value.retryable
    assert engine.load().slots_used == 0
    await engine.submit(input_for(one, candidate.speech(), mode=candidate.mode))
    await ear.turn_ends(one)
    assert not ear.failed


async def test_a_refused_later_input_leaves_the_turn_as_it_was(engine: Engine, candidate: Candidate, ear: Ear) -> None:
    one, two = request_name("a"), request_name("b")
    await engine.submit(input_for(one, candidate.speech(), final=False, mode=candidate.mode))
    with pytest.raises(EngineRefusal):
        await engine.submit(input_for(one, object(), seq=2, turn=1, resumed=True, mode=candidate.mode))
    await engine.submit(input_for(one, candidate.nothing, seq=2, resumed=True, mode=candidate.mode))
    await engine.submit(input_for(two, candidate.speech(), mode=candidate.mode))
    await ear.turn_ends(one)
    await ear.turn_ends(two)
    assert {output.fence.turn_id for output in ear.heard(one)} == {0}
    assert sum(len(output.data) for output in ear.heard(one)) == sum(len(output.data) for output in ear.heard(two))


async def test_load_counts_what_is_held(engine: Engine, candidate: Candidate, ear: Ear) -> None:
    assert engine.load().slots_used == 0
    names = [request_name(f"s{number}") for number in range(3)]
    for held, name in enumerate(names, 1):
        await engine.submit(input_for(name, candidate.speech(), final=held % 2 == 0, mode=candidate.mode))
        load = engine.load()
        assert load.slots_used == held
        assert 0 <= load.running + load.waiting <= held
        assert 0 <= load.utilisation <= 1
        assert load.tick_late_ms >= 0
    for name in names:
        await engine.abort(name)
    assert engine.load().slots_used == 0
    assert engine.load().running == 0
    assert not ear.failed


async def test_fifty_requests_at_once_are_all_answered(engine: Engine, candidate: Candidate, ear: Ear) -> None:
    names = [request_name(f"s{number}") for number in range(50)]
    await asyncio.gather(
        *(
            engine.submit(input_for(name, candidate.speech(number), turn=number, mode=candidate.mode))
            for number, name in enumerate(names)
        )
    )
    for number, name in enumerate(names):
        outputs = await ear.turn_ends(name)
        assert {output.fence.turn_id for output in outputs} == {number}
        assert sum(output.turn_end for output in outputs) == 1
    assert engine.load().slots_used == 50
    await asyncio.gather(*(engine.abort(name) for name in names))
    assert engine.load().slots_used == 0
    assert engine.healthy()


async def test_stop_while_speaking_ends_cleanly(candidate: Candidate, ear: Ear) -> None:
    before = asyncio.all_tasks()
    engine = load_engine(candidate.engine, candidate.options)
    await engine.start(ear)
    assert engine.healthy()
    for number in range(5):
        name = request_name(f"s{number}")
        await engine.submit(input_for(name, candidate.speech(), mode=candidate.mode))
    await ear.until(lambda: ear.outputs)
    await engine.stop()
    heard = len(ear.outputs)
    assert not engine.healthy()
    assert asyncio.all_tasks() == before
    # Long enough for a timer that was forgotten: a frame of any candidate is shorter.
    await asyncio.sleep(0.05)
    assert len(ear.outputs) == heard
    assert not ear.deaths
    assert not ear.failed


async def test_a_fresh_engine_works_after_another_was_stopped(candidate: Candidate, ear: Ear) -> None:
    for life in range(2):
        engine = load_engine(candidate.engine, candidate.options)
        await engine.start(ear)
        await run_past(engine, candidate, ear, f"life{life}")
        await engine.stop()
    assert not ear.deaths
