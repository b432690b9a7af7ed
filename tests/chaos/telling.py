"""Histories and results for people: a line an entry, tables of counts, the waits by the faults that were active.

Leaves judging to `checker.py`. Pure. Units: `_s` seconds.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tests.chaos.check_words import runs
from tests.chaos.history import TERMINALS, History, Seen, Span

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def tell(history: History) -> list[str]:
    """The session's history, a line an entry, in the order of time; runs of outputs are joined."""
    lines: list[tuple[float, str]] = []
    for sent in history.sent.values():
        what = f"tokens {runs(sent.tokens)}{' final' * sent.final}" if sent.tokens else ""
        if sent.op == "touch":
            what = sent.activity
        elif sent.op == "signal":
            what = sent.event if sent.next_epoch is None else f"-> {sent.next_epoch}"
        expects = "" if sent.generation is None else f" expects generation {sent.generation}"
        times = "" if sent.deliveries == 1 else f" x{sent.deliveries}"
        at = f"{sent.incarnation}/{sent.epoch}/{sent.turn[0]}/{sent.turn[1]}"
        lines.append((sent.at_s, f"      > {sent.op} {sent.control_id} at {at} {what}{expects}{times}"))
    run: list[Seen] = []
    for entry in [*history.seen, None]:
        if run and (entry is None or entry.kind != "output" or _place(entry) != _place(run[-1])):
            lines.append((run[0].at_s, _tell_outputs(run)))
            run = []
        if entry is None:
            break
        body = entry.body
        if entry.kind == "output":
            run.append(entry)
        elif entry.kind == "reply":
            detail = body["detail"] or {}
            number = detail.get("seq", detail.get("lease_generation", ""))
            answer = f"ok {number}" if body["ok"] else f"{body['code']} {body['message']}"
            lines.append((entry.at_s, f"{entry.n:>6} reply {body['control_id']} {answer}"))
        else:
            mark = "##" if body["event"] in TERMINALS else ""
            at = f"{entry.incarnation}/{entry.epoch}"
            why = f"{body.get('reason') or ''} {body.get('worker_id') or ''}"
            lines.append((entry.at_s, f"{entry.n:>6} {body['event']} at {at} {why} {mark}"))
    return _folded([(at_s, text) for at_s, text in sorted(lines, key=lambda line: line[0])])


def _place(entry: Seen) -> tuple[object, ...]:
    return entry.incarnation, entry.epoch, entry.turn


def _tell_outputs(run: list[Seen]) -> str:
    first, last = run[0], run[-1]
    said = [token for output in run for token in output.body["data"]]
    end = " end" if last.body.get("turn_end") else ""
    at = f"{first.incarnation}/{first.epoch}/{first.turn[0]}/{first.turn[1]}"
    return f"{f'{first.n}..{last.n}':>6} output at {at} seq {first.body['seq']}: {runs(said)}{end}"


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


def table(counts: Counter[str]) -> str:
    """Counts in a line, the highest first."""
    return ", ".join(f"{name} {count}" for name, count in counts.most_common()) or "none"


class Wait:
    """How long a command waited for its first reply."""

    def __init__(self, control_id: str, sent_s: float, answered_s: float) -> None:
        self.control_id, self.sent_s, self.answered_s = control_id, sent_s, answered_s

    @property
    def seconds(self) -> float:
        return self.answered_s - self.sent_s


def find_waits(histories: Iterable[History]) -> list[Wait]:
    """The longest first."""
    found: list[Wait] = []
    for history in histories:
        first: dict[str, float] = {}
        for entry in history.seen:
            if entry.kind == "reply":
                first.setdefault(entry.body["control_id"], entry.at_s)
        found += [
            Wait(s.control_id, s.at_s, first[s.control_id]) for s in history.sent.values() if s.control_id in first
        ]
    return sorted(found, key=lambda wait: -wait.seconds)


def waits_by_kind(waits: Sequence[Wait], spans: Sequence[Span]) -> list[str]:
    """A line a kind of fault: how often, and the longest wait while it was active, alone and in any company."""
    worst: dict[str, tuple[float, float]] = {}
    for wait in waits:
        near = {span.kind for span in spans if span.began_s < wait.answered_s and span.ended_s > wait.sent_s}
        for kind in near:
            alone_s, any_s = worst.get(kind, (0.0, 0.0))
            if len(near) == 1:
                alone_s = max(alone_s, wait.seconds)
            worst[kind] = (alone_s, max(any_s, wait.seconds))
    counts = Counter(span.kind for span in spans)
    lines: list[str] = []
    for kind, count in counts.most_common():
        alone_s, any_s = worst.get(kind, (0.0, 0.0))
        lines.append(f"  {kind:<14} {count:>4} times, longest wait {alone_s:5.2f} s alone, {any_s:5.2f} s with others")
    return lines
