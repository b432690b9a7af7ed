"""What the demo says of its language model: rows of the table, and what is wrong. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.demo.llm_findings import BargeInFindings, CrowdFindings, ModelFindings, Spread

HOW = "(median, all but a tenth, most)"


def find_wrong(model: ModelFindings) -> list[str]:
    """What must not be, each as a clause."""
    wrong: list[str] = []
    if model.stale:
        wrong.append(f"{model.stale} stale outputs were delivered to the crowd")
    if model.requests_left:
        wrong.append(f"vLLM was not seen to free {len(model.requests_left)} requests, {model.requests_left[0]} first")
    if model.held is None:
        wrong.append("vLLM did not say at the end what it held")
    elif model.held:
        wrong.append(f"vLLM's core held {model.held} requests at the end")
    return wrong


def describe_model(model: ModelFindings) -> dict[str, str]:
    """The table's rows."""
    alone = model.barge_ins
    rows = {
        "barge-in to vLLM's abort": f"{_spread(alone.asked_ms)} ms {HOW}, from before the XADD until it is asked",
        "barge-in to KV freed": f"{_spread(alone.freed_ms)} ms, until vLLM's core has let go of the request",
        "tokens wasted": f"{_spread(alone.wasted)} after a barge-in; {_in_mid_answer(alone)}",
    }
    rows |= {f"{crowd.sessions} sessions at once": _describe_crowd(crowd) for crowd in model.crowds}
    if model.crowds:
        more = "" if model.most_at_once < model.searched else "; more were not tried"
        rows["without a missed turn"] = (
            f"{model.most_at_once} sessions at once on this machine, its callers and all its workers included{more}"
        )
    held = "did not say what it held" if model.held is None else f"held {model.held}"
    freed = model.requests - len(model.requests_left)
    rows["freed by vLLM"] = f"{freed} of {model.requests} requests; at the end its core {held}"
    return rows


def _describe_crowd(crowd: CrowdFindings) -> str:
    why = ", ".join(f"{count} x {reason}" for reason, count in sorted(crowd.why.items()))
    missed = f"{crowd.missed} missed ({why})" if crowd.missed else "none missed"
    costs = crowd.barge_ins
    return (
        f"{crowd.turns} turns, {missed}; first sound after {_spread(crowd.first_ms)} ms, abort after "
        f"{_spread(costs.asked_ms)} ms, KV freed after {_spread(costs.freed_ms)} ms, "
        f"tokens wasted {_spread(costs.wasted)}"
    )


def _in_mid_answer(found: BargeInFindings) -> str:
    return f"{found.in_mid_answer} of {found.count} came while vLLM was still at the answer"


def _spread(spread: Spread | None) -> str:
    return "not measured" if spread is None else f"{spread.median:g} / {spread.p90:g} / {spread.most:g}"
