"""The findings: what the demo has shown, as data and as a table for people.

Responsible for the conclusions and their wording. Leaves collecting to `dialogue.py` and `watch.py`. Pure.

The demo has failed if something stale was delivered or a request was not released; everything else is told as it is.
Times are milliseconds unless a name says otherwise. From the producer's XADD on they are by the server's clock, whose
stream ids have whole milliseconds.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from workers.demo.llm_findings import ModelFindings
from workers.demo.llm_words import describe_model, find_wrong
from workers.demo.watch import DROPPED

if TYPE_CHECKING:
    from pathlib import Path

    from workers.demo.dialogue import Dialogue, Takeover
    from workers.demo.watch import Watch

NAMED = 3


class InterruptionFinding(Struct, frozen=True, kw_only=True):
    """One barge-in. `waited`: at that moment the partition had no living owner."""

    at_s: float
    epoch: int
    abort_ms: float | None
    listener_ms: float | None
    confirmed_ms: float | None
    waited: bool


class Spread(Struct, frozen=True):
    """The least, the middle and the greatest of some times (ms)."""

    min_ms: float
    median_ms: float
    max_ms: float


class Outage(Struct, frozen=True, kw_only=True):
    """The killed control worker. `silence_ms`: the longest time without an output while nobody owned the session."""

    killed: str
    pid: int
    at_s: float
    successor: str
    gap_ms: float
    lease_ms: int
    outputs_meanwhile: int
    silence_ms: float


class Findings(Struct, frozen=True, kw_only=True):
    """The table as data. `stale_delivered` is the higher of what the listener and the stored stream say."""

    ok: bool
    pipeline: str
    wav: str
    conversation_s: float
    total_s: float
    turns: int
    answers_heard_out: int
    interruptions: int
    interruptions_each: tuple[InterruptionFinding, ...]
    abort: Spread | None
    stale_dropped_by_stages: int
    stale_dropped_by_client: int
    stale_speech_cut_ms: int
    stale_delivered: int
    listener_events: int
    listener_gaps: int
    stream_events: int
    stream_missing: int
    outputs_delivered: int
    requests_opened: int
    requests_released: int
    requests_held_by_engines: int
    requests_left: tuple[str, ...]
    inputs_sent: int
    inputs_accepted: int
    control_worker_killed: Outage | None
    heard_wav: str
    conversation_wav: str
    log: str
    model: ModelFindings | None = None

    def with_model(self, model: ModelFindings) -> Findings:
        """These, and what the language model's engine has noted."""
        return msgspec.structs.replace(self, model=model, ok=self.ok and model.ok)


def conclude(
    *,
    dialogue: Dialogue,
    watch: Watch,
    dropped_by_client: int,
    lease_ms: int,
    pipeline: str,
    wav: str,
    total_s: float,
    heard_wav: Path,
    conversation_wav: Path,
    log: Path,
) -> Findings:
    """What follows from everything that was seen, once the session is closed and the stage workers have reported."""
    watch.opened.update(
        (epoch, stage_id) for epoch in dialogue.microphone.epochs for stage_id in range(watch.stage_count)
    )
    left = watch.find_registered()
    held = watch.count("requests")
    interruptions = tuple(
        InterruptionFinding(
            at_s=round(each.at_s, 3),
            epoch=each.epoch,
            abort_ms=_since(each.sent_ms, watch.find_aborted_ms(each.epoch)),
            listener_ms=None if each.heard_s is None else round((each.heard_s - each.at_s) * 1000, 1),
            confirmed_ms=None if each.confirmed_s is None else round((each.confirmed_s - each.at_s) * 1000, 1),
            waited=each.waited,
        )
        for each in dialogue.interruptions
    )
    stale = max(dialogue.audit.stale, watch.audit.stale)
    return Findings(
        ok=not stale and not left and not held,
        pipeline=pipeline,
        wav=wav,
        conversation_s=round(dialogue.length_s, 1),
        total_s=round(total_s, 1),
        turns=dialogue.turns,
        answers_heard_out=dialogue.heard_out,
        interruptions=len(interruptions),
        interruptions_each=interruptions,
        abort=_spread([each.abort_ms for each in interruptions if each.abort_ms is not None and not each.waited]),
        stale_dropped_by_stages=watch.count(*DROPPED),
        stale_dropped_by_client=dropped_by_client,
        stale_speech_cut_ms=round(sum(each.cut_s for each in dialogue.interruptions) * 1000),
        stale_delivered=stale,
        listener_events=dialogue.audit.events,
        listener_gaps=dialogue.gaps,
        stream_events=watch.audit.events,
        stream_missing=watch.audit.missing,
        outputs_delivered=watch.audit.outputs,
        requests_opened=len(watch.opened),
        requests_released=len(watch.opened - left),
        requests_held_by_engines=held,
        requests_left=tuple(sorted(watch.request_id(*each) for each in left)),
        inputs_sent=dialogue.microphone.sent,
        inputs_accepted=dialogue.microphone.accepted,
        control_worker_killed=_outage(dialogue.takeover, dialogue.arrivals_s, lease_ms),
        heard_wav=str(heard_wav),
        conversation_wav=str(conversation_wav),
        log=str(log),
    )


