"""Turns: cancels, updates, and every step of the fence to a higher epoch.

Responsible for I1 on the owner's side: the fence and the floor move in the same decision that schedules the cleanup of
every older request (D1). Leaves the confirmation to `release.py`. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from control.core import cleanup as cleanups
from control.core import lease as leases
from control.core import replies
from control.core import requests as ledger
from control.core.cleanup import CleanupKind, OwedReply
from control.core.effects import Announce, Decision, Effect
from control.core.rejections import Code, Rejection
from control.core.replies import Lifecycle, SignalDetail
from control.core.requests import RequestPhase
from control.core.rules.answering import (
    accepted,
    answer,
    find_generation_refusal,
    find_refusal,
    refused,
    stale_message,
)
from control.core.rules.configure import configure
from control.core.rules.release import Step, ask, begin, free_reserved

if TYPE_CHECKING:
    from control.core.commands import Cancel, UnknownSignal, Update
    from control.core.fence import Fence
    from control.core.scene import Scene
    from control.core.session import Session


def advance(scene: Scene, session: Session, fence: Fence, kind: CleanupKind, owed: tuple[OwedReply, ...] = ()) -> Step:
    """Accept `fence`. A higher epoch interrupts: older requests are cleaned up, an older append under way ends.

    `owed` is answered with that cleanup's outcome; where there is nothing to clean up, the caller sees no `Abort`.
    """
    before = session.fence
    if fence.epoch == before.epoch:
        return (session if fence == before else replace(session, fence=fence)), ()
    effects: tuple[Effect, ...] = (interruption(scene, session, fence),)
    session = replace(
        session,
        fence=fence,
        floor=max(session.floor, fence.epoch),
        input_seq=0,
        input_turn_seq=0,
        turn_key=None,
    )
    if session.append is not None and session.append.fence.epoch < fence.epoch:
        overtaken = session.append
        session = replace(session, append=None)
        effects = (
            *effects,
            answer(
                scene,
                session,
                "append",
                overtaken.control_id,
                overtaken.fence,
                rejection=Rejection(
                    Code.STALE_FENCE,
                    f"epoch {overtaken.fence.epoch} of session {scene.session_id!r} was interrupted "
                    f"by epoch {fence.epoch}",
                ),
            ),
        )
    session, freed = free_reserved(session, fence.epoch)
    epochs = ledger.epochs_in(session.requests, RequestPhase.SUBMITTED, fence.epoch)
    aborts: tuple[Effect, ...] = ()
    if epochs:
        session, aborts = begin(scene, session, kind, epochs, owed)
    return session, (*effects, *freed, *aborts)


def interruption(scene: Scene, session: Session, fence: Fence) -> Announce:
    """What a listener stops playback on: everything below `fence` is over."""
    return Announce(
        Lifecycle(
            event=replies.INTERRUPTED,
            session_id=scene.session_id,
            fence=fence,
            lease_generation=session.lease.generation,
            cancelled_fence=session.fence,
        )
    )


def cancel(scene: Scene, session: Session, command: Cancel) -> Decision:
    """Interrupt the cancelled epoch, whatever waits or runs, and answer when its cleanup is confirmed."""
    if command.next_fence is None:
        return refused(
            scene,
            session,
            command,
            Code.INVALID_ARGUMENT,
            f"$.next_fence: {command.event} needs the fence to go to",
        )
    bad = find_cancel_refusal(scene, session, command, command.next_fence)
    if bad is None:
        bad = find_generation_refusal(session, command)
    if bad is not None:
        return refused(scene, session, command, *bad)
    try:
        configured = _configure(scene, session, command)
    except (TypeError, ValueError) as error:
        return refused(scene, session, command, Code.INVALID_ARGUMENT, f"$.runtime_config: {error}")
    pending = cleanups.find_covering(session.cleanups, command.fence.epoch)
    owed = owed_cancel(scene, command)
    effects: tuple[Effect, ...] = ()
    number = session.number
    if command.fence.epoch >= session.fence.epoch:
        session, effects = advance(scene, session, command.next_fence, CleanupKind.CANCEL, (owed,))
    if cleanups.find(session.cleanups, number + 1) is not None:
        return Decision(session, effects)
    if pending is not None:
        # That epoch is over already: the cancel is late (D2), or an append of it has timed out (S72). It waits for the
        # cleanup that still runs, and asks for it again.
        session, aborts = ask(scene, session, replace(pending, owed=(*pending.owed, owed)))
        return Decision(session, (*effects, *aborts))
    session = replace(
        session,
        config=configured.config,
        config_generation=configured.config_generation,
        lease=leases.touch(session.lease, scene.now_ms),
    )
    return Decision(session, (*effects, accepted(scene, session, command, _detail(command))))


def owed_cancel(scene: Scene, command: Cancel) -> OwedReply:
    """The cancel as its cleanup remembers it. What it configures takes effect with its ok, as in the reference."""
    return OwedReply(
        command.control_id,
        "signal",
        command.event,
        command.fence,
        command.next_fence,
        scene.now_ms + scene.settings.cleanup_timeout_ms,
        command.session_config,
        command.runtime_config,
    )


def find_cancel_refusal(scene: Scene, session: Session, command: Cancel, next_fence: Fence) -> tuple[Code, str] | None:
    """A cancel's own guard: of this life, to a higher epoch, from a fence that somebody has come with before."""
    fence = command.fence
    incarnation = session.fence.incarnation
    if fence.incarnation != incarnation or next_fence.incarnation != incarnation:
        return Code.STALE_FENCE, stale_message(session, command.session_id, fence)
    if next_fence.epoch <= fence.epoch:
        return (
            Code.STALE_FENCE,
            f"$.next_fence.epoch: {next_fence.epoch} is not above the cancelled epoch {fence.epoch}",
        )
    # The cancel overtakes appends, so it may name what only they carry yet.
    known = session.fence.key
    if session.append is not None:
        known = max(known, session.append.fence.key)
    if scene.offered is not None:
        known = max(known, scene.offered.key)
    if fence.key > known:
        return Code.STALE_FENCE, stale_message(session, command.session_id, fence)
    return None


def update(scene: Scene, session: Session, command: Update) -> Decision:
    """Replace one or both configurations, behind the appends that came before."""
    if session.append is not None:
        return Decision(session, wait=True)
    bad = find_refusal(session, command)
    if bad is not None:
        return refused(scene, session, command, *bad)
    try:
        session = _configure(scene, session, command)
    except (TypeError, ValueError) as error:
        return refused(scene, session, command, Code.INVALID_ARGUMENT, f"$.runtime_config: {error}")
    session = replace(session, lease=leases.touch(session.lease, scene.now_ms))
    session, effects = advance(scene, session, command.fence, CleanupKind.EPOCH)
    return Decision(session, (*effects, accepted(scene, session, command, _detail(command))))


def refuse_unknown_signal(scene: Scene, session: Session, command: UnknownSignal) -> Decision:
    """No such event, in whatever phase."""
    return refused(
        scene,
        session,
        command,
        Code.INVALID_ARGUMENT,
        f"$.event: {command.event!r} is none of barge_in, input.cancel, response.cancel, session.update",
    )


def _configure(scene: Scene, session: Session, command: Cancel | Update) -> Session:
    return configure(scene, session, command.session_config, command.runtime_config)


def _detail(command: Cancel | Update) -> SignalDetail:
    return SignalDetail(event=command.event, fence=command.fence, next_fence=command.next_fence)
