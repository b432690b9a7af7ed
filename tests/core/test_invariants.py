"""The guard of the guards: a record that breaks an invariant is found, by its number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from control.core.cleanup import Cleanup, CleanupKind
from control.core.invariants import find_broken
from control.core.lease import Lease
from control.core.requests import Request, RequestPhase
from control.core.session import Opening, Phase, Session
from tests.core.call import Call, at, opened, talking


def appending() -> Session:
    call = talking()
    call.append()
    return call.open_session


def cancelled() -> Session:
    call = talking()
    call.cancel(at(1))
    return call.open_session


def closing() -> Session:
    call = talking()
    call.close()
    return call.open_session


def opening() -> Session:
    call = Call()
    call.open()
    return call.open_session


def tombstone() -> Session:
    call = opened()
    call.close()
    return call.open_session


def changed(make: Callable[[], Session], **fields: Any) -> Callable[[], Session]:
    return lambda: replace(make(), **fields)


def with_append(**fields: Any) -> Session:
    session = appending()
    assert session.append is not None
    return replace(session, append=replace(session.append, **fields))


def with_cleanup(make: Callable[[], Session], **fields: Any) -> Session:
    session = make()
    return replace(session, cleanups=(replace(session.cleanups[0], **fields),))


def covered_twice() -> Session:
    session = cancelled()
    return replace(session, cleanups=session.cleanups * 2)


WHOLE = [appending, cancelled, closing, opening, tombstone]
BROKEN: dict[str, tuple[Callable[[], Session], str]] = {
    "no open": (changed(opening, opening=None), "an opening session knows its open"),
    "no holders": (changed(opening, holders=()), "an opening session knows its open"),
    "an open too many": (changed(appending, opening=Opening("c", 1, 0)), "only an opening session"),
    "a dead route": (changed(tombstone, route=("ear",)), "I3: a vacant record holds nothing"),
    "a dead slot": (changed(tombstone, holders=("ear",)), "I3: a vacant record holds nothing"),
    "a dead request": (changed(tombstone, requests=(Request(0),)), "I3: a vacant record holds nothing"),
    "an end without reason": (changed(closing, lease=Lease(0, 0)), "I10: exactly a closing session"),
    "a reason without end": (changed(appending, lease=Lease(0, 0, None, "x")), "I10: exactly a closing session"),
    "an open floor": (changed(closing, floor=3), "I1: the floor of a closing session"),
    "an append while closing": (changed(closing, append=appending().append), "only an open session has an append"),
    "an append below the floor": (changed(appending, floor=1), "I1: an append under way"),
    "an append without request": (changed(appending, requests=()), "I2: an append under way"),
    "an append of a reserved one": (changed(appending, requests=(Request(0),)), "I2: an append under way"),
    "a gap": (lambda: with_append(seq=7), "I5: the append under way"),
    "a request twice": (
        changed(appending, requests=(Request(0, RequestPhase.SUBMITTED),) * 2),
        "one request an epoch",
    ),
    "an old one left": (changed(appending, fence=at(1), floor=1, append=None), "I3: every request of an older epoch"),
    "one below the floor": (changed(appending, floor=1), "I3: nothing below the floor"),
    "covered twice": (covered_twice, "I2: a request has one cleanup"),
    "not covered": (changed(cancelled, cleanups=()), "I3: every request in cleaning"),
    "the end forgets": (lambda: with_cleanup(closing, epochs=()), "I3: the end covers"),
    "nobody to wait for": (lambda: with_cleanup(cancelled, waiting=()), "I3: a cleanup that waits for nobody"),
    "a stranger": (lambda: with_cleanup(cancelled, waiting=("nose",)), "I2: only workers of the route"),
    "no end": (changed(closing, cleanups=()), "I10: a closing session has exactly one end"),
    "an end too early": (
        lambda: with_cleanup(cancelled, kind=CleanupKind.END),
        "I10: a closing session has exactly one end",
    ),
    "a number from the future": (lambda: with_cleanup(cancelled, number=99), "numbers only rise"),
}


@pytest.mark.parametrize("make", WHOLE)
def test_a_session_as_the_rules_leave_it_breaks_nothing(make: Callable[[], Session]) -> None:
    assert find_broken(make()) == []


@pytest.mark.parametrize(("make", "sentence"), BROKEN.values(), ids=BROKEN)
def test_a_broken_record_is_found(make: Callable[[], Session], sentence: str) -> None:
    assert any(broken.startswith(sentence) for broken in find_broken(make())), find_broken(make())


def test_an_empty_cleanup_is_over_unless_it_is_the_end() -> None:
    empty = Cleanup(1, CleanupKind.EPOCH, (), ("ear",), 1, 0, 0)
    session = replace(appending(), cleanups=(empty,))
    assert "I3: a cleanup that waits for nobody, or for nothing, is over" in find_broken(session)


def test_phases_are_stored_as_the_numbers_that_they_always_had() -> None:
    assert [(phase.name, phase.value) for phase in Phase] == [
        ("VACANT", 0),
        ("OPENING", 1),
        ("OPEN", 2),
        ("CLOSING", 3),
    ]
    assert [phase.value for phase in RequestPhase] == [0, 1, 2]
