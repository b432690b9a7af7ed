"""How a command is answered: accepted, refused, or answered again.

Responsible for the reply's common fields, the guards that every command shares and what is remembered. Leaves the
details to each rule. Pure. Keeps I4 and I8: a refusal returns the session that it was given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from control.core import replies
from control.core.answers import Answered, Operation, key_of
from control.core.commands import (
    DEFAULT_LEVEL,
    Append,
    Cancel,
    Close,
    Command,
    Malformed,
    Open,
    Resume,
    Touch,
    Update,
    op_of,
)
from control.core.effects import Answer, Decision
from control.core.fence import is_acceptable
from control.core.rejections import RETRYABLE, Code, Rejection
from control.core.replies import Detail, Reply
from control.core.requests import request_id
from control.core.session import NOBODY, Phase, Session
from control.core.tokens import is_right

if TYPE_CHECKING:
    from control.core.cleanup import OwedReply
    from control.core.fence import Fence
    from control.core.scene import Scene

# A message may quote what a producer or a stage sent, which may be as long as a body; the event stream is bounded.
MESSAGE_MAX_CHARS = 500


def accepted(
    scene: Scene,
    session: Session,
    command: Command,
    detail: Detail | None,
    *,
    numbers: tuple[int, ...] = (),
    operation: Operation | None = None,
) -> Answer:
    """The good answer to `command`. `session`: as it is after the command."""
    return answer(
        scene,
        session,
        op_of(command),
        command.control_id,
        command.fence,
        detail=detail,
        numbers=numbers,
        operation=operation,
    )


def refused(scene: Scene, session: Session, command: Command, code: Code, message: str) -> Decision:
    """The decision that changes nothing and says why."""
    return Decision(session, (refusal(scene, session, command, Rejection(code, message)),))


def refusal(scene: Scene, session: Session, command: Command, rejection: Rejection) -> Answer:
    """The bad answer to `command`."""
    return answer(
        scene,
        session,
        op_of(command),
        command.control_id,
        command.fence,
        rejection=rejection,
    )


def owed_answer(scene: Scene, session: Session, owed: OwedReply, rejection: Rejection | None = None) -> Answer:
    """The answer to a cancel or a close with its cleanup's outcome."""
    detail: Detail | None = None
    if rejection is None:
        detail = (
            replies.CloseDetail(reason=owed.event)
            if owed.op == "close"
            else replies.SignalDetail(event=owed.event, fence=owed.fence, next_fence=owed.next_fence)
        )
    return answer(scene, session, owed.op, owed.control_id, owed.fence, rejection=rejection, detail=detail)


def answer(
    scene: Scene,
    session: Session,
    op: str,
    control_id: str,
    fence: Fence | None,
    *,
    rejection: Rejection | None = None,
    detail: Detail | None = None,
    numbers: tuple[int, ...] = (),
    operation: Operation | None = None,
) -> Answer:
    """Any answer, from its parts: an append's after its stage, a cancel's after its cleanup. `rejection`: a bad one."""
    known = session.phase is not Phase.VACANT
    accepted_fence = session.fence if known else None
    generation = session.lease.generation if known else None
    code = None if rejection is None else rejection.code
    reply = Reply(
        control_id=control_id,
        op=op,
        session_id=scene.session_id,
        ok=rejection is None,
        code=code,
        message="" if rejection is None else rejection.message[:MESSAGE_MAX_CHARS],
        retryable=code in RETRYABLE,
        fence=fence,
        accepted_fence=accepted_fence,
        lease_generation=generation,
        detail=detail,
    )
    # A retryable answer is no answer for good (D5); an id without a life must not grow a memory (S14), and what came
    # without a control id can't be told apart from the next of its kind.
    if code in RETRYABLE or (not known and (code is not None or session.ended is None)) or not control_id:
        return Answer(reply)
    key = key_of(control_id, session.token)
    level = detail.implementation_level if isinstance(detail, replies.AppendDetail) else DEFAULT_LEVEL
    remembered = Answered(
        key,
        op,
        code,
        scene.now_ms,
        accepted_fence,
        generation,
        numbers,
        operation,
        "" if level == DEFAULT_LEVEL else level,
    )
    return Answer(reply, remembered)


def is_barred(session: Session, command: Command) -> bool:
    """Whether the session was opened with a token that the command does not show."""
    return session.token is not None and not is_right(session.token, command.token)


def find_token_refusal(scene: Scene, session: Session, command: Command) -> Decision | None:
    """The refusal of a command without its session's token. It comes before everything else.

    It changes nothing, counts as no activity, says nothing of the session and is not remembered: the control id may be
    another's. A body that is no command learns what is wrong with it, and no more.
    """
    if not is_barred(session, command):
        return None
    code, message = Code.FAILED_PRECONDITION, token_message(command.session_id)
    if isinstance(command, Malformed):
        code, message = Code(command.code), command.message
    return Decision(session, (refusal(scene, NOBODY, command, Rejection(code, message)),))


def token_message(session_id: str) -> str:
    """What is missing, without what it is."""
    return f"session {session_id!r} was opened with a token, and the command has none or another; send that token along"


def refuse_malformed(scene: Scene, session: Session, command: Malformed) -> Decision:
    """No command at all; whatever the phase, the producer learns what is wrong with it."""
    return refused(scene, session, command, Code(command.code), command.message)


