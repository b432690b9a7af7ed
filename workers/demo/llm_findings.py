"""What the language model's engine has noted, as data: what interruptions cost, how many sessions the machine bears.

Responsible for the conclusions from the engine's journal and the crowds. Leaves noting to `noting.py`, wording to
`llm_words.py`. Reads the journal. Times are milliseconds of this machine's clock.
"""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import TYPE_CHECKING

from msgspec import Struct

from workers.demo.journal import read_journal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from workers.demo.crowd import BargeIn, Crowd
    from workers.demo.journal import Note


class Spread(Struct, frozen=True):
    """The middle, all but the highest tenth, and the greatest of some numbers."""

    median: float
    p90: float
    most: float


class BargeInFindings(Struct, frozen=True, kw_only=True):
    """What interruptions cost. From before the producer's XADD until the engine was asked, and had freed the cache.

    `wasted`: tokens that the model made after that moment, of an answer that it was in the middle of.
    """

    count: int
    in_mid_answer: int
    asked_ms: Spread | None
    freed_ms: Spread | None
    wasted: Spread | None


class CrowdFindings(Struct, frozen=True, kw_only=True):
    """So many sessions at once. `first_ms`: from the user's last word to the answer's first sound."""

    sessions: int
    turns: int
    missed: int
    why: dict[str, int]
    first_ms: Spread | None
    barge_ins: BargeInFindings


class ModelFindings(Struct, frozen=True, kw_only=True):
    """What the engine's journal says. `held`: requests that the core had at the end, None: nobody could say.

    `most_at_once`: sessions at once without a missed turn; `searched`: where the search ended.
    """

    ok: bool
    requests: int
    requests_left: tuple[str, ...]
    held: int | None
    stale: int
    tokens: int
    barge_ins: BargeInFindings
    crowds: tuple[CrowdFindings, ...]
    most_at_once: int
    searched: int


def conclude_model(journal: Path, barge_ins: Sequence[BargeIn], crowds: Sequence[Crowd]) -> ModelFindings:
    """What follows from the journal, once the engine has stopped."""
    try:
        notes = list(read_journal(journal))
    except OSError:
        notes = []
    taken = {note.request_id for note in notes if note.what == "taken"}
    left = taken - {note.request_id for note in notes if note.what == "freed"}
    held = next((note.count for note in notes if note.what == "held"), None)
    book = _Book(notes)
    stale = sum(crowd.stale for crowd in crowds)
    return ModelFindings(
        ok=not left and held == 0 and not stale,
        requests=len(taken),
        requests_left=tuple(sorted(left)),
        held=held,
        stale=stale,
        tokens=sum(note.count for note in notes if note.what == "said"),
        barge_ins=book.conclude(barge_ins),
        crowds=tuple(
            CrowdFindings(
                sessions=crowd.sessions,
                turns=crowd.turns,
                missed=len(crowd.missed),
                why=dict(Counter(crowd.missed)),
                first_ms=_spread([1000 * each for each in crowd.first_s]),
                barge_ins=book.conclude(crowd.barge_ins),
            )
            for crowd in crowds
        ),
        most_at_once=max((crowd.sessions for crowd in crowds if not crowd.missed), default=0),
        searched=max((crowd.sessions for crowd in crowds), default=0),
    )


class _Book:
    """The notes by request."""

    def __init__(self, notes: Iterable[Note]) -> None:
        self._said: dict[str, list[tuple[float, int]]] = {}
        self._turns: dict[str, list[tuple[float, int]]] = {}  # 1: one has begun, -1: its answer is whole
        self._asked: dict[str, float] = {}
        self._freed: dict[str, float] = {}
        for note in notes:
            match note.what:
                case "said":
                    self._said.setdefault(note.request_id, []).append((note.at_s, note.count))
                case "turn" | "ended":
                    step = 1 if note.what == "turn" else -1
                    self._turns.setdefault(note.request_id, []).append((note.at_s, step))
                case "asked":
                    self._asked.setdefault(note.request_id, note.at_s)
                case "freed":
                    self._freed.setdefault(note.request_id, note.at_s)
                case _:
                    pass

    def conclude(self, barge_ins: Sequence[BargeIn]) -> BargeInFindings:
        """What these interruptions cost."""
        in_mid_answer = [each for each in barge_ins if self._is_answering(each)]
        return BargeInFindings(
            count=len(barge_ins),
            in_mid_answer=len(in_mid_answer),
            asked_ms=self._since(barge_ins, self._asked),
            freed_ms=self._since(barge_ins, self._freed),
            wasted=_spread([float(self._count_after(each)) for each in in_mid_answer]),
        )

    def _is_answering(self, each: BargeIn) -> bool:
        return sum(step for at_s, step in self._turns.get(each.request_id, []) if at_s <= each.at_s) > 0

    def _count_after(self, each: BargeIn) -> int:
        return sum(count for at_s, count in self._said.get(each.request_id, []) if at_s > each.at_s)

    @staticmethod
    def _since(barge_ins: Sequence[BargeIn], then: dict[str, float]) -> Spread | None:
        return _spread([1000 * (then[each.request_id] - each.at_s) for each in barge_ins if each.request_id in then])


def _spread(values: list[float]) -> Spread | None:
    if not values:
        return None
    ordered = sorted(values)
    p90 = ordered[min(len(ordered) - 1, 9 * len(ordered) // 10)]
    return Spread(round(median(ordered), 1), round(p90, 1), round(ordered[-1], 1))
