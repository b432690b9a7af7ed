"""The lease: who is attached, until when, and who may speak."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control.core import commands as c
from control.core import effects as e
from control.core import lease as leases
from control.core.lease import DISCONNECT_GRACE_EXPIRED, IDLE_TTL_EXPIRED, Lease
from control.core.session import Phase
from tests.core.call import Call, at, opened, talking

NOW_MS = 1_000_000
TTL_MS, GRACE_MS = 60_000, 20_000
MOMENTS = st.integers(0, 200_000)


def find_expiry(
    lease: Lease, now_ms: int, *, ttl_ms: int | None = TTL_MS, output_ms: int = 0, busy: bool = False
) -> str | None:
    return leases.find_expiry(
        lease, now_ms, idle_ttl_ms=ttl_ms, disconnect_grace_ms=GRACE_MS, output_ms=output_ms, busy=busy
    )


def test_a_lease_ends_at_its_idle_ttl_and_not_a_millisecond_earlier() -> None:
    lease = Lease(0, NOW_MS)
    assert find_expiry(lease, NOW_MS + TTL_MS - 1) is None
    assert find_expiry(lease, NOW_MS + TTL_MS) == IDLE_TTL_EXPIRED


def test_an_output_counts_as_activity() -> None:
    lease = Lease(0, NOW_MS)
    assert find_expiry(lease, NOW_MS + TTL_MS, output_ms=NOW_MS + 1) is None
    assert find_expiry(lease, NOW_MS + 1 + TTL_MS, output_ms=NOW_MS + 1) == IDLE_TTL_EXPIRED


def test_s06_without_an_idle_ttl_the_disconnect_grace_still_counts() -> None:
    lease = leases.detach(Lease(0, NOW_MS), NOW_MS)
    assert find_expiry(lease, NOW_MS + GRACE_MS - 1, ttl_ms=None) is None
    assert find_expiry(lease, NOW_MS + GRACE_MS, ttl_ms=None) == DISCONNECT_GRACE_EXPIRED
    assert find_expiry(Lease(0, NOW_MS), 10 * NOW_MS, ttl_ms=None) is None


def test_s06_a_detached_session_without_an_idle_ttl_expires_by_its_grace() -> None:
    call = opened(idle_ttl_ms=None)
    call.touch("detach")
    call.wait_ms(19_999)
    assert call.phase is Phase.OPEN
    call.wait_ms(1)
    assert call.phase is Phase.VACANT
    assert (call.events[-1], call.lifecycle[-1].reason) == ("expired", DISCONNECT_GRACE_EXPIRED)


def test_s06_both_deadlines_count_and_the_earlier_one_ends_the_session() -> None:
    call = opened(idle_ttl_ms=15_000)
    call.touch("detach")
    call.wait_ms(15_000)
    assert call.lifecycle[-1].reason == IDLE_TTL_EXPIRED


def test_the_grace_counts_through_outputs_and_operations_since_nobody_hears_them() -> None:
    lease = leases.detach(Lease(0, NOW_MS), NOW_MS)
    assert find_expiry(lease, NOW_MS + GRACE_MS, output_ms=NOW_MS + GRACE_MS, busy=True) == DISCONNECT_GRACE_EXPIRED


def test_s07_an_attach_after_a_detach_is_activity_and_no_more() -> None:
    call = opened()
    call.touch("detach")
    call.pass_ms(10_000)
    assert call.touch("attach").reply.ok
    assert call.open_session.lease.last_activity_ms == call.now_ms
    call.wait_ms(10_000)
    assert call.lifecycle[-1].reason == DISCONNECT_GRACE_EXPIRED


def test_s07_only_a_resume_ends_a_detach() -> None:
    call = opened()
    call.touch("detach")
    call.pass_ms(10_000)
    assert call.resume().reply.detail.lease_generation == 1
    call.wait_ms(59_999)
    assert call.phase is Phase.OPEN


def test_s08_an_append_that_takes_longer_than_the_idle_ttl_keeps_the_session() -> None:
    call = opened(idle_ttl_ms=5_000, append_timeout_ms=60_000)
    call.append()
    call.wait_ms(20_000)
    assert call.phase is Phase.OPEN
    assert call.accept().reply.ok
    call.wait_ms(4_999)
    assert call.phase is Phase.OPEN  # the TTL counts from the append's end
    call.wait_ms(1)
    assert call.lifecycle[-1].reason == IDLE_TTL_EXPIRED


def test_s08_the_ttl_counts_from_the_end_of_an_append_that_was_refused_or_timed_out() -> None:
    refused = opened(idle_ttl_ms=5_000, append_timeout_ms=60_000)
    refused.append()
    refused.wait_ms(20_000)
    refused.reject()
    refused.wait_ms(4_999)
    assert refused.phase is Phase.OPEN
    late = opened(idle_ttl_ms=5_000, append_timeout_ms=20_000)
    late.append()
    late.wait_ms(24_999)
    assert late.replies[-1].code == "timeout"
    assert late.phase is Phase.OPEN
    late.wait_ms(1)
    assert late.lifecycle[-1].reason == IDLE_TTL_EXPIRED


def test_s08_a_cancel_that_waits_for_its_cleanup_keeps_the_session() -> None:
    call = talking(idle_ttl_ms=5_000, cleanup_timeout_ms=20_000)
    call.cancel(at(1))
    call.wait_ms(19_999)
    assert call.phase is Phase.OPEN
    call.wait_ms(1)
    assert call.replies[-1].code == "timeout"
    call.wait_ms(4_999)
    assert call.phase is Phase.OPEN
    call.wait_ms(1)
    assert call.phase is Phase.CLOSING


def test_s08_a_cancel_whose_cleanup_fails_was_activity_too() -> None:
    call = talking(idle_ttl_ms=5_000)
    call.pass_ms(4_000)
    call.cancel(at(1))
    call.fail_cleanup("ear")
    call.wait_ms(4_999)
    assert call.phase is Phase.OPEN


def test_s09_a_resume_with_an_old_generation_is_refused_and_told_the_current_one() -> None:
    call = opened()
    call.resume()
    word = call.resume(0)
    assert word.code == "invalid_argument"
    assert word.reply.lease_generation == 1
    assert word.changed_nothing


def test_s09_a_resume_has_to_name_the_generation_that_it_takes_over() -> None:
    call = opened()
    word = call.feed(call.make(c.Resume))
    assert word.code == "invalid_argument"
    assert "$.expected_lease_generation" in word.reply.message


def test_s10_nobody_attaches_to_a_closing_session() -> None:
    call = talking()
    call.close()
    generation = call.open_session.lease.generation
    for word in (call.touch(), call.touch("attach"), call.touch("detach"), call.resume(generation)):
        assert word.code == "failed_precondition"
        assert "closing" in word.reply.message
        assert word.changed_nothing


def test_s32_an_output_of_an_interrupted_epoch_does_not_keep_the_lease_alive() -> None:
    # The scripts mark a session active only for what they deliver; without that mark its time runs on.
    call = talking()
    call.cancel(at(1))
    call.clean()
    call.wait_ms(60_000)
    assert call.lifecycle[-1].reason == IDLE_TTL_EXPIRED


def test_an_output_that_was_delivered_moves_the_deadline_on() -> None:
    call = opened()
    call.pass_ms(60_000)
    word = call.feed(c.Due(call.now_ms - 10_000))
    assert word.events == []
    assert call.find_due_ms() == call.now_ms + 50_000


def test_an_idle_expiry_is_refused_by_the_commit_if_the_session_was_heard_meanwhile() -> None:
    call = opened()
    call.pass_ms(60_000)
    word = call.feed(c.Due(call.now_ms - 60_000))
    assert word.all(e.ExpireUnlessHeard) == [e.ExpireUnlessHeard(call.now_ms - 60_000)]


def test_a_client_that_has_gone_stays_gone_whatever_is_heard() -> None:
    call = opened()
    call.touch("detach")
    call.pass_ms(20_000)
    assert call.feed(c.Due()).all(e.ExpireUnlessHeard) == []
    assert call.phase is Phase.VACANT


def test_nothing_expires_before_the_backlog_is_read_but_what_is_owed_goes_on() -> None:
    call = talking()
    call.cancel(at(1))
    call.touch("detach")
    call.pass_ms(100_000)
    word = call.feed(c.Due(may_expire=False))
    assert word.replies == []
    assert word.events == []
    assert word.aborts == [("ear", (0,)), ("mouth", (0,))]
    assert call.feed(c.Due()).events == ["closing"]


def test_s82_a_gateway_that_notices_its_dead_socket_late_detaches_nobody() -> None:
    call = opened()
    before = call.open_session.lease.generation
    call.resume()  # through another gateway
    word = call.touch("detach", expected_lease_generation=before)
    assert word.code == "failed_precondition"
    assert word.reply.lease_generation == 1
    assert word.changed_nothing
    assert call.open_session.lease.detached_at_ms is None
    assert call.touch("detach", expected_lease_generation=1).reply.ok


def test_d11_any_command_may_say_which_attachment_speaks() -> None:
    def refusals(call: Call, generation: int) -> list[bool]:
        common: dict[str, Any] = {"expected_lease_generation": generation}
        words = [
            call.touch(**common),
            call.append(**common),
            call.update(**common),
            call.cancel(at(call.fence.epoch + 1), **common),
            call.close(**common),
        ]
        return ["failed_precondition" in [reply.code for reply in word.replies] for word in words]

    call = opened()
    call.resume()
    assert refusals(call, 0) == [True] * 5
    assert refusals(call, 2) == [True] * 5
    assert call.phase is Phase.OPEN
    assert refusals(call, 1) == [False] * 5


def test_d11_an_append_that_waited_speaks_for_the_attachment_of_its_turn() -> None:
    call = opened()
    call.append()
    assert call.append(expected_lease_generation=0).waits
    call.resume()
    call.accept()
    assert call.replies[-1].code == "failed_precondition"


def test_an_unknown_activity_is_refused_with_what_is_allowed() -> None:
    word = opened().touch("wave")
    assert word.code == "invalid_argument"
    assert word.reply.message.startswith("$.activity: 'wave' is none of append, attach, detach")
    assert word.changed_nothing


@pytest.mark.parametrize("activity", sorted(leases.ACTIVITIES))
def test_every_activity_of_the_wire_is_one(activity: str) -> None:
    word = opened().touch(activity)
    assert (word.reply.ok, word.reply.detail.activity) == (True, activity)


def test_the_first_reason_stays() -> None:
    ended = leases.end(leases.detach(Lease(3, NOW_MS), NOW_MS), "client_close")
    assert ended == Lease(4, NOW_MS, None, "client_close")
    assert leases.end(ended, "stage_lost") is ended
    assert find_expiry(ended, 10 * NOW_MS) is None


@given(
    active=MOMENTS,
    detached=st.none() | MOMENTS,
    now=MOMENTS,
    output=MOMENTS,
    busy=st.booleans(),
    ttl=st.none() | st.just(TTL_MS),
)
def test_a_lease_is_looked_at_again_no_later_than_it_ends(
    active: int, detached: int | None, now: int, output: int, busy: bool, ttl: int | None
) -> None:
    lease = Lease(0, active, detached)
    reason = leases.find_expiry(lease, now, idle_ttl_ms=ttl, disconnect_grace_ms=GRACE_MS, output_ms=output, busy=busy)
    due_ms = leases.due_ms(lease, idle_ttl_ms=ttl, disconnect_grace_ms=GRACE_MS, busy=busy)
    if reason is not None:
        assert due_ms is not None
        assert due_ms <= now
