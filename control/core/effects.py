"""What a decision asks for beside the new session.

Responsible for the closed set of effects. Leaves carrying them out to the commit (everything but `Place` and `Pay`,
in the same script as the state) and to the owner (`Place` and `Pay`, only after that commit is confirmed, since the
slots live in the workers' own keys). Pure.
"""

from __future__ import annotations

from msgspec import Struct

from control.core.answers import Answered
from control.core.fence import Fence
from control.core.replies import Lifecycle, Reply
from control.core.session import Debt, Session


class Answer(Struct, frozen=True, gc=False):
    """Append a reply to the session's events. `remember` is None where the command may be tried again."""

    reply: Reply
    remember: Answered | None = None


class Announce(Struct, frozen=True, gc=False):
    """Append a lifecycle event to the session's events."""

    lifecycle: Lifecycle


class Submit(Struct, frozen=True, gc=False, kw_only=True):
    """Queue a submission at the route's first worker; the commit moves the append's payload along.

    `config` is empty where the stage already has `generation`. `resumed`: the request already runs there.
    """

    worker_id: str
    number: int
    fence: Fence
    seq: int
    turn_seq: int
    mode: str
    final: bool
    resumed: bool
    generation: int
    config: bytes
    route: tuple[str, ...]
    traceparent: str | None


class Abort(Struct, frozen=True, gc=False, kw_only=True):
    """Queue an abort of the requests of `epochs` at one worker of the route, for cleanup `number`.

    `restart`: the worker has not confirmed for so long that its engine must go if this try fails as well.
    `incarnation`: of requests that are not of the session's present life.
    """

    worker_id: str
    stage_id: int
    number: int
    attempt: int
    epochs: tuple[int, ...]
    restart: bool = False
    incarnation: int | None = None


class Release(Struct, frozen=True, gc=False):
    """The requests of these epochs are gone for good; their ids are free."""

    epochs: tuple[int, ...]


class Place(Struct, frozen=True, gc=False):
    """Take a slot at every holder for the opening session; tell it `Placed` or `PlacementRefused`."""

    attempt: int
    holders: tuple[str, ...]


class Pay(Struct, frozen=True, gc=False):
    """Give slots back; tell the session `DebtPaid` for each."""

    debts: tuple[Debt, ...]


class ExpireUnlessHeard(Struct, frozen=True, gc=False):
    """Refuse the commit if an output was delivered after `output_ms`: the session is not idle after all."""

    output_ms: int


Effect = Answer | Announce | Submit | Abort | Release | Place | Pay | ExpireUnlessHeard


class Decision(Struct, frozen=True, gc=False):
    """The session as it is from now on (None: forget the id) and what has to be done with it.

    `wait`: not now; the command stays where it is until the session's append or placement has ended. `row`: the
    transition table's row, set by `step`.
    """

    session: Session | None
    effects: tuple[Effect, ...] = ()
    wait: bool = False
    row: str = ""
