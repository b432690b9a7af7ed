"""Appends: reserve and submit, then the stage's word, or none in time.

Responsible for I5 and I7: one append under way, its sequence numbers counted only when the stage has accepted.
Leaves the order of waiting appends to the owner, who asks again, in stream order, once none is under way. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from control.core import lease as leases
from control.core import replies
from control.core import requests as ledger
from control.core.answers import Operation, digest
from control.core.cleanup import CleanupKind
from control.core.effects import Decision, Release, Submit
from control.core.fence import Fence, is_acceptable
from control.core.rejections import CODES, Code, Rejection
from control.core.requests import Request, RequestPhase
from control.core.rules.answering import (
    accepted,
    answer,
    append_detail,
    closing_message,
    find_refusal,
    refused,
    stale_message,
)
from control.core.rules.open import INPUT_MODES
from control.core.rules.release import Step, announce, begin, free_reserved
from control.core.rules.turn import advance
from control.core.session import AppendUnderWay, Session

if TYPE_CHECKING:
    from control.core.commands import Accepted, Append, Rejected
    from control.core.scene import Scene


def append(scene: Scene, session: Session, command: Append) -> Decision:
    """Reserve the epoch's request and submit; without a model policy, count and answer at once."""
    if session.append is not None:
        return Decision(session, wait=True)
    bad = _find_argument_refusal(command)
    if bad is not None:
        return refused(scene, session, command, *bad)
    if command.operation_id is not None:
        repeat = _find_completed(scene, session, command, command.operation_id)
        if repeat is not None:
            return repeat
    bad = find_refusal(session, command) or _find_state_refusal(session, command)
    if bad is not None:
        return refused(scene, session, command, *bad)
    seq, turn_seq = _next_numbers(session, command)
    if scene.settings.configure is None:
        return _count_locally(scene, session, command, seq, turn_seq)
    return _submit(scene, session, command, seq, turn_seq)


def refuse_closing_append(scene: Scene, session: Session, command: Append) -> Decision:
    """A session that is closing takes no input."""
    bad = _find_argument_refusal(command)
    if bad is None and not is_acceptable(session.fence, command.fence):
        bad = (Code.STALE_FENCE, stale_message(session, command.session_id, command.fence))
    if bad is None:
        bad = (Code.FAILED_PRECONDITION, closing_message(session, command.session_id))
    return refused(scene, session, command, *bad)


def note_accepted(scene: Scene, session: Session, event: Accepted) -> Decision:
    """The stage has the input: the fence and the numbers move, and the append is answered."""
    under_way = session.append
    if under_way is None or not _is_this(session, under_way, event.incarnation, event.number):
        return Decision(session)
    request = ledger.find(session.requests, under_way.fence.epoch) or ledger.reserve(under_way.fence)
    session = replace(
        session,
        append=None,
        lease=leases.touch(session.lease, scene.now_ms),
        requests=ledger.put(session.requests, _bind(request, under_way)),
    )
    # A cancel may have gone further within this epoch meanwhile (S84); the fence never moves back.
    fence = under_way.fence if is_acceptable(session.fence, under_way.fence) else session.fence
    session, effects = advance(scene, session, fence, CleanupKind.EPOCH)
    session = replace(session, input_seq=under_way.seq, input_turn_seq=under_way.turn_seq, turn_key=under_way.fence.key)
    detail = append_detail(
        scene, session.implementation_level, under_way.fence, under_way.mode, under_way.seq, under_way.turn_seq
    )
    reply = answer(
        scene,
        session,
        "append",
        under_way.control_id,
        under_way.fence,
        detail=detail,
        numbers=(under_way.seq, under_way.turn_seq),
        operation=_operation(
            under_way.operation_id, under_way.fence, under_way.mode, under_way.final, under_way.payload_digest
        ),
    )
    return Decision(session, (*effects, reply))


def note_rejected(scene: Scene, session: Session, event: Rejected) -> Decision:
    """The stage kept nothing of the input (I7): everything is as before, the request reserved again if it was new."""
    under_way = session.append
    if under_way is None or not _is_this(session, under_way, event.incarnation, event.number):
        return Decision(session)
    requests, released = session.requests, ()
    if under_way.first and under_way.fence.epoch > session.fence.epoch:
        # The fence hasn't moved, so nothing of that epoch stays: a row of refused epochs must not fill the ledger.
        requests = ledger.release(requests, (under_way.fence.epoch,))
        released = (Release((under_way.fence.epoch,)),)
    elif under_way.first:
        requests = ledger.put(requests, ledger.reserve(under_way.fence))
    session = replace(session, append=None, requests=requests, lease=leases.touch(session.lease, scene.now_ms))
    code = Code(event.code) if event.code in CODES else Code.FAILED_PRECONDITION
    reply = answer(
        scene,
        session,
        "append",
        under_way.control_id,
        under_way.fence,
        rejection=Rejection(code, event.message),
    )
    return Decision(session, (*released, reply))


def give_up_append(scene: Scene, session: Session, under_way: AppendUnderWay) -> Step:
    """No word from the stage in time (S21): whatever it did with the input is undone, together with the epoch.

    The model's context of that epoch can't be trusted any more, and its request id must never be submitted again after
    the abort, so the floor rises above it and the producer goes on with a cancel (S72).
    """
    epoch = under_way.fence.epoch
    lease = leases.touch(session.lease, scene.now_ms)
    session = replace(session, append=None, floor=max(session.floor, epoch + 1), lease=lease)
    timed_out = answer(
        scene,
        session,
        "append",
        under_way.control_id,
        under_way.fence,
        rejection=Rejection(
            Code.TIMEOUT,
            f"the stage of session {scene.session_id!r} has not answered in "
            f"{scene.settings.append_timeout_ms} ms; epoch {epoch} is lost, go on with a cancel to a higher one",
        ),
    )
    lost = announce(scene, session, replies.EPOCH_LOST, "append_timeout")
    session, freed = free_reserved(session, epoch + 1)
    epochs = ledger.epochs_in(session.requests, RequestPhase.SUBMITTED, epoch + 1)
    session, aborts = begin(scene, session, CleanupKind.APPEND, epochs)
    return session, (timed_out, lost, *freed, *aborts)


