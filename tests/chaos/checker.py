"""Judges a chaos run from what its producers sent and its listeners saw, and from what was left at the end.

Responsible for I1, I3, I4, I5, I9, I10, for the parrots' words and for liveness. Knows nothing of how the system works
inside. Pure. Leaves collecting to `traffic.py` and `leftovers.py`. It says no with a list of `Violation`.

`stage_faults_s`: when a stage worker was killed, stopped or cut off. A session may be lost only within `LOSS_S` of it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tests.chaos.history import TERMINALS, History, Leftovers, Seen, Sent, Violation

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LOSS_S = 12.0


def check(histories: Iterable[History], leftovers: Leftovers, stage_faults_s: Sequence[float] = ()) -> list[Violation]:
    """Every broken promise."""
    found: list[Violation] = []
    for history in histories:
        found += check_history(history, stage_faults_s)
    return [*found, *check_leftovers(leftovers)]


def check_history(history: History, stage_faults_s: Sequence[float] = ()) -> list[Violation]:
    """What is wrong with one session."""
    return [
        *_check_numbers(history),
        *_check_fence(history),
        *_check_replies(history),
        *_check_appends(history),
        *_check_outputs(history),
        *_check_terminal(history, stage_faults_s),
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
    """`n` counts from 1; 0 is for replies to an id that has no session."""
    found: list[Violation] = []
    last, alive = 0, False
    for entry in history.seen:
        if entry.n == 0:
            if alive:
                found.append(Violation("n", history.session_id, f"0 within a life, after {last}"))
            continue
        begins = entry.n == 1 and not alive  # an open that found no slot after all is tried again from the start
        if entry.n != last + 1 and not begins and not history.trimmed:
            found.append(Violation("n", history.session_id, f"{entry.n} after {last}"))
        last = entry.n
        if entry.kind == "lifecycle":
            alive = (alive or entry.body["event"] == "opened") and not entry.terminal
    return found


def _check_fence(history: History) -> list[Violation]:
    """I1: whoever has read `interrupted` reads nothing older after it."""
    found: list[Violation] = []
    floor = 0
    for entry in history.seen:
        if entry.kind == "lifecycle" and entry.body["event"] == "interrupted":
            floor = max(floor, entry.epoch)
        elif entry.kind == "output" and entry.epoch < floor:
            what = f"output {entry.body['data']} of epoch {entry.epoch} (n {entry.n}) after interrupted to {floor}"
            found.append(Violation("I1", history.session_id, what))
    return found


def _check_replies(history: History) -> list[Violation]:
    """I4: at least one reply, at most one a delivery, all the same once one was final."""
    found: list[Violation] = []
    unknown = {e.body["control_id"] for e in history.seen if e.kind == "reply"} - history.sent.keys()
    found += [Violation("I4", history.session_id, f"reply to {control_id}, never sent") for control_id in unknown]
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
                final = None if reply.body["retryable"] else reply
            elif _essence(reply) != _essence(final):
                what = f"{name} was answered {_essence(final)}, then {_essence(reply)}"
                found.append(Violation("I4", history.session_id, what))
    return found


def _essence(reply: Seen) -> tuple[object, ...]:
    return reply.body["ok"], reply.body["code"], reply.body["detail"]


def _accepted(history: History, epoch: int) -> list[tuple[Sent, Seen]]:
    """The epoch's accepted appends with their replies, in the order of their numbers."""
    found: list[tuple[Sent, Seen]] = []
    for sent in history.sent.values():
        if sent.op == "append" and sent.epoch == epoch:
            found += [(sent, reply) for reply in history.replies(sent.control_id) if reply.body["ok"]][:1]
    return sorted(found, key=lambda pair: pair[1].body["detail"]["seq"])


def _epochs(history: History) -> list[int]:
    sent = {sent.epoch for sent in history.sent.values() if sent.op == "append"}
    return sorted(sent | {entry.epoch for entry in history.seen if entry.kind == "output"})


def _check_appends(history: History) -> list[Violation]:
    """I5: numbers from 1 without gap or repeat, in the order of sending."""
    found: list[Violation] = []
    order = {control_id: index for index, control_id in enumerate(history.sent)}
    for epoch in _epochs(history):
        accepted = _accepted(history, epoch)
        numbers = [reply.body["detail"]["seq"] for _, reply in accepted]
        if numbers != list(range(1, len(numbers) + 1)) and not history.trimmed:
            found.append(Violation("I5", history.session_id, f"epoch {epoch}: appends are numbered {numbers}"))
        # One that was told to try again has lost its place.
        places = [
            order[sent.control_id]
            for sent, _ in accepted
            if not any(reply.body["retryable"] for reply in history.replies(sent.control_id))
        ]
        if places != sorted(places):
            what = f"epoch {epoch}: accepted in the order {[sent.control_id for sent, _ in accepted]}"
            found.append(Violation("I5", history.session_id, what))
    return found


