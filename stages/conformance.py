"""The engine contract as questions: each guarantee of `stages/engine.py` that can be asked of a running engine.

Responsible for asking any engine the same, one's own too (`bargein engine check`), and for saying in a sentence what
was expected and what came. Leaves how an engine is built and found to `load_engine`. Runs models. A question says no
with `NotKept`; one that hears nothing for `patience_s` says that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from control.core.fence import Fence
from control.core.requests import request_id as build_request_id
from stages.engine import Engine, EngineRefusal, Load, Output, Submission, load_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

InputKind = Literal["audio", "tokens"]

PATIENCE_S = 60.0
# A timer that was forgotten has gone off by then.
AFTERWARDS_S = 0.05
SAMPLES = 8_000  # half a second at 16 kHz
TOKENS = 25


class NotKept(Exception):
    """A guarantee that the engine doesn't keep. The message says what was expected and what came."""


class Answer(Struct, frozen=True, kw_only=True):
    """What became of one question. `why` is None if the guarantee is kept."""

    question: str
    why: str | None
    took_s: float


class Bench:
    """An engine and the ear that listens to it. `outputs`, `failed` and `deaths`: what it has said since it started.

    `input_kind`: what its prompts are; audio is 16 kHz s16le.
    """

    def __init__(self, build: Callable[[], Engine], input_kind: InputKind, patience_s: float = PATIENCE_S) -> None:
        self.build = build
        self.input_kind: InputKind = input_kind
        self.patience_s = patience_s
        self.outputs: list[Output] = []
        self.failed: dict[str, str] = {}
        self.deaths: list[str] = []
        self._engine: Engine | None = None
        self._news = asyncio.Event()
        self._names: list[str] = []
        self._count = 0

    # ---- the engine's port

    def emit(self, output: Output) -> None:
        """See `EnginePort.emit`."""
        self.outputs.append(output)
        self._news.set()

    def fail(self, request_id: str, message: str) -> None:
        """See `EnginePort.fail`."""
        if request_id in self.failed:
            self.deaths.append(f"it let request {request_id} fail twice: {message}")
        self.failed[request_id] = message
        self._news.set()

    def died(self, message: str) -> None:
        """See `EnginePort.died`."""
        self.deaths.append(message)
        self._news.set()

    # ---- its life

    @property
    def engine(self) -> Engine:
        """The running one."""
        assert self._engine is not None
        return self._engine

    @property
    def load(self) -> Load:
        """What the engine says of itself."""
        return self.engine.load()

    async def start(self) -> Engine:
        """Start one, unless it runs."""
        if self._engine is None:
            engine = self.build()
            await engine.start(self)
            self._engine = engine
        return self._engine

    async def stop(self) -> None:
        """Stop it, if it runs."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.stop()

    def forget(self) -> None:
        """Give the engine up as it is: it can't even be stopped."""
        self._engine = None
        self._names.clear()

    async def clear(self) -> None:
        """Abort every request of the last question, and forget what was heard."""
        names, self._names = self._names, []
        if self._engine is not None:
            await self.abort(*names)
        self.outputs.clear()
        self.failed.clear()
        self.deaths.clear()

    # ---- speaking with it

    def name(self) -> str:
        """A request id that no one has used."""
        self._count += 1
        name = build_request_id(f"check-{self._count}", 0, 0, 0)
        self._names.append(name)
        return name

    def speech(self, voice: int = 1) -> Any:
        """Half a second, or some tokens."""
        if self.input_kind == "audio":
            return b"".join((voice * 100 + n % 80).to_bytes(2, "little") for n in range(SAMPLES))
        return [voice + n for n in range(TOKENS)]

    @property
    def nothing(self) -> Any:
        """A prompt without content."""
        return b"" if self.input_kind == "audio" else []

    async def say(
        self,
        name: str,
        prompt: Any,
        *,
        final: bool = True,
        turn: int = 0,
        seq: int = 1,
        resumed: bool = False,
        mode: str | None = None,
    ) -> None:
        """Submit. Raises what the engine raises."""
        submission = Submission(
            request_id=name,
            session_id="check",
            stage_id=0,
            fence=Fence(incarnation=0, epoch=0, turn_id=turn, response_seq=turn),
            seq=seq,
            turn_seq=1,
            mode=mode or ("append_audio_chunk" if self.input_kind == "audio" else "append_tokens"),
            prompt=prompt,
            final=final,
            resumed=resumed,
        )
        await self.engine.submit(submission)

    async def is_refused(self, code: str, name: str, prompt: Any, **more: Any) -> EngineRefusal:
        """Submit what must be refused as `code`."""
        try:
            await self.say(name, prompt, **more)
        except EngineRefusal as refusal:
            expect(refusal.code == code, f"it refuses with {refusal.code}, not {code}: {refusal.message}")
            return refusal
        raise NotKept(f"it takes what it should refuse as {code}")

    def heard(self, name: str) -> list[Output]:
        """The outputs of a request."""
        return [output for output in self.outputs if output.request_id == name]

    def length(self, name: str) -> int:
        """How much it has said: bytes or tokens."""
        return sum(len(output.data) for output in self.heard(name))

    def ends(self, name: str) -> int:
        """How many of its turns have ended."""
        return sum(output.turn_end for output in self.heard(name))

    async def until(self, holds: Callable[[], object], what: str) -> None:
        """Wait for news until it holds."""
        try:
            async with asyncio.timeout(self.patience_s):
                while not holds():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            more = f"; it has died: {self.deaths}" if self.deaths else f"; failed: {self.failed}" if self.failed else ""
            raise NotKept(f"not within {self.patience_s:g} s: {what}{more}") from None

    async def turn_ends(self, name: str, count: int = 1) -> list[Output]:
        """Everything heard of a request, once so many of its turns have ended."""
        await self.until(lambda: self.ends(name) >= count, f"the end of turn {count} of {name}")
        return self.heard(name)

    async def abort(self, *names: str) -> None:
        """Abort, all at once."""
        try:
            async with asyncio.timeout(self.patience_s):
                await asyncio.gather(*(self.engine.abort(name) for name in names))
        except TimeoutError:
            raise NotKept(f"an abort doesn't return within {self.patience_s:g} s, or raises TimeoutError") from None

    async def pass_time(self) -> None:
        """As long as another request's whole turn takes: what was to come has come."""
        other = self.name()
        await self.say(other, self.speech())
        await self.turn_ends(other)
        await self.abort(other)

    async def is_silent(self, name: str, since: int) -> None:
        """Nothing more is heard of a request that is gone."""
        await self.pass_time()
        await asyncio.sleep(AFTERWARDS_S)
        more = len(self.heard(name)) - since
        expect(not more, f"{more} outputs of a request came after its abort had returned")

    def holds(self, count: int) -> None:
        """It says that it holds so many requests."""
        found = self.load.slots_used
        expect(found == count, f"load().slots_used is {found}, and it should hold {count} requests")


