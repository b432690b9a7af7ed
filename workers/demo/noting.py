"""The demo's vLLM engine: vLLM's, which notes what it does and when, for the demo to read.

Responsible for a journal of inputs, tokens and aborts, and for asking the core at the end what it still holds. Leaves
everything else to `stages/vllm_engine.py`, the lines to `journal.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.vllm_engine import VllmEngine
from workers.demo.journal import Note, encode_note

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stages.engine import Submission
    from stages.vllm_core import VllmCore
    from stages.vllm_request import Request
    from workers.demo.journal import What

HELD_S = 10.0


class NotingVllm(VllmEngine):
    """Options: vLLM's, and `journal`, the file to write to."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        own = dict(options)
        self._path = Path(str(own.pop("journal", "")))
        super().__init__(own)
        # Buffered: a line a token is too much for a write each.
        self._journal = self._path.open("ab")

    async def submit(self, submission: Submission) -> None:
        """As the base class."""
        await super().submit(submission)
        if not submission.resumed:
            self._note("taken", submission.request_id)
        if submission.final:
            self._note("turn", submission.request_id)

    async def abort(self, request_id: str) -> None:
        """As the base class."""
        known = request_id in self._requests
        if known:
            self._note("asked", request_id)
        await super().abort(request_id)
        if known:
            self._note("freed", request_id)
            self._journal.flush()

    async def stop(self) -> None:
        """As the base class, after a last question."""
        core = self._core
        try:
            if core is not None and core.find_death() is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HELD_S):
                        self._note("held", count=await core.count_held())
        finally:
            await super().stop()
            self._journal.close()

    def _hear(self, core: VllmCore, request: Request, output: Any) -> None:
        # Also what nobody will hear any more: the base class passes over that.
        if output.outputs and request.flying is not None and request.flying.final:
            said = output.outputs[0]
            self._note("said", request.request_id, len(said.token_ids))
            if said.finish_reason in {"stop", "length"}:
                self._note("ended", request.request_id)
        super()._hear(core, request, output)

    def _note(self, what: What, name: str = "", count: int = 0) -> None:
        if not self._journal.closed:
            self._journal.write(encode_note(Note(time.monotonic(), what, name, count)))
