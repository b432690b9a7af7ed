"""Who is attached: touch, detach and resume.

Responsible for S7, S9, S10 and S82. Leaves the expiry that a detach leads to, to `close.py`. Pure. None of these waits
behind an append, and none moves the fence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from control.core import lease as leases
from control.core.effects import Decision
from control.core.lease import ACTIVITIES, Activity
from control.core.rejections import Code
from control.core.replies import ResumeDetail, TouchDetail
from control.core.rules.answering import accepted, closing_message, find_refusal, refused

if TYPE_CHECKING:
    from control.core.commands import Resume, Touch
    from control.core.scene import Scene
    from control.core.session import Session


def touch(scene: Scene, session: Session, command: Touch) -> Decision:
    """Note activity; a detach also starts the disconnect grace."""
    bad = _find_activity_refusal(command) or find_refusal(session, command)
    if bad is not None:
        return refused(scene, session, command, *bad)
    change = leases.detach if command.activity == Activity.DETACH else leases.touch
    session = replace(session, lease=change(session.lease, scene.now_ms))
    generation = session.lease.generation
    detail = TouchDetail(activity=command.activity, lease_generation=generation)
    return Decision(session, (accepted(scene, session, command, detail, numbers=(generation,)),))


def resume(scene: Scene, session: Session, command: Resume) -> Decision:
    """Take the session up again, if nobody else has since."""
    expected, generation = command.expected_lease_generation, session.lease.generation
    bad = find_refusal(session, replace(command, expected_lease_generation=None))
    if bad is None and expected is None:
        bad = (
            Code.INVALID_ARGUMENT,
            "$.expected_lease_generation: a resume needs the generation that it takes over",
        )
    if bad is None and expected != generation:
        bad = (
            Code.INVALID_ARGUMENT,
            (
                f"$.expected_lease_generation: session {command.session_id!r} is at lease generation {generation}, "
                f"not {expected}"
            ),
        )
    if bad is not None:
        return refused(scene, session, command, *bad)
    session = replace(session, lease=leases.resume(session.lease, scene.now_ms))
    generation = session.lease.generation
    detail = ResumeDetail(lease_generation=generation)
    return Decision(session, (accepted(scene, session, command, detail, numbers=(generation,)),))


def refuse_closing_touch(scene: Scene, session: Session, command: Touch) -> Decision:
    """Nobody keeps a session alive that is closing (S10)."""
    bad = _find_activity_refusal(command)
    return _refuse_closing(scene, session, command, bad)


def refuse_closing_resume(scene: Scene, session: Session, command: Resume) -> Decision:
    """Nobody takes up a session that is closing (S10)."""
    return _refuse_closing(scene, session, command, None)


def _refuse_closing(scene: Scene, session: Session, command: Touch | Resume, bad: tuple[Code, str] | None) -> Decision:
    # The generation has risen with the end, so it says nothing about who speaks.
    bad = bad or find_refusal(session, replace(command, expected_lease_generation=None))
    bad = bad or (Code.FAILED_PRECONDITION, closing_message(session, command.session_id))
    return refused(scene, session, command, *bad)


def _find_activity_refusal(command: Touch) -> tuple[Code, str] | None:
    if command.activity in ACTIVITIES:
        return None
    return Code.INVALID_ARGUMENT, f"$.activity: {command.activity!r} is none of {', '.join(sorted(ACTIVITIES))}"
