"""Judges what was said: the accepted appends' order and numbers, and the parrots' words.

Responsible for I5 and for liveness of what was accepted. The parrots say each accepted append once and in order; a turn
is cut off by the next one, an epoch by its interruption. Leaves staleness to `checker.py`. Pure. It says no with a list
of `Violation`.
"""

from __future__ import annotations

from collections import Counter
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from tests.chaos.history import History, Seen, Sent, Turn, Violation

if TYPE_CHECKING:
    from collections.abc import Sequence


def check_words(history: History) -> list[Violation]:
    """Epoch by epoch of each life."""
    places = {(sent.incarnation, sent.epoch) for sent in history.sent.values() if sent.op == "append"}
    places |= {(entry.incarnation, entry.epoch) for entry in history.seen if entry.kind == "output"}
    found: list[Violation] = []
    for place in sorted(places):
        epoch = _Epoch(history, *place)
        found += [Violation("I5", history.session_id, f"{epoch}: {what}") for what in epoch.find_wrong_numbers()]
        if epoch.life not in history.trimmed:
            found += [Violation("I5", history.session_id, f"{epoch}: {what}") for what in epoch.find_wrong_words()]
            if history.settled.get(epoch.life) == epoch.epoch:
                missing = epoch.find_unsaid()
                found += [Violation("liveness", history.session_id, f"{epoch}: {what}") for what in missing]
    return found


