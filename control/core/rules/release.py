"""Cleanups begun, asked for again, confirmed, and the release of their requests; and the end of a life.

Responsible for I2 and I3: requests leave the ledger only in `settle`, and a cleanup ends only there. Leaves to
`close.py`, `turn.py` and `append.py` what makes a cleanup necessary. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from control.core import cleanup as cleanups
from control.core import lease as leases
from control.core import replies
from control.core import requests as ledger
from control.core.cleanup import Cleanup, CleanupKind, OwedReply
from control.core.effects import Abort, Announce, Decision, Effect, Pay, Release
from control.core.rejections import Code, Rejection
from control.core.replies import Lifecycle
from control.core.requests import RequestPhase
from control.core.rules.answering import answer, closing_message, owed_answer
from control.core.rules.configure import configure
from control.core.session import FLOOR_CLOSED, Debt, Ended, Phase, Session, vacant

if TYPE_CHECKING:
    from control.core.commands import Cleaned, CleanupFailed, Due, RetryNow, StageLost
    from control.core.scene import Scene

# A rule that changes part of a session returns the session and what has to be done so far.
Step = tuple[Session, tuple[Effect, ...]]


def begin(
    scene: Scene,
    session: Session,
    kind: CleanupKind,
    epochs: tuple[int, ...],
    owed: tuple[OwedReply, ...] = (),
    waiting: tuple[str, ...] | None = None,
) -> Step:
    """Schedule the cleanup of the requests of `epochs`, at every worker of the route unless `waiting` says less."""
    fresh = Cleanup(
        number=session.number + 1,
        kind=kind,
        epochs=epochs,
        waiting=session.route if waiting is None else waiting,
        attempts=0,
        created_ms=scene.now_ms,
        retry_at_ms=scene.now_ms,
        owed=owed,
    )
    session = replace(session, number=fresh.number, requests=ledger.mark_cleaning(session.requests, epochs))
    return ask(scene, session, fresh)


def ask(scene: Scene, session: Session, cleanup: Cleanup) -> Step:
    """Ask every worker that has not confirmed, once more, and set the time of the next try."""
    settings = scene.settings
    attempts = cleanup.attempts + 1
    delay_ms = cleanups.backoff_ms(
        scene.session_id,
        cleanup.number,
        attempts,
        base_ms=settings.cleanup_backoff_ms,
        max_ms=settings.cleanup_backoff_max_ms,
    )
    cleanup = replace(cleanup, attempts=attempts, retry_at_ms=scene.now_ms + delay_ms)
    if cleanup.kind is CleanupKind.END:
        cleanup = replace(cleanup, epochs=tuple(request.epoch for request in session.requests))
    aborts = tuple(
        Abort(
            worker_id=worker_id,
            stage_id=session.route.index(worker_id),
            number=cleanup.number,
            attempt=attempts,
            epochs=cleanup.epochs,
            restart=scene.now_ms - cleanup.created_ms >= settings.restart_after_ms,
        )
        for worker_id in cleanup.waiting
    )
    return replace(session, cleanups=cleanups.put(session.cleanups, cleanup)), aborts


def free_reserved(session: Session, below: int | None = None) -> Step:
    """Release what was reserved and never submitted; no stage has to be asked (D10)."""
    epochs = ledger.epochs_in(session.requests, RequestPhase.RESERVED, below)
    if not epochs:
        return session, ()
    return replace(session, requests=ledger.release(session.requests, epochs)), (Release(epochs),)


def settle(scene: Scene, session: Session, cleanup: Cleanup) -> Decision:
    """A worker has confirmed: keep waiting for the others, or release the requests and answer those who waited."""
    if cleanup.waiting:
        return Decision(replace(session, cleanups=cleanups.put(session.cleanups, cleanup)))
    if cleanup.kind is CleanupKind.END:
        # Its aborts named every request that was left, those of other cleanups too. Those belong to cancels that came
        # while the session was closing, which is never ok.
        late = tuple(o for pending in session.cleanups if pending.number != cleanup.number for o in pending.owed)
        epochs = tuple(request.epoch for request in session.requests)
        released: tuple[Effect, ...] = (Release(epochs),) if epochs else ()
        effects = (*released, *(owed_answer(scene, session, o, _closing(scene, session)) for o in late))
        return finish(scene, replace(session, requests=(), cleanups=()), cleanup.owed, effects)
    session = replace(
        session,
        requests=ledger.release(session.requests, cleanup.epochs),
        cleanups=_without(cleanups.drop(session.cleanups, cleanup.number), cleanup.epochs),
    )
    effects: tuple[Effect, ...] = (Release(cleanup.epochs),)
    for owed in cleanup.owed:
        session = configure(scene, session, owed.session_config, owed.runtime_config)
        if session.phase is Phase.CLOSING:
            effects = (*effects, owed_answer(scene, session, owed, _closing(scene, session)))
            continue
        session = replace(session, lease=leases.touch(session.lease, scene.now_ms))
        effects = (*effects, owed_answer(scene, session, owed))
    return Decision(session, effects)


def _closing(scene: Scene, session: Session) -> Rejection:
    return Rejection(Code.FAILED_PRECONDITION, closing_message(session, scene.session_id))


def _without(pending: tuple[Cleanup, ...], epochs: tuple[int, ...]) -> tuple[Cleanup, ...]:
    return tuple(replace(c, epochs=tuple(e for e in c.epochs if e not in epochs)) for c in pending)


def find_end(session: Session) -> Cleanup | None:
    """The one cleanup that a closing session ends with."""
    for cleanup in session.cleanups:
        if cleanup.kind is CleanupKind.END:
            return cleanup
    return None


def end(
    scene: Scene,
    session: Session,
    reason: str,
    *,
    owed: tuple[OwedReply, ...] = (),
    lost: str | None = None,
) -> Decision:
    """End a session for good: nothing is accepted or delivered from here, every request is cleaned up.

    Cleanups that are pending already become one with this one, their commands included, so that a session that closes
    has exactly one debt. `lost`: a worker that needs no asking, since its life is over.
    """
    effects: tuple[Effect, ...] = ()
    if session.append is not None:
        effects = (
            answer(
                scene,
                session,
                "append",
                session.append.control_id,
                session.append.fence,
                rejection=Rejection(
                    Code.FAILED_PRECONDITION,
                    f"session {scene.session_id!r} ended ({reason}) before its stage had answered",
                ),
            ),
        )
    owed = (*(o for pending in session.cleanups for o in pending.owed), *owed)
    session = replace(
        session,
        phase=Phase.CLOSING,
        floor=FLOOR_CLOSED,
        lease=leases.end(session.lease, reason),
        append=None,
        cleanups=(),
    )
    epochs = tuple(request.epoch for request in session.requests)
    waiting = tuple(worker_id for worker_id in session.route if worker_id != lost)
    asked = any(request.phase is not RequestPhase.RESERVED for request in session.requests)
    aborts: tuple[Effect, ...] = ()
    if asked and waiting:
        session, aborts = begin(scene, session, CleanupKind.END, epochs, owed, waiting)
    if aborts:
        return Decision(session, (*effects, announce(scene, session, replies.CLOSING, reason, lost), *aborts))
    session = replace(session, requests=())
    released = (Release(epochs),) if epochs else ()
    return finish(scene, session, owed, (*effects, *released), lost)


def finish(
    scene: Scene,
    session: Session,
    owed: tuple[OwedReply, ...],
    effects: tuple[Effect, ...],
    lost: str | None = None,
) -> Decision:
    """Nothing is registered any more: answer, announce the one terminal event (I10), owe the slots back (I9)."""
    reason = session.lease.terminal_reason
    terminal = replies.EXPIRED if reason in leases.EXPIRY_REASONS else replies.CLOSED
    gone = leave(scene, session, Ended(session.fence.incarnation, scene.now_ms))
    # What is answered for this life is remembered for this life's token.
    answers = tuple(owed_answer(scene, replace(gone, token=session.token), o) for o in owed)
    pay = (Pay(gone.debts),) if gone.debts else ()
    return Decision(gone, (*effects, *answers, announce(scene, session, terminal, reason, lost), *pay))


def leave(scene: Scene, session: Session, ended: Ended | None) -> Session:
    """The vacant record that a life leaves behind, with every slot it held as a debt."""
    retry_at_ms = scene.now_ms + scene.settings.placement_retry_ms
    incarnation = session.fence.incarnation
    debts = (*session.debts, *(Debt(holder, incarnation, retry_at_ms) for holder in session.holders))
    return vacant(debts=debts, ended=ended)


def ask_debts(scene: Scene, session: Session, event: Due) -> Step:
    """Ask again for the slots that were not given back, whatever the session does meanwhile."""
    due = tuple(debt for debt in session.debts if event.anew or debt.retry_at_ms <= scene.now_ms)
    if not due:
        return session, ()
    retry_at_ms = scene.now_ms + scene.settings.placement_retry_ms
    debts = tuple(replace(d, retry_at_ms=retry_at_ms) if d in due else d for d in session.debts)
    return replace(session, debts=debts), (Pay(due),)


def announce(
    scene: Scene, session: Session, event: str, reason: str | None = None, worker_id: str | None = None
) -> Announce:
    """A lifecycle event at the session's accepted fence."""
    return Announce(
        Lifecycle(
            event=event,
            session_id=scene.session_id,
            fence=session.fence,
            lease_generation=session.lease.generation,
            reason=reason,
            worker_id=worker_id,
        )
    )