def _check_outputs(history: History) -> list[Violation]:
    """The parrots say the accepted appends, in order, once, up to where they were interrupted.

    The last of an epoch may be an append that was refused afterwards: overtaken by a cancel, timed out, its stage lost.
    """
    found: list[Violation] = []
    for epoch in _epochs(history):
        said, numbers = [], []
        for entry in history.seen:
            if entry.kind == "output" and entry.epoch == epoch:
                said += entry.body["data"]
                numbers.append(entry.body["seq"])
        if numbers != list(range(len(numbers))) and not history.trimmed:
            found.append(Violation("I5", history.session_id, f"epoch {epoch}: outputs are numbered {_runs(numbers)}"))
        accepted = _accepted(history, epoch)
        expected = [token for sent, _ in accepted for token in sent.tokens]
        ours = {sent.control_id for sent, _ in accepted}
        endings = [
            list(sent.tokens)
            for sent in history.sent.values()
            if sent.op == "append" and sent.epoch == epoch and sent.control_id not in ours
        ]
        right = any(said == [*expected, *ending][: len(said)] for ending in ([], *endings))
        if not right and not history.trimmed:
            twice = [token for token, times in Counter(said).items() if times > 1]
            what = f"epoch {epoch}: said {_runs(said)} of {_runs(expected)}"
            found.append(Violation("I5", history.session_id, what + (f"; repeated {_runs(twice)}" if twice else "")))
        elif epoch == history.settled_epoch and len(said) < len(expected) and not history.trimmed:
            what = f"epoch {epoch}: {len(said)} of {len(expected)} tokens were ever said"
            found.append(Violation("liveness", history.session_id, what))
    return found


def _check_terminal(history: History, stage_faults_s: Sequence[float]) -> list[Violation]:
    """I10: opened once, ended once, for a reason that there was."""
    found: list[Violation] = []
    events = [entry for entry in history.seen if entry.kind == "lifecycle"]
    opened = [entry for entry in events if entry.body["event"] == "opened"]
    terminals = [entry for entry in events if entry.terminal]
    if len(opened) > 1:
        found.append(Violation("I10", history.session_id, f"opened {len(opened)} times"))
    if opened and len(terminals) != 1 and not history.trimmed:
        names = [f"{entry.body['event']} ({entry.body.get('reason')})" for entry in terminals]
        found.append(Violation("I10", history.session_id, f"opened, and {len(terminals)} terminal events {names}"))
    ended = False
    for entry in history.seen:
        ended = ended or entry.terminal
        if ended and entry.kind == "output":
            found.append(Violation("I10", history.session_id, f"an output (n {entry.n}) after the end"))
    closes = any(sent.op == "close" for sent in history.sent.values())
    for entry in terminals:
        reason = entry.body.get("reason")
        if reason == "stage_lost":
            right = any(at_s <= entry.at_s <= at_s + LOSS_S for at_s in stage_faults_s)
        else:
            right = (reason == "client_close" and closes) or (reason == "open_rollback" and not opened)
        if not right:
            what = f"{entry.body['event']} for the reason {reason} at {entry.at_s:.1f} s, without a cause"
            found.append(Violation("I10", history.session_id, what))
    return found


def _runs(numbers: Sequence[int]) -> str:
    """Numbers with what is consecutive joined, so that a gap shows."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return " ".join(str(a) if a == b else f"{a}..{b}" for a, b in parts) or "nothing"


def tell(history: History) -> list[str]:
    """The session's history for people, a line an entry, in the order of time; runs of outputs are joined."""
    lines: list[tuple[float, str]] = []
    for sent in history.sent.values():
        what = f"tokens {_runs(sent.tokens)}" if sent.tokens else ""
        to = "" if sent.next_epoch is None else f" -> {sent.next_epoch}"
        times = "" if sent.deliveries == 1 else f" x{sent.deliveries}"
        lines.append((sent.at_s, f"      > {sent.op} {sent.control_id} epoch {sent.epoch}{to} {what}{times}"))
    run: list[Seen] = []
    for entry in [*history.seen, None]:
        if run and (entry is None or entry.kind != "output" or entry.epoch != run[-1].epoch):
            said = [token for output in run for token in output.body["data"]]
            count = f"{run[0].n}..{run[-1].n}"
            lines.append(
                (run[0].at_s, f"{count:>6} output epoch {run[0].epoch} seq {run[0].body['seq']}: {_runs(said)}")
            )
            run = []
        if entry is None:
            break
        body = entry.body
        if entry.kind == "output":
            run.append(entry)
        elif entry.kind == "reply":
            number = (body["detail"] or {}).get("seq", "") if body["ok"] else f"{body['code']} {body['message']}"
            lines.append((entry.at_s, f"{entry.n:>6} reply {body['control_id']} ok={body['ok']} {number}"))
        else:
            mark = "##" if body["event"] in TERMINALS else ""
            lines.append((entry.at_s, f"{entry.n:>6} {body['event']} epoch {entry.epoch} {body.get('reason')} {mark}"))
    return _folded([(at_s, text) for at_s, text in sorted(lines, key=lambda line: line[0])])


def _folded(lines: list[tuple[float, str]]) -> list[str]:
    """Lines that repeat the one before are counted only."""
    told: list[str] = []
    last, times = "", 0
    for at_s, text in lines:
        times = times + 1 if text == last else 1
        if times > 1:
            told.pop()
        told.append(f"  {at_s:8.3f} {text}" + (f"  ({times} times)" if times > 1 else ""))
        last = text
    return told
