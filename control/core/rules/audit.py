"""An audit: what a holder of slots says that it has of a session, against what the session says (S43, S44).

Responsible for requests that run and that nobody owns, and for slots that one side knows of and the other doesn't. Both
come about only where Redis has lost what it had acknowledged, or somebody has deleted it. Leaves asking again to the
next audit, so nothing is remembered here but slots that are owed back. Pure.

An audit is a little old when it is decided. That does no harm: an abort names its place in the queue, so nothing that
is submitted later is stopped by it (S80), and slots are compared by incarnation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from control.core.effects import Abort, Decision, Effect, Pay, Place
from control.core.requests import RequestPhase
from control.core.session import Debt, Phase, Session

if TYPE_CHECKING:
    from control.core.commands import Audited
    from control.core.scene import Scene


def compare(scene: Scene, session: Session, event: Audited) -> Decision:
    """Abort what nobody owns, give back a slot that nobody holds, take one that a live session should hold."""
    effects: tuple[Effect, ...] = ()
    strays = _find_strays(session, event)
    if strays:
        effects = (
            Abort(
                worker_id=event.holder,
                stage_id=event.stage_id,
                number=0,
                attempt=0,
                epochs=strays,
                incarnation=event.incarnation,
            ),
        )
    is_held_here = _lives(session, event) and event.holder in session.holders
    if event.has_slot and not is_held_here and not _is_owed(session, event):
        debt = Debt(event.holder, event.incarnation, scene.now_ms + scene.settings.placement_retry_ms)
        session = replace(session, debts=(*session.debts, debt))
        effects = (*effects, Pay((debt,)))
    elif not event.has_slot and is_held_here and session.phase is not Phase.OPENING:
        # What comes of it changes nothing for an open session: it keeps its place even where that is one too many.
        effects = (*effects, Place(0, (event.holder,)))
    return Decision(session, effects)


def _find_strays(session: Session, event: Audited) -> tuple[int, ...]:
    owned: set[int] = set()
    if _lives(session, event) and event.holder in session.route:
        owned = {request.epoch for request in session.requests if request.phase is not RequestPhase.RESERVED}
    return tuple(epoch for epoch in event.epochs if epoch not in owned)


def _lives(session: Session, event: Audited) -> bool:
    return session.phase is not Phase.VACANT and session.fence.incarnation == event.incarnation


def _is_owed(session: Session, event: Audited) -> bool:
    return any((debt.holder, debt.incarnation) == (event.holder, event.incarnation) for debt in session.debts)
