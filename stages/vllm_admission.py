"""What a vLLM stage takes and what it refuses, by places, KV cache and context: hazards 1, 2 and 3 of docs/vllm.md.

Responsible for the figures behind a refusal and for its words. Leaves the requests to the engine. Pure. Refuses with
`EngineRefusal`, before anything of the input is kept (I7).
"""

from collections.abc import Collection

from stages.engine import EngineRefusal
from stages.vllm_core import VllmCore
from stages.vllm_request import Request


class Admission:
    """`requests`: those that are held now. `refuse_above_kv`: the share of the KV cache."""

    def __init__(self, core: VllmCore, requests: Collection[Request], refuse_above_kv: float) -> None:
        self._core = core
        self._requests = requests
        self._refuse_above_kv = refuse_above_kv

    @property
    def kv(self) -> float:
        """The share of the KV cache in use, with the input that the core's figure doesn't show yet."""
        if not self._core.kv_tokens:
            return self._core.counts.kv
        unseen = sum(request.unseen_tokens for request in self._requests)
        return self._core.counts.kv_now + unseen / self._core.kv_tokens

    @property
    def accepts(self) -> bool:
        """Whether there is room for one more request."""
        return len(self._requests) < self._core.seats and self.kv < self._refuse_above_kv

    def check_new(self) -> None:
        """Refuse a new request where it would have no place, or would make the others stall."""
        if len(self._requests) >= self._core.seats:
            raise EngineRefusal("resource_exhausted", f"all {self._core.seats} requests are taken", retryable=True)
        if (kv := self.kv) >= self._refuse_above_kv:
            message = f"{kv:.0%} of the KV cache are in use; no new request is taken"
            raise EngineRefusal("resource_exhausted", message, retryable=True)

    def check_room(self, request: Request, count: int) -> None:
        """Refuse input of `count` tokens that can't fit, while the session can still be told so."""
        room = request.room()
        if count > room:
            message = (
                f"{count} tokens don't fit: {max(0, room)} of the model's {self._core.context_tokens} are left (one is "
                "kept for an answer); the next request of this session begins with an empty context"
            )
            raise EngineRefusal("resource_exhausted", message)
        if self._core.kv_tokens and self.kv + count / self._core.kv_tokens > 1:
            raise EngineRefusal("resource_exhausted", "the KV cache is full: the input would stall", retryable=True)
