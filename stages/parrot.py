"""The parrot: an engine without a model, which speaks the session's own audio or tokens back.

For hearing a barge-in and for tests that check every sample: what comes out is exactly what went in, in
order, cut into frames, at the pace of speech or as fast as the loop allows. Leaves fences and publishing to
the stage worker. Keeps the engine contract (`stages/engine.py`) on the event loop alone, a timer a request.

A turn is audio or tokens, never both. Input with a higher fence makes the parrot leave off what it was still
going to say (nobody would hear it), as a person would who is asked something new.
"""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from stages.chunks import SAMPLE_BYTES, Chunk, ChunkKind, read_chunk
from stages.engine import (
    EngineConfigError,
    EngineError,
    EnginePort,
    EngineRefusal,
    Load,
    Output,
    Submission,
    read_options,
)
from stages.framing import Frame, Framer
from stages.gauges import RecentPeak

# Frames said in one go before the loop gets its turn, at full speed or when catching up after a stall.
_BURST = 64

_Positive = Annotated[int, Meta(ge=1)]
_Count = Annotated[int, Meta(ge=0)]


class ParrotOptions(Struct, frozen=True, kw_only=True):
    """The `options:` of a parrot stage.

    `reply`: `turn` says the whole turn back once it is final; `stream` echoes input as it comes, frame by
    frame. Both wait `delay_ms` first. A frame is `frame_ms` of audio or `frame_tokens` tokens; the last of a
    turn may be shorter. `pace`: `realtime` says a frame every `frame_ms`, `fast` does not wait.
    `max_requests`: None for no bound. `max_backlog_frames` bounds what one request may have waiting.

    Faults, for tests and demos: `abort_delay_ms` (an abort silences at once but is confirmed later),
    `fail_aborts` and `fail_submits` (the first so many say no).
    """

    pace: Literal["realtime", "fast"] = "realtime"
    reply: Literal["turn", "stream"] = "turn"
    frame_ms: Annotated[int, Meta(ge=1, le=1000)] = 20
    frame_tokens: _Positive = 1
    sample_rate_hz: Annotated[int, Meta(ge=1000, le=384_000)] = 16_000
    delay_ms: Annotated[float, Meta(ge=0, le=60_000)] = 0
    max_requests: _Positive | None = None
    max_backlog_frames: _Positive = 30_000
    abort_delay_ms: Annotated[float, Meta(ge=0, le=600_000)] = 0
    fail_aborts: _Count = 0
    fail_submits: _Count = 0