def expect(holds: object, otherwise: str) -> None:
    """Raise `NotKept` if it doesn't hold."""
    if not holds:
        raise NotKept(otherwise)


Question = Callable[[Bench], Awaitable[None]]


# ---- turns


async def a_turn_is_answered_once_and_under_its_fence(bench: Bench) -> None:
    """One output has `turn_end`, the last one, and all carry the turn's fence."""
    one = bench.name()
    await bench.say(one, bench.speech(), turn=3)
    outputs = list(await bench.turn_ends(one))
    await bench.pass_time()
    expect(bench.heard(one) == outputs, "more came after the turn's end")
    ends = [output.turn_end for output in outputs]
    expect(ends == [False] * (len(ends) - 1) + [True], "an output with turn_end is not the last, or there are several")
    fences = {(output.fence.turn_id, output.fence.response_seq) for output in outputs}
    expect(fences == {(3, 3)}, f"the fences are {sorted(fences)}, not (3, 3)")
    expect(bench.length(one) > 0, "there is no data in the outputs")


async def a_request_lives_through_several_turns(bench: Bench) -> None:
    """It stays between its turns, and each is answered."""
    one = bench.name()
    for turn in range(4):
        await bench.say(one, bench.speech(turn + 1), turn=turn, resumed=turn > 0)
        last = (await bench.turn_ends(one, turn + 1))[-1]
        expect(last.turn_end, f"the last output of turn {turn} has no turn_end")
        expect(last.fence.turn_id == turn, f"turn {turn} ends under the fence of turn {last.fence.turn_id}")
    expect(bench.ends(one) == 4, f"four turns have {bench.ends(one)} ends")
    expect(not bench.failed, f"requests failed: {bench.failed}")