def find_refusal(session: Session, command: Command) -> tuple[Code, str] | None:
    """The guards that every command to a live session passes, in this order: fence, then lease generation (D11)."""
    if not is_acceptable(session.fence, command.fence):
        return Code.STALE_FENCE, stale_message(session, command.session_id, command.fence)
    return find_generation_refusal(session, command)


def find_generation_refusal(session: Session, command: Command) -> tuple[Code, str] | None:
    """Whether the command speaks for an attachment that is no longer the current one (D11)."""
    expected = command.expected_lease_generation
    if expected is None or expected == session.lease.generation:
        return None
    return (
        Code.FAILED_PRECONDITION,
        (
            f"session {command.session_id!r} was taken over: its lease generation is {session.lease.generation}, "
            f"the command expects {expected}; resume the session first"
        ),
    )


def stale_message(session: Session, session_id: str, fence: Fence) -> str:
    """What a client needs to catch up."""
    return (
        f"session {session_id!r} is at fence {_spell(session.fence)}, the command is at {_spell(fence)}; "
        "continue from accepted_fence"
    )


def closing_message(session: Session, session_id: str) -> str:
    """Why a closing session takes nothing more."""
    return f"session {session_id!r} is closing ({session.lease.terminal_reason}); open it anew once it is closed"


def _spell(fence: Fence) -> str:
    return f"{fence.incarnation}/{fence.epoch}/{fence.turn_id}/{fence.response_seq}"


def find_repeat(scene: Scene, session: Session, command: Command) -> Decision | None:
    """The decision for a control id that was answered already, or whose answer is on its way (I4, D5)."""
    op = op_of(command)
    under_way = _find_op_under_way(session, command.control_id)
    if under_way == op:
        return Decision(session)
    answered = scene.answers.find(command.control_id, command.token)
    if answered is not None and answered.op == op:
        return Decision(session, (Answer(replay(scene, command, answered)),))
    used_for = under_way if answered is None else answered.op
    if used_for is None:
        return None
    message = (
        f"control_id {command.control_id!r} of session {command.session_id!r} was used for {used_for!r} before; "
        "give every command an id of its own"
    )
    # Not remembered: the id belongs to the other command.
    bad = refusal(scene, session, command, Rejection(Code.INVALID_ARGUMENT, message))
    return Decision(session, (Answer(bad.reply),))


def _find_op_under_way(session: Session, control_id: str) -> str | None:
    """The op of the command that `control_id` names, if its answer is still to come."""
    if session.append is not None and session.append.control_id == control_id:
        return "append"
    if session.opening is not None and session.opening.control_id == control_id:
        return "open"
    for cleanup in session.cleanups:
        for owed in cleanup.owed:
            if owed.control_id == control_id:
                return owed.op
    return None


def replay(scene: Scene, command: Command, answered: Answered) -> Reply:
    """The reply that the command has had, built again from the command and the few numbers that were kept."""
    if answered.code is not None:
        return _again(command, answered, None, Code(answered.code), "answered before: this is the same refusal again")
    return _again(command, answered, _detail_again(scene, command, answered), None, "")


def _again(command: Command, answered: Answered, detail: Detail | None, code: Code | None, message: str) -> Reply:
    return Reply(
        control_id=command.control_id,
        op=op_of(command),
        session_id=command.session_id,
        ok=code is None,
        code=code,
        message=message,
        retryable=False,
        fence=command.fence,
        accepted_fence=answered.accepted_fence,
        lease_generation=answered.lease_generation,
        detail=detail,
    )


def _detail_again(scene: Scene, command: Command, answered: Answered) -> Detail | None:
    policy = scene.settings.configure is not None
    fence = command.fence
    match command:
        case Open():
            return replies.OpenDetail(
                implementation_level=command.capabilities.level,
                session_mode=command.session_mode,
                scheduler_request_context=policy,
                request_id=request_id(command.session_id, fence.incarnation, fence.epoch, 0) if policy else None,
            )
        case Append():
            seq, turn_seq = answered.numbers
            level = answered.level or DEFAULT_LEVEL
            return append_detail(scene, level, fence, command.mode, seq, turn_seq)
        case Cancel() | Update():
            return replies.SignalDetail(event=command.event, fence=fence, next_fence=command.next_fence)
        case Close():
            return None if answered.numbers else replies.CloseDetail(reason=command.reason)
        case Touch():
            return replies.TouchDetail(activity=command.activity, lease_generation=answered.numbers[0])
        case Resume():
            return replies.ResumeDetail(lease_generation=answered.numbers[0])
        case _:
            return None


def append_detail(scene: Scene, level: str, fence: Fence, mode: str, seq: int, turn_seq: int) -> Detail:
    """The detail of a counted append, by whether there is a stage behind it."""
    settings = scene.settings
    if settings.configure is None:
        return replies.LocalAppendDetail(seq=seq, turn_id=fence.turn_id, turn_seq=turn_seq, mode=mode)
    return replies.AppendDetail(
        implementation_level=level,
        request_id=request_id(scene.session_id, fence.incarnation, fence.epoch, 0),
        response_stage_id=settings.stage_count - 1,
        seq=seq,
        turn_id=fence.turn_id,
        response_seq=fence.response_seq,
        turn_seq=turn_seq,
        mode=mode,
    )
