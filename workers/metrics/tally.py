"""What a partition's decisions will count for, gathered beside a commit.

Responsible for when a command came, until its reply is on its way, and for telling from two versions of a session what
became of its cleanups. Leaves adding up to `control_stats.py`, only after the commit is confirmed. Pure. Times are the
server's milliseconds. What an owner hasn't seen come, because it took the partition over since, has no time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from control.core import commands as c
from control.core import effects as e
from control.core.cleanup import Cleanup, CleanupKind, find
from control.core.replies import INTERRUPTED

if TYPE_CHECKING:
    from control.core.replies import Reply
    from control.core.session import Session

Arrivals = dict[str | int, int]
"""When commands came that are decided and not answered, by control id; and barge-ins, by their cleanup's number too."""


# What there is to count. Numbers, since an enum's members are slow to look up before Python 3.12 (0.1 µs each).
FENCED = 0  # a barge-in has moved the fence
LET_GO = 1  # every stage has let go of what a barge-in stopped
BEGUN, ASKED, CONFIRMED, JOINED = 2, 3, 4, 5  # of a cleanup, as `CleanupStats` has it
REFUSED, TIMED_OUT = 6, 7  # tries that failed
_CANCEL, _END = CleanupKind.CANCEL, CleanupKind.END


class Tally:
    """`answered`: replies, each with the time of its command. `notes`: all the rest, rarer: what, kind, time (ms)."""

    __slots__ = ("answered", "notes")

    def __init__(self) -> None:
        self.answered: list[tuple[Reply, int | None]] = []
        self.notes: list[tuple[int, str, int]] = []

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to count."""
        return not (self.answered or self.notes)

    def note_cancel(self, effects: tuple[e.Effect, ...], entered_ms: int) -> None:
        """An open session's cancel is decided. One that is refused, or comes late, moves no fence."""
        for effect in effects:
            if isinstance(effect, e.Announce) and effect.lifecycle.event == INTERRUPTED:
                self.notes.append((FENCED, "", entered_ms))
                return

    def note_cleanups(
        self,
        had: tuple[Cleanup, ...],
        has: tuple[Cleanup, ...],
        arrivals: Arrivals,
        *,
        is_open: bool,
        cancelled_ms: int | None,
    ) -> None:
        """A step has changed the cleanups. `is_open`: the session was, before. `cancelled_ms`: it was a cancel's."""
        notes, joins = self.notes, False
        if len(had) == 1 == len(has) and had[0].number == has[0].number:
            # The usual case: one of its workers has confirmed, or it is asked for again.
            if has[0].attempts != had[0].attempts:
                notes.append((ASKED, has[0].kind, 0))
            return
        for cleanup in has:
            known = find(had, cleanup.number)
            kind = cleanup.kind
            if known is None:
                notes.append((BEGUN, kind, 0))
                joins = joins or cleanup.kind is _END
                if cancelled_ms is not None:
                    arrivals[cleanup.number] = cancelled_ms
            asked = cleanup.attempts - (0 if known is None else known.attempts)
            if asked:
                notes.append((ASKED, kind, 0))
        for cleanup in had:
            if find(has, cleanup.number) is not None:
                continue
            cancelled_ms = arrivals.pop(cleanup.number, cleanup.created_ms)
            notes.append((JOINED if joins else CONFIRMED, cleanup.kind, 0))
            if cleanup.kind is _CANCEL and is_open and not joins:
                notes.append((LET_GO, "", cancelled_ms))

    def note_failure(self, session: Session, event: c.CleanupFailed) -> None:
        """A stage worker could not clean up, and the session has taken note of it."""
        cleanup = find(session.cleanups, event.number)
        if cleanup is not None:
            self.notes.append((TIMED_OUT if event.timed_out else REFUSED, cleanup.kind, 0))


NOTHING = Tally()
"""Of a batch that counts for nothing. Never added to."""
