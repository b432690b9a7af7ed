"""Opening a session: checks, the choice of a route, placement, and what happens when there is no slot.

Responsible for D3 and D4 at open, for S1 to S5, and for I9: every slot that was asked for is either held or owed back.
Leaves the taking and freeing of slots to the owner. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from control.core import replies
from control.core.effects import Announce, Answer, Decision, Effect, Pay, Place
from control.core.lease import Lease
from control.core.rejections import Code, Rejection
from control.core.replies import Lifecycle, OpenDetail
from control.core.requests import request_id, reserve
from control.core.rules.answering import accepted, answer, refused, stale_message
from control.core.rules.configure import pack
from control.core.rules.release import ask_debts, leave
from control.core.scene import ADMISSION
from control.core.session import LAYOUT, Debt, Ended, Opening, Phase, Session

if TYPE_CHECKING:
    from control.core.commands import (
        Close,
        DebtPaid,
        Due,
        Open,
        Placed,
        PlacementRefused,
        Poisoned,
        StageLost,
    )
    from control.core.scene import Scene

SESSION_MODES = ("duplex", "turn")
TURN_COMMIT_ONLY = "turn_commit_only"
INPUT_MODES = (
    "append_tokens",
    "append_audio_chunk",
    "replace_latest_chunk",
    "reencode_context",
    "rollback_to_checkpoint",
    TURN_COMMIT_ONLY,
)


def open_session(scene: Scene, session: Session, command: Open) -> Decision:
    """Check everything, choose a route, and ask for its slots; or open at once where no slot is needed."""
    refusal_ = _find_argument_refusal(scene, command)
    if refusal_ is not None:
        return refused(scene, session, command, *refusal_)
    if session.ended is not None and command.fence.incarnation <= session.ended.incarnation:
        return refused(
            scene,
            session,
            command,
            Code.STALE_FENCE,
            f"session {command.session_id!r} has lived as incarnation {session.ended.incarnation} already; "
            "open it with a higher one",
        )
    if session.debts:
        return Decision(session, wait=True)
    try:
        config = pack(scene, command.session_config, command.runtime_config)
    except (TypeError, ValueError) as error:
        return refused(scene, session, command, Code.INVALID_ARGUMENT, f"$.runtime_config: {error}")
    route = scene.choose_route() if scene.settings.configure is not None else ()
    if route is None:
        return refused(scene, session, command, Code.RESOURCE_EXHAUSTED, _no_slot(command.session_id))
    holders = (*route, ADMISSION) if scene.settings.limit_sessions else route
    capabilities = command.capabilities
    fresh = Session(
        LAYOUT,
        Phase.OPENING,
        command.fence,
        Lease(0, scene.now_ms),
        floor=command.fence.epoch,
        session_mode=command.session_mode,
        implementation_level=capabilities.level,
        input_modes=tuple(dict.fromkeys(str(m) for m in capabilities.input_modes or (TURN_COMMIT_ONLY,))),
        config=config,
        route=route,
        holders=holders,
        opening=Opening(command.control_id, 1, scene.now_ms + scene.settings.placement_retry_ms),
        ended=session.ended,
        token=command.token,
    )
    if not holders:
        return _opened(scene, fresh)
    return Decision(fresh, (Place(1, holders),))


def refuse_second_open(scene: Scene, session: Session, command: Open) -> Decision:
    """An id that lives, or whose close is not confirmed yet, isn't opened again (S4, S5)."""
    refusal_ = _find_argument_refusal(scene, command)
    if refusal_ is None:
        refusal_ = (
            Code.INVALID_ARGUMENT,
            f"session {command.session_id!r} exists already ({session.phase.name.lower()}); close it first",
        )
    return refused(scene, session, command, *refusal_)


def note_placed(scene: Scene, session: Session, event: Placed) -> Decision:
    """All slots are taken: the session is open."""
    if not _is_this_try(session, event.incarnation, event.attempt):
        return Decision(session)
    return _opened(scene, session)


def place_elsewhere(scene: Scene, session: Session, event: PlacementRefused) -> Decision:
    """A holder had no slot after all: try another route, or give up and owe back whatever was taken."""
    if not _is_this_try(session, event.incarnation, event.attempt):
        return Decision(session)
    return _choose_again(scene, session, event.holder)


def leave_lost_route(scene: Scene, session: Session, event: StageLost) -> Decision:
    """A worker of the chosen route is gone before the session was open."""
    if event.worker_id not in session.route:
        return Decision(session)
    return _choose_again(scene, session, event.worker_id)


def retry_placement(scene: Scene, session: Session, event: Due) -> Decision:
    """No word from placement for a while, or a new owner has taken over: ask again, it is idempotent."""
    session, pay = ask_debts(scene, session, event)
    opening = session.opening
    if opening is None or (opening.retry_at_ms > scene.now_ms and not event.anew):
        return Decision(session, pay)
    again = replace(opening, retry_at_ms=scene.now_ms + scene.settings.placement_retry_ms)
    return Decision(replace(session, opening=again), (*pay, Place(opening.attempt, session.holders)))


def close_while_opening(scene: Scene, session: Session, command: Close) -> Decision:
    """The producer gave up before the session was open (S1): the slots come back, the open is refused."""
    if command.fence.incarnation != session.fence.incarnation:
        message = stale_message(session, command.session_id, command.fence)
        return refused(scene, session, command, Code.STALE_FENCE, message)
    decision = _give_up(
        scene,
        session,
        Rejection(Code.FAILED_PRECONDITION, f"session {command.session_id!r} was closed while it was opening"),
        Ended(session.fence.incarnation, scene.now_ms),
    )
    gone = decision.session or session
    closed = accepted(scene, gone, command, replies.CloseDetail(reason=command.reason))
    return replace(decision, effects=(*decision.effects, closed))


