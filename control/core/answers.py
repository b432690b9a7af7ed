"""What a session has already answered, so that a command sent again has one effect and the same reply (I4, D5).

Responsible for the memory of the last answers: a hash of the control id, the op, the code and the numbers of the
detail; the rest of a reply is rebuilt from the command itself. The answers of a life with a token are found only by
commands that show it, even after that life, since its digest is part of the hash. Leaves the storing to the commit (a
list a session, written by increment). Pure, but `Answers` is mutable: dropped whole when a commit is refused.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from functools import lru_cache
from hashlib import blake2b

from msgspec import Struct

from control.core.fence import Fence
from control.core.tokens import TokenDigest

KEEP_ANSWERS = 256
KEEP_MS = 60_000


@lru_cache(maxsize=8192)
def digest(text: str) -> bytes:
    """Eight bytes that stand for an id of up to 128 bytes. 2^-46 a pair within 256 answers: never by accident."""
    return blake2b(text.encode(), digest_size=8).digest()


def key_of(control_id: str, token: TokenDigest | None) -> bytes:
    """What an answer is remembered under: its command's id, within a life with a token together with that token."""
    if token is None:
        return digest(control_id)
    return blake2b(control_id.encode(), digest_size=8, key=token.sha256).digest()


class Operation(Struct, frozen=True, gc=False, array_like=True):
    """What an append with an `operation_id` was, to tell a repeat from a reuse with other content (S22)."""

    key: bytes
    fence: Fence
    mode: str
    final: bool
    payload_digest: bytes | None


class Answered(Struct, frozen=True, gc=False, array_like=True):
    """One answer. `numbers` by op: append `(seq, turn_seq)`, touch and resume `(lease_generation,)`.

    `level`: of an append whose session has another implementation level than most; the session may be gone by then.
    """

    key: bytes
    op: str
    code: str | None
    at_ms: int
    accepted_fence: Fence | None
    lease_generation: int | None
    numbers: tuple[int, ...] = ()
    operation: Operation | None = None
    level: str = ""


class Answers:
    """The answers of one session id, oldest first."""

    __slots__ = ("_by_key", "_operation_limit", "_operations", "_order")

    def __init__(self, entries: list[Answered] | None = None, *, operation_limit: int = KEEP_ANSWERS) -> None:
        """`entries` as stored, oldest first; `operation_limit`: how many completed operations replay."""
        self._by_key: dict[bytes, Answered] = {}
        self._order: deque[Answered] = deque()
        self._operations: OrderedDict[bytes, Answered] = OrderedDict()
        self._operation_limit = operation_limit
        for entry in entries or ():
            self._add(entry)

    def __len__(self) -> int:
        """How many answers are remembered."""
        return len(self._order)

    def find(self, control_id: str, token: TokenDigest | None = None) -> Answered | None:
        """The answer that `control_id` has had, if it is still remembered; in a life with a token only with that."""
        if not self._by_key:
            return None
        found = self._by_key.get(digest(control_id))
        return found if found is not None or token is None else self._by_key.get(key_of(control_id, token))

    def find_operation(self, operation_id: str, accepted: Fence) -> Answered | None:
        """The completed append of this operation in the accepted fence's life and epoch."""
        found = self._operations.get(digest(operation_id))
        if found is None or found.operation is None:
            return None
        fence = found.operation.fence
        return found if (fence.incarnation, fence.epoch) == (accepted.incarnation, accepted.epoch) else None

    def remember(self, entry: Answered) -> int:
        """Add an answer and return how many of the oldest were dropped: beyond 256 and older than a minute."""
        self._add(entry)
        dropped = 0
        while len(self._order) > KEEP_ANSWERS and self._order[0].at_ms + KEEP_MS < entry.at_ms:
            gone = self._order.popleft()
            if self._by_key.get(gone.key) is gone:
                del self._by_key[gone.key]
            dropped += 1
        return dropped

    def _add(self, entry: Answered) -> None:
        self._order.append(entry)
        self._by_key[entry.key] = entry
        if entry.operation is None or entry.code is not None:
            return
        epoch = entry.operation.fence.epoch
        for key, old in list(self._operations.items()):
            if old.operation is not None and old.operation.fence.epoch == epoch:
                break
            del self._operations[key]
        self._operations[entry.operation.key] = entry
        self._operations.move_to_end(entry.operation.key)
        while len(self._operations) > self._operation_limit:
            self._operations.popitem(last=False)
