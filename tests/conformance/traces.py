"""Recorded runs of the reference class: reading them, and comparing what was seen here with what was seen there.

Responsible for the file's form and for the comparison: replies, lifecycle, submissions, cleaned and registered
requests, fences, generations and details. Message texts are free. Leaves the running to the two runners.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEFAULT_TRACES = Path(__file__).with_name("traces.jsonl.gz")

# The reference names the end after its own clean-up; the wire protocol names what happened.
REASONS = {"request_failed": "request_cleanup"}


@dataclass
class Seen:
    """What one step showed, in the trace's own form."""

    results: list[dict[str, Any]] = field(default_factory=list)
    lifecycle: list[dict[str, Any]] = field(default_factory=list)
    submitted: list[dict[str, Any]] = field(default_factory=list)
    cleaned: set[str] = field(default_factory=set)
    sessions: dict[str, dict[str, Any]] = field(default_factory=dict)


def load_traces(path: Path | str) -> list[dict[str, Any]]:
    """Every run of a file, gzipped or not, one JSON object a line."""
    data = Path(path).read_bytes()
    text = gzip.decompress(data).decode() if data[:2] == b"\x1f\x8b" else data.decode()
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def find_differences(expect: dict[str, Any], seen: Seen) -> list[str]:
    """Sentences about what differs in a step; empty if nothing does."""
    wrong: list[str] = []
    _compare(
        wrong,
        "results",
        [_plain_result(r) for r in expect["results"]],
        [_plain_reply(r) for r in seen.results],
    )
    _compare(
        wrong,
        "lifecycle",
        sorted((e["fence"]["session_id"], e["event"], e["reason"]) for e in expect["lifecycle"]),
        sorted((e["session_id"], e["event"], e["reason"]) for e in seen.lifecycle),
    )
    _compare(wrong, "submitted", [_plain_submission(s) for s in expect["submitted"]], seen.submitted)
    _compare(wrong, "cleaned", sorted(set(expect["cleaned"])), sorted(seen.cleaned))
    _compare(wrong, "sessions", {k: _plain_session(v) for k, v in expect["sessions"].items()}, seen.sessions)
    return wrong


def plain_fence(fence: dict[str, Any] | None) -> tuple[int, int, int, int] | None:
    """A fence as a tuple, the session id left out."""
    return None if fence is None else (fence["incarnation"], fence["epoch"], fence["turn_id"], fence["response_seq"])


def _compare(wrong: list[str], what: str, expected: object, got: object) -> None:
    if expected != got:
        wrong.append(f"{what}: expected {expected!r}, got {got!r}")


def _plain_detail(detail: dict[str, Any] | None) -> dict[str, Any] | None:
    if detail is None:
        return None
    return {k: plain_fence(v) if k in {"fence", "next_fence"} else v for k, v in detail.items()}


def _plain_result(result: dict[str, Any]) -> dict[str, Any]:
    error, stages = result["error"], result["stage_results"]
    return {
        "control_id": result["control_id"],
        "op": result["operation"],
        "session_id": result["session_id"],
        "ok": result["ok"],
        "code": error and error["code"],
        "retryable": bool(error and error["retryable"]),
        "fence": plain_fence(result["fence"]),
        "accepted_fence": plain_fence(result["accepted_fence"]),
        "lease_generation": result["lease_generation"],
        "detail": _plain_detail(stages[0]["result"]) if stages else None,
    }


def _plain_reply(reply: dict[str, Any]) -> dict[str, Any]:
    plain = {k: v for k, v in reply.items() if k != "message"}
    plain["fence"] = plain_fence(reply["fence"])
    plain["accepted_fence"] = plain_fence(reply["accepted_fence"])
    plain["detail"] = _plain_detail(reply["detail"])
    return plain


def _plain_submission(submission: dict[str, Any]) -> dict[str, Any]:
    return {**submission, "fence": plain_fence(submission["fence"])}


def _plain_session(session: dict[str, Any]) -> dict[str, Any]:
    return {
        "fence": plain_fence(session["fence"]),
        "lease_generation": session["lease_generation"],
        "terminal_reason": session["terminal_reason"],
        "detached": session["detached"],
        "input_seq": session["input_seq"],
        "input_turn_seq": session["input_turn_seq"],
        "config_generation": session["config_generation"],
        "resources": sorted((r["request_id"], r["submitted"]) for r in session["resources"]),
    }