def drop_poisoned_open(scene: Scene, session: Session, event: Poisoned) -> Decision:
    """The open can't be carried out; its slots come back."""
    return _give_up(scene, session, Rejection(Code.INTERNAL, event.message), session.ended)


def note_debt_paid(scene: Scene, session: Session, event: DebtPaid) -> Decision:  # noqa: ARG001
    """A slot came back. A record with nothing left to say is forgotten."""
    debts = tuple(d for d in session.debts if (d.holder, d.incarnation) != (event.holder, event.incarnation))
    if len(debts) == len(session.debts):
        return Decision(session)
    if session.phase is Phase.VACANT and not debts and session.ended is None:
        return Decision(None)
    return Decision(replace(session, debts=debts))


def keep_vacant(scene: Scene, session: Session, event: Due) -> Decision:
    """Ask again for slots that were not given back; forget a tombstone once its hour is over."""
    if not session.debts and session.is_forgettable(scene.now_ms):
        return Decision(None)
    return Decision(*ask_debts(scene, session, event))


def _opened(scene: Scene, session: Session) -> Decision:
    opening, fence = session.opening, session.fence
    policy = scene.settings.configure is not None
    session = replace(
        session,
        phase=Phase.OPEN,
        opening=None,
        ended=None,
        lease=Lease(0, scene.now_ms),
        requests=(reserve(fence),) if policy else (),
    )
    detail = OpenDetail(
        implementation_level=session.implementation_level,
        session_mode=session.session_mode,
        scheduler_request_context=policy,
        request_id=request_id(scene.session_id, fence.incarnation, fence.epoch, 0) if policy else None,
    )
    control_id = "" if opening is None else opening.control_id
    return Decision(
        session,
        (
            Announce(Lifecycle(event=replies.OPENED, session_id=scene.session_id, fence=fence, lease_generation=0)),
            answer(scene, session, "open", control_id, fence, detail=detail),
        ),
    )


def _choose_again(scene: Scene, session: Session, refused_by: str) -> Decision:
    opening = session.opening
    attempt = 1 if opening is None else opening.attempt + 1
    if refused_by == ADMISSION:
        full = "the limit of sessions is reached; try again once one has ended"
        return _give_up(scene, session, Rejection(Code.RESOURCE_EXHAUSTED, full), session.ended)
    route = scene.choose_route() if attempt <= scene.settings.placement_attempts else None
    if route is None:
        return _give_up(scene, session, Rejection(Code.RESOURCE_EXHAUSTED, _no_slot(scene.session_id)), session.ended)
    retry_at_ms = scene.now_ms + scene.settings.placement_retry_ms
    holders = (*route, ADMISSION) if scene.settings.limit_sessions else route
    incarnation = session.fence.incarnation
    # A worker that was asked before and isn't on the new route may have given a slot: that is owed back. One that owes
    # from an earlier try and is on the route again holds it: what is held must not be given back.
    left = tuple(Debt(holder, incarnation, retry_at_ms) for holder in session.holders if holder not in holders)
    owed = tuple(d for d in session.debts if d.incarnation != incarnation or d.holder not in holders)
    again = replace(
        session,
        route=route,
        holders=holders,
        debts=(*owed, *left),
        opening=None if opening is None else replace(opening, attempt=attempt, retry_at_ms=retry_at_ms),
    )
    effects: tuple[Effect, ...] = (Pay(left),) if left else ()
    return Decision(again, (*effects, Place(attempt, holders)))


def _give_up(scene: Scene, session: Session, rejection: Rejection, ended: Ended | None) -> Decision:
    gone = leave(scene, session, ended)
    effects: tuple[Answer | Pay, ...] = ()
    if session.opening is not None:
        effects = (answer(scene, gone, "open", session.opening.control_id, session.fence, rejection=rejection),)
    pay = (Pay(gone.debts),) if gone.debts else ()
    return Decision(gone, (*effects, *pay))


def _is_this_try(session: Session, incarnation: int, attempt: int) -> bool:
    opening = session.opening
    return opening is not None and opening.attempt == attempt and session.fence.incarnation == incarnation


def _find_argument_refusal(scene: Scene, command: Open) -> tuple[Code, str] | None:
    if command.session_mode not in SESSION_MODES:
        return (
            Code.INVALID_ARGUMENT,
            f"$.session_mode: {command.session_mode!r} is none of {', '.join(SESSION_MODES)}",
        )
    modes = command.capabilities.input_modes or ()
    for index, mode in enumerate(modes):
        if mode not in INPUT_MODES:
            return (
                Code.INVALID_CAPABILITY,
                f"$.capabilities.input_modes[{index}]: {mode!r} is none of {', '.join(INPUT_MODES)}",
            )
    if scene.settings.configure is None and any(mode != TURN_COMMIT_ONLY for mode in modes):
        return (
            Code.FAILED_PRECONDITION,
            f"no model policy is configured here, so only {TURN_COMMIT_ONLY} input is possible",
        )
    return None


def _no_slot(session_id: str) -> str:
    return f"no stage worker has a free slot for session {session_id!r}; try again, or add stage workers"