def describe(findings: Findings) -> list[tuple[str, str]]:
    """The table's rows: what, and what was found."""
    found, outage = findings, findings.control_worker_killed
    rows = {
        "conversation": f"{found.conversation_s:.1f} s, {found.turns} turns of the user; {found.answers_heard_out} "
        "answers heard to their end",
        "interruptions": str(found.interruptions),
        "barge-in to the engines' abort": _describe_abort(found),
        "stale outputs dropped": f"{found.stale_dropped_by_stages} at the stages, {found.stale_dropped_by_client} by "
        f"the client, {found.stale_speech_cut_ms} ms of speech in the loudspeaker: what was on its way just then",
        "stale outputs delivered": f"{found.stale_delivered} of {found.outputs_delivered}, by the order of what the "
        f"listener heard and of what the session's stream holds{_describe_missing(found)}",
        "requests released": _describe_requests(found),
        "inputs accepted": f"{found.inputs_accepted:,} of {found.inputs_sent:,} sent",
    }
    if outage is not None:
        rows |= {
            "control worker killed": f"{outage.killed} (process {outage.pid}), {outage.at_s:.1f} s into the "
            f"conversation; {outage.successor} took over",
            "gap to the next reply": f"{outage.gap_ms:,.0f} ms with a lease of {outage.lease_ms:,} ms; meanwhile "
            f"{outage.outputs_meanwhile} pieces of speech came, at most {outage.silence_ms:.0f} ms apart",
        }
    if found.model is not None:
        rows |= describe_model(found.model)
    rows |= {
        "what the user heard": found.heard_wav,
        "both voices": f"{found.conversation_wav} (left the user, right the model)",
        "what the workers logged": found.log,
    }
    return list(rows.items())


def verdict(findings: Findings) -> str:
    """One sentence."""
    if findings.ok:
        return "Nothing stale was delivered, and every request was released."
    wrong: list[str] = []
    if findings.stale_delivered:
        wrong.append(f"{findings.stale_delivered} stale outputs were delivered")
    if findings.requests_left:
        left = findings.requests_left
        others = f" and {len(left) - NAMED} more" if len(left) > NAMED else ""
        wrong.append(f"not released: {', '.join(left[:NAMED])}{others}")
    elif findings.requests_held_by_engines:
        wrong.append(f"the stage workers still hold {findings.requests_held_by_engines} requests")
    if findings.model is not None:
        wrong += find_wrong(findings.model)
    return f"FAILED: {'; '.join(wrong)}."


def _since(sent_ms: int, then_ms: float | None) -> float | None:
    """From one server time to another; the second is an estimate and may lie a hair before the first."""
    return None if then_ms is None else round(max(0.0, then_ms - sent_ms), 1)


def _spread(times_ms: list[float]) -> Spread | None:
    return Spread(min(times_ms), round(median(times_ms), 1), max(times_ms)) if times_ms else None


def _outage(takeover: Takeover | None, arrivals_s: list[float], lease_ms: int) -> Outage | None:
    if takeover is None or takeover.replied_s is None:
        return None
    within = [each for each in arrivals_s if takeover.killed_s <= each <= takeover.replied_s]
    steps = [later - earlier for earlier, later in pairwise(within)]
    return Outage(
        killed=takeover.victim,
        pid=takeover.pid,
        at_s=round(takeover.killed_s, 1),
        successor=takeover.successor,
        gap_ms=round((takeover.replied_s - takeover.killed_s) * 1000),
        lease_ms=lease_ms,
        outputs_meanwhile=len(within),
        silence_ms=round(max(steps, default=0.0) * 1000),
    )


def _describe_abort(found: Findings) -> str:
    waited = [each for each in found.interruptions_each if each.waited]
    unknown = sum(1 for each in found.interruptions_each if each.abort_ms is None)
    text = "not measured"
    if found.abort is not None:
        text = (
            f"{found.abort.min_ms:.1f} / {found.abort.median_ms:.1f} / {found.abort.max_ms:.1f} ms (min, median, max)"
        )
        text += ", from the producer's XADD until the last engine had dropped the request"
    for each in waited:
        text += f"; {each.abort_ms or 0:,.0f} ms for one during the takeover"
    return text + (f"; {unknown} not measured" if unknown and found.abort is not None else "")


def _describe_missing(found: Findings) -> str:
    return f"; {found.stream_missing} were gone before they were read" if found.stream_missing else ""


def _describe_requests(found: Findings) -> str:
    text = f"{found.requests_released} of {found.requests_opened} opened"
    held = found.requests_held_by_engines
    return text + (f"; the stage workers still hold {held}" if held else "; the stage workers hold none")
