"""What each step of a trace asks of a runner, in small operations that both runners know how to carry out.

Responsible for the order in which the reference's reaper works, which the expectations depend on. Pure: a generator
yields operations and is sent what they answer.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from control.core.requests import RequestName, find_request_name


@dataclass(frozen=True)
class Send:
    """Handle a command."""

    message: dict[str, Any]


@dataclass(frozen=True)
class Advance:
    """Time passes."""

    ms: int


@dataclass(frozen=True)
class FailNext:
    """The next `count` cleanups, or submissions, go wrong."""

    what: str
    count: int


@dataclass(frozen=True)
class TakeFailure:
    """Whether the next cleanup would have gone wrong; that failure is used up."""


@dataclass(frozen=True)
class Pending:
    """The session ids that have a cleanup pending, in the order in which they were opened."""


@dataclass(frozen=True)
class Retry:
    """Every pending cleanup of these sessions is tried again, whatever its backoff; None: of all."""

    session_ids: tuple[str, ...] | None


@dataclass(frozen=True)
class FailRequests:
    """The stage reports requests of one session as dead."""

    names: tuple[RequestName, ...]


@dataclass(frozen=True)
class Expire:
    """Leases that are over are collected."""


@dataclass(frozen=True)
class Tell:
    """A lifecycle event that the reference tells only now."""

    event: dict[str, Any]


Operation = Send | Advance | FailNext | TakeFailure | Pending | Retry | FailRequests | Expire | Tell


@dataclass
class Early:
    """Expiries that a close has completed: told at once here (I10), at the next reap by the reference."""

    events: list[dict[str, Any]] = field(default_factory=list)


def operations(recorded: dict[str, Any], early: Early) -> Generator[Operation, Any, None]:
    """The operations of one recorded step."""
    match recorded["do"]:
        case "command":
            yield Send(recorded["message"])
        case "advance":
            yield Advance(round(recorded["seconds"] * 1000))
        case "reap":
            yield from _tell_early(early)
            yield Retry(None)
            yield Expire()
        case "fail_cleanups" | "fail_submits":
            yield FailNext(recorded["do"], recorded["count"])
        case "request_failed":
            yield from _fail_requests(recorded["request_ids"], early)
            yield Expire()
        case other:
            msg = f"a trace has no step {other!r}"
            raise ValueError(msg)


def _tell_early(early: Early) -> Generator[Operation, Any, None]:
    """The reference cleans up once more before it tells; a failure leaves the event for the reap after."""
    for event in early.events[:]:
        if not (yield TakeFailure()):
            early.events.remove(event)
            yield Tell(event)


def _fail_requests(request_ids: list[str], early: Early) -> Generator[Operation, Any, None]:
    """The sessions close, and the reap that follows is the first attempt at their cleanup.

    The reference keeps the cleanups that were pending before, and tries those first.
    """
    failed: dict[str, list[RequestName]] = {}
    for text in request_ids:
        name = find_request_name(text)
        assert name is not None, text
        failed.setdefault(name.session_id, []).append(name)
    before = yield Pending()
    yield from _tell_early(early)
    for sid in before:
        yield FailRequests(tuple(failed[sid])) if sid in failed else Retry((sid,))
    for sid, names in failed.items():
        yield Retry((sid,)) if sid in before else FailRequests(tuple(names))
