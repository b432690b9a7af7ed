"""Inputs at the first stage and at later ones: order, answers, refusals, and that nothing runs twice."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from control.wire.stage import AcceptedAck, RejectedAck, RequestFailedAck, encode, pack_config
from stages.engine import EngineRefusal, Output
from stages.policy import AppendPlan, DefaultPolicy
from tests.workers.stage_bed import CONFIG, StageBed, fence, name_of, pipeline
from workers.stage_forward import Forwarded

if TYPE_CHECKING:
    from collections.abc import Callable


class Planner(DefaultPolicy):
    """Plans as it is told to."""

    def __init__(self, plan: Callable[[Any], Any]) -> None:
        self.plan = plan

    def plan_append(self, *, payload: Any, **_: Any) -> AppendPlan:  # type: ignore[override]
        return AppendPlan(self.plan(payload))


async def test_an_input_reaches_the_engine_and_its_acceptance_the_owner(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await bed.submit("s", b"\1\0\2\0")
        assert await bed.next_ack("s") == AcceptedAck("s", 1, 1)
        [submission] = bed.engine.submitted
        assert submission.request_id == name_of("s")
        assert submission.prompt == b"\1\0\2\0"
        assert submission.session_config == {"voice": "low"}
        assert submission.runtime_config == {"speed": 2}
        assert submission.sampling == {"temperature": 0.5}
        assert (submission.seq, submission.turn_seq, submission.final, submission.resumed) == (1, 1, True, False)
        await bed.until_drained("s")


async def test_structured_input_is_decoded_here(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await bed.submit("s", {"tokens": [1, 2, 3]})
        await bed.next_ack("s")
        assert bed.engine.submitted[0].prompt == {"tokens": [1, 2, 3]}


async def test_more_input_resumes_the_request_with_the_configuration_that_it_has(redis_url: str) -> None:
    newer = pack_config({}, {"speed": 3}, ({"temperature": 0.9},))
    async with StageBed(redis_url) as bed:
        await bed.submit("s", number=1)
        await bed.submit("s", number=2)
        await bed.submit("s", number=3, config=newer, generation=1)
        await bed.next_acks("s", 3)
        seen = [(each.resumed, each.config_generation, each.runtime_config) for each in bed.engine.submitted]
        assert seen == [(False, 0, {"speed": 2}), (True, 0, {"speed": 2}), (True, 1, {"speed": 3})]


async def test_i5_i11_inputs_of_one_request_keep_their_order_and_hold_up_no_other(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        bed.engine.submit_gate.clear()
        for number in (1, 2, 3):
            await bed.submit("slow", number=number)
        await bed.submit("other")
        # Both wait inside the engine at the same time; of the slow session, only the first input does.
        await bed.engine.until(lambda: len(bed.engine.submitting) == 2)
        assert sorted(bed.engine.submitting) == sorted([name_of("slow"), name_of("other")])
        bed.engine.submit_gate.set()
        acks = await bed.next_acks("slow", 3)
        assert [ack.number for ack in acks if ack.session_id == "slow"][:3] == [1, 2, 3]
        await bed.engine.until(lambda: len(bed.engine.submitted) == 4)
        assert [each.seq for each in bed.engine.submitted if each.session_id == "slow"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("bad words"), "invalid_argument"),
        (TypeError("bad words"), "invalid_argument"),
        (EngineRefusal("payload_too_large", "bad words"), "payload_too_large"),
        (KeyError("bad words"), "failed_precondition"),
    ],
)
async def test_i7_a_plan_that_fails_is_a_rejection_and_leaves_nothing(
    redis_url: str, error: Exception, code: str
) -> None:
    errors = [error]

    def plan(payload: Any) -> Any:
        if errors:
            raise errors.pop()
        return payload

    async with StageBed(redis_url, policy=Planner(plan)) as bed:
        await bed.submit("s", number=1)
        ack = await bed.next_ack("s")
        assert (ack.number, ack.code) == (1, code)
        assert "bad words" in ack.message
        await bed.until(lambda: not len(bed.worker.lanes))
        # The owner has taken the request back to reserved: the next input begins it.
        await bed.submit("s", number=2, resumed=False, config=CONFIG)
        assert await bed.next_ack("s") == AcceptedAck("s", 1, 2)
        assert [each.resumed for each in bed.engine.submitted] == [False]


async def test_i7_a_refusal_of_the_engine_keeps_what_ran_before(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await bed.submit("s", number=1)
        await bed.next_ack("s")
        bed.engine.fail_submits = 1
        bed.engine.refusal_code = "resource_exhausted"
        await bed.submit("s", number=2)
        assert await bed.next_ack("s") == RejectedAck("s", 1, 2, "resource_exhausted", "told to refuse")
        await bed.submit("s", number=3)
        assert await bed.next_ack("s") == AcceptedAck("s", 1, 3)
        assert [each.resumed for each in bed.engine.submitted] == [False, True]


async def test_an_engine_that_breaks_over_an_input_loses_that_request_alone(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await bed.submit("other")
        await bed.next_ack("other")
        bed.engine.broken_submits = 1
        await bed.submit("s")
        ack = await bed.next_ack("s")
        assert isinstance(ack, RequestFailedAck)
        assert (ack.epoch, ack.worker_id) == (0, bed.worker_id)
        await bed.engine.until(lambda: bed.engine.aborted == [name_of("s")])
        assert list(bed.engine.running) == [name_of("other")]


async def test_more_input_for_a_request_that_does_not_run_here_is_rejected(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await bed.submit("s", number=4)
        assert (await bed.next_ack("s")).code == "failed_precondition"
        assert bed.engine.submitting == []


async def test_s54_entries_that_are_no_input_hold_up_nothing(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        queue, entry = bed.submission("s", stage_id=1)
        entries: list[dict[Any, Any]] = [{"b": b"\xc1"}, {"x": "y"}, {"b": encode([1, 2])}, entry]
        for bad in entries:
            await bed.redis.xadd(queue, bad)
        await bed.submit("s")
        assert await bed.next_ack("s") == AcceptedAck("s", 1, 1)
        await bed.until_drained("s")
        assert bed.worker.stats.unreadable == 4


async def test_s20_an_input_that_a_failover_brings_back_is_answered_and_not_run_again(redis_url: str) -> None:
    async with StageBed(redis_url) as bed:
        await bed.submit("s", b"\1\0")
        await bed.submit("s", b"\2\0", number=2)
        await bed.submit("s", b"\1\0")
        acks = await bed.next_acks("s", 3)
        assert [ack.number for ack in acks] == [1, 2, 1]
        assert [each.prompt for each in bed.engine.submitted] == [b"\1\0", b"\2\0"]
        assert bed.worker.stats.repeated == 1


async def test_i11_a_policy_that_thinks_for_long_holds_up_nobody(redis_url: str) -> None:
    thinking, thought = threading.Event(), threading.Event()

    def plan(payload: bytes) -> bytes:
        if payload == b"hard":
            thinking.set()
            assert thought.wait(30)
        return payload

    async with StageBed(redis_url, policy=Planner(plan)) as bed:
        try:
            await bed.submit("s", b"hard")
            await bed.until(thinking.is_set)
            await bed.submit("other", b"easy")
            await bed.engine.until(lambda: [each.session_id for each in bed.engine.submitted] == ["other"])
        finally:
            thought.set()
        await bed.engine.until(lambda: len(bed.engine.submitted) == 2)


# Later stages: inputs come from the stage before.


def forwarded(bed: StageBed, session_id: str, seq: int, data: Any = b"\1\0", **more: Any) -> Any:
    payload = encode(Forwarded("audio" if isinstance(data, bytes) else "tokens", data, {"rate": 8000}))
    config = CONFIG if seq == 0 else b""
    return bed.submit(
        session_id, payload, number=0, seq=seq, turn_seq=seq, config=config, packed=True, resumed=seq > 0, **more
    )


class Adapter:
    """Keeps the outputs that it was given."""

    def __init__(self) -> None:
        self.seen: list[Output] = []
        self.error: Exception | None = None

    def __call__(self, *, output: Output, seq: int, **_: Any) -> AppendPlan:
        if self.error is not None:
            raise self.error
        self.seen.append(output)
        return AppendPlan((seq, output.data))


async def test_a_later_stage_hears_the_former_ones_outputs_through_its_adapter(redis_url: str) -> None:
    adapter = Adapter()
    async with StageBed(redis_url, stage_id=1, stages=2, adapter=adapter) as bed:
        await forwarded(bed, "s", 0, final=False)
        await forwarded(bed, "s", 1, [7])
        await bed.until_drained("s")
        assert [each.prompt for each in bed.engine.submitted] == [(0, b"\1\0"), (1, [7])]
        assert [each.request_id for each in bed.engine.submitted] == [name_of("s", stage_id=1)] * 2
        assert [each.sampling for each in bed.engine.submitted] == [{"pitch": 3}] * 2
        assert [(each.seq, each.resumed, each.final) for each in bed.engine.submitted] == [
            (0, False, False),
            (1, True, True),
        ]
        assert adapter.seen[0] == Output(
            request_id=name_of("s"), fence=fence(), kind="audio", data=b"\1\0", metadata={"rate": 8000}
        )
        assert adapter.seen[1].turn_end
        assert await bed.length(bed.keys("s").acks) == 0


async def test_a_forwarded_input_that_comes_twice_runs_once(redis_url: str) -> None:
    async with StageBed(redis_url, stage_id=1, stages=2) as bed:
        for seq in (0, 1, 0, 1, 3):
            await forwarded(bed, "s", seq)
        await bed.until_drained("s")
        assert [each.seq for each in bed.engine.submitted] == [0, 1, 3]


@pytest.mark.parametrize("what", ["engine refuses", "adapter refuses", "no output"])
async def test_a_later_stage_has_nobody_to_reject_to_so_the_request_fails(redis_url: str, what: str) -> None:
    adapter = Adapter()
    async with StageBed(redis_url, stage_id=1, stages=2, adapter=adapter) as bed:
        await forwarded(bed, "s", 0)
        await bed.until_drained("s")
        if what == "engine refuses":
            bed.engine.fail_submits = 1
        elif what == "adapter refuses":
            adapter.error = ValueError("no such sound")
        if what == "no output":
            await bed.submit("s", b"\xc1", number=0, seq=1, packed=True, config=b"", resumed=True)
        else:
            await forwarded(bed, "s", 1)
        ack = await bed.next_ack("s")
        assert isinstance(ack, RequestFailedAck)
        assert (ack.session_id, ack.incarnation, ack.epoch, ack.worker_id) == ("s", 1, 0, bed.worker_id)
        await bed.engine.until(lambda: name_of("s", stage_id=1) in bed.engine.aborted)
        await forwarded(bed, "s", 2)
        await bed.until_drained("s")
        assert [each.seq for each in bed.engine.submitted] == [0]
        assert await bed.length(bed.keys("s").acks) == 1


async def test_i11_input_that_piles_up_before_a_stuck_engine_costs_that_request(redis_url: str) -> None:
    small = pipeline(2, session={"max_waiting_bytes": 4096}, limits={"payload_bytes": 4096})
    async with StageBed(redis_url, stage_id=1, stages=2, pipeline=small) as bed:
        bed.engine.submit_gate.clear()
        for seq in range(5):
            await forwarded(bed, "s", seq, b"\0" * 1500)
        ack = await bed.next_ack("s")
        assert isinstance(ack, RequestFailedAck)
        assert "4096 bytes" in ack.message
        await bed.until_drained("s")
        bed.engine.submit_gate.set()
        await forwarded(bed, "other", 0)
        await bed.engine.until(lambda: [each.session_id for each in bed.engine.submitted] == ["other"])
