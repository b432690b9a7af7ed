"""The engine conformance suite (`stages/conformance.py`), asked of every engine that comes along, and of bad ones."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from msgspec import Struct
from msgspec.structs import replace

from control.core.fence import Fence
from stages.conformance import LIVES, QUESTIONS, RUNNING, Bench, InputKind, ask, check_engine, title_of
from stages.engine import EngineConfigError, EngineRefusal, Load, Output, load_engine
from stages.parrot import ParrotEngine
from stages.tiny_model import QUICK, make_tiny_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from stages.conformance import Question
    from stages.engine import Submission

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Candidate(Struct):
    """An engine under test."""

    label: str
    engine: str
    options: dict[str, Any]
    input_kind: InputKind


CANDIDATES = [
    Candidate("parrot-fast", "parrot", {"pace": "fast"}, "audio"),
    # Twenty times as quick as speech, so that the suite is.
    Candidate("parrot-paced", "parrot", {"frame_ms": 1, "sample_rate_hz": 320_000}, "audio"),
    Candidate("parrot-stream", "parrot", {"pace": "fast", "reply": "stream"}, "tokens"),
    Candidate("parrot-slow-abort", "parrot", {"pace": "fast", "abort_delay_ms": 20}, "audio"),
    Candidate("torch", "torch", {"module": "stages.modules.voice:Voice"}, "audio"),
    Candidate("torch-ticks", "torch", {"module": "stages.modules.voice:Voice", "tick_ms": 2}, "audio"),
    # It asks its core nothing meanwhile: a question counts the loop's tasks.
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


@pytest.fixture(params=[pytest.param(each, id=each.label, marks=MARKS.get(each.engine, [])) for each in CANDIDATES])
def candidate(request: pytest.FixtureRequest) -> Candidate:
    if request.param.engine != "vllm":
        return request.param
    model = str(request.getfixturevalue("contract_model"))
    return Candidate(request.param.label, "vllm", {**request.param.options, "model": model}, request.param.input_kind)


@pytest.fixture(scope="session")
def contract_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def benches() -> AsyncIterator[dict[str, Bench]]:
    """A running engine of each kind, for all questions: some take seconds to start."""
    benches: dict[str, Bench] = {}
    yield benches
    for bench in benches.values():
        await bench.stop()


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.__name__)
async def test_a_guarantee_is_kept(candidate: Candidate, benches: dict[str, Bench], question: Question) -> None:
    bench = benches.get(candidate.label)
    if bench is None:
        bench = benches[candidate.label] = Bench(
            lambda: load_engine(candidate.engine, candidate.options), candidate.input_kind
        )
    answer = await ask(bench, question)
    assert answer.why is None
    if question in LIVES:
        await bench.stop()


# ---- a suite that never said no is not trusted


class _Plain(ParrotEngine):
    """The parrot, without a break between its words."""

    def __init__(self, options: Any = ()) -> None:
        super().__init__({"pace": "fast", **dict(options)})


class _SpeaksAfterAborts(_Plain):
    async def abort(self, request_id: str) -> None:
        lane = self._requests.get(request_id)
        await super().abort(request_id)
        if lane is not None:
            fence = Fence(incarnation=0, epoch=0, turn_id=0, response_seq=0)
            late = Output(request_id=request_id, fence=fence, kind="audio", data=b"late")
            asyncio.get_running_loop().call_later(0.001, self._say_late, late)

    def _say_late(self, late: Output) -> None:
        if self._port is not None:
            self._port.emit(late)


class _KeepsWhatItRefuses(_Plain):
    def load(self) -> Load:
        load = super().load()
        return Load(slots_used=load.slots_used + self._refused, running=load.running)

    _refused = 0

    async def submit(self, submission: Submission) -> None:
        try:
            await super().submit(submission)
        except EngineRefusal:
            self._refused += 1
            raise


class _TakesAnything(_Plain):
    async def submit(self, submission: Submission) -> None:
        try:
            await super().submit(submission)
        except EngineRefusal:
            return


class _NeverEndsATurn(_Plain):
    async def submit(self, submission: Submission) -> None:
        await super().submit(replace(submission, final=False))


class _MixesUpFences(_Plain):
    async def submit(self, submission: Submission) -> None:
        fence = Fence(incarnation=0, epoch=0, turn_id=0, response_seq=0)
        await super().submit(replace(submission, fence=fence))


class _HangsInAborts(_Plain):
    async def abort(self, request_id: str) -> None:
        if request_id in self._requests:
            await asyncio.Event().wait()


class _RaisesInAborts(_Plain):
    async def abort(self, request_id: str) -> None:
        if request_id not in self._requests:
            raise KeyError(request_id)
        await super().abort(request_id)


class _LeavesATask(_Plain):
    async def start(self, port: Any) -> None:
        await super().start(port)
        self._left = asyncio.create_task(asyncio.sleep(0.3), name="left behind")


class _StaysHealthy(_Plain):
    def healthy(self) -> bool:
        return True


class _ForgetsItsRequests(_Plain):
    def load(self) -> Load:
        return Load()


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (_SpeaksAfterAborts, "came after its abort had returned"),
        (_KeepsWhatItRefuses, "load().slots_used is"),
        (_TakesAnything, "it takes what it should refuse as failed_precondition"),
        (_NeverEndsATurn, "not within 0.3 s: the end of turn 1"),
        (_MixesUpFences, "the fences are [(0, 0)], not (3, 3)"),
        (_HangsInAborts, "an abort doesn't return within 0.3 s"),
        (_RaisesInAborts, "it raises KeyError"),
        (_LeavesATask, "tasks are left on the event loop: ['left behind']"),
        (_StaysHealthy, "healthy() is True although it was stopped"),
        (_ForgetsItsRequests, "load().slots_used is 0, and it should hold 1 requests"),
    ],
)
async def test_what_an_engine_does_not_keep_is_said(broken: type[ParrotEngine], says: str) -> None:
    path = f"{broken.__module__}:{broken.__name__}"
    answers = [answer async for answer in check_engine(path, {}, "audio", patience_s=0.3)]
    assert len(answers) == len(QUESTIONS)
    complaints = [answer.why for answer in answers if answer.why is not None]
    assert any(says in complaint for complaint in complaints), complaints
    await asyncio.sleep(0.35)  # until the task that one of them leaves has ended


async def test_an_engine_that_can_not_be_built_is_no_question(tmp_path: Path) -> None:
    with pytest.raises(EngineConfigError, match="there is no module"):
        _ = [answer async for answer in check_engine("tests.no_such:Owl", {}, "audio")]


async def test_every_guarantee_has_a_title_and_a_sentence() -> None:
    assert len({title_of(question) for question in QUESTIONS}) == len(QUESTIONS) == len(RUNNING) + len(LIVES)
    assert all(question.__doc__ for question in QUESTIONS)
