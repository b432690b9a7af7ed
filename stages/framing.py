"""Framing: cuts the input of one request into frames and marks where a turn ends.

Responsible for the built-in engines' input between acceptance and work: a turn's bytes or tokens in order,
in frames of one size, the last of the turn shorter and marked. Leaves to the engine what a frame becomes and
what a new turn does to the frames of an old one. Pure: times are arguments. Says no with a `ValueError`
before anything changes.
"""

from collections import deque
from collections.abc import Mapping

from msgspec import Struct

from control.core.fence import Fence
from stages.chunks import Chunk, ChunkKind


class Frame(Struct):
    """`data` is empty only where a turn ends and everything of it has been taken already."""

    fence: Fence
    kind: ChunkKind
    data: bytes | list[int]
    turn_end: bool
    ready_s: float


class Framer:
    """The frames of one request. `sizes`: how much of each kind (bytes, tokens) fills a frame."""

    def __init__(self, sizes: Mapping[ChunkKind, int], kind: ChunkKind, fence: Fence) -> None:
        self.frames: deque[Frame] = deque()
        self.fence = fence
        self._sizes = sizes
        self._kind: ChunkKind = kind
        self._turn_kind: ChunkKind | None = None
        # The turn so far if it is held back until its end, else less than one frame.
        self._rest: bytearray | list[int] = bytearray()

    def check(self, chunk: Chunk) -> None:
        """Raise `ValueError` if the turn that is under way can't go on with `chunk`."""
        if chunk.kind is not None and self._turn_kind not in (None, chunk.kind):
            raise ValueError(f"the turn began with {self._turn_kind}, and this is {chunk.kind}")

    def backlog_with(self, chunk: Chunk) -> int:
        """How many frames would be waiting, those still held back included, with `chunk` added."""
        return len(self.frames) + self.rest_with(chunk) // self._sizes[chunk.kind or self._kind]

    def rest_with(self, chunk: Chunk) -> int:
        """How much of the turn would not be in frames yet (bytes or tokens), with `chunk` added."""
        return len(self._rest) + len(chunk.data)

    def add(self, chunk: Chunk, *, final: bool, hold: bool, ready_s: float) -> None:
        """Take a chunk that was checked. `hold`: cut nothing before the turn is final."""
        if chunk.kind is not None:
            if self._turn_kind is None:
                self._kind = self._turn_kind = chunk.kind
                self._rest = [] if chunk.kind == "tokens" else bytearray()
            self._rest.extend(chunk.data)
        if final:
            self.flush(ready_s=ready_s)
            self._end(ready_s)
        elif not hold:
            self._cut(len(self._rest) - len(self._rest) % self._sizes[self._kind], ready_s)

    def flush(self, *, ready_s: float, whole: int = 1) -> None:
        """Cut what is left, however short, without marking an end; less than `whole` of it is dropped."""
        self._cut(len(self._rest) - len(self._rest) % whole, ready_s)
        self._rest = bytearray()
        self._turn_kind = None

    def clear(self) -> None:
        """Forget everything that was not taken, and the turn with it."""
        self.frames.clear()
        self._rest = bytearray()
        self._turn_kind = None

    def _cut(self, length: int, ready_s: float) -> None:
        size = self._sizes[self._kind]
        for start in range(0, length, size):
            piece = self._rest[start : min(start + size, length)]
            data = bytes(piece) if isinstance(piece, bytearray) else piece
            self.frames.append(Frame(self.fence, self._kind, data, turn_end=False, ready_s=ready_s))
        self._rest = self._rest[length:]

    def _end(self, ready_s: float) -> None:
        last = self.frames[-1] if self.frames else None
        if last is None or last.turn_end or last.fence != self.fence:
            nothing: bytes | list[int] = [] if self._kind == "tokens" else b""
            last = Frame(self.fence, self._kind, nothing, turn_end=False, ready_s=ready_s)
            self.frames.append(last)
        last.turn_end = True
