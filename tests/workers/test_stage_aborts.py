"""Aborts: at once, whatever else goes on; confirmed only when the request is gone; nothing runs after them."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

from control.store.lives import fetch_figures
from control.wire.stage import AcceptedAck, CleanedAck, CleanupFailedAck, RequestFailedAck
from stages.policy import AppendPlan, DefaultPolicy
from tests.workers.stage_bed import StageBed, eventually, fence, name_of

if TYPE_CHECKING:
    from control.store.queues import Reading


async def started(bed: StageBed, *session_ids: str) -> None:
    """Sessions whose first request runs, their acceptance read."""
    await bed.start(*session_ids)
    for session_id in session_ids:
        assert isinstance(await bed.next_ack(session_id), AcceptedAck)


async def test_i2_an_abort_is_confirmed_once_the_engine_has_dropped_the_request(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await started(bed, "s")
        bed.engine.stuck.add(name_of("s"))
        await bed.abort("s", 0, number=7)
        await bed.engine.until(lambda: bed.engine.abort_calls)
        assert await bed.length(bed.keys("s").acks) == 1
        assert await bed.length(bed.keys("s").aborts(bed.worker_id)) == 1
        bed.engine.free(name_of("s"))
        assert await bed.next_ack("s") == CleanedAck("s", 1, 7, bed.worker_id)
        await bed.until_drained("s")
        assert not len(bed.worker.lanes)


async def test_an_abort_of_several_requests_is_one_word(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await started(bed, "s")
        await bed.submit("s", at=fence(1), number=1)
        await bed.next_ack("s")
        await bed.abort("s", 0, 1, 5, number=7)
        assert await bed.next_ack("s") == CleanedAck("s", 1, 7, bed.worker_id)
        assert sorted(bed.engine.aborted) == sorted(name_of("s", epoch) for epoch in (0, 1, 5))
        assert bed.engine.running == {}


async def test_s33_an_abort_of_nothing_is_confirmed(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await bed.abort("s", 0, number=7)
        assert await bed.next_ack("s") == CleanedAck("s", 1, 7, bed.worker_id)
        queue, entry = bed.abort_entry("s", number=8)
        await bed.redis.xadd(queue, entry)
        assert await bed.next_ack("s") == CleanedAck("s", 1, 8, bed.worker_id)


@pytest.mark.parametrize("stuck", [False, True])
async def test_s31_an_abort_waits_neither_for_a_stuck_input_nor_for_those_behind_it(
    redis_url: str, stuck: bool
) -> None:
    async with StageBed(redis_url) as bed:
        await started(bed, "s")
        if stuck:
            bed.engine.submit_gate.clear()
        for number in range(2, 8):
            await bed.submit("s", number=number)
        if stuck:
            await bed.engine.until(lambda: len(bed.engine.submitting) == 2)
        await bed.abort("s", 0)
        await bed.until_drained("s")
        [cleaned] = [ack for ack in await bed.acks("s") if isinstance(ack, CleanedAck)]
        assert cleaned == CleanedAck("s", 1, 100, bed.worker_id)
        assert name_of("s") not in bed.engine.running
        bed.engine.submit_gate.set()
        await bed.submit("other")
        await bed.engine.until(lambda: list(bed.engine.running) == [name_of("other")])


async def test_s34_an_abort_that_overtakes_its_submission_wins(redis_url: str) -> None:
    """The submission is committed first, and read later than the abort."""
    async with StageBed(redis_url) as bed:
        late = "99999999999999-5"
        await bed.abort("s", 0, after=late)
        assert isinstance(await bed.next_ack("s"), CleanedAck)
        queue, entry = bed.submission("s")
        await bed.redis.xadd(queue, entry, id="99999999999999-1")
        await bed.redis.xadd(queue, entry, id=late)
        await bed.until_drained("s")
        assert bed.engine.submitting == []
        assert bed.worker.stats.discarded == 2
        assert await bed.length(bed.keys("s").acks) == 1


async def test_s34_an_abort_that_stands_beside_its_submission_is_seen_first(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        for round_ in range(20):
            session_id = f"s{round_}"
            queue, entry = bed.submission(session_id)
            aborts, order = bed.abort_entry(session_id, 0)
            async with bed.redis.pipeline(transaction=True) as pipe:
                pipe.xadd(queue, entry)
                pipe.xadd(aborts, {**order, "a": "99999999999999-0"})
                await pipe.execute()
        await bed.until_drained(*(f"s{round_}" for round_ in range(20)))
        assert bed.engine.submitting == []


async def test_s34_an_abort_is_seen_by_who_reads_the_submissions_even_if_its_own_reader_hangs(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        life = bed.worker._life
        assert life is not None
        reading = life._aborts.readers[0].read
        released = asyncio.Event()

        async def hang() -> Reading:
            await released.wait()
            return await reading()

        life._aborts.readers[0].read = hang  # type: ignore[method-assign]
        await bed.abort("first", 0)  # ends the read that is under way
        await bed.until_drained("first")
        queue, entry = bed.submission("s")
        aborts, order = bed.abort_entry("s", 0)
        async with bed.redis.pipeline(transaction=True) as pipe:
            pipe.xadd(queue, entry)
            pipe.xadd(aborts, {**order, "a": "99999999999999-0"})
            await pipe.execute()
        await bed.until_empty(queue)
        assert bed.engine.submitting == []
        released.set()
        await bed.until_drained("s")
        assert CleanedAck("s", 1, 100, bed.worker_id) in await bed.acks("s")


async def test_s34_an_input_whose_plan_outlasts_its_abort_is_not_submitted(redis_url: str) -> None:
    thought = threading.Event()

    class Slow(DefaultPolicy):
        def plan_append(self, **asked: Any) -> AppendPlan:
            if asked["session_id"] == "s":
                assert thought.wait(30)
            return super().plan_append(**asked)

    async with StageBed(redis_url, policy=Slow()) as bed:
        try:
            await bed.submit("s")
            await bed.until(lambda: len(bed.worker.lanes))
            await bed.abort("s", 0)
            await bed.until_empty(bed.keys("s").aborts(bed.worker_id))
            assert CleanedAck("s", 1, 100, bed.worker_id) in await bed.acks("s")
        finally:
            thought.set()
        await bed.until_drained("s")
        assert bed.engine.submitting == []
        assert bed.worker.stats.discarded == 1


async def test_s34_an_aborted_id_is_remembered_no_longer_than_needed(redis_url: str) -> None:
    sessions = [f"s{number}" for number in range(50)]
    async with StageBed(redis_url) as bed:
        for session_id in sessions:
            await bed.submit(session_id)
            await bed.abort(session_id, 0)
        await bed.until_drained(*sessions)
        await bed.until(lambda: bed.worker.lanes.remembered == 0)


async def test_inputs_that_wait_when_the_abort_comes_are_dropped_without_a_word(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        bed.engine.submit_gate.clear()
        for number in (1, 2, 3):
            await bed.submit("s", number=number)
        await bed.engine.until(lambda: bed.engine.submitting)
        await bed.abort("s", 0)
        assert await bed.next_ack("s") == CleanedAck("s", 1, 100, bed.worker_id)
        await bed.until_drained("s")
        assert bed.engine.submitted == []
        assert bed.worker.stats.discarded == 3


async def test_i2_an_input_that_goes_in_after_its_abort_is_aborted_again(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        bed.engine.submit_gate.clear()
        await bed.submit("s")
        await bed.engine.until(lambda: bed.engine.submitting)
        await bed.abort("s", 0)
        await bed.engine.until(lambda: bed.engine.aborted)
        bed.engine.submit_gate.set()
        assert await bed.next_ack("s") == CleanedAck("s", 1, 100, bed.worker_id)
        assert bed.engine.running == {}
        assert len(bed.engine.aborted) == 2


async def test_s30_an_abort_that_goes_unconfirmed_is_told_and_the_next_order_tries_again(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await started(bed, "s")
        await bed.submit("s", at=fence(1), number=1)
        await bed.next_ack("s")
        bed.engine.fail_cleanups = 2
        for attempt in (1, 2):
            await bed.abort("s", 0, 1, number=7, attempt=attempt)
            ack = await bed.next_ack("s")
            assert ack == CleanupFailedAck("s", 1, 7, attempt, bed.worker_id, True, "told not to confirm")
        assert len(bed.engine.running) == 2
        await bed.abort("s", 0, 1, number=7, attempt=3)
        assert await bed.next_ack("s") == CleanedAck("s", 1, 7, bed.worker_id)
        assert bed.engine.running == {}
        assert bed.worker.stats.cleanup_failed == 2


async def test_an_engine_that_says_no_is_told_from_one_that_says_nothing(redis_url: str) -> None:
    async with StageBed(redis_url, abort_timeout_s=0.05) as bed:
        await started(bed, "deaf", "stubborn")
        bed.engine.stuck.add(name_of("deaf"))
        bed.engine.stubborn.add(name_of("stubborn"))
        await bed.abort("deaf", 0)
        ack = await bed.next_ack("deaf")
        assert ack.timed_out
        assert "0.05 s" in ack.message
        await bed.abort("stubborn", 0)
        ack = await bed.next_ack("stubborn")
        assert not ack.timed_out
        assert "told to say no" in ack.message
        await bed.until_drained("deaf", "stubborn")


async def test_a_repeated_order_joins_the_abort_that_is_under_way(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await started(bed, "s")
        bed.engine.stuck.add(name_of("s"))
        await bed.abort("s", 0, number=7, attempt=1)
        await bed.abort("s", 0, number=7, attempt=2)
        await bed.until(lambda: bed.worker.stats.aborts == 2)
        assert bed.engine.abort_calls == [name_of("s")]
        bed.engine.free(name_of("s"))
        assert await bed.next_acks("s", 2) == [CleanedAck("s", 1, 7, bed.worker_id)] * 2
        assert bed.engine.abort_calls == [name_of("s")]


async def test_each_joined_order_names_its_own_attempt_when_it_fails(redis_url: str) -> None:
    async with StageBed(redis_url, abort_timeout_s=0.3) as bed:
        await started(bed, "s")
        bed.engine.stuck.add(name_of("s"))
        await bed.abort("s", 0, number=7, attempt=1)
        await bed.abort("s", 0, number=7, attempt=2)
        assert [ack.attempt for ack in await bed.next_acks("s", 2)] == [1, 2]
        bed.engine.free(name_of("s"))
        await bed.abort("s", 0, number=7, attempt=3)
        assert await bed.next_ack("s") == CleanedAck("s", 1, 7, bed.worker_id)


async def test_s46_one_stuck_abort_among_many_delays_none(redis_url: str) -> None:
    sessions = [f"s{number}" for number in range(60)]
    async with StageBed(redis_url) as bed:
        await started(bed, *sessions)
        bed.engine.stuck.add(name_of("s0"))
        for session_id in sessions:
            await bed.abort(session_id, 0)
        await bed.engine.until(lambda: len(bed.engine.running) == 1)
        await bed.until_drained(*(each for each in sessions if bed.keys(each).partition != bed.keys("s0").partition))
        assert list(bed.engine.running) == [name_of("s0")]
        bed.engine.free(name_of("s0"))
        await bed.until_drained(*sessions)


async def test_s35_a_request_that_ends_during_its_abort_is_confirmed_once(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await started(bed, "s")
        bed.engine.stuck.add(name_of("s"))
        await bed.abort("s", 0)
        await bed.engine.until(lambda: bed.engine.abort_calls)
        bed.engine.fail(name_of("s"))
        bed.engine.fail(name_of("s"))
        assert await bed.next_ack("s") == CleanedAck("s", 1, 100, bed.worker_id)
        await bed.until_drained("s")
        assert await bed.length(bed.keys("s").acks) == 2
        assert bed.worker.stats.failed == 0


async def test_s37_a_late_failure_is_charged_to_the_old_request(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await started(bed, "s")
        await bed.abort("s", 0)
        assert isinstance(await bed.next_ack("s"), CleanedAck)
        await bed.submit("s", at=fence(1))
        assert isinstance(await bed.next_ack("s"), AcceptedAck)
        bed.engine.fail(name_of("s"), "too late")
        bed.engine.fail(name_of("s", 1), "this one counts")
        ack = await bed.next_ack("s")
        assert ack == RequestFailedAck("s", 1, 1, bed.worker_id, "this one counts")


async def test_a_failure_between_two_tries_is_told_and_the_next_try_confirms(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await started(bed, "s")
        bed.engine.fail_cleanups = 1
        await bed.abort("s", 0, number=7)
        assert isinstance(await bed.next_ack("s"), CleanupFailedAck)
        bed.engine.fail(name_of("s"))
        assert await bed.next_ack("s") == RequestFailedAck("s", 1, 0, bed.worker_id, "told to fail")
        await bed.abort("s", 0, number=7, attempt=2)
        assert await bed.next_ack("s") == CleanedAck("s", 1, 7, bed.worker_id)


async def test_s42_one_failed_request_is_told_and_the_others_run_on(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await started(bed, "s", "other")
        bed.engine.emit(name_of("s"), "last words")
        bed.engine.fail(name_of("s"), "out of memory")
        assert await bed.next_ack("s") == RequestFailedAck("s", 1, 0, bed.worker_id, "out of memory")
        assert [each["data"] for each in await bed.next_events("s")] == ["last words"]
        await bed.submit("s", number=2)
        await bed.until_drained("s")
        bed.engine.emit(name_of("other"), "still here")
        assert [each["data"] for each in await bed.next_events("other")] == ["still here"]
        await bed.abort("s", 0)
        assert await bed.next_ack("s") == CleanedAck("s", 1, 100, bed.worker_id)


async def test_s54_an_entry_that_is_no_abort_holds_up_nothing(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        queue, _ = bed.abort_entry("s", 0)
        await bed.redis.xadd(queue, {"b": b"\xc1", "a": "nonsense"})
        await bed.redis.xadd(queue, {"x": "y"})
        await bed.abort("s", 0)
        assert isinstance(await bed.next_ack("s"), CleanedAck)
        await bed.until_drained("s")


async def test_how_long_an_abort_took_stands_in_the_workers_record(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await started(bed, "s")
        life = bed.worker._life
        assert life is not None
        # Before the first answer to TIME there is nothing to measure by.

        async def knows_the_time() -> bool:
            return life._heartbeat._time.find_ms(0) is not None

        await eventually(knows_the_time)
        entry_id = await bed.abort("s", 0)
        await bed.next_ack("s")
        figures: dict[str, str] = {}
        while "abort_log" not in figures:
            figures = await fetch_figures(bed.redis, bed.worker_id)
        [row] = json.loads(figures["abort_log"])
        assert row["request_id"] == name_of("s")
        assert row["entry_ms"] == int(entry_id.partition("-")[0])
        assert 0 <= float(figures["abort_ms_last"]) == float(figures["abort_ms_max"]) < 10_000
        assert abs(row["engine_ms"] - row["entry_ms"]) < 10_000
        assert figures["cleaned"] == "1"
