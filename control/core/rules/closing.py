"""Signals to a session that is closing: heard as in the reference, and refused.

Responsible for the one place where a refusal is not without trace: the reference moves the fence of a closing session
and, for a cancel, asks for its requests again before it says `failed_precondition`, and the recorded traces are the
contract. Nothing is accepted or delivered by it; the floor is closed (I1). Leaves the end itself to `release.py`. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from control.core.cleanup import CleanupKind
from control.core.effects import Decision
from control.core.rejections import Code
from control.core.requests import RequestPhase
from control.core.rules.answering import closing_message, find_refusal, refused
from control.core.rules.configure import configure
from control.core.rules.release import ask, begin, find_end
from control.core.rules.turn import find_cancel_refusal, interruption, owed_cancel

if TYPE_CHECKING:
    from control.core.commands import Cancel, RequestFailed, Update
    from control.core.fence import Fence
    from control.core.scene import Scene
    from control.core.session import Session


def cancel_closing(scene: Scene, session: Session, command: Cancel) -> Decision:
    """Ask for the requests bound to the cancelled fence once more; answered by their cleanup, never with ok."""
    if command.next_fence is None:
        message = f"$.next_fence: {command.event} needs the fence to go to"
        return refused(scene, session, command, Code.INVALID_ARGUMENT, message)
    bad = find_cancel_refusal(scene, session, command, command.next_fence)
    if bad is not None:
        return refused(scene, session, command, *bad)
    message = closing_message(session, command.session_id)
    if command.fence.epoch < session.fence.epoch:
        return refused(scene, session, command, Code.FAILED_PRECONDITION, message)
    try:
        configure(scene, session, command.session_config, command.runtime_config)
    except (TypeError, ValueError) as error:
        return refused(scene, session, command, Code.INVALID_ARGUMENT, f"$.runtime_config: {error}")
    raised = interruption(scene, session, command.next_fence)
    session = _move(session, command.next_fence)
    asked = {epoch for c in session.cleanups if c.kind is not CleanupKind.END for epoch in c.epochs}
    epochs = tuple(
        request.epoch
        for request in session.requests
        if request.phase is RequestPhase.CLEANING and request.key == command.fence.key and request.epoch not in asked
    )
    if not epochs:
        session = configure(scene, session, command.session_config, command.runtime_config)
        decision = refused(scene, session, command, Code.FAILED_PRECONDITION, message)
        return replace(decision, effects=(raised, *decision.effects))
    # Whoever the end doesn't wait for any more has confirmed these requests with it, or is gone.
    end = find_end(session)
    waiting = () if end is None else end.waiting
    session, aborts = begin(scene, session, CleanupKind.CANCEL, epochs, (owed_cancel(scene, command),), waiting)
    return Decision(session, (raised, *aborts))


def update_closing(scene: Scene, session: Session, command: Update) -> Decision:
    """Too late to matter; the fence and the generation still move."""
    bad = find_refusal(session, command)
    if bad is not None:
        return refused(scene, session, command, *bad)
    try:
        session = configure(scene, session, command.session_config, command.runtime_config)
    except (TypeError, ValueError) as error:
        return refused(scene, session, command, Code.INVALID_ARGUMENT, f"$.runtime_config: {error}")
    session = _move(session, command.fence)
    return refused(scene, session, command, Code.FAILED_PRECONDITION, closing_message(session, command.session_id))


def ask_again(scene: Scene, session: Session, event: RequestFailed) -> Decision:
    """A request died while the session was closing: its cleanup may well succeed now."""
    pending = find_end(session)
    if pending is None or event.incarnation != session.fence.incarnation:
        return Decision(session)
    return Decision(*ask(scene, session, pending))


def _move(session: Session, fence: Fence) -> Session:
    if fence.epoch == session.fence.epoch:
        return replace(session, fence=fence)
    return replace(session, fence=fence, input_seq=0, input_turn_seq=0, turn_key=None)
