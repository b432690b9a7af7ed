"""Cleanups that don't end: asked for again, and at last with the engine's restart."""

from __future__ import annotations

from control.core import effects as e
from tests.core.call import at, talking


def test_a_cleanup_asks_for_a_restart_once_it_is_old_enough_and_not_before() -> None:
    call = talking(restart_after_ms=20_000, idle_ttl_ms=None)
    first = call.cancel(at(1))
    assert [abort.restart for abort in first.all(e.Abort)] == [False, False]
    young = [abort for word in call.wait_ms(15_000) for abort in word.all(e.Abort)]
    assert young
    assert not any(abort.restart for abort in young)
    old = [abort for word in call.wait_ms(15_000) for abort in word.all(e.Abort)]
    assert old[-1].restart
    assert {abort.worker_id for abort in old if abort.restart} == {"ear", "mouth"}


def test_only_those_who_have_not_confirmed_are_asked_for_a_restart() -> None:
    call = talking(restart_after_ms=10_000, idle_ttl_ms=None)
    call.cancel(at(1))
    call.clean("ear")
    old = [abort for word in call.wait_ms(30_000) for abort in word.all(e.Abort) if abort.restart]
    assert {abort.worker_id for abort in old} == {"mouth"}
