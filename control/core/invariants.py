"""What must hold of every stored session after every step, whatever came before.

Responsible for the invariants that one session's record can show: parts of I2, I3, I7, I9 and I10. The others need the
history and are checked by the simulation and the chaos run. Pure. Says no with a list of sentences, empty if all holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from control.core.cleanup import CleanupKind
from control.core.requests import RequestPhase
from control.core.session import FLOOR_CLOSED, Phase

if TYPE_CHECKING:
    from control.core.session import Session


def find_broken(session: Session) -> list[str]:
    """The invariants that the record breaks."""
    checks = (_phase, _append, _requests, _cleanups)
    return [broken for check in checks for broken in check(session)]


def _phase(s: Session) -> list[str]:
    broken: list[str] = []
    if s.phase is Phase.OPENING and (s.opening is None or not s.holders):
        broken.append("an opening session knows its open and its holders")
    if s.phase is not Phase.OPENING and s.opening is not None:
        broken.append("only an opening session has an open under way")
    if s.phase is Phase.VACANT and (s.requests or s.cleanups or s.append or s.holders or s.route or s.token):
        broken.append("I3: a vacant record holds nothing")
    if (s.phase is Phase.CLOSING) != (s.lease.terminal_reason is not None):
        broken.append("I10: exactly a closing session has a terminal reason")
    if s.phase is Phase.CLOSING and s.floor != FLOOR_CLOSED:
        broken.append("I1: the floor of a closing session is closed")
    return broken


def _append(s: Session) -> list[str]:
    if s.append is None:
        return []
    broken: list[str] = []
    if s.phase is not Phase.OPEN:
        broken.append("only an open session has an append under way")
    if s.append.fence.epoch < s.floor:
        broken.append("I1: an append under way is not below the floor")
    request = next((r for r in s.requests if r.epoch == s.append.fence.epoch), None)
    if request is None or request.phase is not RequestPhase.SUBMITTED:
        broken.append("I2: an append under way has a submitted request")
    if s.append.fence.epoch == s.fence.epoch and s.append.seq != s.input_seq + 1:
        broken.append("I5: the append under way carries the next number")
    return broken


def _requests(s: Session) -> list[str]:
    broken: list[str] = []
    epochs = [r.epoch for r in s.requests]
    if len(set(epochs)) != len(epochs):
        broken.append("one request an epoch")
    if s.phase is Phase.OPEN and any(
        r.phase is not RequestPhase.CLEANING and r.epoch < min(s.floor, s.fence.epoch) for r in s.requests
    ):
        broken.append("I3: every request of an older epoch is being cleaned up (D1)")
    if any(r.phase is RequestPhase.SUBMITTED and r.epoch < s.floor for r in s.requests):
        broken.append("I3: nothing below the floor counts as running")
    return broken


def _cleanups(s: Session) -> list[str]:
    broken: list[str] = []
    ends = [c for c in s.cleanups if c.kind is CleanupKind.END]
    covered = [epoch for c in s.cleanups if c.kind is not CleanupKind.END for epoch in c.epochs]
    cleaning = {r.epoch for r in s.requests if r.phase is RequestPhase.CLEANING}
    if len(set(covered)) != len(covered) or not set(covered) <= cleaning:
        broken.append("I2: a request has one cleanup, beside the session's end")
    if not ends and set(covered) != cleaning:
        broken.append("I3: every request in cleaning has a cleanup")
    if ends and not cleaning <= {*covered, *ends[0].epochs}:
        broken.append("I3: the end covers what no other cleanup does")
    if any(not c.waiting for c in s.cleanups) or any(not c.epochs for c in s.cleanups if c not in ends):
        broken.append("I3: a cleanup that waits for nobody, or for nothing, is over")
    if any(worker not in s.route for c in s.cleanups for worker in c.waiting):
        broken.append("I2: only workers of the route are waited for")
    if (s.phase is Phase.CLOSING) != bool(ends) or len(ends) > 1:
        broken.append("I10: a closing session has exactly one end")
    if any(c.number > s.number for c in s.cleanups):
        broken.append("numbers only rise")
    return broken
