"""The other side of an engine in tests: a port that keeps what it hears, and submissions with few words."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from control.core.fence import Fence
from control.core.requests import request_id as build_request_id
from stages.engine import Output, Submission

if TYPE_CHECKING:
    from collections.abc import Callable

# Only ever reached by a test that fails: long enough for a busy machine.
PATIENCE_S = 60.0


class Ear:
    """Keeps outputs, failed requests and the engine's death, in order and with the loop's time."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.times_s: list[float] = []
        self.failed: dict[str, str] = {}
        self.deaths: list[str] = []
        self._news = asyncio.Event()

    def emit(self, output: Output) -> None:
        self.outputs.append(output)
        self.times_s.append(asyncio.get_running_loop().time())
        self._news.set()

    def fail(self, request_id: str, message: str) -> None:
        assert request_id not in self.failed, "a request fails once"
        self.failed[request_id] = message
        self._news.set()

    def died(self, message: str) -> None:
        self.deaths.append(message)
        self._news.set()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for news until `condition` holds."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._news.clear()
                await self._news.wait()

    def heard(self, request_id: str) -> list[Output]:
        return [output for output in self.outputs if output.request_id == request_id]

    def ends(self, request_id: str) -> int:
        return sum(output.turn_end for output in self.heard(request_id))

    async def turn_ends(self, request_id: str, count: int = 1) -> list[Output]:
        """Everything heard of a request, once `count` of its turns have ended."""
        await self.until(lambda: self.ends(request_id) >= count)
        return self.heard(request_id)


def joined(outputs: list[Output]) -> bytes | list[int]:
    """The data of outputs of one kind, put together."""
    if all(output.kind == "audio" for output in outputs):
        return b"".join(output.data for output in outputs)
    return [token for output in outputs for token in output.data]


def request_name(session_id: str = "s", epoch: int = 0, stage_id: int = 0) -> str:
    return build_request_id(session_id, 0, epoch, stage_id)


def input_for(
    request_id: str,
    prompt: Any,
    *,
    final: bool = True,
    turn: int = 0,
    seq: int = 1,
    resumed: bool = False,
    mode: str = "append_audio_chunk",
    **more: Any,
) -> Submission:
    return Submission(
        request_id=request_id,
        session_id="s",
        stage_id=0,
        fence=Fence(incarnation=0, epoch=0, turn_id=turn, response_seq=turn),
        seq=seq,
        turn_seq=1,
        mode=mode,
        prompt=prompt,
        final=final,
        resumed=resumed,
        **more,
    )
