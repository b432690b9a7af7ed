"""The transition table: what each phase makes of each event. Total: late, repeated and senseless pairs have rows too.

Responsible for which rule applies, and for the order in which a command is looked at: without its session's token,
answered before (I4), too old, then its row. Leaves everything else to `rules/`. Pure. The row's id shows in logs,
metrics, tests and the docs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from control.core import commands as c
from control.core.effects import Decision
from control.core.rejections import Code
from control.core.rules import answering, append, attach, audit, close, closing, open, release, turn  # noqa: A004  a rule file per command family
from control.core.rules.answering import find_repeat, find_token_refusal, refused
from control.core.session import NOBODY, Phase, Session

if TYPE_CHECKING:
    from control.core.scene import Scene

VACANT, OPENING, OPEN, CLOSING = Phase.VACANT, Phase.OPENING, Phase.OPEN, Phase.CLOSING

Rule = Callable[["Scene", Session, Any], Decision]


class Row(Struct, frozen=True, gc=False):
    """One cell of the table. `leads_to`: the phases that the rule may end in; VACANT stands for forgotten, too."""

    id: str
    phase: Phase
    event: type
    rule: Rule
    leads_to: tuple[Phase, ...]


def ignore(scene: Scene, session: Session, event: object) -> Decision:  # noqa: ARG001
    """Late, repeated or meant for a former life: nothing to do, nothing to say."""
    return Decision(session)


def wait(scene: Scene, session: Session, event: object) -> Decision:  # noqa: ARG001
    """Not before the placement under way has ended."""
    return Decision(session, wait=True)


# fmt: off
TABLE = (
    #   row    phase    event               rule                             leads to
    Row("T01", VACANT,  c.Open,             open.open_session,               (VACANT, OPENING, OPEN)),
    Row("T02", VACANT,  c.Append,           close.refuse_not_found,          (VACANT,)),
    Row("T03", VACANT,  c.Cancel,           close.refuse_not_found,          (VACANT,)),
    Row("T04", VACANT,  c.Update,           close.refuse_not_found,          (VACANT,)),
    Row("T05", VACANT,  c.UnknownSignal,    turn.refuse_unknown_signal,      (VACANT,)),
    Row("T06", VACANT,  c.Close,            close.close_nobody,              (VACANT,)),
    Row("T07", VACANT,  c.Touch,            close.refuse_not_found,          (VACANT,)),
    Row("T08", VACANT,  c.Resume,           close.refuse_not_found,          (VACANT,)),
    Row("T09", VACANT,  c.Accepted,         ignore,                          (VACANT,)),
    Row("T10", VACANT,  c.Rejected,         ignore,                          (VACANT,)),
    Row("T11", VACANT,  c.Cleaned,          ignore,                          (VACANT,)),
    Row("T12", VACANT,  c.CleanupFailed,    ignore,                          (VACANT,)),
    Row("T13", VACANT,  c.RequestFailed,    ignore,                          (VACANT,)),
    Row("T14", VACANT,  c.StageLost,        ignore,                          (VACANT,)),
    Row("T15", VACANT,  c.Placed,           ignore,                          (VACANT,)),
    Row("T16", VACANT,  c.PlacementRefused, ignore,                          (VACANT,)),
    Row("T17", VACANT,  c.DebtPaid,         open.note_debt_paid,             (VACANT,)),
    Row("T18", VACANT,  c.Due,              open.keep_vacant,                (VACANT,)),
    Row("T19", VACANT,  c.RetryNow,         ignore,                          (VACANT,)),
    Row("T20", VACANT,  c.Poisoned,         ignore,                          (VACANT,)),

    Row("T21", OPENING, c.Open,             open.refuse_second_open,         (OPENING,)),
    Row("T22", OPENING, c.Append,           wait,                            (OPENING,)),
    Row("T23", OPENING, c.Cancel,           wait,                            (OPENING,)),
    Row("T24", OPENING, c.Update,           wait,                            (OPENING,)),
    Row("T25", OPENING, c.UnknownSignal,    turn.refuse_unknown_signal,      (OPENING,)),
    Row("T26", OPENING, c.Close,            open.close_while_opening,        (OPENING, VACANT)),
    Row("T27", OPENING, c.Touch,            wait,                            (OPENING,)),
    Row("T28", OPENING, c.Resume,           wait,                            (OPENING,)),
    Row("T29", OPENING, c.Accepted,         ignore,                          (OPENING,)),
    Row("T30", OPENING, c.Rejected,         ignore,                          (OPENING,)),
    Row("T31", OPENING, c.Cleaned,          ignore,                          (OPENING,)),
    Row("T32", OPENING, c.CleanupFailed,    ignore,                          (OPENING,)),
    Row("T33", OPENING, c.RequestFailed,    ignore,                          (OPENING,)),
    Row("T34", OPENING, c.StageLost,        open.leave_lost_route,           (OPENING, VACANT)),
    Row("T35", OPENING, c.Placed,           open.note_placed,                (OPENING, OPEN)),
    Row("T36", OPENING, c.PlacementRefused, open.place_elsewhere,            (OPENING, VACANT)),
    Row("T37", OPENING, c.DebtPaid,         open.note_debt_paid,             (OPENING,)),
    Row("T38", OPENING, c.Due,              open.retry_placement,            (OPENING,)),
    Row("T39", OPENING, c.RetryNow,         ignore,                          (OPENING,)),
    Row("T40", OPENING, c.Poisoned,         open.drop_poisoned_open,         (VACANT,)),

    Row("T41", OPEN,    c.Open,             open.refuse_second_open,         (OPEN,)),
    Row("T42", OPEN,    c.Append,           append.append,                   (OPEN,)),
    Row("T43", OPEN,    c.Cancel,           turn.cancel,                     (OPEN,)),
    Row("T44", OPEN,    c.Update,           turn.update,                     (OPEN,)),
    Row("T45", OPEN,    c.UnknownSignal,    turn.refuse_unknown_signal,      (OPEN,)),
    Row("T46", OPEN,    c.Close,            close.close,                     (OPEN, CLOSING, VACANT)),
    Row("T47", OPEN,    c.Touch,            attach.touch,                    (OPEN,)),
    Row("T48", OPEN,    c.Resume,           attach.resume,                   (OPEN,)),
    Row("T49", OPEN,    c.Accepted,         append.note_accepted,            (OPEN,)),
    Row("T50", OPEN,    c.Rejected,         append.note_rejected,            (OPEN,)),
    Row("T51", OPEN,    c.Cleaned,          release.confirm_cleanup,         (OPEN,)),
    Row("T52", OPEN,    c.CleanupFailed,    release.note_failed_cleanup,     (OPEN,)),
    Row("T53", OPEN,    c.RequestFailed,    close.fail_request,              (OPEN, CLOSING, VACANT)),
    Row("T54", OPEN,    c.StageLost,        close.lose_stage,                (OPEN, CLOSING, VACANT)),
    Row("T55", OPEN,    c.Placed,           ignore,                          (OPEN,)),
    Row("T56", OPEN,    c.PlacementRefused, ignore,                          (OPEN,)),
    Row("T57", OPEN,    c.DebtPaid,         open.note_debt_paid,             (OPEN,)),
    Row("T58", OPEN,    c.Due,              close.look_at_clock,             (OPEN, CLOSING, VACANT)),
    Row("T59", OPEN,    c.RetryNow,         release.retry_cleanups,          (OPEN,)),
    Row("T60", OPEN,    c.Poisoned,         close.end_poisoned,              (CLOSING, VACANT)),

    Row("T61", CLOSING, c.Open,             open.refuse_second_open,         (CLOSING,)),
    Row("T62", CLOSING, c.Append,           append.refuse_closing_append,    (CLOSING,)),
    Row("T63", CLOSING, c.Cancel,           closing.cancel_closing,          (CLOSING,)),
    Row("T64", CLOSING, c.Update,           closing.update_closing,          (CLOSING,)),
    Row("T65", CLOSING, c.UnknownSignal,    turn.refuse_unknown_signal,      (CLOSING,)),
    Row("T66", CLOSING, c.Close,            close.close_again,               (CLOSING, VACANT)),
    Row("T67", CLOSING, c.Touch,            attach.refuse_closing_touch,     (CLOSING,)),
    Row("T68", CLOSING, c.Resume,           attach.refuse_closing_resume,    (CLOSING,)),
    Row("T69", CLOSING, c.Accepted,         ignore,                          (CLOSING,)),
    Row("T70", CLOSING, c.Rejected,         ignore,                          (CLOSING,)),
    Row("T71", CLOSING, c.Cleaned,          release.confirm_cleanup,         (CLOSING, VACANT)),
    Row("T72", CLOSING, c.CleanupFailed,    release.note_failed_cleanup,     (CLOSING,)),
    Row("T73", CLOSING, c.RequestFailed,    closing.ask_again,               (CLOSING,)),
    Row("T74", CLOSING, c.StageLost,        release.drop_lost_worker,        (CLOSING, VACANT)),
    Row("T75", CLOSING, c.Placed,           ignore,                          (CLOSING,)),
    Row("T76", CLOSING, c.PlacementRefused, ignore,                          (CLOSING,)),
    Row("T77", CLOSING, c.DebtPaid,         open.note_debt_paid,             (CLOSING,)),
    Row("T78", CLOSING, c.Due,              close.look_at_clock,             (CLOSING,)),
    Row("T79", CLOSING, c.RetryNow,         release.retry_cleanups,          (CLOSING,)),
    Row("T80", CLOSING, c.Poisoned,         ignore,                          (CLOSING,)),

    Row("T81", VACANT,  c.Malformed,        answering.refuse_malformed,      (VACANT,)),
    Row("T82", OPENING, c.Malformed,        answering.refuse_malformed,      (OPENING,)),
    Row("T83", OPEN,    c.Malformed,        answering.refuse_malformed,      (OPEN,)),
    Row("T84", CLOSING, c.Malformed,        answering.refuse_malformed,      (CLOSING,)),

    Row("T85", VACANT,  c.Audited,          audit.compare,                   (VACANT,)),
    Row("T86", OPENING, c.Audited,          audit.compare,                   (OPENING,)),
    Row("T87", OPEN,    c.Audited,          audit.compare,                   (OPEN,)),
    Row("T88", CLOSING, c.Audited,          audit.compare,                   (CLOSING,)),

    Row("T89", VACANT,  c.Dismissed,        ignore,                          (VACANT,)),
    Row("T90", OPENING, c.Dismissed,        ignore,                          (OPENING,)),
    Row("T91", OPEN,    c.Dismissed,        close.dismiss,                   (OPEN, CLOSING, VACANT)),
    Row("T92", CLOSING, c.Dismissed,        ignore,                          (CLOSING,)),
)
# fmt: on

ROWS: dict[tuple[Phase, type], Row] = {(row.phase, row.event): row for row in TABLE}


def step(scene: Scene, session: Session | None, event: c.Event) -> Decision:
    """Decide one event. The session in the decision is the very object given where nothing changed."""
    current = NOBODY if session is None else session
    if isinstance(event, c.Command):
        early = find_token_refusal(scene, current, event) if current.token is not None else None
        early = early or find_repeat(scene, current, event) or _find_overdue(scene, current, event)
        if early is not None:
            return _of_row(early, session, "T00")
    row = ROWS[current.phase, type(event)]
    return _of_row(row.rule(scene, current, event), session, row.id)


def _of_row(decision: Decision, session: Session | None, row_id: str) -> Decision:
    after = session if decision.session is NOBODY else decision.session
    return replace(decision, session=after, row=row_id)


def _find_overdue(scene: Scene, session: Session, command: c.Command) -> Decision | None:
    """A command older than its own deadline is refused; what ends something never is."""
    if command.deadline_ms is None or scene.entered_ms is None or isinstance(command, c.Cancel | c.Close):
        return None
    late_ms = scene.now_ms - scene.entered_ms - command.deadline_ms
    if late_ms <= 0:
        return None
    message = (
        f"the command of session {command.session_id!r} was handled {late_ms} ms after its deadline of "
        f"{command.deadline_ms} ms; send it again if it still matters"
    )
    return refused(scene, session, command, Code.TIMEOUT, message)
