"""Every way for a session to end: close, expiry, a failed request, a lost stage, an operator, poison.

Responsible for S6, S8, S12, S13 and I10. Leaves the cleanup and the terminal event to `release.py`. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from control.core import cleanup as cleanups
from control.core import lease as leases
from control.core import requests as ledger
from control.core.cleanup import CleanupKind, OwedReply
from control.core.effects import Decision, ExpireUnlessHeard
from control.core.fence import is_acceptable
from control.core.rejections import Code, Rejection
from control.core.requests import RequestPhase
from control.core.rules.answering import (
    accepted,
    find_refusal,
    owed_answer,
    refused,
    stale_message,
)
from control.core.rules.append import give_up_append
from control.core.rules.release import ask, ask_debts, end, find_end, finish
from control.core.rules.turn import interruption
from control.core.session import is_busy

if TYPE_CHECKING:
    from control.core.commands import Close, Command, Dismissed, Due, Poisoned, RequestFailed, StageLost
    from control.core.scene import Scene
    from control.core.session import Session

REQUEST_FAILED = "request_failed"
STAGE_LOST = "stage_lost"
COMMAND_FAILED = "command_failed"

# How the memory of answers tells the close of nobody, which has no detail, from one that ended something.
NOTHING_CLOSED = (0,)


def close(scene: Scene, session: Session, command: Close) -> Decision:
    """End the session; the answer comes when nothing of it runs any more."""
    bad = find_refusal(session, command)
    if bad is not None:
        return refused(scene, session, command, *bad)
    raised = command.fence.epoch > session.fence.epoch
    effects = (interruption(scene, session, command.fence),) if raised else ()
    session = replace(session, fence=command.fence)
    decision = end(scene, session, command.reason, owed=(_owed(scene, command),))
    return replace(decision, effects=(*effects, *decision.effects))


def close_again(scene: Scene, session: Session, command: Close) -> Decision:
    """A close of a closing session joins its cleanup and asks for it again (D2, S12)."""
    if not is_acceptable(session.fence, command.fence):
        message = stale_message(session, command.session_id, command.fence)
        return refused(scene, session, command, Code.STALE_FENCE, message)
    pending = find_end(session)
    if pending is None:
        raise AssertionError(session)  # a closing session without its cleanup: see invariants.py
    session = replace(session, fence=command.fence)
    if not session.requests:
        owed = (*pending.owed, _owed(scene, command))
        return finish(scene, replace(session, cleanups=()), owed, ())
    joined = replace(pending, owed=(*pending.owed, _owed(scene, command)))
    return Decision(*ask(scene, session, joined))


def close_nobody(scene: Scene, session: Session, command: Close) -> Decision:
    """Nothing lives under the id: that is what the command wanted (S12)."""
    return Decision(session, (accepted(scene, session, command, None, numbers=NOTHING_CLOSED),))


def refuse_not_found(scene: Scene, session: Session, command: Command) -> Decision:
    """Nothing lives under the id."""
    return refused(
        scene, session, command, Code.NOT_FOUND, f"there is no session {command.session_id!r}; open it first"
    )


def fail_request(scene: Scene, session: Session, event: RequestFailed) -> Decision:
    """A stage lost a request, and its session ends with it.

    The late failure of a request that is being cleaned up is charged to that request (S37), unless the cleanup has
    failed before: then the stage could neither stop the request nor keep it, and the session ends as in the reference.
    An append that timed out is none of the reference's cases; its producer has been told that the epoch is lost (S72).
    """
    request = ledger.find(session.requests, event.epoch)
    if event.incarnation != session.fence.incarnation or request is None or event.worker_id not in session.route:
        return Decision(session)
    if request.phase is RequestPhase.CLEANING:
        pending = cleanups.find_covering(session.cleanups, event.epoch)
        if pending is None or not pending.failed or pending.kind is CleanupKind.APPEND:
            return Decision(session)
    return end(scene, session, REQUEST_FAILED)


def lose_stage(scene: Scene, session: Session, event: StageLost) -> Decision:
    """A worker of the route is gone, and the model's context with it (D8)."""
    if event.worker_id not in session.route:
        return Decision(session)
    return end(scene, session, STAGE_LOST, lost=event.worker_id)


def dismiss(scene: Scene, session: Session, event: Dismissed) -> Decision:
    """An operator ends the session. An order that is for a former life, or comes twice, finds nothing to end (S62)."""
    if event.incarnation != session.fence.incarnation:
        return Decision(session)
    return end(scene, session, event.reason)


def end_poisoned(scene: Scene, session: Session, event: Poisoned) -> Decision:  # noqa: ARG001
    """An input of the session can't be handled; the session ends, everything behind it goes on."""
    return end(scene, session, COMMAND_FAILED)


def look_at_clock(scene: Scene, session: Session, event: Due) -> Decision:
    """Whatever time has come for: the append's, the waiting commands', the cleanups', the debts', at last the lease's.

    While closing only the middle two are left; the lease is terminal then.
    """
    session, effects = ask_debts(scene, session, event)
    now_ms = scene.now_ms
    if event.may_expire and session.append is not None and session.append.deadline_ms <= now_ms:
        session, effects = give_up_append(scene, session, session.append)
    for cleanup in session.cleanups:
        due = cleanup
        if event.may_expire and any(owed.deadline_ms <= now_ms for owed in cleanup.owed):
            late = tuple(owed for owed in cleanup.owed if owed.deadline_ms <= now_ms)
            due = replace(cleanup, owed=tuple(owed for owed in cleanup.owed if owed.deadline_ms > now_ms), failed=True)
            lease = leases.touch(session.lease, now_ms)
            session = replace(session, cleanups=cleanups.put(session.cleanups, due), lease=lease)
            rejection = Rejection(
                Code.TIMEOUT,
                f"stage workers {', '.join(cleanup.waiting)} of session {scene.session_id!r} have not confirmed in "
                f"{scene.settings.cleanup_timeout_ms} ms; they are asked again until they have",
            )
            effects = (*effects, *(owed_answer(scene, session, owed, rejection) for owed in late))
        if due.retry_at_ms <= now_ms:
            session, aborts = ask(scene, session, due)
            effects = (*effects, *aborts)
    if not event.may_expire:
        return Decision(session, effects)
    settings = scene.settings
    reason = leases.find_expiry(
        session.lease,
        now_ms,
        idle_ttl_ms=settings.idle_ttl_ms,
        disconnect_grace_ms=settings.disconnect_grace_ms,
        output_ms=event.output_ms,
        busy=is_busy(session),
    )
    if reason is None:
        if event.output_ms > session.lease.last_activity_ms and session.lease.terminal_reason is None:
            session = replace(session, lease=leases.touch(session.lease, event.output_ms))
        return Decision(session, effects)
    # Only idleness is disproved by an output; a client that has gone stays gone.
    guard = (ExpireUnlessHeard(event.output_ms),) if reason == leases.IDLE_TTL_EXPIRED else ()
    ended = end(scene, session, reason)
    return Decision(ended.session, (*guard, *effects, *ended.effects))


def _owed(scene: Scene, command: Close) -> OwedReply:
    deadline_ms = scene.now_ms + scene.settings.cleanup_timeout_ms
    return OwedReply(command.control_id, "close", command.reason, command.fence, None, deadline_ms)
