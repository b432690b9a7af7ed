"""The request ledger: which inference requests a session has registered at the stages.

A request lives for one epoch on every stage of the route, under one id a stage. The ledger keeps one record an
epoch and derives the ids, since once the first stage holds a submission the later ones count as holding it too.
Leaves to `cleanup.py` who still has to confirm. Pure. Keeps I2 and I3: a record leaves the ledger only through
`release`, which the rules call when nobody is left to confirm.

    reserved --submit--> submitted --clean up--> cleaning --release--> (gone)
    reserved --release--> (gone)            never submitted: no stage has to be asked (D10)
"""

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from enum import IntEnum
from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from control.core.fence import Fence

_REQUEST_ID = re.compile(r"duplex-s\.([A-Za-z0-9_-]+)\.i\.(\d{1,16})\.e\.(\d{1,16})\.r\.stage(\d{1,4})")


class RequestPhase(IntEnum):
    """Stored as a number; see the header for the steps."""

    RESERVED = 0
    SUBMITTED = 1
    CLEANING = 2


class Request(Struct, frozen=True, gc=False, array_like=True):
    """One epoch's request, bound to the turn and response of its last append.

    `generation`: the configuration that the first stage last accepted with it.
    """

    epoch: int
    phase: RequestPhase = RequestPhase.RESERVED
    generation: int = -1
    turn_id: int = 0
    response_seq: int = 0

    @property
    def key(self) -> tuple[int, int, int]:
        """`(epoch, turn_id, response_seq)`, to compare with a fence's key."""
        return (self.epoch, self.turn_id, self.response_seq)


def reserve(fence: Fence) -> Request:
    """A request that no stage has heard of yet."""
    return Request(fence.epoch, turn_id=fence.turn_id, response_seq=fence.response_seq)


class RequestName(Struct, frozen=True, gc=False):
    """What a request id says."""

    session_id: str
    incarnation: int
    epoch: int
    stage_id: int


Ledger = tuple[Request, ...]


@lru_cache(maxsize=8192)
def request_id(session_id: str, incarnation: int, epoch: int, stage_id: int) -> str:
    """The id under which a stage runs the request of one epoch."""
    encoded = urlsafe_b64encode(session_id.encode()).decode().rstrip("=")
    return f"duplex-s.{encoded}.i.{incarnation}.e.{epoch}.r.stage{stage_id}"


def find_request_name(text: str) -> RequestName | None:
    """The parts of a request id, or None if `text` is not one."""
    match = _REQUEST_ID.fullmatch(text)
    if match is None:
        return None
    encoded, incarnation, epoch, stage = match.groups()
    try:
        session_id = urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode()
    except (Base64Error, UnicodeDecodeError):
        return None
    return RequestName(session_id, int(incarnation), int(epoch), int(stage))


def find(ledger: Ledger, epoch: int) -> Request | None:
    """The request of an epoch, if it is registered."""
    for request in ledger:
        if request.epoch == epoch:
            return request
    return None


def put(ledger: Ledger, request: Request) -> Ledger:
    """The ledger with `request` in the place of its epoch's record, or added at the end."""
    for index, known in enumerate(ledger):
        if known.epoch == request.epoch:
            return (*ledger[:index], request, *ledger[index + 1 :])
    return (*ledger, request)


def mark_cleaning(ledger: Ledger, epochs: tuple[int, ...]) -> Ledger:
    """The ledger with the submitted requests of `epochs` in phase cleaning; one only reserved has nothing to clean."""
    return tuple(
        replace(request, phase=RequestPhase.CLEANING)
        if request.phase is RequestPhase.SUBMITTED and request.epoch in epochs
        else request
        for request in ledger
    )


def release(ledger: Ledger, epochs: tuple[int, ...]) -> Ledger:
    """The ledger without the requests of `epochs`. Only for requests that every stage has confirmed (I2)."""
    return tuple(request for request in ledger if request.epoch not in epochs)


def epochs_in(ledger: Ledger, phase: RequestPhase, below: int | None = None) -> tuple[int, ...]:
    """The epochs of the requests in a phase, those below an epoch only where one is given."""
    return tuple(r.epoch for r in ledger if r.phase is phase and (below is None or r.epoch < below))