async def turns_of_one_fence_are_all_answered(bench: Bench) -> None:
    """Three final inputs with the same fence have three answers."""
    one = bench.name()
    for number in range(3):
        await bench.say(one, bench.speech(), resumed=number > 0)
    await bench.turn_ends(one, 3)
    await bench.pass_time()
    expect(bench.ends(one) == 3, f"three turns have {bench.ends(one)} ends")


async def a_turn_may_come_in_pieces(bench: Bench) -> None:
    """Cut anywhere, for audio even inside a sample, it is answered as the whole."""
    one, two = bench.name(), bench.name()
    speech = bench.speech()
    cut = len(speech) // 4 * 2 + 1
    if bench.input_kind == "audio":
        await bench.say(one, speech[:cut], final=False)
        await bench.say(one, speech[cut:], seq=2, resumed=True)
    else:
        await bench.say(one, speech)
    await bench.say(two, bench.speech())
    await bench.turn_ends(one)
    await bench.turn_ends(two)
    pieces, whole = bench.length(one), bench.length(two)
    expect(pieces == whole, f"in pieces it is answered with {pieces}, as a whole with {whole}")


async def an_empty_final_input_ends_the_turn(bench: Bench) -> None:
    """The end of a turn may come without content."""
    one = bench.name()
    await bench.say(one, bench.speech(), final=False)
    await bench.say(one, bench.nothing, seq=2, resumed=True)
    expect((await bench.turn_ends(one))[-1].turn_end, "the last output has no turn_end")


async def a_turn_without_any_input_ends_too(bench: Bench) -> None:
    """A `turn_commit_only` as the first input is answered with an empty output that has `turn_end`."""
    one = bench.name()
    await bench.say(one, None, mode="turn_commit_only")
    found = [(output.turn_end, len(output.data)) for output in await bench.turn_ends(one)]
    expect(found == [(True, 0)], f"it is answered with (turn_end, length) {found}, not one empty output")


async def outputs_never_go_back_to_an_older_fence(bench: Bench) -> None:
    """A higher turn makes what is left of the lower ones worthless."""
    one = bench.name()
    for turn in range(5):
        await bench.say(one, bench.speech(), turn=turn, resumed=turn > 0, final=turn % 2 == 0)
        await asyncio.sleep(0)
    await bench.until(lambda: any(o.turn_end and o.fence.turn_id == 4 for o in bench.heard(one)), "the end of turn 4")
    turns = [output.fence.turn_id for output in bench.heard(one)]
    expect(turns == sorted(turns), f"turns come in the order {turns}")
    ended = {output.fence.turn_id for output in bench.heard(one) if output.turn_end}
    expect(ended <= {0, 2, 4}, f"turns {sorted(ended)} have ended, and only 0, 2 and 4 had a final input")


# ---- aborts


async def an_abort_of_an_unknown_request_returns(bench: Bench) -> None:
    """S33: it may come before the first submit, which then never comes."""
    never = bench.name()
    await bench.abort(never)
    await bench.abort(never)
    await bench.pass_time()
    expect(not bench.heard(never), "something is heard of a request that never was")


