"""Judges the replies of a history: one to each command, and the right one.

Responsible for I4 and for each answer's cause. Replies and lifecycle events share one stream, so what stands before a
reply is what had been committed by then: whether the session lived, which epoch it was in, which lease generation it
had. Leaves numbers and words to its neighbours. Pure. It says no with a list of `Violation`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.chaos.history import History, Seen, Sent, Violation

if TYPE_CHECKING:
    from collections.abc import Iterator


def check_replies(history: History) -> list[Violation]:
    """I4: at least one reply, at most one a delivery, all the same once one was final; and each with its cause."""
    found: list[Violation] = []
    unknown = {e.body["control_id"] for e in history.seen if e.kind == "reply"} - history.sent.keys()
    found += [Violation("I4", history.session_id, f"reply to {control_id}, never sent") for control_id in unknown]
    remembered = _find_remembered(history)
    for sent in history.sent.values():
        replies = history.replies(sent.control_id)
        name = f"{sent.op} {sent.control_id}"
        if not replies and not history.trimmed:
            found.append(Violation("liveness", history.session_id, f"{name} has no reply"))
        if len(replies) > sent.deliveries:
            what = f"{name} was delivered at most {sent.deliveries} times and has {len(replies)} replies"
            found.append(Violation("I4", history.session_id, what))
        final: Seen | None = None
        for reply in replies:
            if final is None:
                final = reply if id(reply) in remembered else None
            elif _essence(reply) != _essence(final):
                what = f"{name} was answered {_essence(final)}, then {_essence(reply)}"
                found.append(Violation("I4", history.session_id, what))
    return [*found, *_check_causes(history)]


def _find_remembered(history: History) -> set[int]:
    """The replies (by `id`) that hold for good. Where nobody lives there is no memory of answers either."""
    found: set[int] = set()
    alive = False
    for entry in history.seen:
        if entry.kind == "lifecycle":
            alive = (alive or entry.is_event("opened")) and not entry.terminal
        elif entry.kind == "reply" and alive and not entry.body["retryable"]:
            found.add(id(entry))
    return found


def _essence(reply: Seen) -> tuple[object, ...]:
    detail = dict(reply.body["detail"] or {})
    return reply.body["ok"], reply.body["code"], detail


@dataclass(slots=True)
class _State:
    """What the listener knows of the session at a place of its stream."""

    alive: int | None = None
    closing: bool = False
    floor: int = 0  # the highest epoch that was interrupted to
    last_floor: int = 0  # the same as it was when the end began
    lost: int = -1  # the highest epoch that was lost
    generation: int = 0
    turns: dict[int, tuple[int, int]] = field(default_factory=dict)
    ok_close: str | None = None  # answered ok before the end was told, which has to follow at once

    def hear(self, entry: Seen) -> None:
        event = entry.body["event"] if entry.kind == "lifecycle" else ""
        if event == "opened":
            self.alive, self.closing, self.floor, self.lost, self.generation = entry.incarnation, False, 0, -1, 0
            self.turns, self.ok_close = {}, None
        elif event == "interrupted":
            self.floor = max(self.floor, entry.epoch)
        elif event == "epoch_lost":
            self.lost = max(self.lost, entry.epoch)
        elif event == "closing":
            self.closing, self.last_floor = True, self.floor
        elif entry.terminal:
            self.alive, self.ok_close = None, None


def _check_causes(history: History) -> list[Violation]:
    """Whether each first answer fits what had been committed by then."""
    found: list[Violation] = []
    state, final = _State(), set[str]()
    remembered = _find_remembered(history)
    following = _following_events(history)
    for entry in history.seen:
        nearest = next(following)
        if entry.kind != "reply":
            if state.ok_close is not None and not entry.terminal:
                what = f"close {state.ok_close} was answered ok, and the session went on (n {entry.n})"
                found.append(Violation("I10", history.session_id, what))
                state.ok_close = None
            state.hear(entry)
            continue
        sent = history.sent.get(entry.body["control_id"])
        if sent is None or sent.control_id in final:
            continue
        if id(entry) in remembered:
            final.add(sent.control_id)
        if history.trimmed:
            continue
        if entry.body["ok"]:
            wrong = _find_wrong_ok(state, sent, entry)
            _note_ok(state, sent, entry)
        else:
            wrong = _find_wrong_no(state, sent, entry, nearest, history)
        if wrong:
            answer = "ok" if entry.body["ok"] else f"{entry.body['code']} ({entry.body['message']})"
            what = f"{sent.op} {sent.control_id} was answered {answer} {wrong}"
            found.append(Violation("answer", history.session_id, what))
    return found


def _following_events(history: History) -> Iterator[Seen | None]:
    """For each entry of the stream the next one that is no reply."""
    nearest: list[Seen | None] = []
    last: Seen | None = None
    for entry in reversed(history.seen):
        nearest.append(last)
        if entry.kind != "reply":
            last = entry
    return reversed(nearest)


def _note_ok(state: _State, sent: Sent, reply: Seen) -> None:
    if state.alive != sent.incarnation:
        return
    if sent.op == "resume":
        state.generation = reply.body["detail"]["lease_generation"]
    elif sent.op == "append" or sent.event == "session.update":
        state.turns[sent.epoch] = sent.turn
    elif sent.op == "close":
        state.ok_close = sent.control_id


def _find_wrong_ok(state: _State, sent: Sent, reply: Seen) -> str:
    """Why the command can't have been accepted where its answer stands, or nothing."""
    if sent.op == "close":
        foreign = state.alive is not None and state.alive != sent.incarnation
        return f"while life {state.alive} went on" if foreign else ""
    if state.alive != sent.incarnation:
        return f"while life {state.alive} was open, not its own"
    if sent.op == "open":
        return ""
    # A cancel from before is answered by the cleanup that the end goes on with.
    if state.closing and not (sent.cancels and state.last_floor >= (sent.next_epoch or 0)):
        return "by a session that was closing"
    if sent.op == "append":
        if sent.epoch < state.floor:
            return f"after interrupted to {state.floor}"
        if sent.epoch <= state.lost:
            return f"after its epoch {sent.epoch} was lost"
    elif sent.cancels:
        return "" if state.floor >= (sent.next_epoch or 0) else "before interrupted was told"
    elif sent.op == "resume":
        if sent.generation != state.generation:
            return f"at generation {state.generation}, it expected {sent.generation}"
        if reply.body["detail"]["lease_generation"] != state.generation + 1:
            return f"with generation {reply.body['detail']['lease_generation']} after {state.generation}"
    elif sent.generation not in (None, state.generation):
        return f"at generation {state.generation}, it expected {sent.generation}"
    return ""