class _Epoch:
    """One epoch of one life. `accepted`: its appends with their good replies, in the order of their numbers."""

    def __init__(self, history: History, life: int, epoch: int) -> None:
        self.life, self.epoch = life, epoch
        self._trimmed = life in history.trimmed
        self._sent = [s for s in history.sent.values() if (s.incarnation, s.epoch) == (life, epoch)]
        self._retried: set[str] = set()
        answers: dict[str, Seen] = {}
        for sent in self._sent:
            replies = history.replies(sent.control_id)
            if any(reply.body["retryable"] for reply in replies):
                self._retried.add(sent.control_id)
            good = next((reply for reply in replies if reply.body["ok"]), None)
            if good is not None:
                answers[sent.control_id] = good
        appends = [sent for sent in self._sent if sent.op == "append"]
        self.accepted = sorted(
            ((sent, answers[sent.control_id]) for sent in appends if sent.control_id in answers),
            key=lambda pair: pair[1].body["detail"]["seq"],
        )
        self.unsure = [sent for sent in appends if sent.control_id not in answers]
        self._updated = [
            sent.turn for sent in self._sent if sent.event == "session.update" and sent.control_id in answers
        ]
        self._said = [e for e in history.seen if e.kind == "output" and (e.incarnation, e.epoch) == (life, epoch)]

    def __str__(self) -> str:
        return f"life {self.life}, epoch {self.epoch}"

    def find_wrong_numbers(self) -> list[str]:
        """`seq` from 1 without gap or repeat, in the order of sending; `turn_seq` the same in each turn."""
        found: list[str] = []
        numbers = [reply.body["detail"]["seq"] for _, reply in self.accepted]
        if numbers != list(range(1, len(numbers) + 1)) and not self._trimmed:
            found.append(f"appends are numbered {numbers}")
        order = {sent.control_id: index for index, sent in enumerate(self._sent)}
        # One that was told to try again has lost its place.
        places = [order[sent.control_id] for sent, _ in self.accepted if sent.control_id not in self._retried]
        if places != sorted(places):
            found.append(f"accepted in the order {[sent.control_id for sent, _ in self.accepted]}")
        for turn, pairs in groupby(self.accepted, key=lambda pair: pair[0].turn):
            counted = [reply.body["detail"]["turn_seq"] for _, reply in pairs]
            if counted != list(range(1, len(counted) + 1)) and not self._trimmed:
                found.append(f"appends of turn {turn} are numbered {counted}")
        return found

    def find_wrong_words(self) -> list[str]:
        """Each turn's words from their beginning, in order, once, up to where they were cut off.

        The last of an epoch may be an append that was refused afterwards: overtaken by a cancel, timed out, its stage
        lost.
        """
        found: list[str] = []
        groups = [(turn, list(entries)) for turn, entries in groupby(self._said, key=lambda entry: entry.turn)]
        turns = [turn for turn, _ in groups]
        if any(b[0] < a[0] or b[1] < a[1] or a == b for a, b in pairwise(turns)):
            found.append(f"turns are mixed: {turns}")
        last_seq, unsaid, before = -1, 0, (-1, -1)
        for index, (turn, entries) in enumerate(groups):
            # What was cut off has had its numbers all the same.
            gap = unsaid + sum(len(s.tokens) + s.final for s, _ in self.accepted if before < s.turn < turn)
            said = [token for entry in entries for token in entry.body["data"]]
            numbers = [entry.body["seq"] for entry in entries]
            if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
                found.append(f"outputs of turn {turn} are numbered {runs(numbers)}")
            if not last_seq < numbers[0] <= last_seq + 1 + gap:
                found.append(f"outputs of turn {turn} begin with number {numbers[0]} after {last_seq}")
            last_seq = numbers[-1]
            expected = self._words(turn)
            unsaid, before = len(expected) - len(said) + self._ends(turn), turn
            if not self._is_said(turn, said, is_last=index == len(groups) - 1):
                twice = [token for token, times in Counter(said).items() if times > 1]
                what = f"turn {turn}: said {runs(said)} of {runs(expected)}"
                found.append(what + (f"; repeated {runs(twice)}" if twice else ""))
            found += self._find_wrong_end(turn, entries, said)
        return found

    def find_unsaid(self) -> list[str]:
        """What of the last turn was never said, though there was time."""
        turn = max((sent.turn for sent, _ in self.accepted), default=(0, 0))
        if any(later > turn for later in self._updated):
            return []
        expected = self._words(turn)
        entries = [entry for entry in self._said if entry.turn == turn]
        said = sum(len(entry.body["data"]) for entry in entries)
        if said < len(expected):
            return [f"{said} of {len(expected)} tokens of turn {turn} were ever said"]
        if self._ends(turn) and not any(entry.body.get("turn_end") for entry in entries):
            return [f"turn {turn} was never said to end"]
        return []

    def _words(self, turn: Turn) -> list[int]:
        return [token for sent, _ in self.accepted if sent.turn == turn for token in sent.tokens]

    def _ends(self, turn: Turn) -> int:
        return sum(1 for sent, _ in self.accepted if sent.turn == turn and sent.final)

    def _is_said(self, turn: Turn, said: list[int], *, is_last: bool) -> bool:
        expected = self._words(turn)
        endings = [list(sent.tokens) for sent in self.unsure if sent.turn == turn] if is_last else []
        return any(said == [*expected, *ending][: len(said)] for ending in ([], *endings))

    def _find_wrong_end(self, turn: Turn, entries: list[Seen], said: list[int]) -> list[str]:
        ends = [index for index, entry in enumerate(entries) if entry.body.get("turn_end")]
        if not ends:
            return []
        if ends != [len(entries) - 1]:
            return [f"turn {turn} is said to end {len(ends)} times, or not last"]
        closing: list[Sent] = [sent for sent, _ in self.accepted if sent.turn == turn and sent.final]
        closing += [sent for sent in self.unsure if sent.turn == turn and sent.final]
        if not closing:
            return [f"turn {turn} is said to end, and no append has ended it"]
        if len(said) < len(self._words(turn)):
            return [f"turn {turn} is said to end after {len(said)} of {len(self._words(turn))} tokens"]
        return []


def runs(numbers: Sequence[int]) -> str:
    """Numbers with what is consecutive joined, so that a gap shows."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return " ".join(str(a) if a == b else f"{a}..{b}" for a, b in parts) or "nothing"
