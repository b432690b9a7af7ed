"""The torch engine: runs any user-given streaming `torch.nn.Module`, many requests in one forward.

Responsible for requests, their input in frames, ticks and the engine contract (`stages/engine.py`). Leaves
the module, the batch and the culprit of a failed forward to `torch_batch.py`, which is imported at start, in
the model thread, so that a process that only checks a pipeline file needs no torch.

    submit ──frames──► ready requests ──one frame of each──► tick: one forward in the model thread ──► emit

A tick starts when a request has a frame, at most every `tick_ms`, and takes what is ready by then. What comes
meanwhile goes into the next one, so batches grow by themselves under load. The module's contract is
`StreamingModule`'s docstring.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from msgspec import Meta, Struct, field

from stages.chunks import FLOAT_BYTES, SAMPLE_BYTES, Chunk, ChunkKind, read_chunk
from stages.engine import EngineConfigError, EnginePort, EngineRefusal, Load, Output, Submission, read_options
from stages.framing import Frame, Framer
from stages.gauges import Budget, RecentPeak
from stages.model_thread import ModelThread
from stages.rows import Computed, Failed, Row
from stages.tensors import PackedTensor

if TYPE_CHECKING:
    from torch import Tensor

    from stages.torch_batch import StreamingBatch

_STOP_TIMEOUT_S = 5.0
# What a turn's bare end says, by the module's `output_kind`.
_NOTHING: dict[ChunkKind, bytes | list[int] | PackedTensor] = {
    "audio": b"",
    "tokens": [],
    "features": PackedTensor("float32", (0, 0), b""),
}

_Positive = Annotated[int, Meta(ge=1)]
_Milliseconds = Annotated[float, Meta(gt=0, le=3_600_000)]


class StreamingModule(Protocol):
    """What a user's `torch.nn.Module` has to offer. It is built as `Module(**module_options)`.

    Attributes: `frame_samples` (int): how many samples (or tokens) one forward takes of each request.
    Optional ones: `sample_rate_hz` (int, 16000); `input_kind` and `output_kind`: `audio` (the default;
    float32 between -1 and 1), `tokens` (int64) or `features` (float32, rows of `feature_size`, another attribute:
    an earlier stage's hidden states, or what the next stage gets).

    A state is a tensor, or a dict, list or tuple of states, or None, of the same shapes for every request and
    after every forward. The engine keeps it for each request, from the first frame to the abort and across
    turns. A row's result must not depend on the other rows. A turn's last frame is padded with zeros, and its
    output cut in proportion. Runs under `inference_mode`, in one thread, in eval mode.
    """

    frame_samples: int

    def initial_state(self) -> Any:
        """The state before the first frame, without a batch dimension."""
        ...

    def forward(self, frames: "Tensor", state: Any) -> "tuple[Tensor, Any]":
        """`frames` [B, frame_samples] and a state with B in front to output [B, out] and the next state.

        Features have one dimension more: [B, frame_samples, feature_size], [B, out, size].
        """
        ...


class TorchOptions(Struct, frozen=True, kw_only=True):
    """The `options:` of a torch stage.

    `module`: import path of the module's class (or a function that returns one); `module_options`: its
    keywords. `device`: as torch writes it (`cpu`, `cuda:0`). `num_threads`: torch's threads for one forward,
    None leaves torch's default. `tick_ms`: the shortest time between two ticks; 0: as soon as there is input.
    `max_batch` bounds one forward, `max_requests` (None: no bound) what is held, `max_backlog_frames` what
    one request may have waiting. `budget_ms` (None: no bound): a forward takes no more requests than have lately
    fitted into that time; one that took longer is counted as missed. An abort that must wait for a running tick
    gives up after `abort_timeout_ms`; a forward that takes `hang_after_ms` makes the engine unhealthy.
    """

    module: str
    module_options: dict[str, Any] = field(default_factory=dict[str, Any])
    device: str = "cpu"
    num_threads: _Positive | None = 1
    tick_ms: Annotated[float, Meta(ge=0, le=10_000)] = 0
    max_batch: _Positive = 256
    budget_ms: _Milliseconds | None = None
    max_requests: _Positive | None = None
    max_backlog_frames: _Positive = 30_000
    abort_timeout_ms: _Milliseconds = 5_000
    hang_after_ms: _Milliseconds = 10_000


class _Request:
    """`state` is None before the first frame. `ready_s`: since when it has been in the ready queue."""

    def __init__(self, request_id: str, framer: Framer) -> None:
        self.request_id = request_id
        self.framer = framer
        self.state: Any = None
        self.queued = False
        self.ready_s = 0.0
        self.leaving = False

    def drop(self) -> None:
        self.leaving = True
        self.framer.clear()
        self.state = None


class TorchEngine:
    """See the file's header. Options: `TorchOptions`."""

    name = "torch"

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = read_options(TorchOptions, options)
        self._requests: dict[str, _Request] = {}
        self._ready: deque[_Request] = deque()
        self._budget = Budget(self._options.budget_ms, self._options.max_batch)
        self._missed = 0
        self._state_bytes = 0
        self._wake = asyncio.Event()
        self._in_tick: set[_Request] = set()
        self._tick_done: asyncio.Future[None] | None = None
        self._next_tick_s = 0.0
        self._late_ms = RecentPeak()
        self._busy = RecentPeak()
        self._thread = ModelThread("torch-engine")
        self._port: EnginePort | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._input_kind: ChunkKind = "audio"
        self._output_kind: ChunkKind = "audio"
        self._metadata: dict[str, Any] = {}
        self._sizes: dict[ChunkKind, int] = {}
        self._feature_size = 1

    async def start(self, port: EnginePort) -> None:
        """Load the module in the model thread and try it on silence. Raises `EngineConfigError`."""
        try:
            batch = await self._thread.call(partial(_load, self._options))
        except BaseException:
            await self._thread.stop(_STOP_TIMEOUT_S)
            raise
        self._input_kind = batch.input_kind
        self._output_kind = batch.output_kind
        self._metadata = {"sample_rate_hz": batch.sample_rate_hz} if batch.output_kind == "audio" else {}
        self._feature_size = batch.feature_size
        self._state_bytes = batch.state_bytes
        self._sizes = {
            "audio": batch.frame_samples * SAMPLE_BYTES,
            "tokens": batch.frame_samples,
            "features": batch.frame_samples * batch.feature_size * FLOAT_BYTES,
        }
        self._port = port
        self._ticker = asyncio.create_task(self._run(batch), name="torch-engine ticks")

    async def submit(self, submission: Submission) -> None:
        """Take input. Raises `EngineRefusal`; everything is checked before anything is kept (I7)."""
        request = self._requests.get(submission.request_id)
        chunk = self._admit(submission, request)
        now_s = asyncio.get_running_loop().time()
        if request is None:
            framer = Framer(self._sizes, self._input_kind, submission.fence)
            request = self._requests[submission.request_id] = _Request(submission.request_id, framer)
        elif request.framer.fence != submission.fence:
            # The model hears what the older turn left over, since it was accepted; that turn just has no end.
            request.framer.flush(ready_s=now_s, whole=self._whole())
            request.framer.fence = submission.fence
        request.framer.add(chunk, final=submission.final, hold=False, ready_s=now_s)
        self._queue(request, now_s)

    async def abort(self, request_id: str) -> None:
        """Drop input and state; return when no running tick holds the request. Raises `TimeoutError`."""
        request = self._requests.get(request_id)
        if request is None:
            return
        request.drop()
        if request in self._in_tick and self._tick_done is not None:
            done, _ = await asyncio.wait({self._tick_done}, timeout=self._options.abort_timeout_ms / 1000)
            if not done:
                raise TimeoutError(f"{request_id} is in a forward that has run for {self._thread.busy_s():.1f} s")
        self._requests.pop(request_id, None)

    def load(self) -> Load:
        """`utilisation`: the higher of a tick's duration to a frame's, and of requests to `max_requests`."""
        now_s = asyncio.get_running_loop().time()
        bound = self._options.max_requests
        slots = len(self._requests) / bound if bound else 0.0
        return Load(
            running=len(self._in_tick),
            waiting=len(self._ready),
            slots_used=len(self._requests),
            utilisation=min(1.0, max(slots, self._busy.read(now_s))),
            tick_late_ms=self._late_ms.read(now_s),
            missed_ticks=self._missed,
            memory_bytes=self._state_bytes * sum(r.state is not None for r in self._requests.values()),
        )

    def healthy(self) -> bool:
        """Whether it runs and no forward has been hanging for `hang_after_ms`."""
        return self._port is not None and self._thread.busy_s() * 1000 < self._options.hang_after_ms

    async def stop(self) -> None:
        """Drop everything. Waits a few seconds for a running forward, then leaves its thread behind."""
        self._port = None
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.wait({self._ticker})
        self._forget_all()
        await self._thread.stop(_STOP_TIMEOUT_S)

    def _admit(self, submission: Submission, request: _Request | None) -> Chunk:
        if self._port is None:
            raise EngineRefusal("failed_precondition", "the engine is not running", retryable=True)
        if (request is not None) != submission.resumed:
            state = "does not run" if request is None else "already runs"
            raise EngineRefusal("failed_precondition", f"request {submission.request_id} {state} here")
        if request is not None and request.leaving:
            raise EngineRefusal("failed_precondition", f"request {submission.request_id} is being aborted")
        bound = self._options.max_requests
        if request is None and bound is not None and len(self._requests) >= bound:
            raise EngineRefusal("resource_exhausted", f"all {bound} requests are taken", retryable=True)
        try:
            chunk = read_chunk(submission.prompt)
        except ValueError as error:
            raise EngineRefusal("invalid_argument", str(error)) from None
        if chunk.kind not in (None, self._input_kind):
            raise EngineRefusal("invalid_argument", f"this stage takes {self._input_kind}, not {chunk.kind}")
        if chunk.kind == "features" and chunk.width != self._feature_size:
            message = f"a row of features has {chunk.width} numbers; this stage takes {self._feature_size}"
            raise EngineRefusal("invalid_argument", message)
        same_turn = request is not None and request.framer.fence == submission.fence
        rest = request.framer.rest_with(chunk) if request is not None and same_turn else len(chunk.data)
        if self._input_kind == "audio" and submission.final and rest % SAMPLE_BYTES:
            raise EngineRefusal("invalid_argument", "the turn's audio ends with half a sample (s16le: 2 bytes)")
        waiting = len(request.framer.frames) if request is not None else 0
        backlog = waiting + rest // self._sizes[self._input_kind]
        if backlog > self._options.max_backlog_frames:
            message = f"{backlog} frames would wait; the bound is {self._options.max_backlog_frames}"
            raise EngineRefusal("resource_exhausted", message, retryable=request is not None)
        return chunk

    def _whole(self) -> int:
        """What can't be cut any further: a sample, a token, a row."""
        if self._input_kind == "audio":
            return SAMPLE_BYTES
        return self._feature_size * FLOAT_BYTES if self._input_kind == "features" else 1

    def _queue(self, request: _Request, now_s: float) -> None:
        """Put a request that has a frame at the end of the ready queue, once, unless it is in a tick."""
        if request.queued or request in self._in_tick or not request.framer.frames:
            return
        request.queued = True
        request.ready_s = now_s
        self._ready.append(request)
        self._wake.set()

    async def _run(self, batch: "StreamingBatch") -> None:
        try:
            while True:
                await self._pace()
                await self._tick(batch)
        except Exception as error:  # noqa: BLE001  whatever it was, no request would ever be served again
            self._die(f"{type(error).__name__}: {error}")

    async def _pace(self) -> None:
        """Wait until there is input, and until the next tick may start."""
        while not self._ready:
            self._wake.clear()
            await self._wake.wait()
        loop, tick_s = asyncio.get_running_loop(), self._options.tick_ms / 1000
        if (wait_s := self._next_tick_s - loop.time()) > 0:
            await asyncio.sleep(wait_s)
        now_s = loop.time()
        # On a grid while input keeps coming; a pause, or a tick that took too long, begins a new one.
        on_grid = now_s - self._next_tick_s < tick_s
        self._next_tick_s = (self._next_tick_s if on_grid else now_s) + tick_s

    def _pick(self) -> list[tuple[_Request, Frame]]:
        """A frame of each of the requests that have waited longest. Bare ends of turns need no forward."""
        picked: list[tuple[_Request, Frame]] = []
        now_s = asyncio.get_running_loop().time()
        while self._ready and len(picked) < self._budget.rows:
            request = self._ready.popleft()
            request.queued = False
            self._late_ms.note(now_s, max(0.0, (now_s - request.ready_s) * 1000 - self._options.tick_ms))
            frames = request.framer.frames
            while frames:
                frame = frames.popleft()
                if frame.data:
                    picked.append((request, frame))
                    break
                self._emit(request, frame, _NOTHING[self._output_kind])
        return picked

    async def _tick(self, batch: "StreamingBatch") -> None:
        picked, loop = self._pick(), asyncio.get_running_loop()
        if not picked:
            return
        rows = [Row(frame.data, request.state) for request, frame in picked]
        self._in_tick = {request for request, _ in picked}
        self._tick_done = loop.create_future()
        begun_s = loop.time()
        try:
            results = await self._thread.call(partial(batch.compute, rows))
            for (request, frame), result in zip(picked, results, strict=True):
                self._conclude(request, frame, result)
            # The thread may hold these two lists for a moment longer, but nothing of a request in them (I2).
            rows.clear()
            results.clear()
        finally:
            self._in_tick = set()
            self._tick_done.set_result(None)
        now_s = loop.time()
        if self._budget.note(len(picked), (now_s - begun_s) * 1000):
            self._missed += 1
        if self._input_kind == "audio":
            self._busy.note(now_s, (now_s - begun_s) * batch.sample_rate_hz / batch.frame_samples)
        for request, _ in picked:
            self._queue(request, now_s)

    def _conclude(self, request: _Request, frame: Frame, result: Computed | Failed) -> None:
        if request.leaving or self._port is None:
            return
        if isinstance(result, Failed):
            self._requests.pop(request.request_id, None)
            request.drop()
            self._port.fail(request.request_id, f"the module could not compute a frame: {result.reason}")
            return
        request.state = result.state
        self._emit(request, frame, result.data)

    def _emit(self, request: _Request, frame: Frame, data: bytes | list[int] | PackedTensor) -> None:
        if self._port is None:
            return
        self._port.emit(
            Output(
                request_id=request.request_id,
                fence=frame.fence,
                kind="data" if self._output_kind == "features" else self._output_kind,
                data=data,
                turn_end=frame.turn_end,
                metadata=dict(self._metadata),
            )
        )

    def _die(self, message: str) -> None:
        port, self._port = self._port, None
        self._forget_all()
        if port is not None:
            port.died(message)

    def _forget_all(self) -> None:
        for request in self._requests.values():
            request.drop()
        self._requests.clear()
        self._ready.clear()


def _load(options: TorchOptions) -> "StreamingBatch":
    try:
        from stages.torch_batch import load_batch  # noqa: PLC0415  see the header
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        message = "the torch engine needs PyTorch, which is missing: install bargein with its extra `torch`"
        raise EngineConfigError(message) from None
    try:
        return load_batch(options.module, options.module_options, options.device, options.num_threads)
    except Exception as error:
        raise EngineConfigError(f"module {options.module!r}: {error}") from error
