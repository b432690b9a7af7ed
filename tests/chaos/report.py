"""The report of a chaos run, for people; the last line, which is for machines, is the caller's.

Leaves the tables' parts to `telling.py`. Prints, and writes the histories beside the logs if there are violations.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tests.chaos.telling import find_waits, table, tell, waits_by_kind

if TYPE_CHECKING:
    from pathlib import Path

    from tests.chaos.faults import Faults
    from tests.chaos.history import Violation
    from tests.chaos.traffic import Traffic

SHOWN = 40
TOLD = 5


def report(traffic: Traffic, faults: Faults, ended_alone: Counter[str], violations: list[Violation]) -> None:
    """What was done, how it was answered, how long it took, and what is wrong."""
    histories = list(traffic.histories.values())
    waits = find_waits(histories)
    ends: Counter[str] = Counter()
    answers: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    for history in histories:
        ends.update(str(e.body.get("reason")) for e in history.seen if e.terminal)
        answers.update(str(e.body["code"] or "ok") for e in history.seen if e.kind == "reply")
        sent.update(one.op for one in history.sent.values())
    deliveries = sum(sent.deliveries for history in histories for sent in history.sent.values())
    outputs = sum(1 for history in histories for entry in history.seen if entry.kind == "output")
    lives = sum(1 for history in histories for entry in history.seen if entry.is_event("opened"))
    print(f"commands   {traffic.commands} in {lives} lives of {len(histories)} sessions: {table(sent)}")
    print(f"           {deliveries} deliveries, {outputs} outputs")
    print(f"replies    {traffic.answers}: {table(answers)}")
    print(f"ends       {table(ends)}")
    print(f"faults     {faults.counts.total()}: {table(faults.counts)}")
    if faults.missing:
        print(f"no faults  disk full, no writes: {faults.missing}")
    print(f"ended      {table(ended_alone)} (by themselves)")
    print(f"unjudged   {sum(len(history.trimmed) for history in histories)} lives in part: cut before they were read")
    if waits:
        worst = ", ".join(f"{wait.seconds:.2f} s ({wait.control_id} at {wait.sent_s:.1f} s)" for wait in waits[:3])
        print(f"no service {worst}; median {waits[len(waits) // 2].seconds * 1000:.0f} ms")
        print("\n".join(waits_by_kind(waits, faults.spans)))
    for rule, count in Counter(violation.rule for violation in violations).most_common():
        print(f"violated   {rule}: {count}")
    told: set[str] = set()
    for violation in violations[:SHOWN]:
        print(f"\n{violation}")
        if violation.where in traffic.histories and violation.where not in told and len(told) < TOLD:
            told.add(violation.where)
            print("\n".join(tell(traffic.histories[violation.where])))


def write_histories(traffic: Traffic, path: Path) -> None:
    """Every session's history, a line an entry."""
    with path.open("w") as log:
        for history in traffic.histories.values():
            print(history.session_id, *tell(history), sep="\n", file=log)