async def an_abort_while_speaking_silences_at_once(bench: Bench) -> None:
    """Once it has returned, nothing of the request is held or said any more (I2)."""
    one = bench.name()
    await bench.say(one, bench.speech())
    await bench.until(lambda: bench.heard(one), "a first output")
    await bench.abort(one)
    since = len(bench.heard(one))
    bench.holds(0)
    await bench.is_silent(one, since)
    expect(not bench.failed, f"an aborted request fails: {bench.failed}")


async def an_abort_before_the_first_output_leaves_silence(bench: Bench) -> None:
    """The input was accepted, and nothing was said yet."""
    one = bench.name()
    await bench.say(one, bench.speech())
    await bench.abort(one)
    await bench.is_silent(one, len(bench.heard(one)))


async def an_abort_in_the_middle_of_a_turn_drops_what_was_heard(bench: Bench) -> None:
    """The turn's end will never come."""
    one = bench.name()
    await bench.say(one, bench.speech(), final=False)
    await bench.abort(one)
    since = len(bench.heard(one))
    bench.holds(0)
    await bench.is_silent(one, since)


async def an_abort_during_a_submit_wins(bench: Bench) -> None:
    """S34: the submit may be refused or return; nothing of it stays."""
    one = bench.name()
    submit = asyncio.ensure_future(bench.say(one, bench.speech()))
    await asyncio.sleep(0)
    await bench.abort(one)
    await asyncio.wait({submit}, timeout=bench.patience_s)
    expect(submit.done(), "the submit doesn't return")
    error = submit.exception()
    expect(isinstance(error, EngineRefusal | None), f"the submit raises {error!r}")
    await bench.is_silent(one, len(bench.heard(one)))
    bench.holds(0)


async def an_abort_at_the_turns_end_is_confirmed(bench: Bench) -> None:
    """S35: a request stays until it is aborted, also when it has nothing to do."""
    one = bench.name()
    await bench.say(one, bench.speech())
    await bench.turn_ends(one)
    bench.holds(1)
    await bench.abort(one)
    bench.holds(0)
    await bench.pass_time()
    expect(bench.ends(one) == 1, f"one turn has {bench.ends(one)} ends")


async def an_abort_may_come_twice_and_at_the_same_time(bench: Bench) -> None:
    """Each of them returns, and once is enough."""
    one = bench.name()
    await bench.say(one, bench.speech())
    await bench.abort(one, one, one)
    since = len(bench.heard(one))
    bench.holds(0)
    await bench.abort(one)
    await bench.is_silent(one, since)


async def an_abort_that_was_cancelled_may_be_repeated(bench: Bench) -> None:
    """The worker's patience ends before the engine's."""
    one = bench.name()
    await bench.say(one, bench.speech())
    abort = asyncio.ensure_future(bench.engine.abort(one))
    await asyncio.sleep(0)
    abort.cancel()
    await asyncio.wait({abort}, timeout=bench.patience_s)
    await bench.abort(one)
    since = len(bench.heard(one))
    bench.holds(0)
    await bench.is_silent(one, since)


async def an_abort_touches_no_other_request(bench: Bench) -> None:
    """Half of six go, the others are answered as if nothing had been."""
    names = [bench.name() for _ in range(6)]
    for name in names:
        await bench.say(name, bench.speech())
    await bench.abort(*names[::2])
    for name in names[1::2]:
        await bench.turn_ends(name)
    lengths = {bench.length(name) for name in names[1::2]}
    expect(len(lengths) == 1, f"the same input is answered with lengths {sorted(lengths)}")
    bench.holds(3)


# ---- refusals


async def a_request_id_that_runs_is_not_taken_again(bench: Bench) -> None:
    """A submission that contradicts `resumed` is refused, and the one that runs is answered."""
    one = bench.name()
    await bench.say(one, bench.speech())
    await bench.is_refused("failed_precondition", one, bench.speech())
    await bench.turn_ends(one)
    await bench.pass_time()
    expect(bench.ends(one) == 1, f"one turn has {bench.ends(one)} ends")


