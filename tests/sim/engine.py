"""The engine inside the simulated stage workers: says back what it was given, and has troubles when the plan says so.

Responsible for the engine contract on virtual time. It dies with its process; what it was given and what it holds stays
in an `EngineRecord` outside, which the checkers read. Leaves when to have which trouble to `plan.py`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stages.engine import EngineError, EngineRefusal, Load, Output, Submission

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from stages.engine import EnginePort


@dataclass(slots=True)
class Given:
    """An input that an engine has accepted."""

    at_s: float
    worker_id: str
    request_id: str
    session_id: str
    incarnation: int
    epoch: int
    tokens: tuple[int, ...]


@dataclass(slots=True)
class EngineRecord:
    """One engine's life. `holds`: the requests that it has not let go of. `over`: the device is free again."""

    role: str
    stage_id: int
    over: bool = False
    holds: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Trouble:
    """From `from_s` to `until_s`: `stuck` (aborts don't return), `stubborn` (they're refused), `silent` (they give up),
    `refuse` (inputs are), `slow` (inputs take as long as that lasts), `broken` (they raise), `drawl` (slow speech),
    `fail` (a request dies at `from_s`), `die` (the engine does). `only`: of this session's requests.
    """

    kind: str
    from_s: float
    until_s: float
    only: str = ""


class _Speech:
    """What one request still has to say."""

    def __init__(self) -> None:
        self.words: deque[tuple[Any, list[int], bool]] = deque()
        self.timer: asyncio.TimerHandle | None = None

    def silence(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        self.words.clear()


class SimEngine:
    """`note` hears of each accepted input, `breach` of what the contract forbids."""

    name = "sim"

    def __init__(
        self,
        record: EngineRecord,
        troubles: list[Trouble],
        choose: random.Random,
        *,
        worker_id: Callable[[], str | None],
        note: Callable[[Given], None],
        breach: Callable[[str], None],
    ) -> None:
        self._record = record
        self._troubles = troubles
        self._choose = choose
        self._worker_id = worker_id
        self._note = note
        self._breach = breach
        self._speeches: dict[str, _Speech] = {}
        self._sessions: dict[str, str] = {}
        self._port: EnginePort | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._dead = False
        self._going_in: set[str] = set()

    async def start(self, port: EnginePort) -> None:
        await asyncio.sleep(0.01 * self._choose.random())
        self._port = port
        loop = asyncio.get_running_loop()
        for trouble in self._troubles:
            if trouble.from_s > loop.time() and trouble.kind in ("fail", "die"):
                work = self._fail_one if trouble.kind == "fail" else self._die
                self._timers.append(loop.call_at(trouble.from_s, work, trouble))

    async def submit(self, submission: Submission) -> None:
        request_id = submission.request_id
        if request_id in self._going_in:
            self._breach(f"two inputs of {request_id} at once")
        self._going_in.add(request_id)
        if submission.resumed != (request_id in self._record.holds):
            self._breach(f"resumed is {submission.resumed} for {request_id}, and it is {not submission.resumed} here")
        try:
            slow = self._find("slow", submission.session_id)
            x = self._choose.random()
            if slow is not None:
                await asyncio.sleep(slow.until_s - slow.from_s)
            elif x > 0.7:
                await asyncio.sleep(0.06 * (x - 0.7))
        finally:
            self._going_in.discard(request_id)
        if self._dead or self._port is None:
            raise EngineRefusal("failed_precondition", "the engine is not running")
        if self._find("refuse", submission.session_id) is not None:
            raise EngineRefusal("resource_exhausted", "told to refuse", retryable=True)
        broken = self._find("broken", submission.session_id) is not None
        if submission.resumed and request_id not in self._record.holds:
            raise EngineRefusal("failed_precondition", "it was aborted meanwhile")
        tokens = tuple(submission.prompt or ())
        fence = submission.fence
        self._record.holds.add(request_id)
        self._note(
            Given(
                asyncio.get_running_loop().time(),
                self._worker_id() or "",
                request_id,
                submission.session_id,
                fence.incarnation,
                fence.epoch,
                tokens,
            )
        )
        if broken:
            raise RuntimeError("told to break, with the input half in")
        self._sessions[request_id] = submission.session_id
        speech = self._speeches.setdefault(request_id, _Speech())
        if speech.words and speech.words[-1][0] != fence and self._choose.random() < 0.5:
            speech.silence()
        size = self._choose.randint(1, 4)
        chunks: list[list[int]] = [list(tokens[i : i + size]) for i in range(0, max(1, len(tokens)), size)]
        for number, chunk in enumerate(chunks):
            speech.words.append((fence, chunk, submission.final and number == len(chunks) - 1))
        self._schedule(request_id, speech)

    async def abort(self, request_id: str) -> None:
        speech = self._speeches.get(request_id)
        session_id = self._sessions.get(request_id, "")
        if request_id not in self._record.holds:
            return
        if speech is not None and self._choose.random() < 0.7:
            speech.silence()
        if self._find("stubborn", session_id) is not None:
            raise EngineError("told to say no")
        if self._find("silent", session_id) is not None:
            raise TimeoutError("told not to confirm")
        stuck = self._find("stuck", session_id)
        if stuck is not None:
            await asyncio.sleep(max(0.0, stuck.until_s - asyncio.get_running_loop().time()))
        elif (x := self._choose.random()) > 0.6:
            await asyncio.sleep(0.05 * (x - 0.6))
        self._forget(request_id)

    def load(self) -> Load:
        return Load(running=len(self._record.holds), slots_used=len(self._record.holds))

    def healthy(self) -> bool:
        return not self._dead

    async def stop(self) -> None:
        for request_id in list(self._record.holds):
            self._forget(request_id)
        for timer in self._timers:
            timer.cancel()
        self._port = None
        self._record.over = True

    def _find(self, kind: str, session_id: str) -> Trouble | None:
        now_s = asyncio.get_running_loop().time()
        for trouble in self._troubles:
            if trouble.kind == kind and trouble.from_s <= now_s < trouble.until_s and trouble.only in ("", session_id):
                return trouble
        return None

    def _forget(self, request_id: str) -> None:
        self._record.holds.discard(request_id)
        speech = self._speeches.pop(request_id, None)
        if speech is not None:
            speech.silence()

    def _schedule(self, request_id: str, speech: _Speech) -> None:
        if speech.timer is None and speech.words:
            delay_s = 0.001 + 0.03 * self._choose.random() ** 3
            if self._find("drawl", self._sessions.get(request_id, "")) is not None:
                delay_s += 0.5
            speech.timer = asyncio.get_running_loop().call_later(delay_s, self._say, request_id, speech)

    def _say(self, request_id: str, speech: _Speech) -> None:
        speech.timer = None
        if self._port is None or not speech.words:
            return
        fence, chunk, last = speech.words.popleft()
        self._port.emit(Output(request_id=request_id, fence=fence, kind="tokens", data=chunk, turn_end=last))
        self._schedule(request_id, speech)

    def _fail_one(self, trouble: Trouble) -> None:
        held = [r for r in sorted(self._record.holds) if trouble.only in ("", self._sessions.get(r, ""))]
        if held and self._port is not None:
            request_id = self._choose.choice(held)
            self._forget(request_id)
            self._port.fail(request_id, "told to fail")

    def _die(self, trouble: Trouble) -> None:
        if self._port is not None:
            self._dead = True
            for request_id in list(self._record.holds):
                self._forget(request_id)
            self._record.over = True
            self._port.died("told to die")
