"""A session with a token, where commands wait in line: who does not show it takes no place and swallows nobody."""

from __future__ import annotations

from typing import Any

import pytest

from control.core import commands as c
from control.core.rejections import Code
from control.core.session import Phase
from control.core.tokens import TokenDigest, digest_token
from control.wire.limits import Limits
from tests.workers.test_partition import SID, Bench, fence

TOKEN = digest_token(b"sixteen bytes or more")
OTHER = digest_token(b"some other sixteen bytes")
SHOWN = pytest.mark.parametrize("shown", [None, OTHER], ids=["no token", "another token"])
BARRED = str(Code.FAILED_PRECONDITION)


def guarded(**changes: Any) -> Bench:
    bench = Bench(**changes)
    bench.open(token=TOKEN)
    bench.partition.tell(SID, c.Placed(0, 1), bench.now_ms)
    bench.commit()
    bench.out.clear()
    assert bench.session.phase is Phase.OPEN
    return bench


@SHOWN
def test_a_command_without_the_token_is_refused_at_once_though_others_wait(shown: TokenDigest | None) -> None:
    bench = guarded()
    mine = [bench.append(token=TOKEN) for _ in range(3)]
    stranger = bench.append(token=shown)
    assert bench.replies() == [(stranger, BARRED)]
    assert bench.partition.waiting == 2
    for _ in mine:
        bench.accept()
    assert bench.replies() == [(stranger, BARRED), *((entry_id, None) for entry_id in mine)]


@SHOWN
def test_without_the_token_nobody_fills_the_line(shown: TokenDigest | None) -> None:
    bench = guarded(limits=Limits(waiting_appends=2))
    mine = [bench.append(token=TOKEN)]
    strangers = [bench.append(token=shown) for _ in range(10)]
    mine += [bench.append(token=TOKEN) for _ in range(2)]
    for _ in mine:
        bench.accept()
    assert bench.replies() == [(entry_id, BARRED) for entry_id in strangers] + [(entry_id, None) for entry_id in mine]


@SHOWN
def test_the_control_id_of_a_waiting_command_is_no_way_in(shown: TokenDigest | None) -> None:
    bench = guarded()
    bench.append(token=TOKEN)
    waiting = bench.append(token=TOKEN, control_id="again")
    bench.append(token=shown, control_id="again")
    assert bench.replies() == [("again", BARRED)]
    batch_entries = bench.partition.waiting
    bench.append(token=TOKEN, control_id="again")  # the rightful one again: swallowed, its reply is still to come
    assert bench.partition.waiting == batch_entries
    bench.accept()
    bench.accept()
    assert [code for name, code in bench.replies() if name == "again"] == [BARRED, None]
    assert waiting


@SHOWN
def test_before_the_placement_a_stranger_is_refused_and_the_rightful_go_on(shown: TokenDigest | None) -> None:
    bench = Bench()
    opened = bench.open(token=TOKEN)
    mine = bench.append(token=TOKEN)
    stranger = bench.append(token=shown)
    closed = bench.send(c.Close, token=shown)
    assert bench.replies() == [(stranger, BARRED), (closed, BARRED)]
    bench.partition.tell(SID, c.Placed(0, 1), bench.now_ms)
    bench.accept()
    assert bench.replies()[2:] == [(opened, None), (mine, None)]


@SHOWN
def test_behind_an_open_that_waits_a_stranger_with_the_same_control_id_swallows_nobody(
    shown: TokenDigest | None,
) -> None:
    bench = guarded()
    bench.send(c.Close, token=TOKEN)
    opened = bench.open(incarnation=1, token=TOKEN)  # waits for the commit of the last life's end
    bench.append(fence(incarnation=1), token=shown, control_id="mine")
    bench.append(fence(incarnation=1), token=TOKEN, control_id="mine")
    bench.commit()
    for debt in bench.session.debts:
        bench.partition.tell(SID, c.DebtPaid(debt.incarnation, debt.holder), bench.now_ms)
    bench.partition.reopen(bench.now_ms)
    bench.partition.tell(SID, c.Placed(1, 1), bench.now_ms)
    under_way = bench.session.append
    assert under_way is not None
    bench.ack(c.Accepted(1, under_way.number))
    found = [(name, code) for name, code in bench.replies() if name in {opened, "mine"}]
    assert found == [("mine", BARRED), (opened, None), ("mine", None)]


@SHOWN
def test_a_stranger_behind_waiting_input_of_a_new_life_is_not_held_up(shown: TokenDigest | None) -> None:
    bench = guarded()
    bench.send(c.Close, token=TOKEN)
    bench.open(incarnation=1, token=TOKEN)
    bench.append(fence(incarnation=1), token=TOKEN)
    bench.append(fence(incarnation=1), token=TOKEN)
    stranger = bench.append(fence(incarnation=1), token=shown)
    bench.commit()
    for debt in bench.session.debts:
        bench.partition.tell(SID, c.DebtPaid(debt.incarnation, debt.holder), bench.now_ms)
    bench.partition.reopen(bench.now_ms)
    assert (stranger, BARRED) in bench.replies()
    assert bench.partition.waiting == 2


def test_a_command_that_could_not_be_stored_is_not_answered_in_anothers_name() -> None:
    bench = guarded()
    command = c.Touch(control_id="mine", session_id=SID, fence=fence(), activity="heartbeat")
    bench.partition.fail(command, bench.now_ms)
    assert bench.replies() == [("mine", "internal")]
    bench.send(c.Touch, control_id="mine", activity="heartbeat", token=TOKEN)
    assert bench.replies()[1:] == [("mine", None)]