async def more_input_for_a_request_that_does_not_run_is_refused(bench: Bench) -> None:
    """The same the other way round."""
    one = bench.name()
    await bench.is_refused("failed_precondition", one, bench.speech(), resumed=True)
    bench.holds(0)
    await bench.pass_time()
    expect(not bench.heard(one), "a refused input is answered")


async def a_refused_first_input_keeps_nothing(bench: Bench) -> None:
    """I7: the same request may begin afterwards."""
    one = bench.name()
    refusal = await bench.is_refused("invalid_argument", one, object())
    expect(not refusal.retryable, "a prompt that can't be read is refused as retryable")
    bench.holds(0)
    await bench.say(one, bench.speech())
    await bench.turn_ends(one)
    expect(not bench.failed, f"requests failed: {bench.failed}")


async def a_refused_later_input_leaves_the_turn_as_it_was(bench: Bench) -> None:
    """I7: neither its content nor its fence stays."""
    one, two = bench.name(), bench.name()
    await bench.say(one, bench.speech(), final=False)
    await bench.is_refused("invalid_argument", one, object(), seq=2, turn=1, resumed=True)
    await bench.say(one, bench.nothing, seq=2, resumed=True)
    await bench.say(two, bench.speech())
    await bench.turn_ends(one)
    await bench.turn_ends(two)
    turns = {output.fence.turn_id for output in bench.heard(one)}
    expect(turns == {0}, f"it speaks under the turns {sorted(turns)}, and turn 1 was refused")
    expect(bench.length(one) == bench.length(two), "a refused input has changed the answer")


# ---- load


async def load_counts_what_is_held(bench: Bench) -> None:
    """Slots, requests that run or wait, and a utilisation between 0 and 1."""
    bench.holds(0)
    names = [bench.name() for _ in range(3)]
    for held, name in enumerate(names, 1):
        await bench.say(name, bench.speech(), final=held % 2 == 0)
        bench.holds(held)
        load = bench.load
        expect(0 <= load.running + load.waiting <= held, f"{held} requests are there, and load() is {load}")
        expect(0 <= load.utilisation <= 1 and load.tick_late_ms >= 0, f"load() is {load}")
    await bench.abort(*names)
    bench.holds(0)
    expect(bench.load.running == 0, f"nothing is there, and load() is {bench.load}")
    expect(not bench.failed, f"requests failed: {bench.failed}")


async def many_requests_at_once_are_all_answered(bench: Bench) -> None:
    """Fifty, or as many as it can hold; each hears its own turn."""
    limit: int | None = getattr(bench.engine, "capacity_limit", None)
    names = [bench.name() for _ in range(50 if limit is None else min(50, limit))]
    speeches = enumerate(names)
    await asyncio.gather(*(bench.say(name, bench.speech(number), turn=number) for number, name in speeches))
    for number, name in enumerate(names):
        outputs = await bench.turn_ends(name)
        turns = {output.fence.turn_id for output in outputs}
        expect(turns == {number}, f"the request of turn {number} hears turns {sorted(turns)}")
        expect(bench.ends(name) == 1, f"one turn has {bench.ends(name)} ends")
    bench.holds(len(names))
    await bench.abort(*names)
    bench.holds(0)
    expect(bench.engine.healthy(), "healthy() is False")


# ---- its life