def _submit(scene: Scene, session: Session, command: Append, seq: int, turn_seq: int) -> Decision:
    fence = command.fence
    request = ledger.find(session.requests, fence.epoch) or ledger.reserve(fence)
    number = session.number + 1
    first = request.phase is RequestPhase.RESERVED
    generation = session.config_generation
    under_way = AppendUnderWay(
        number=number,
        control_id=command.control_id,
        operation_id=command.operation_id,
        fence=fence,
        mode=command.mode,
        final=command.final,
        seq=seq,
        turn_seq=turn_seq,
        first=first,
        generation=generation,
        deadline_ms=scene.now_ms + scene.settings.append_timeout_ms,
        payload_digest=command.payload_digest,
    )
    submit = Submit(
        worker_id=session.route[0],
        number=number,
        fence=fence,
        seq=seq,
        turn_seq=turn_seq,
        mode=command.mode,
        final=command.final,
        resumed=not first,
        generation=generation,
        config=b"" if request.generation == generation else session.config,
        route=session.route,
        traceparent=command.traceparent,
    )
    session = replace(
        session,
        number=number,
        append=under_way,
        requests=ledger.put(session.requests, replace(request, phase=RequestPhase.SUBMITTED)),
        lease=leases.touch(session.lease, scene.now_ms),
    )
    return Decision(session, (submit,))


def _count_locally(scene: Scene, session: Session, command: Append, seq: int, turn_seq: int) -> Decision:
    session = replace(session, lease=leases.touch(session.lease, scene.now_ms))
    session, effects = advance(scene, session, command.fence, CleanupKind.EPOCH)
    session = replace(session, input_seq=seq, input_turn_seq=turn_seq, turn_key=command.fence.key)
    reply = accepted(
        scene,
        session,
        command,
        append_detail(scene, session.implementation_level, command.fence, command.mode, seq, turn_seq),
        numbers=(seq, turn_seq),
        operation=_operation(command.operation_id, command.fence, command.mode, command.final, command.payload_digest),
    )
    return Decision(session, (*effects, reply))


def _next_numbers(session: Session, command: Append) -> tuple[int, int]:
    fence = command.fence
    if fence.epoch != session.fence.epoch:
        return 1, 1
    turn_seq = session.input_turn_seq + 1 if session.turn_key == fence.key else 1
    return session.input_seq + 1, turn_seq


def _find_argument_refusal(command: Append) -> tuple[Code, str] | None:
    if command.expected_epoch is not None and command.expected_epoch != command.fence.epoch:
        return (
            Code.INVALID_ARGUMENT,
            f"$.expected_epoch: {command.expected_epoch} is not the fence's epoch {command.fence.epoch}",
        )
    if command.mode not in INPUT_MODES:
        return Code.INVALID_ARGUMENT, f"$.mode: {command.mode!r} is none of {', '.join(INPUT_MODES)}"
    return None


def _find_state_refusal(session: Session, command: Append) -> tuple[Code, str] | None:
    if command.mode not in session.input_modes:
        return (
            Code.INVALID_ARGUMENT,
            (
                f"$.mode: session {command.session_id!r} was opened with {', '.join(session.input_modes)}, "
                f"not with {command.mode!r}"
            ),
        )
    if command.fence.epoch < session.floor:
        return (
            Code.FAILED_PRECONDITION,
            (
                f"epoch {command.fence.epoch} of session {command.session_id!r} is lost (epoch_lost); "
                f"go on with a cancel to epoch {session.floor} or higher"
            ),
        )
    return None


def _find_completed(scene: Scene, session: Session, command: Append, operation_id: str) -> Decision | None:
    """The same reply again for a completed operation; a reuse with other content is refused (S22)."""
    known = scene.answers.find_operation(operation_id, session.fence)
    bad = find_refusal(session, command)
    if bad is not None:
        return refused(scene, session, command, *bad)
    if known is None:
        return None
    wanted = _operation(operation_id, command.fence, command.mode, command.final, command.payload_digest)
    if known.operation != wanted:
        return refused(
            scene,
            session,
            command,
            Code.INVALID_ARGUMENT,
            f"$.operation_id: {operation_id!r} of session {command.session_id!r} was used for another append; "
            "give every operation an id of its own",
        )
    session = replace(session, lease=leases.touch(session.lease, scene.now_ms))
    seq, turn_seq = known.numbers
    detail = append_detail(scene, session.implementation_level, command.fence, command.mode, seq, turn_seq)
    return Decision(session, (accepted(scene, session, command, detail, numbers=known.numbers),))


def _operation(
    operation_id: str | None, fence: Fence, mode: str, final: bool, payload_digest: bytes | None
) -> Operation | None:
    if operation_id is None:
        return None
    return Operation(digest(operation_id), fence, mode, final, payload_digest)


def _bind(request: Request, under_way: AppendUnderWay) -> Request:
    fence = under_way.fence
    return replace(request, generation=under_way.generation, turn_id=fence.turn_id, response_seq=fence.response_seq)


def _is_this(session: Session, under_way: AppendUnderWay, incarnation: int, number: int) -> bool:
    return under_way.number == number and session.fence.incarnation == incarnation
