"""What a control worker has done so far, for health checks, metrics and tests. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ControlStats:
    """Counters since the start."""

    commands: int = 0
    acks: int = 0
    commits: int = 0
    refused_commits: int = 0
    dead_letters: int = 0
    missing_entries: int = 0
    reconnects: int = 0