def _find_wrong_no(state: _State, sent: Sent, reply: Seen, nearest: Seen | None, history: History) -> str:
    """Why the refusal has no cause where it stands, or nothing."""
    here = state.alive == sent.incarnation
    # An append that its session's end overtakes is answered just before the end is told.
    ends = nearest is not None and (nearest.terminal or nearest.is_event("closing"))
    wrong = "without a cause"
    match reply.body["code"]:
        case "not_found":
            right = state.alive is None and sent.op != "open"
            wrong = f"while life {state.alive} was open"
        case "stale_fence":
            if sent.op == "open":
                right = state.alive is None and any(
                    entry.incarnation >= sent.incarnation for entry in history.seen if entry.terminal
                )
                right = right or (reply.n == 0 and _has_given_up(history, sent))
            elif not here:
                right = state.alive is not None
            else:
                accepted = state.turns.get(sent.epoch, sent.turn)
                behind = sent.turn[0] < accepted[0] or sent.turn[1] < accepted[1]
                # A cancel that comes late is no stale one. A close moves the fence to its own.
                right = not sent.cancels and (sent.epoch < state.floor or behind or state.closing)
        case "failed_precondition":
            moved = sent.op != "resume" and sent.generation not in (None, state.generation)
            over = state.closing or (ends and sent.op == "append")
            lost = sent.op == "append" and sent.epoch <= max(state.lost, state.floor - 1)
            right = (here and (moved or over or lost)) or (sent.op == "open" and _has_given_up(history, sent))
        case "invalid_argument":
            right = (sent.op == "resume" and here and sent.generation != state.generation) or (
                sent.op == "open" and state.alive is not None
            )
        case "resource_exhausted":
            right = sent.op == "open" and state.alive is None
        case "timeout":
            lost = nearest is not None and nearest.is_event("epoch_lost") and nearest.epoch == sent.epoch
            right = (sent.op == "append" and lost) or sent.cancels or sent.op == "close"
        case "cleanup_failed":
            right = sent.cancels or sent.op == "close"
        case _:
            right = False
    return "" if right else wrong


def _has_given_up(history: History, opening: Sent) -> bool:
    """S1: whether a close of the same life was sent, which may have found it opening."""
    return any(sent.op == "close" and sent.incarnation == opening.incarnation for sent in history.sent.values())
