"""The watch over vLLM's core: whether it lives, whether it answers, and whether it holds only what is known here.

Responsible for noticing; `on_death` decides what follows. Leaves requests to the engine. vLLM notices by itself that a
process is gone, but tells only who waits for something (hazard 8), and it never notices one that hangs (hazard 9). A
request that the core runs for nobody (hazard 4) would hold its place for ever: better a new engine.
"""

import asyncio
from collections.abc import Callable

from stages.vllm_core import VllmCore
from stages.vllm_options import VllmOptions

_LOOK_S = 0.2
_STRAY_S = 10.0


class Watch:
    """Begins at once. `held`: how many requests are known here. `on_death` is called once, with the reason."""

    def __init__(
        self, core: VllmCore, options: VllmOptions, held: Callable[[], int], on_death: Callable[[str], None]
    ) -> None:
        self._core = core
        self._every_s = options.watch_every_ms / 1000
        self._patience_s = options.hang_after_ms / 1000
        self._held = held
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._asked_s = self._loop.time()
        self._question: asyncio.Task[None] | None = None
        self._stray_since_s: float | None = None
        self._found = False
        self._task = self._loop.create_task(self._run(), name="vllm-engine watch")

    @property
    def is_good(self) -> bool:
        """Whether the core lives and nothing is wrong with it."""
        return not self._found and self._core.find_death() is None

    async def close(self) -> None:
        """Look no more."""
        tasks = {self._task} if self._question is None else {self._task, self._question}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def _run(self) -> None:
        while True:
            reason = self._core.find_death() or self._find_hang() or self._find_stray()
            if reason is not None:
                self._found = True
                self._on_death(reason)
                return
            now_s = self._loop.time()
            if self._question is None and now_s - self._asked_s >= self._every_s:
                self._asked_s = now_s
                self._question = self._loop.create_task(self._core.settle(), name="vllm-engine question")
                self._question.add_done_callback(self._note_answer)
            pause_s = min(_LOOK_S, self._every_s)
            await asyncio.sleep(pause_s)
            # While this process itself stood still, nobody could hear an answer.
            self._asked_s += max(0.0, self._loop.time() - now_s - pause_s)

    def _note_answer(self, question: asyncio.Task[None]) -> None:
        self._question = None
        if not question.cancelled():
            question.exception()  # a dead engine is found by looking

    def _find_hang(self) -> str | None:
        if self._question is None:
            return None
        silent_s = self._loop.time() - self._asked_s
        return f"vLLM's core has not answered for {silent_s:.1f} s" if silent_s >= self._patience_s else None

    def _find_stray(self) -> str | None:
        stray = self._core.counts.held - self._held()
        if stray <= 0:
            self._stray_since_s = None
            return None
        now_s = self._loop.time()
        since_s = self._stray_since_s = now_s if self._stray_since_s is None else self._stray_since_s
        return f"vLLM's core holds {stray} requests that nobody owns" if now_s - since_s >= _STRAY_S else None
