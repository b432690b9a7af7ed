"""The vLLM engine: many sessions on one model, each a request that goes on from turn to turn.

Responsible for the engine contract (`stages/engine.py`): what is taken, what is said and when a request is gone. Leaves
vLLM to `vllm_core.py`, a request's input and its room to `vllm_request.py`, text to `vllm_text.py`.

    submit ──chunks──► Request.feed ──► vLLM's core ──► _hear: at once into the port's emit (hazard 6)
    abort: stop feeding, abort, wait for vLLM's stream to end, abort again, ask the core (hazards 4 and 5)

The numbered hazards are explained to operators in docs/vllm.md; each has a test that carries its number.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from stages.engine import EngineConfigError, EnginePort, EngineRefusal, Load, Output, Submission
from stages.model_thread import ModelThread
from stages.vllm_admission import Admission
from stages.vllm_core import VllmCore, load_core
from stages.vllm_options import find_seats, read_sampling, read_vllm_options
from stages.vllm_request import Chunk, Request, close_feed
from stages.vllm_text import Prompt, TurnText, read_prompt
from stages.vllm_watch import Watch

log = logging.getLogger("bargein.vllm")

_STOP_S = 20.0
_STREAM_END_S = 1.0


class VllmEngine:
    """See the file's header. Options: `stages.vllm_options.VllmOptions`."""

    name = "vllm"

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = read_vllm_options(options)
        self._requests: dict[str, Request] = {}
        self._thread = ModelThread("vllm-engine")
        self._core: VllmCore | None = None
        self._loaded: VllmCore | None = None
        self._admission: Admission | None = None
        self._port: EnginePort | None = None
        self._watch: Watch | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._wanted = True
        self._broken = False

    async def start(self, port: EnginePort) -> None:
        """Load the model in the model thread. Raises `EngineConfigError`, or what vLLM raises."""
        try:
            core = await self._thread.call(self._load)
        except EngineConfigError:
            raise
        except Exception as error:
            raise EngineConfigError(f"vLLM does not start with model {self._options.model!r}: {error}") from error
        if core is None:
            raise EngineConfigError("stopped while it was starting")
        self._core = core
        self._admission = Admission(core, self._requests.values(), self._options.refuse_above_kv)
        if self._options.output == "text" and core.tokenizer is None:
            raise EngineConfigError("output: text needs a tokenizer, and engine.skip_tokenizer_init leaves it out")
        self._port = port
        self._watch = Watch(core, self._options, lambda: len(self._requests), self._die)

    async def submit(self, submission: Submission) -> None:
        """Take input. Raises `EngineRefusal`; everything is checked before anything is kept (I7)."""
        core, admission = self._require_core()
        request = self._requests.get(submission.request_id)
        self._check_place(submission, request)
        try:
            sampling = read_sampling(self._options.sampling, submission.sampling)
            core.check_sampling(sampling)
            prompt = read_prompt(submission.prompt, core.vocabulary)
        except ValueError as error:
            raise EngineRefusal("invalid_argument", str(error)) from None
        if request is None:
            # From here on an abort finds it, also while its text is being read (S34).
            request = Request(
                submission.request_id, submission.fence, core.context_tokens, keeps_all_said=core.keeps_all_said
            )
            self._requests[submission.request_id] = request
        try:
            tokens, media = await self._read(core, request, prompt)
            if request.leaving or self._port is None:
                raise EngineRefusal("failed_precondition", f"request {submission.request_id} is being aborted")
            admission.check_room(request, len(tokens))
        except BaseException:
            if not request.taken and not request.leaving:
                self._requests.pop(submission.request_id, None)
            raise
        chunk = Chunk(tokens, submission.fence, submission.final, sampling, media)
        request.add(chunk, prefill=self._options.prefill)
        if request.task is None:
            request.task = self._spawn(self._run(core, request), f"vllm-engine {request.request_id}")

    async def abort(self, request_id: str) -> None:
        """Drop a request; returns once the core has let go of it. Raises `TimeoutError`."""
        request, core = self._requests.get(request_id), self._core
        if request is None or core is None:
            return
        if request.ending is None or request.ending.done():
            request.leave()
            request.ending = self._spawn(self._end(core, request), f"vllm-engine end of {request_id}")
        ending = request.ending
        await asyncio.wait({ending}, timeout=self._options.abort_timeout_ms / 1000)
        if not ending.done():
            raise TimeoutError(f"vLLM's core has not confirmed the abort of {request_id}")
        if not ending.cancelled() and (error := ending.exception()) is not None:
            raise error

    def load(self) -> Load:
        """`running`: turns that the core works on. `utilisation`: the higher of KV cache and places in use."""
        core, admission = self._core, self._admission
        if core is None or admission is None:
            return Load()
        flying = sum(1 for request in self._requests.values() if request.flying is not None)
        stuck = min(flying, core.counts.waiting)
        waiting = sum(1 for request in self._requests.values() if request.is_waiting)
        held = len(self._requests)
        return Load(
            running=flying - stuck,
            waiting=waiting + stuck,
            slots_used=held,
            utilisation=min(1.0, max(admission.kv, held / core.seats)),
            accepts=admission.accepts,
        )

    def healthy(self) -> bool:
        """Whether it runs and its core answers."""
        return self._port is not None and self._watch is not None and self._watch.is_good

    async def stop(self) -> None:
        """Drop everything and end vLLM's processes. Bounded: what doesn't end by itself is killed."""
        self._wanted = False
        self._port = None
        core, self._core = self._core, None
        watch, self._watch = self._watch, None
        if watch is not None:
            await watch.close()
            self._broken = self._broken or not watch.is_good
        await self._forget_all()
        try:
            async with asyncio.timeout(_STOP_S):
                if core is not None:
                    await core.close(self._thread, kill=self._broken)
                await self._thread.call(self._drop_loaded)
        except Exception:
            log.exception("vLLM does not stop")
        await self._thread.stop(_STOP_S)

    def _load(self) -> VllmCore | None:
        self._loaded = load_core(self._options, lambda: self._wanted)
        return self._loaded

    def _drop_loaded(self) -> None:
        """In the model thread, behind a start that was given up: what it has started is ended, too."""
        if self._loaded is not None:
            self._loaded.shut_down()
            self._loaded = None

    @property
    def capacity_limit(self) -> int | None:
        """How many requests it holds at most: a stage's capacity must not be above it. None: known once started."""
        return self._core.seats if self._core is not None else find_seats(self._options)

    # What is taken.

    def _require_core(self) -> tuple[VllmCore, Admission]:
        if self._port is None or self._core is None or self._admission is None:
            raise EngineRefusal("failed_precondition", "the engine is not running", retryable=True)
        return self._core, self._admission

    def _check_place(self, submission: Submission, request: Request | None) -> None:
        if request is not None and request.leaving:
            raise EngineRefusal("failed_precondition", f"request {submission.request_id} is being aborted")
        if (request is not None) != submission.resumed:
            state = "does not run" if request is None else "already runs"
            raise EngineRefusal("failed_precondition", f"request {submission.request_id} {state} here")
        if request is None and self._admission is not None:
            self._admission.check_new()

    async def _read(self, core: VllmCore, request: Request, prompt: Prompt) -> tuple[list[int], Any]:
        """The prompt's tokens, and vLLM's own form of it where it holds more than tokens."""
        said = prompt.said
        tokens = await self._encode(core, request, said) if isinstance(said, str) else said
        if prompt.media is None:
            return tokens, None
        try:
            rendered = await core.render(tokens, prompt.media)
        except ValueError as error:
            raise EngineRefusal("invalid_argument", str(error)) from None
        return rendered["prompt_token_ids"], rendered

    async def _encode(self, core: VllmCore, request: Request, text: str) -> list[int]:
        if core.tokenizer is None:
            raise EngineRefusal("invalid_argument", "this stage takes tokens: engine.skip_tokenizer_init is set")
        # A beginning belongs to the first input alone.
        encode = partial(core.tokenizer.encode, text, add_special_tokens=not request.taken)
        return list(await asyncio.to_thread(encode))

    # What is said.

    async def _run(self, core: VllmCore, request: Request) -> None:
        feed = request.feed(
            partial(self._wrap, core), partial(self._answer_nothing, request), partial(self._lose, core, request)
        )
        try:
            async for output in core.generate(request.request_id, feed):
                self._hear(core, request, output)
            if not request.leaving:
                self._lose(core, request, "vLLM has ended it")
        except Exception as error:  # noqa: BLE001  whatever it is, it is either all or one that it happened to
            if core.is_death(error):
                self._die(f"{type(error).__name__}: {error}")
            elif not request.leaving:
                self._lose(core, request, f"{type(error.__cause__ or error).__name__}: {error.__cause__ or error}")
        finally:
            await close_feed(feed)

    def _wrap(self, core: VllmCore, chunk: Chunk, room: int) -> Any:
        if chunk.final:
            return core.chunk(chunk.tokens, chunk.media, core.sampling(chunk.sampling, room))
        return core.chunk(chunk.tokens, chunk.media, core.sampling({"max_tokens": 1, "temperature": 0.0}, 1))

    def _hear(self, core: VllmCore, request: Request, output: Any) -> None:
        """One of vLLM's outputs. Only copies and hands over: who listens here must not be slow (hazard 6)."""
        chunk = request.flying
        if request.leaving or chunk is None or not output.outputs:
            return
        said = output.outputs[0]
        tokens = list(said.token_ids)
        request.said += len(tokens)
        ended = said.finish_reason is not None
        # Under a newer fence nobody hears the rest of the older turn.
        if chunk.final and chunk.fence == request.fence:
            data = self._data(core, request, tokens, ended)
            if data or ended:
                self._emit(request, chunk, data, said if ended else None)
        if ended:
            request.land()

    def _data(self, core: VllmCore, request: Request, tokens: list[int], ended: bool) -> list[int] | str:
        if self._options.output == "tokens":
            return tokens
        if request.text is None:
            request.text = TurnText(core.tokenizer)
        return request.text.add(tokens, end=ended)

    def _answer_nothing(self, request: Request, chunk: Chunk) -> None:
        """A turn in which nothing was said to the model has an answer without anything in it."""
        self._emit(request, chunk, [] if self._options.output == "tokens" else "", None, turn_end=True)

    def _emit(self, request: Request, chunk: Chunk, data: Any, end: Any, *, turn_end: bool = False) -> None:
        if self._port is None:
            return
        metadata: dict[str, Any] = {}
        if end is not None or turn_end:
            metadata = {
                "finish_reason": "empty" if end is None else end.finish_reason,
                "input_tokens": request.turn_tokens,
                "output_tokens": request.said,
                "context_tokens": request.context_tokens,
            }
        self._port.emit(
            Output(
                request_id=request.request_id,
                fence=chunk.fence,
                kind=self._options.output,
                data=data,
                turn_end=end is not None or turn_end,
                metadata=metadata,
            )
        )

    # How it ends.

    async def _end(self, core: VllmCore, request: Request) -> None:
        """Nothing goes in any more; let go of it everywhere, the core last."""
        try:
            task = request.task
            if task is not None:
                await request.until_still()
                if request.was_fed:
                    await core.abort(request.request_id)
                    await asyncio.wait({task}, timeout=_STREAM_END_S)
                # Not fed: vLLM doesn't know of it and an abort would be passed over (hazard 5).
                while not task.done():
                    task.cancel()
                    await asyncio.wait({task}, timeout=_STREAM_END_S)
                await request.until_closed()
                await core.abort(request.request_id)
                await core.settle()
                if core.kv_tokens:
                    core.counts.note_freed(request.context_tokens / core.kv_tokens)
        except Exception as error:
            if not core.is_death(error):
                raise
            self._die(f"{type(error).__name__}: {error}")
        self._requests.pop(request.request_id, None)

    def _lose(self, core: VllmCore, request: Request, message: str) -> None:
        """This request can't go on (S42): once it is gone everywhere, the worker is told."""
        if request.leaving:
            return
        request.leave()
        request.ending = self._spawn(
            self._end_lost(core, request, message), f"vllm-engine loss of {request.request_id}"
        )

    async def _end_lost(self, core: VllmCore, request: Request, message: str) -> None:
        try:
            await self._end(core, request)
        except Exception as error:  # noqa: BLE001  it can't be told that it is gone, and nobody will ask again
            self._die(f"{request.request_id} can't be ended: {type(error).__name__}: {error}")
        if self._port is not None:
            self._port.fail(request.request_id, message)

    def _die(self, message: str) -> None:
        port, self._port = self._port, None
        self._broken = True
        if port is None:
            return
        for request in self._requests.values():
            request.leave()
        self._requests.clear()
        port.died(message)

    async def _forget_all(self) -> None:
        for request in self._requests.values():
            request.leave()
        self._requests.clear()
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_STREAM_END_S)

    def _spawn(self, coroutine: Any, name: str) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            with contextlib.suppress(Exception):
                task.exception()
