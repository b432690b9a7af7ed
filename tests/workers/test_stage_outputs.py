"""Outputs: numbered, in order, once, to whom they belong, and none after the word that stops them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from control.wire.stage import AcceptedAck, CleanedAck, RequestFailedAck, decode_submission
from stages.policy import DefaultPolicy, OutputAction, OutputDecision
from tests.workers.stage_bed import CONFIG, StageBed, fence, name_of
from workers.stage_forward import unwrap_output
from workers.stage_lanes import Input

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from stages.engine import Output

XADD_THOUGH_FULL = """#!lua flags=allow-oom
return redis.call('XADD', KEYS[1], '*', 'b', ARGV[1], 'a', '0-0')
"""
LONG_S = 1000.0  # longer than any test


async def test_the_last_stages_outputs_reach_the_listener_with_their_numbers(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await bed.start("s")
        bed.engine.emit(name_of("s"), b"\1\0", kind="audio", metadata={"rate": 8000})
        bed.engine.emit(name_of("s"), [1, 2], kind="tokens", turn_end=True)
        first, second = await bed.next_events("s", 2)
        assert first == {
            "session_id": "s",
            "request_id": name_of("s"),
            "stage_id": 0,
            "fence": {"incarnation": 1, "epoch": 0, "turn_id": 0, "response_seq": 0},
            "seq": 0,
            "kind": "audio",
            "data": b"\1\0",
            "turn_end": False,
            "metadata": {"rate": 8000},
            "n": 1,
        }
        assert (second["seq"], second["data"], second["turn_end"], second["n"]) == (1, [1, 2], True, 2)
        await bed.until(lambda: bed.worker.stats.outputs_delivered == 2)


async def test_each_request_counts_from_zero(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await bed.start("s", "t")
        for session_id in ("s", "t", "s", "t", "t"):
            bed.engine.emit(name_of(session_id), session_id)
        assert [each["seq"] for each in await bed.next_events("s", 2)] == [0, 1]
        assert [each["seq"] for each in await bed.next_events("t", 3)] == [0, 1, 2]
        await bed.set_fence("s", fence(1), floor=1)
        await bed.submit("s", at=fence(1))
        await bed.engine.until(lambda: name_of("s", 1) in bed.engine.running)
        bed.engine.emit(name_of("s", 1), "new")
        [event] = await bed.next_events("s")
        assert (event["seq"], event["n"]) == (0, 3)


async def test_s32_i1_what_the_engine_says_after_a_cancel_is_never_delivered_and_stops_it(redis_url: str) -> None:
    """The cancel's fence is committed; its abort has not been read yet."""
    async with StageBed(redis_url) as bed:
        await bed.start("s", "other")
        bed.engine.emit(name_of("s"), "before")
        await bed.next_events("s")
        await bed.set_fence("s", fence(1), floor=1)
        bed.engine.emit(name_of("s"), "after")
        await bed.engine.until(lambda: bed.engine.aborted == [name_of("s")])
        assert await bed.length(bed.keys("s").events("s")) == 1
        assert bed.worker.stats.outputs_stopped == 1
        # Nobody had ordered it, so nobody is told; the order is confirmed when it comes.
        assert all(isinstance(ack, AcceptedAck) for ack in await bed.acks("s"))
        await bed.submit("s", number=2)
        await bed.until_drained("s")
        assert name_of("s") not in bed.engine.running
        await bed.abort("s", 0)
        await bed.until_drained("s")
        assert (await bed.acks("s"))[-1] == CleanedAck("s", 1, 100, bed.worker_id)
        assert list(bed.engine.running) == [name_of("other")]


async def test_a_session_that_nobody_knows_is_stopped(redis_url: str) -> None:
    """S44, S50: the request runs, and the server has forgotten its session."""
    async with StageBed(redis_url) as bed:
        await bed.start("s")
        await bed.redis.hdel(bed.keys("s").fences, "s")
        bed.engine.emit(name_of("s"), "anybody?")
        await bed.engine.until(lambda: bed.engine.aborted == [name_of("s")])
        await bed.until(lambda: not len(bed.worker.lanes))


async def test_a_request_that_can_not_be_stopped_at_once_is_stopped_later(redis_url: str) -> None:
    async with StageBed(redis_url, abort_timeout_s=0.05) as bed:
        await bed.start("s")
        bed.engine.stuck.add(name_of("s"))
        await bed.set_fence("s", fence(1), floor=1)
        bed.engine.emit(name_of("s"), "after")
        await bed.engine.until(lambda: len(bed.engine.abort_calls) == 2)
        bed.engine.free(name_of("s"))
        await bed.engine.until(lambda: bed.engine.aborted)
        await bed.until(lambda: not len(bed.worker.lanes))


