"""Conditions that say which sessions an operator means."""

from __future__ import annotations

from typing import Any

import pytest

from control.store.inspect import SessionRow
from workers.maintenance.where import WhereError, is_meant, parse_length_ms, parse_where


def row(**changes: Any) -> SessionRow:
    about: dict[str, Any] = {
        "session_id": "call-7",
        "partition": 3,
        "phase": "open",
        "session_mode": "duplex",
        "idle_ms": 90_000,
        "cleanups": 1,
        "oldest_cleanup_ms": 5_000,
        "route": ("ear-1", "mouth-2"),
    }
    return SessionRow(**{**about, **changes})


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("id=call-7", True),
        ("id=call-*", True),
        ("id!=call-*", False),
        ("id=CALL-7", False),
        ("worker=mouth-2", True),
        ("worker=mouth-*", True),
        ("worker!=mouth-2", False),
        ("worker!=nose", True),
        ("mode=turn", False),
        ("phase=open", True),
        ("partition=3", True),
        ("partition>3", False),
        ("partition<4", True),
        ("partition!=3", False),
        ("cleanups>0", True),
        ("idle>1m", True),
        ("idle>1.5min", False),
        ("idle<2h", True),
        ("cleanup_age>4999ms", True),
        ("detached>0s", False),
        ("detached<1d", False),
        ("  idle > 1m ", True),
    ],
)
def test_a_condition_holds_for_what_it_says(text: str, holds: bool) -> None:
    assert is_meant(row(), parse_where([text])) is holds


def test_all_conditions_must_hold_and_none_mean_everybody() -> None:
    assert is_meant(row(), parse_where(["id=call-*", "idle>1m"]))
    assert not is_meant(row(), parse_where(["id=call-*", "idle>2m"]))
    assert is_meant(row(), ())


def test_what_is_attached_is_detached_for_no_time_at_all() -> None:
    assert is_meant(row(detached_ms=61_000), parse_where(["detached>1m"]))
    assert not is_meant(row(detached_ms=None), parse_where(["detached>1m"]))


@pytest.mark.parametrize(
    "text",
    [
        *["", "id", "=x", "id=", "id>x", "nose=1", "idle=5s", "idle>5", "idle>soon", "idle>5 parsecs", "partition=-1"],
        *["partition=x", "partition>1.5", "cleanups>٣", "idle>>5s"],
    ],
)
def test_what_can_not_be_asked_is_said_with_what_can(text: str) -> None:
    with pytest.raises(WhereError, match=r"must be id, worker|is no length of time"):
        parse_where([text])


def test_lengths_of_time() -> None:
    assert [parse_length_ms(text) for text in ("0s", "500ms", "1.5 s", "2m", "2min", "1h", "1d")] == [
        *[0, 500, 1_500, 120_000, 120_000, 3_600_000, 86_400_000]
    ]
    with pytest.raises(WhereError, match="500ms, 30s"):
        parse_length_ms("soon")