async def stop_while_speaking_ends_cleanly(bench: Bench) -> None:
    """Nothing is said afterwards, no task is left, and `healthy` says no."""
    await bench.stop()
    before = asyncio.all_tasks()
    engine = await bench.start()
    expect(engine.healthy(), "healthy() is False although it has just started")
    for _ in range(5):
        await bench.say(bench.name(), bench.speech())
    await bench.until(lambda: bench.outputs, "a first output")
    await bench.stop()
    heard = len(bench.outputs)
    expect(not engine.healthy(), "healthy() is True although it was stopped")
    left = [task.get_name() for task in asyncio.all_tasks() - before]
    expect(not left, f"tasks are left on the event loop: {left}")
    await asyncio.sleep(AFTERWARDS_S)
    expect(len(bench.outputs) == heard, "it speaks after it was stopped")
    expect(not bench.deaths, f"it says that it died: {bench.deaths}")
    expect(not bench.failed, f"requests failed: {bench.failed}")


async def a_fresh_engine_works_after_another_was_stopped(bench: Bench) -> None:
    """The worker builds a new one in the same process when a life is over."""
    for _ in range(2):
        await bench.stop()
        await bench.start()
        await bench.pass_time()
    expect(not bench.deaths, f"it says that it died: {bench.deaths}")


RUNNING: tuple[Question, ...] = (
    a_turn_is_answered_once_and_under_its_fence,
    a_request_lives_through_several_turns,
    turns_of_one_fence_are_all_answered,
    a_turn_may_come_in_pieces,
    an_empty_final_input_ends_the_turn,
    a_turn_without_any_input_ends_too,
    outputs_never_go_back_to_an_older_fence,
    an_abort_of_an_unknown_request_returns,
    an_abort_while_speaking_silences_at_once,
    an_abort_before_the_first_output_leaves_silence,
    an_abort_in_the_middle_of_a_turn_drops_what_was_heard,
    an_abort_during_a_submit_wins,
    an_abort_at_the_turns_end_is_confirmed,
    an_abort_may_come_twice_and_at_the_same_time,
    an_abort_that_was_cancelled_may_be_repeated,
    an_abort_touches_no_other_request,
    a_request_id_that_runs_is_not_taken_again,
    more_input_for_a_request_that_does_not_run_is_refused,
    a_refused_first_input_keeps_nothing,
    a_refused_later_input_leaves_the_turn_as_it_was,
    load_counts_what_is_held,
    many_requests_at_once_are_all_answered,
)
"""Asked of an engine that runs."""

LIVES: tuple[Question, ...] = (stop_while_speaking_ends_cleanly, a_fresh_engine_works_after_another_was_stopped)
"""They start and stop engines themselves."""

QUESTIONS = (*RUNNING, *LIVES)


def title_of(question: Question) -> str:
    """`A turn is answered once and under its fence`."""
    return str(getattr(question, "__name__", question)).replace("_", " ").capitalize()


async def ask(bench: Bench, question: Question) -> Answer:
    """One question to an engine that is there, or is started for it. One that isn't kept costs the engine its life."""
    began_s = time.monotonic()
    why: str | None = None
    try:
        if question in RUNNING:
            await bench.start()
        await question(bench)
        if bench.deaths:
            why = f"it says that it died: {bench.deaths}"
    except NotKept as no:
        why = str(no)
    except Exception as error:  # noqa: BLE001  whatever the engine raises where it may not
        why = f"it raises {type(error).__name__}: {error}"
    try:
        if why is not None:
            async with asyncio.timeout(bench.patience_s):
                await bench.stop()
        await bench.clear()
    except Exception as error:  # noqa: BLE001  likewise
        why = why or f"afterwards: {type(error).__name__}: {error}"
        bench.forget()
    return Answer(question=title_of(question), why=why, took_s=time.monotonic() - began_s)


async def check_engine(
    name_or_path: str, options: Mapping[str, Any], input_kind: InputKind, patience_s: float = PATIENCE_S
) -> AsyncIterator[Answer]:
    """Ask everything, one after the other. Raises `EngineConfigError` for an engine that can't even be built."""
    bench = Bench(lambda: load_engine(name_or_path, options), input_kind, patience_s)
    await bench.start()
    try:
        for question in QUESTIONS:
            yield await ask(bench, question)
    finally:
        await bench.stop()