class _Request:
    """One request's words, and when the next of them is due (`next_s`, by the loop's clock)."""

    def __init__(self, request_id: str, framer: Framer) -> None:
        self.request_id = request_id
        self.framer = framer
        self.next_s = 0.0
        self.timer: asyncio.TimerHandle | None = None
        self.leaving = False

    def silence(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        self.framer.clear()


class ParrotEngine:
    """See the file's header. Options: `ParrotOptions`."""

    name = "parrot"

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = read_options(ParrotOptions, options)
        samples, odd = divmod(self._options.sample_rate_hz * self._options.frame_ms, 1000)
        if odd:
            rate = self._options.sample_rate_hz
            raise EngineConfigError(f"frame_ms: {self._options.frame_ms} ms is no whole number of samples at {rate} Hz")
        self._sizes: dict[ChunkKind, int] = {
            "audio": samples * SAMPLE_BYTES,
            "tokens": self._options.frame_tokens,
        }
        self._step_s = self._options.frame_ms / 1000 if self._options.pace == "realtime" else 0.0
        self._requests: dict[str, _Request] = {}
        self._late_ms = RecentPeak()
        self._aborts_to_fail = self._options.fail_aborts
        self._submits_to_fail = self._options.fail_submits
        self._port: EnginePort | None = None

    async def start(self, port: EnginePort) -> None:
        """Nothing to load."""
        self._port = port

    async def submit(self, submission: Submission) -> None:
        """Listen. Raises `EngineRefusal`; everything is checked before anything is kept (I7)."""
        request = self._requests.get(submission.request_id)
        chunk = self._admit(submission, request)
        if request is None:
            request = self._listen(submission)
        elif request.framer.fence != submission.fence:
            request.silence()
            request.framer.fence = submission.fence
        request.framer.add(
            chunk,
            final=submission.final,
            hold=self._options.reply == "turn",
            ready_s=asyncio.get_running_loop().time() + self._options.delay_ms / 1000,
        )
        self._schedule(request)

    async def abort(self, request_id: str) -> None:
        """Fall silent at once; return when the request is forgotten. `fail_aborts` raises `EngineError`."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if self._aborts_to_fail > 0:
            self._aborts_to_fail -= 1
            raise EngineError(f"told to say no (fail_aborts; {self._aborts_to_fail} to go)")
        request.leaving = True
        request.silence()
        if self._options.abort_delay_ms:
            await asyncio.sleep(self._options.abort_delay_ms / 1000)
        self._requests.pop(request_id, None)

    def load(self) -> Load:
        """`running`: requests with something left to say. Nothing ever waits for another request."""
        held, bound = len(self._requests), self._options.max_requests
        return Load(
            running=sum(1 for request in self._requests.values() if request.framer.frames),
            slots_used=held,
            utilisation=held / bound if bound else 0.0,
            tick_late_ms=self._late_ms.read(asyncio.get_running_loop().time()),
        )

    def healthy(self) -> bool:
        """Whether it is started and not stopped."""
        return self._port is not None

    async def stop(self) -> None:
        """Fall silent for good."""
        self._port = None
        for request in self._requests.values():
            request.silence()
        self._requests.clear()

    def _admit(self, submission: Submission, request: _Request | None) -> Chunk:
        if self._port is None:
            raise EngineRefusal("failed_precondition", "the engine is not running", retryable=True)
        if self._submits_to_fail > 0:
            self._submits_to_fail -= 1
            raise EngineRefusal("internal", f"told to say no (fail_submits; {self._submits_to_fail} to go)")
        if (request is not None) != submission.resumed:
            state = "does not run" if request is None else "already runs"
            raise EngineRefusal("failed_precondition", f"request {submission.request_id} {state} here")
        if request is not None and request.leaving:
            raise EngineRefusal("failed_precondition", f"request {submission.request_id} is being aborted")
        bound = self._options.max_requests
        if request is None and bound is not None and len(self._requests) >= bound:
            raise EngineRefusal("resource_exhausted", f"all {bound} requests are taken", retryable=True)
        # A new turn begins with nothing in the way: what is left of the old one will be dropped.
        known = request is not None and request.framer.fence == submission.fence
        framer = request.framer if request is not None and known else self._new_framer(submission)
        try:
            chunk = read_chunk(submission.prompt)
            framer.check(chunk)
        except ValueError as error:
            raise EngineRefusal("invalid_argument", str(error)) from None
        if chunk.kind == "features":
            raise EngineRefusal("invalid_argument", "a parrot says audio and tokens back; features it doesn't know")
        backlog = framer.backlog_with(chunk)
        if backlog > self._options.max_backlog_frames:
            message = f"{backlog} frames would wait; the bound is {self._options.max_backlog_frames}"
            raise EngineRefusal("resource_exhausted", message, retryable=bool(framer.frames))
        return chunk

    def _new_framer(self, submission: Submission) -> Framer:
        kind: ChunkKind = "tokens" if submission.mode == "append_tokens" else "audio"
        return Framer(self._sizes, kind, submission.fence)

    def _listen(self, submission: Submission) -> _Request:
        request = _Request(submission.request_id, self._new_framer(submission))
        self._requests[submission.request_id] = request
        return request

    def _schedule(self, request: _Request) -> None:
        frames = request.framer.frames
        if request.timer is None and frames:
            due_s = max(frames[0].ready_s, request.next_s)
            request.timer = asyncio.get_running_loop().call_at(due_s, self._say, request)

    def _say(self, request: _Request) -> None:
        """Say what is due. A deadline follows from the last one, not from the time it is: no drift."""
        request.timer = None
        loop = asyncio.get_running_loop()
        frames = request.framer.frames
        for _ in range(_BURST):
            if self._port is None or not frames:
                return
            now_s, due_s = loop.time(), max(frames[0].ready_s, request.next_s)
            if due_s > now_s:
                break
            frame = frames.popleft()
            request.next_s = due_s + self._step_s
            if self._step_s:
                self._late_ms.note(now_s, (now_s - due_s) * 1000)
            self._port.emit(self._speech(request.request_id, frame))
        self._schedule(request)

    def _speech(self, request_id: str, frame: Frame) -> Output:
        return Output(
            request_id=request_id,
            fence=frame.fence,
            kind="tokens" if frame.kind == "tokens" else "audio",
            data=frame.data,
            turn_end=frame.turn_end,
            metadata={"sample_rate_hz": self._options.sample_rate_hz} if frame.kind == "audio" else {},
        )
