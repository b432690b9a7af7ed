"""The stored record: what it says after being stored, and when time has something to say."""

from __future__ import annotations

import msgspec
import pytest

from control.core import commands as c
from control.core.session import FLOOR_CLOSED, LAYOUT, NOBODY, TOMBSTONE_MS, Ended, Phase, Session, is_busy, vacant
from tests.core.call import START_MS, Call, at, opened, settings, talking


def rich() -> Call:
    """A session with something in every field."""
    call = talking(limit_sessions=True)
    call.cancel(at(1), session_config={"voice": "b"}, runtime_config={"temperature": 2})
    call.append(operation_id="say1", payload_digest=b"x", final=True)
    call.touch("detach")
    return call


@pytest.mark.parametrize("phase", Phase)
def test_a_session_reads_the_same_after_being_stored(phase: Phase) -> None:
    call = Call(settings(limit_sessions=True))
    call.open()
    if phase is Phase.OPEN:
        call = rich()
    elif phase is Phase.CLOSING:
        call = rich()
        call.close()
    elif phase is Phase.VACANT:
        call.close()
    session = call.open_session
    assert session.phase is phase
    stored = msgspec.msgpack.encode(session)
    assert msgspec.msgpack.decode(stored, type=Session) == session


def test_the_record_is_an_array_that_begins_with_its_layout() -> None:
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(rich().open_session))
    assert isinstance(stored, list)
    assert stored[:2] == [LAYOUT, Phase.OPEN]


def test_a_record_with_fewer_fields_is_read_with_their_defaults() -> None:
    # Fields are only ever added at the end, so an older record is a shorter array.
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(opened().open_session))
    short = msgspec.msgpack.encode(stored[:5])
    assert msgspec.msgpack.decode(short, type=Session).cleanups == ()


def test_the_earliest_of_all_deadlines_is_the_one_that_is_due() -> None:
    call = opened()
    assert call.find_due_ms() == START_MS + 60_000  # idle
    call.touch("detach")
    assert call.find_due_ms() == START_MS + 20_000  # the grace
    call.append()
    assert call.find_due_ms() == START_MS + 10_000  # the append; the idle TTL waits for its end
    call.accept()
    call.cancel(at(1))
    assert call.find_due_ms() == call.cleanups[0].retry_at_ms
    call.wait_ms(4_000)
    due_ms = call.find_due_ms()
    assert due_ms is not None
    assert due_ms <= START_MS + 5_000  # the cancel's deadline


def test_a_session_without_any_deadline_is_never_due() -> None:
    assert opened(idle_ttl_ms=None).find_due_ms() is None


def test_a_tombstone_is_due_when_its_hour_is_over() -> None:
    call = opened()
    call.close()
    call.pay_debts()
    assert call.find_due_ms() == START_MS + TOMBSTONE_MS


def test_only_what_answers_later_makes_a_session_busy() -> None:
    call = talking()
    assert not is_busy(call.open_session)
    call.update(at(1))  # its cleanup is owed to nobody
    assert call.cleanups
    assert not is_busy(call.open_session)
    call.cancel(at(2), at(0))
    assert is_busy(call.open_session)
    call.clean()
    assert not is_busy(call.open_session)
    call.append()
    assert is_busy(call.open_session)


def test_nobody_is_vacant_and_holds_nothing() -> None:
    assert (NOBODY.phase, NOBODY.holders, NOBODY.debts, NOBODY.requests) == (Phase.VACANT, (), (), ())
    assert NOBODY.is_forgettable(0)
    assert not vacant(ended=Ended(1, START_MS)).is_forgettable(START_MS)
    assert vacant(ended=Ended(1, START_MS)).is_forgettable(START_MS + TOMBSTONE_MS)


def test_numbers_of_submissions_and_cleanups_are_never_given_twice_in_a_life() -> None:
    call = talking()
    seen = [call.submits[0].number]
    for epoch in range(1, 4):
        call.cancel(at(epoch))
        seen.append(call.cleanups[-1].number)
        call.append()
        seen.append(call.append_number)
        call.accept()
    assert seen == sorted(set(seen))


def test_the_floor_of_an_end_is_above_every_epoch() -> None:
    call = talking()
    call.feed(c.Poisoned("no"))
    assert call.open_session.floor == FLOOR_CLOSED
