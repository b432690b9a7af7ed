"""An engine that does as it is told: takes or refuses inputs, confirms aborts or not, speaks when asked to.

Without orders it takes every input, confirms every abort at once and says nothing (with `echo`, each input again).
As an engine of a pipeline file: `tests.workers.scripted:ScriptedEngine`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from stages.engine import EngineError, EngineRefusal, Load, Output, Submission, read_options
from workers.stage_cleanup import CLEANUP_ORDER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from control.core.fence import Fence
    from stages.engine import EnginePort, OutputKind, RefusalCode

# Only ever reached by a test that fails.
PATIENCE_S = 30.0


class ScriptedOptions(Struct, frozen=True, kw_only=True):
    """See the attributes of the same names."""

    fail_submits: int = 0
    fail_cleanups: int = 0
    echo: bool = False


class ScriptedEngine:
    """What happened: `submitted` (accepted), `refused`, `abort_calls`, `aborted` (confirmed), `running` by request id.

    What is to happen: the next `fail_submits` submits are refused with `refusal_code`; the next `fail_cleanups` abort
    orders go unconfirmed (TimeoutError), each whole, however many requests it names; an abort of a request in `stuck`
    never ends, of one in `stubborn` is refused; a submit waits while `submit_gate` is closed. `broken_submits` raise.
    """

    name = "scripted"

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        wanted = read_options(ScriptedOptions, options or {})
        self.fail_submits = wanted.fail_submits
        self.fail_cleanups = wanted.fail_cleanups
        self.broken_submits = 0
        self.echo = wanted.echo
        self.refusal_code: RefusalCode = "failed_precondition"
        self.stuck: set[str] = set()
        self.stubborn: set[str] = set()
        self.submit_gate = asyncio.Event()
        self.submit_gate.set()
        self.submitting: list[str] = []
        self.submitted: list[Submission] = []
        self.refused: list[Submission] = []
        self.abort_calls: list[str] = []
        self.aborted: list[str] = []
        self.running: dict[str, Submission] = {}
        self.is_healthy = True
        self.accepts = True
        self.starts = 0
        self.stops = 0
        self.port: EnginePort | None = None
        self._unconfirmed: dict[str, bool] = {}
        self._news = asyncio.Event()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for calls until `condition` holds."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._news.clear()
                await self._news.wait()

    def emit(
        self,
        request_id: str,
        data: Any,
        *,
        kind: OutputKind = "data",
        turn_end: bool = False,
        fence: Fence | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """Say something, at the fence of the request's last input unless another is given."""
        assert self.port is not None
        at = fence or self.running[request_id].fence
        self.port.emit(
            Output(request_id=request_id, fence=at, kind=kind, data=data, turn_end=turn_end, metadata=metadata or {})
        )

    def fail(self, request_id: str, message: str = "told to fail") -> None:
        """The request dies, running or not."""
        assert self.port is not None
        self.running.pop(request_id, None)
        self.port.fail(request_id, message)

    def die(self, message: str = "told to die") -> None:
        """The whole engine dies."""
        assert self.port is not None
        self.running.clear()
        self.is_healthy = False
        self.port.died(message)

    # The engine contract.

    async def start(self, port: EnginePort) -> None:
        self.port = port
        self.is_healthy = True
        self.starts += 1
        self._news.set()

    async def submit(self, submission: Submission) -> None:
        self.submitting.append(submission.request_id)
        self._news.set()
        await self.submit_gate.wait()
        if self.broken_submits > 0:
            self.broken_submits -= 1
            raise RuntimeError("told to break")
        if self.fail_submits > 0:
            self.fail_submits -= 1
            self.refused.append(submission)
            raise EngineRefusal(self.refusal_code, "told to refuse")
        assert submission.resumed == (submission.request_id in self.running), submission
        self.running[submission.request_id] = submission
        self.submitted.append(submission)
        self._news.set()
        if self.echo:
            kind: OutputKind = "audio" if isinstance(submission.prompt, bytes) else "data"
            self.emit(submission.request_id, submission.prompt, kind=kind, turn_end=submission.final)

    async def abort(self, request_id: str) -> None:
        self.abort_calls.append(request_id)
        self._news.set()
        if self._is_unconfirmed(CLEANUP_ORDER.get()):
            raise TimeoutError("told not to confirm")
        if request_id in self.stubborn:
            raise EngineError("told to say no")
        while request_id in self.stuck:
            self._news.clear()
            await self._news.wait()
        self.running.pop(request_id, None)
        self.aborted.append(request_id)
        self._news.set()

    def free(self, request_id: str) -> None:
        """An abort that is stuck goes on."""
        self.stuck.discard(request_id)
        self._news.set()

    def load(self) -> Load:
        return Load(running=len(self.running), slots_used=len(self.running), accepts=self.accepts)

    def healthy(self) -> bool:
        return self.is_healthy

    async def stop(self) -> None:
        self.running.clear()
        self.stops += 1
        self.port = None
        self._news.set()

    def _is_unconfirmed(self, order: str) -> bool:
        if not order:
            return False
        if order not in self._unconfirmed:
            self._unconfirmed[order] = self.fail_cleanups > 0
            self.fail_cleanups = max(0, self.fail_cleanups - 1)
        return self._unconfirmed[order]
