"""A vLLM engine under test, with few words for submitting and for looking into its core."""

from __future__ import annotations

import asyncio
import copy
from typing import TYPE_CHECKING, Any, Self

from stages.engine import Output
from stages.tiny_model import QUICK
from stages.vllm_engine import VllmEngine
from tests.stages.ear import PATIENCE_S, Ear, input_for, request_name

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

CONTEXT = 256
SEATS = 8
KV_TOKENS = 31 * 32  # 32 blocks, one of which vLLM keeps for itself


def small_options(model: Path, **more: Any) -> dict[str, Any]:
    """An engine whose bounds are reached with a few hundred tokens."""
    options: dict[str, Any] = copy.deepcopy(QUICK)
    options["model"] = str(model)
    options["engine"].update(max_model_len=CONTEXT, max_num_seqs=SEATS, kv_cache_memory_bytes=1024 * 1024)
    options["engine"].update(enable_prefix_caching=False)
    options.update(more)
    return options


class Bed:
    """`async with Bed(options) as bed`: a started engine. `ear` may be changed between tests."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.ear = Ear()
        self.engine = VllmEngine(options)

    async def __aenter__(self) -> Self:
        await self.engine.start(self)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.engine.stop()

    # The engine's port.

    def emit(self, output: Output) -> None:
        self.ear.emit(output)

    def fail(self, request_id: str, message: str) -> None:
        self.ear.fail(request_id, message)

    def died(self, message: str) -> None:
        self.ear.died(message)

    # What tests ask for.

    async def say(self, session: str, prompt: Any, **more: Any) -> str:
        """Submit to a session, whose first input this may be; its request id."""
        name = request_name(session)
        more.setdefault("resumed", name in self.engine._requests)
        await self.engine.submit(input_for(name, prompt, mode="append_tokens", **more))
        return name

    async def ask(self, session: str, prompt: Any, **more: Any) -> list[int]:
        """A turn's whole answer."""
        name = request_name(session)
        before, ends = len(self.ear.heard(name)), self.ear.ends(name)
        await self.say(session, prompt, **more)
        heard = await self.ear.turn_ends(name, ends + 1)
        return [token for output in heard[before:] for token in output.data]

    async def empty(self) -> None:
        await asyncio.gather(*(self.engine.abort(name) for name in list(self.engine._requests)))

    async def core_holds(self) -> int:
        return await core_holds(self.engine)

    def processes(self) -> Sequence[Any]:
        core = self.engine._core
        assert core is not None
        return core.processes


async def core_holds(engine: VllmEngine) -> int:
    """How many requests the core has, told by itself."""
    core = engine._core
    assert core is not None
    async with asyncio.timeout(PATIENCE_S):
        return await core.count_held()
