"""Lanes: what a stage worker knows of each request, and which requests must not run any more.

Responsible for the record of a request at this stage and for the memory of aborted ones (S34). Leaves running inputs
to `stage_intake.py`, aborting to `stage_cleanup.py`, outputs to `stage_outbox.py`. Pure.

A lane begins with the request's first input and ends when the engine has confirmed its abort. An aborted id without a
lane is remembered until its queue has been read past the abort; one that was stopped without an order (a failure, or
the publish script's word) until its order comes, in a bounded memory.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from enum import Enum
from typing import TYPE_CHECKING

from msgspec import Struct

from control.core.requests import request_id

if TYPE_CHECKING:
    import asyncio
    from typing import Any

    from control.store.queues import Queues
    from control.wire.stage import Ack, SubmissionOrder

_ANSWERS_KEPT = 8
_TURNS_KEPT = 8
_ENTOMBED_KEPT = 4096
# An abort may name a submission that somebody has deleted by hand: that one is never read (S55).
_STOP_KEPT_S = 60.0

FenceKey = tuple[int, int, int]


class LanePhase(Enum):
    """`STOPPED`: an abort is ordered, or the publish script said stop. `FAILED`: its owner was told that it is lost."""

    OPEN = "open"
    STOPPED = "stopped"
    FAILED = "failed"


class Input(Struct, frozen=True):
    """A submission in hand."""

    order: SubmissionOrder
    payload: bytes
    entry_id: str


class Turn:
    """What outputs of one turn need: the mode of its input, and how many inputs the next stage was sent."""

    __slots__ = ("forwarded", "mode")

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.forwarded = 0


class Lane:
    """One request at this stage.

    `inputs` wait for `worker`, the task that runs them one at a time. `taken`: the engine has accepted an input, so the
    next one resumes the request. `submit`: the engine's answer that is waited for. `gone`: set while an abort is asked
    for; the engine may say in the same instant that the request has died (S35).

    `config` is kept as it came, with its `generation`; the next stage is known to have `sent_generation`.
    """

    def __init__(self, name: str, partition: int, order: SubmissionOrder) -> None:
        self.request_id = name
        self.partition = partition
        self.session_id = order.session_id
        self.incarnation = order.fence.incarnation
        self.epoch = order.fence.epoch
        self.phase = LanePhase.OPEN
        self.inputs: deque[Input] = deque()
        self.input_bytes = 0
        self.worker: asyncio.Task[None] | None = None
        self.submit: asyncio.Task[None] | None = None
        self.taken = False
        self.gone: asyncio.Future[None] | None = None
        self.last_seq = -1
        self.config = b""
        self.unpacked: tuple[dict[str, Any], dict[str, Any], Any] = ({}, {}, ())
        self.generation = -1
        self.route = order.route
        self.traceparent = order.traceparent
        self.next_number = 0
        self.forwarded = 0
        self.sent_generation = -1
        self.buffered_bytes = 0
        self.silent = False
        self._turns: OrderedDict[FenceKey, Turn] = OrderedDict()
        self._answers: OrderedDict[tuple[int, int, int], Ack] = OrderedDict()

    @property
    def is_idle(self) -> bool:
        """Whether neither the worker nor the engine has anything of it."""
        return not self.inputs and not self.taken and self.submit is None

    def add(self, item: Input) -> None:
        """One more input at the end."""
        self.inputs.append(item)
        self.input_bytes += len(item.payload)

    def take(self) -> Input:
        """The oldest input."""
        item = self.inputs.popleft()
        self.input_bytes -= len(item.payload)
        return item

    def take_all(self) -> list[Input]:
        """Everything that waits."""
        items = list(self.inputs)
        self.inputs.clear()
        self.input_bytes = 0
        return items

    def begin_turn(self, key: FenceKey, mode: str) -> None:
        """An input of this turn is going to the engine."""
        turn = self._turns.get(key)
        if turn is None:
            self._turns[key] = Turn(mode)
            if len(self._turns) > _TURNS_KEPT:
                self._turns.popitem(last=False)
        else:
            turn.mode = mode

    def turn_of(self, key: FenceKey) -> Turn:
        """The turn that an output belongs to; an empty one if it is too old to be known."""
        return self._turns.get(key) or Turn("")

    def find_answer(self, mark: tuple[int, int, int]) -> Ack | None:
        """What was answered to this very input, if a failover has brought it back."""
        return self._answers.get(mark)

    def remember_answer(self, mark: tuple[int, int, int], ack: Ack) -> None:
        """Kept for the last few inputs."""
        self._answers[mark] = ack
        if len(self._answers) > _ANSWERS_KEPT:
            self._answers.popitem(last=False)


class Stop(Struct, frozen=True):
    """An abort without its lane. `after`: the last submission that was unread before it in the partition's queue.

    `moment`: of the submissions' reader, `since_s`: of the loop's clock, when the abort was read.
    """

    partition: int
    after: str
    moment: int
    since_s: float


class Lanes:
    """All lanes of one life, and the ids that must not run."""

    def __init__(self, stage_id: int) -> None:
        self._stage_id = stage_id
        self._lanes: dict[str, Lane] = {}
        self._stops: dict[str, Stop] = {}
        self._entombed: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lanes)

    def find(self, name: str) -> Lane | None:
        """The lane of a request id."""
        return self._lanes.get(name)

    def request_ids(self) -> list[str]:
        """Every request that the engine may hold."""
        return list(self._lanes)

    def held(self) -> list[tuple[str, int, int]]:
        """Session id, incarnation and epoch of each."""
        return [(lane.session_id, lane.incarnation, lane.epoch) for lane in self._lanes.values()]

    def name_of(self, order: SubmissionOrder) -> str:
        """The request id that an order belongs to."""
        fence = order.fence
        return request_id(order.session_id, fence.incarnation, fence.epoch, self._stage_id)

    def begin(self, name: str, partition: int, order: SubmissionOrder) -> Lane:
        """A new lane for a request's first input."""
        lane = self._lanes[name] = Lane(name, partition, order)
        return lane

    def remove(self, name: str) -> None:
        """The engine has nothing of it any more."""
        self._lanes.pop(name, None)

    def entomb(self, name: str) -> None:
        """It was stopped without an order: later inputs must not run, until the order comes."""
        self._entombed[name] = None
        if len(self._entombed) > _ENTOMBED_KEPT:
            self._entombed.popitem(last=False)

    def stop(self, name: str, stop: Stop) -> None:
        """An abort is ordered."""
        self._entombed.pop(name, None)
        self._stops[name] = stop

    def is_stopped(self, name: str) -> bool:
        """Whether inputs of this id are to be discarded."""
        return name in self._stops or name in self._entombed

    def forget_stops(self, queue: Queues, now_s: float) -> None:
        """Drop what can't matter any more, since `queue` has been read past it."""
        for name, stop in list(self._stops.items()):
            lost = now_s - stop.since_s > _STOP_KEPT_S and queue.has_read_since(stop.partition, stop.moment)
            if lost or queue.has_read_to(stop.partition, stop.after):
                del self._stops[name]

    @property
    def remembered(self) -> int:
        """How many aborted ids are remembered."""
        return len(self._stops) + len(self._entombed)


def look_at(task: asyncio.Future[None]) -> None:
    """Take note of how a task ended that nobody may be waiting for; asyncio complains about errors unseen."""
    if not task.cancelled():
        task.exception()
