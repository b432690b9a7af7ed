"""One request at vLLM: the input that waits, the chunk that the core works on, and the room that is left.

Responsible for feeding one chunk at a time, for the count of tokens in the context (hazard 1) and for knowing when
nothing goes in any more (hazard 4). Leaves vLLM to `vllm_core.py`, turns' outputs and ends to `vllm_engine.py`. Pure.

    submit ──► held: a turn's last token, until the turn's end ──► waiting chunks ──► flying: one at the core

A chunk flies until its turn's end has been heard: then the context is known to the token, and outputs of two turns are
never mixed (hazard 6). The core drops the last sampled token of each turn, so a chunk that is only to be read
(`final` is False) samples one token and leaves no trace of it.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

from msgspec import Struct

from control.core.fence import Fence
from stages.vllm_text import TurnText

_CLOSE_TRIES = 100


class Chunk(Struct):
    """Input for the core. `final`: it ends a turn and is answered.

    `media`: vLLM's own input, rendered, with what the placeholders among the tokens stand for; it stays in one piece.
    """

    tokens: list[int]
    fence: Fence
    final: bool
    sampling: dict[str, Any]
    media: Any = None

    def take(self, other: "Chunk") -> bool:
        """Add more input to this, unless one of them is of its own."""
        if self.final or self.media is not None or other.media is not None:
            return False
        self.tokens += other.tokens
        self.fence, self.sampling = other.fence, other.sampling
        return True


class Request:
    """`limit`: the model's context in tokens. `keeps_all_said`: the core may keep a turn's last token, too."""

    def __init__(self, request_id: str, fence: Fence, limit: int, *, keeps_all_said: bool) -> None:
        self.request_id = request_id
        self.fence = fence
        self.leaving = False
        self.taken = False  # an input of it was accepted
        self.was_fed = False
        self.flying: Chunk | None = None
        self.said = 0
        self.turn_tokens = 0
        self.text: TurnText | None = None
        self.task: asyncio.Task[None] | None = None
        self.ending: asyncio.Task[None] | None = None
        self._limit = limit
        self._dropped = 0 if keeps_all_said else 1
        self._context = 0
        self._held: list[Chunk] = []
        self._waiting: deque[Chunk] = deque()
        self._news = asyncio.Event()
        self._still = asyncio.Event()
        self._still.set()
        self._closed = asyncio.Event()

    @property
    def context_tokens(self) -> int:
        """What the core holds of it."""
        return self._context + self.said + (len(self.flying.tokens) if self.flying is not None else 0)

    @property
    def unseen_tokens(self) -> int:
        """Input that the core's figures don't show yet."""
        flying = len(self.flying.tokens) if self.flying is not None and not self.said else 0
        return flying + self._ahead

    @property
    def is_waiting(self) -> bool:
        """Whether it has input that the core could work on and doesn't."""
        return self.flying is None and bool(self._waiting)

    def room(self) -> int:
        """How many more tokens of input fit for all that is known now; one place is left for an answer.

        What a turn that still runs is going to say comes on top; so a chunk is measured again when it is its turn.
        """
        return self._limit - 1 - self.context_tokens - self._ahead

    @property
    def _ahead(self) -> int:
        return sum(len(chunk.tokens) for chunk in (*self._held, *self._waiting))

    def add(self, chunk: Chunk, *, prefill: bool) -> None:
        """Take input. A new turn makes the answers of older ones needless, but their input was said (I7)."""
        if chunk.fence != self.fence:
            self.fence = chunk.fence
            for older in self._waiting:
                older.final = False
        self._append(self._held, Chunk(list(chunk.tokens), chunk.fence, False, chunk.sampling, chunk.media))
        self.taken = True
        if chunk.final:
            *early, last = self._held or [Chunk([], chunk.fence, False, chunk.sampling)]
            self._held = []
            for each in early:
                self._append(self._waiting, each)
            # Of its own, as the end of the turn.
            self._waiting.append(Chunk(last.tokens, chunk.fence, True, chunk.sampling, last.media))
        elif prefill and self._held:
            # The last token, or what is in one piece, stays: so the turn's end always has something to begin with.
            *early, last = self._held
            if last.media is None:
                early.append(Chunk(last.tokens[:-1], last.fence, False, last.sampling))
                last = Chunk(last.tokens[-1:], last.fence, False, last.sampling)
            self._held = [last]
            for each in early:
                self._append(self._waiting, each)
        self._news.set()

    @staticmethod
    def _append(to: list[Chunk] | deque[Chunk], chunk: Chunk) -> None:
        if chunk.tokens and not (to and to[-1].take(chunk)):
            to.append(chunk)

    def land(self) -> None:
        """The chunk at the core has been worked off; the next one may go."""
        if self.flying is not None:
            self._context += len(self.flying.tokens) + max(0, self.said - self._dropped)
            if self.flying.final:
                self.turn_tokens = 0
        self.flying = None
        self.text = None
        self.said = 0
        self._news.set()

    async def feed(
        self,
        wrap: Callable[[Chunk, int], Any],
        on_empty: Callable[[Chunk], None],
        on_full: Callable[[str], None],
    ) -> AsyncGenerator[Any, None]:
        """What goes into vLLM, for as long as the request lives; never returns by itself.

        `wrap` makes vLLM's input from a chunk and the number of tokens that may be answered. A turn without any
        input, or a chunk that doesn't fit, goes to `on_empty` or `on_full` instead.
        """
        try:
            while True:
                chunk = await self._next(on_empty, on_full)
                room = self._limit - self._context - len(chunk.tokens)
                self.was_fed = True
                self.flying = chunk
                self.turn_tokens += len(chunk.tokens)
                self._still.clear()
                yield wrap(chunk, room)
                # Asked again: vLLM has sent the former chunk to the core.
                self._still.set()
        finally:
            self._still.set()
            self._closed.set()

    async def _next(self, on_empty: Callable[[Chunk], None], on_full: Callable[[str], None]) -> Chunk:
        while True:
            if not self.leaving and self.flying is None and self._waiting:
                chunk = self._waiting.popleft()
                total = self._context + len(chunk.tokens)
                if not chunk.tokens:
                    if chunk.final:
                        on_empty(chunk)
                    continue
                if total < self._limit:
                    return chunk
                on_full(f"{total} tokens would be in its context, which holds {self._limit - 1} and an answer")
            self._news.clear()
            await self._news.wait()

    def leave(self) -> None:
        """Nothing goes in any more from now on, not even what waits."""
        self.leaving = True
        self._waiting.clear()
        self._held = []

    async def until_still(self) -> None:
        """Wait until what is just going in has gone in."""
        await self._still.wait()

    async def until_closed(self) -> None:
        """Wait until vLLM has let go of the feed."""
        if self.was_fed:
            await self._closed.wait()


async def close_feed(feed: AsyncGenerator[Any, None]) -> None:
    """Close what vLLM has left open: it forgets a feed whose input it could not take."""
    for _ in range(_CLOSE_TRIES):
        with contextlib.suppress(RuntimeError):  # vLLM's task is still in it, and is just being cancelled
            await feed.aclose()
            return
        await asyncio.sleep(0)