def confirm_cleanup(scene: Scene, session: Session, event: Cleaned) -> Decision:
    """a stage worker holds nothing of the cleanup any more. A late or repeated word finds nothing to do."""
    cleanup = cleanups.find(session.cleanups, event.number)
    if cleanup is None or event.incarnation != session.fence.incarnation or event.worker_id not in cleanup.waiting:
        return Decision(session)
    return settle(scene, session, cleanups.confirm(cleanup, event.worker_id))


def note_failed_cleanup(scene: Scene, session: Session, event: CleanupFailed) -> Decision:
    """a stage worker could not clean up. Those who wait are told (D6), the debt stays and is tried again."""
    cleanup = cleanups.find(session.cleanups, event.number)
    if (
        cleanup is None
        or event.incarnation != session.fence.incarnation
        or event.worker_id not in cleanup.waiting
        or event.attempt != cleanup.attempts
    ):
        return Decision(session)
    code = Code.TIMEOUT if event.timed_out else Code.CLEANUP_FAILED
    rejection = Rejection(
        code,
        f"stage worker {event.worker_id} of session {scene.session_id!r} has not cleaned up: {event.message}; "
        "it is asked again until it has",
    )
    answers = tuple(owed_answer(scene, session, owed, rejection) for owed in cleanup.owed)
    if answers:
        session = replace(session, lease=leases.touch(session.lease, scene.now_ms))
    return Decision(
        replace(session, cleanups=cleanups.put(session.cleanups, replace(cleanup, owed=(), failed=True))),
        answers,
    )


def retry_cleanups(scene: Scene, session: Session, event: RetryNow) -> Decision:  # noqa: ARG001
    """an operator's word; every pending cleanup is asked for at once."""
    effects: tuple[Effect, ...] = ()
    for cleanup in session.cleanups:
        session, aborts = ask(scene, session, cleanup)
        effects = (*effects, *aborts)
    return Decision(session, effects)


def drop_lost_worker(scene: Scene, session: Session, event: StageLost) -> Decision:
    """while closing, a worker of the route is gone; its part of every cleanup counts as done (D8)."""
    effects: tuple[Effect, ...] = ()
    for cleanup in session.cleanups:
        if event.worker_id in cleanup.waiting:
            decision = settle(scene, session, cleanups.confirm(cleanup, event.worker_id))
            effects = (*effects, *decision.effects)
            if decision.session is None or decision.session.phase is Phase.VACANT:
                return Decision(decision.session, effects)
            session = decision.session
    return Decision(session, effects)
