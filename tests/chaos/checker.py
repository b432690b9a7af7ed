"""Judges a chaos run from what its producers sent and its listeners saw, and from what was left at the end.

Responsible for I1, I3, I9, I10 and the numbers of the events, life by life. Leaves replies to `check_replies.py`,
appends and words to `check_words.py`, the causes of a loss to `losses.py`, collecting to `traffic.py` and
`leftovers.py`. Knows nothing of how the system works inside. Pure. It says no with a list of `Violation`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.chaos.check_replies import check_replies
from tests.chaos.check_words import check_words
from tests.chaos.history import History, Leftovers, Seen, Violation
from tests.chaos.losses import Losses

if TYPE_CHECKING:
    from collections.abc import Iterable

# How long a detached session is kept, as in the run's pipeline; the checker holds an expiry to it.
GRACE_S = 4.0


def check(histories: Iterable[History], leftovers: Leftovers, losses: Losses | None = None) -> list[Violation]:
    """Every broken promise."""
    found: list[Violation] = []
    for history in histories:
        found += check_history(history, losses)
    return [*found, *check_leftovers(leftovers)]


def check_history(history: History, losses: Losses | None = None) -> list[Violation]:
    """What is wrong with one session id."""
    return [
        *_check_numbers(history),
        *_check_fence(history),
        *check_replies(history),
        *check_words(history),
        *_check_lives(history, losses or Losses()),
    ]


def check_leftovers(left: Leftovers) -> list[Violation]:
    """I3 and I9: what must not be there once every session is closed."""
    found = [Violation("I3", session, "still open, opening or closing") for session in left.sessions]
    found += [Violation("I3", session, "still owes slots") for session in left.debts]
    found += [Violation("I3", place, f"slots still held by {', '.join(held)}") for place, held in left.slots.items()]
    found += [Violation("I3", name, f"holds {length} entries") for name, length in left.queues.items()]
    found += [Violation("I9", place, "held more sessions than it may") for place in left.overfull]
    if left.cleanups:
        found.append(Violation("I3", "cleanups", f"{left.cleanups} sessions have cleanups pending"))
    if left.dead_letters:
        found.append(Violation("I4", "dead letters", f"{left.dead_letters}, and every command was well-formed"))
    return found


def _check_numbers(history: History) -> list[Violation]:
    """`n` counts from 1 in each life; 0 is for what is said while there is none."""
    found: list[Violation] = []
    last, alive = 0, None
    for entry in history.seen:
        begins = entry.is_event("opened")
        if begins:
            alive = entry.incarnation
        if entry.n == 0:
            if alive is not None:
                found.append(Violation("n", history.session_id, f"0 within life {alive}, after {last}"))
            continue
        wanted = 1 if begins else last + 1
        if entry.n != wanted and not ({alive, entry.incarnation} & history.trimmed):
            found.append(Violation("n", history.session_id, f"{entry.n} after {last}, in life {alive}"))
        last = entry.n
        if entry.terminal:
            alive = None
    return found


def _check_fence(history: History) -> list[Violation]:
    """I1: whoever has read `interrupted` reads nothing older after it; the same for a new turn that was accepted."""
    found: list[Violation] = []
    floors: dict[int, int] = {}
    turns: dict[tuple[int, int], tuple[int, int]] = {}
    answered: set[str] = set()
    for entry in history.seen:
        life = entry.incarnation
        if entry.is_event("interrupted"):
            floors[life] = max(floors.get(life, 0), entry.epoch)
        elif entry.kind == "output":
            where = f"output {entry.body['data']} (n {entry.n}) of life {life}, epoch {entry.epoch}"
            if entry.epoch < floors.get(life, 0):
                found.append(Violation("I1", history.session_id, f"{where} after interrupted to {floors[life]}"))
            turn = turns.get((life, entry.epoch), (0, 0))
            if entry.turn[0] < turn[0] or entry.turn[1] < turn[1]:
                found.append(Violation("I1", history.session_id, f"{where}, turn {entry.turn} after turn {turn}"))
        elif entry.kind == "reply" and entry.body["control_id"] not in answered:
            sent = history.sent.get(entry.body["control_id"])
            if sent is None or not entry.body["ok"]:
                continue
            answered.add(sent.control_id)
            if sent.op == "append":
                place = sent.incarnation, sent.epoch
                before = turns.get(place, (0, 0))
                turns[place] = (max(before[0], sent.turn[0]), max(before[1], sent.turn[1]))
    return found


def _check_lives(history: History, losses: Losses) -> list[Violation]:
    """I10: each life is opened once and ended once, for a reason that there was, and none begins before its time."""
    found: list[Violation] = []
    name = history.session_id
    opened: dict[int, int] = {}
    terminals: dict[int, list[Seen]] = {}
    closing: set[int] = set()
    highest, alive = -1, None
    for entry in history.seen:
        if entry.kind == "reply":
            continue
        life = entry.incarnation
        if life in terminals and not entry.terminal:
            what = entry.body["event"] if entry.kind == "lifecycle" else "output"
            found.append(Violation("I10", name, f"{what} (n {entry.n}) after the end of life {life}"))
        if entry.is_event("opened"):
            opened[life] = opened.get(life, 0) + 1
            if opened[life] > 1:
                found.append(Violation("I10", name, f"life {life} was opened {opened[life]} times"))
            elif life <= highest:
                found.append(Violation("D4", name, f"life {life} was opened after life {highest}"))
            if alive is not None and alive not in history.trimmed and alive != life:
                found.append(Violation("I10", name, f"life {life} was opened while life {alive} had not ended"))
            highest, alive = max(highest, life), life
        elif entry.is_event("closing"):
            if life in closing:
                found.append(Violation("I10", name, f"life {life} is closing twice"))
            closing.add(life)
        if entry.terminal:
            terminals.setdefault(life, []).append(entry)
            alive = None
    for life in sorted(opened.keys() | terminals.keys()):
        ends = terminals.get(life, [])
        if life in opened and len(ends) != 1 and life not in history.trimmed:
            names = [f"{entry.body['event']} ({entry.body.get('reason')})" for entry in ends]
            found.append(Violation("I10", name, f"life {life} was opened, and has {len(ends)} terminal events {names}"))
        for entry in ends:
            if not _has_cause(history, life, entry, losses):
                what = f"{entry.body['event']} for the reason {entry.body.get('reason')} at {entry.at_s:.1f} s"
                found.append(Violation("I10", name, f"life {life}: {what}, without a cause"))
    return found


def _has_cause(history: History, life: int, entry: Seen, losses: Losses) -> bool:
    reason = entry.body.get("reason")
    if entry.body["event"] == "expired":
        return reason == "disconnect_grace_expired" and _was_detached(history, life, entry)
    if reason == "stage_lost":
        # Decided when the end began; other stages may have had to clean up before it was complete.
        begun = (e for e in history.seen if e.is_event("closing") and e.incarnation == life)
        return losses.is_caused(next(begun, entry))
    return reason == "client_close" and any(
        sent.op == "close" and sent.incarnation == life for sent in history.sent.values()
    )


def _was_detached(history: History, life: int, end: Seen) -> bool:
    """Whether the last word on the attachment was a detach, and it was sent a grace before the end."""
    detached_s: float | None = None
    answered: set[str] = set()
    for entry in history.seen:
        if entry is end:
            break
        if entry.kind != "reply" or entry.body["control_id"] in answered or not entry.body["ok"]:
            continue
        answered.add(entry.body["control_id"])
        sent = history.sent.get(entry.body["control_id"])
        if sent is None or sent.incarnation != life:
            continue
        if sent.op == "resume":
            detached_s = None
        elif sent.op == "touch" and sent.activity == "detach":
            detached_s = sent.at_s
    if life in history.trimmed and detached_s is None:
        return True
    return detached_s is not None and end.at_s - detached_s >= GRACE_S