async def test_s74_an_older_turns_last_output_is_dropped_and_the_request_runs_on(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await bed.start("s")
        # Turn 1 is offered, and not accepted yet: both turns may speak.
        await bed.set_fence("s", fence(0, 0), offered=fence(0, 1))
        await bed.submit("s", at=fence(0, 1), number=2)
        await bed.engine.until(lambda: len(bed.engine.submitted) == 2)
        bed.engine.emit(name_of("s"), "first of turn 1")
        bed.engine.emit(name_of("s"), "rest of turn 0", fence=fence(0, 0))
        await bed.next_events("s", 2)
        await bed.set_fence("s", fence(0, 1))
        bed.engine.emit(name_of("s"), "last of turn 0", fence=fence(0, 0))
        bed.engine.emit(name_of("s"), "more of turn 1")
        [event] = await bed.next_events("s")
        assert event["data"] == "more of turn 1"
        await bed.until(lambda: bed.worker.stats.outputs_dropped == 1)
        assert bed.engine.abort_calls == []


async def test_nothing_of_a_request_goes_out_once_its_abort_was_read(redis_url: str) -> None:
    async with StageBed(redis_url, linger_s=LONG_S) as bed:
        await bed.start("s")
        bed.engine.emit(name_of("s"), "at once")
        await bed.next_events("s")
        bed.engine.emit(name_of("s"), "lingers")
        bed.engine.stuck.add(name_of("s"))
        queue, order = bed.abort_entry("s", 0)
        await bed.redis.xadd(queue, {**order, "a": "0-0"})  # the fence has not moved: only the worker can hold it back
        await bed.engine.until(lambda: bed.engine.abort_calls)
        bed.engine.emit(name_of("s"), "too late")
        bed.engine.free(name_of("s"))
        await bed.until_drained("s")
        assert bed.worker.stats.outputs_late == 1
        for number in range(64):
            session_id = f"t{number}"
            await bed.start(session_id)
            bed.engine.emit(name_of(session_id), "a full batch goes at once")
        await bed.next_events("t0")
        assert await bed.length(bed.keys("s").events("s")) == 1


async def test_the_first_output_after_a_pause_goes_at_once_and_the_next_ones_together(redis_url: str) -> None:
    async with StageBed(redis_url, linger_s=LONG_S) as bed:
        await bed.start("s")
        bed.engine.emit(name_of("s"), 0)
        await bed.next_events("s")
        before = await calls(bed)
        for number in range(1, 64):
            bed.engine.emit(name_of("s"), number)
        await bed.start("t")
        assert await bed.length(bed.keys("s").events("s")) == 1
        bed.engine.emit(name_of("s"), 64)
        assert [each["data"] for each in await bed.next_events("s", 64)] == list(range(1, 65))
        # One for the outputs; the rest are acks and heartbeats, one at a time.
        assert await calls(bed) - before < 40


async def calls(bed: StageBed) -> int:
    """How many scripts the server has run."""
    stats = await bed.redis.info("commandstats")
    return sum(int(each["calls"]) for name, each in stats.items() if name.startswith("cmdstat_evalsha"))


async def test_many_outputs_at_once_keep_their_order(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await bed.start("s", "t")
        for number in range(1000):
            bed.engine.emit(name_of("s"), number)
            if number % 7 == 0:
                bed.engine.emit(name_of("t"), number)
                await asyncio.sleep(0)
        assert [each["data"] for each in await bed.next_events("s", 1000)] == list(range(1000))
        assert [each["data"] for each in await bed.next_events("t", 143)] == list(range(0, 1000, 7))


# Towards the next stage.


async def test_an_output_is_forwarded_with_all_that_the_next_stage_needs(redis_url: str) -> None:
    async with StageBed(redis_url, stages=2) as bed:
        await bed.start("s", at=fence(0, 0), traceparent="00-trace")
        bed.engine.emit(name_of("s"), b"\1\0", kind="audio", metadata={"rate": 8000})
        queue = bed.keys("s").submissions("other1")
        [first] = await bed.next_entries(queue, 1)
        await bed.until(lambda: bed.worker.stats.outputs_forwarded == 1)
        await bed.set_fence("s", fence(0, 1))
        await bed.submit("s", [5], fence(0, 1), number=2)
        await bed.engine.until(lambda: len(bed.engine.submitted) == 2)
        bed.engine.emit(name_of("s"), [1, 2], kind="tokens", turn_end=True)
        [second] = await bed.next_entries(queue, 1)
        order, later = decode_submission(first[b"b"]), decode_submission(second[b"b"])
        assert (order.session_id, order.stage_id, order.fence, order.number) == ("s", 1, fence(), 0)
        assert (order.seq, order.turn_seq, order.mode, order.final) == (0, 0, "append_audio_chunk", False)
        assert (order.config, order.generation, order.route) == (CONFIG, 0, (bed.worker_id, "other1"))
        assert order.traceparent == "00-trace"
        assert (later.seq, later.turn_seq, later.mode, later.final) == (1, 0, "append_tokens", True)
        assert (later.config, later.resumed, later.fence) == (b"", True, fence(0, 1))
        output = unwrap_output(Input(order, first[b"p"], "1-1"))
        assert (output.kind, output.data, output.turn_end, output.metadata) == ("audio", b"\1\0", False, {"rate": 8000})
        assert unwrap_output(Input(later, second[b"p"], "1-2")).turn_end
        assert await bed.length(bed.keys("s").events("s")) == 0


async def test_the_configuration_goes_along_until_an_input_that_carries_it_was_taken(redis_url: str) -> None:
    async with StageBed(redis_url, stages=2) as bed:
        await bed.start("s")
        await bed.set_fence("s", fence(0, 1))
        bed.engine.emit(name_of("s"), "dropped", fence=fence(0, 0))
        await bed.until(lambda: bed.worker.stats.outputs_dropped == 1)
        bed.engine.emit(name_of("s"), "taken", fence=fence(0, 1))
        [entry] = await bed.next_entries(bed.keys("s").submissions("other1"), 1)
        assert decode_submission(entry[b"b"]).config == CONFIG


async def test_s36_s73_nothing_is_forwarded_once_the_cancel_was_accepted(redis_url: str) -> None:
    async with StageBed(redis_url, stages=2) as bed:
        await bed.start("s")
        await bed.set_fence("s", fence(1), floor=1)
        bed.engine.emit(name_of("s"), "too late")
        await bed.engine.until(lambda: bed.engine.aborted == [name_of("s")])
        assert await bed.redis.exists(bed.keys("s").submissions("other1")) == 0


class Chooser(DefaultPolicy):
    """Text is said from here; everything else goes on; `odd` is none of its business."""

    def decide_output(self, *, stage_id: int, final_stage_id: int, output: Output) -> Any:
        assert (stage_id, final_stage_id) == (0, 1)
        if output.kind == "text":
            return OutputDecision(OutputAction.DIRECT_RESPONSE, {"from": "thinker"})
        return 7 if output.data == "odd" else None


async def test_the_policy_may_answer_from_here(redis_url: str) -> None:
    async with StageBed(redis_url, stages=2, policy=Chooser()) as bed:
        await bed.start("s")
        bed.engine.emit(name_of("s"), "well", kind="text", metadata={"rate": 1})
        bed.engine.emit(name_of("s"), b"", kind="audio")
        [event] = await bed.next_events("s")
        assert (event["data"], event["stage_id"], event["metadata"]) == ("well", 0, {"rate": 1, "from": "thinker"})
        [entry] = await bed.next_entries(bed.keys("s").submissions("other1"), 1)
        assert decode_submission(entry[b"b"]).seq == 0


async def test_what_the_policy_or_the_encoding_can_not_handle_costs_that_request(redis_url: str) -> None:
    async with StageBed(redis_url, stages=2, policy=Chooser()) as bed:
        await bed.start("s", "t", "other")
        bed.engine.emit(name_of("s"), "odd")
        bed.engine.emit(name_of("t"), object())
        await bed.engine.until(lambda: sorted(bed.engine.aborted) == sorted([name_of("s"), name_of("t")]))
        await bed.until_drained("s", "t")
        acks = [*await bed.acks("s"), *await bed.acks("t")]
        failed = {ack.session_id: ack for ack in acks if isinstance(ack, RequestFailedAck)}
        assert set(failed) == {"s", "t"}
        assert "decide_output" in failed["s"].message
        bed.engine.emit(name_of("other"), "fine")
        await bed.next_entries(bed.keys("other").submissions("other1"), 1)


# When the server can't take them.


async def full(bed: StageBed) -> None:
    await bed.redis.config_set("maxmemory", "1")


async def free(bed: StageBed) -> None:
    await bed.redis.config_set("maxmemory", "0")


async def test_s53_outputs_wait_while_the_servers_memory_is_full(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await bed.start("s")
        try:
            await full(bed)
            for number in range(200):
                bed.engine.emit(name_of("s"), number)
            await bed.until(lambda: bed.worker.stats.retries > 2)
            assert bed.worker.is_ready
        finally:
            await free(bed)
        assert [each["data"] for each in await bed.next_events("s", 200)] == list(range(200))
        assert bed.worker.stats.outputs_duplicate == 0


async def test_an_output_that_could_not_be_sent_is_not_sent_after_its_abort(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await bed.start("s", "t")
        try:
            await full(bed)
            bed.engine.emit(name_of("s"), "waits")
            bed.engine.emit(name_of("t"), "waits too")
            await bed.until(lambda: bed.worker.stats.retries)
            queue, order = bed.abort_entry("s", 0)
            # The fence has not moved: only the worker can hold it back.
            await bed.redis.eval(XADD_THOUGH_FULL, 1, queue, order["b"])
            await bed.until_drained("s")
        finally:
            await free(bed)
        assert [each["data"] for each in await bed.next_events("t")] == ["waits too"]
        assert await bed.redis.exists(bed.keys("s").events("s")) == 0


async def test_s47_s53_a_request_whose_buffer_overflows_fails_and_no_other(redis_url: str) -> None:
    async with StageBed(redis_url, request_buffer_bytes=20_000) as bed:
        await bed.start("loud", "quiet")
        try:
            await full(bed)
            bed.engine.emit(name_of("quiet"), "a word")
            for _ in range(30):
                if name_of("loud") in bed.engine.running:
                    bed.engine.emit(name_of("loud"), b"\0" * 1000, kind="audio")
            await bed.engine.until(lambda: bed.engine.aborted == [name_of("loud")])
            await bed.until_drained("loud")
            [failed] = [ack for ack in await bed.acks("loud") if isinstance(ack, RequestFailedAck)]
            assert failed.session_id == "loud"
        finally:
            await free(bed)
        assert [each["data"] for each in await bed.next_events("quiet")] == ["a word"]
        assert await bed.redis.exists(bed.keys("loud").events("loud")) == 0


async def test_s78_a_listeners_key_that_is_something_else_costs_that_request(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await bed.start("s", "t")
        await bed.redis.set(bed.keys("s").events("s"), "not a stream")
        bed.engine.emit(name_of("s"), "lost")
        bed.engine.emit(name_of("t"), "heard")
        assert [each["data"] for each in await bed.next_events("t")] == ["heard"]
        await bed.engine.until(lambda: bed.engine.aborted == [name_of("s")])
        await bed.until_drained("s")
        assert any(isinstance(ack, RequestFailedAck) for ack in await bed.acks("s"))


async def cut_connections(bed: StageBed) -> AsyncIterator[int]:
    """Every connection of the worker is cut, again and again."""
    for number in range(15):
        own = await bed.redis.client_id()
        for client in await bed.redis.client_list():
            if int(client["id"]) != own:
                await bed.redis.client_kill_filter(_id=client["id"])
        yield number


async def test_s20_s52_lost_connections_lose_and_double_nothing(redis_url: str) -> None:
    sessions = [f"s{number}" for number in range(6)]
    async with StageBed(redis_url) as bed:
        bed.engine.echo = True
        for session_id in sessions:
            await bed.set_fence(session_id)
        async for number in cut_connections(bed):
            for session_id in sessions:
                await bed.submit(session_id, [number], number=number + 1)
            for _ in range(20):
                await asyncio.sleep(0.001)
        for session_id in sessions:
            heard = await bed.next_events(session_id, 15)
            assert [each["data"] for each in heard] == [[number] for number in range(15)]
            assert [each["n"] for each in heard] == list(range(1, 16))
        await bed.until_drained(*sessions)
        for session_id in sessions:
            acks = [ack for ack in await bed.acks(session_id) if ack.session_id == session_id]
            # An ack whose answer was lost is said again; the owner knows it by its number.
            assert sorted({ack.number for ack in acks}) == list(range(1, 16))
            assert all(isinstance(ack, AcceptedAck) for ack in acks)
            assert await bed.length(bed.keys(session_id).events(session_id)) == 15
        assert len(bed.engine.submitted) == 15 * len(sessions)
        for session_id in sessions:
            await bed.abort(session_id, 0)
        await bed.until_drained(*sessions)
        assert bed.engine.running == {}
