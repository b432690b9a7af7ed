"""Stage workers that are full, stuck, slow to give back or gone, as the sessions placed on them see it."""

from __future__ import annotations

from typing import Any

from control.core.requests import request_id
from control.store import keys
from control.store.publishing import Published
from tests.workers.control_bed import Bed, Caller, fence, local, make_pipeline, until, until_free
from tests.workers.control_stalls import Stalled


async def test_a_lost_stage_ends_its_sessions_and_no_others(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(partitions=4)) as bed:
        await bed.control("control-a")
        await bed.control("control-b", whole=False)
        await bed.until_owned(*bed.controls)
        doomed, safe = await bed.stage("ear-1", capacity=4), await bed.stage("ear-2", capacity=4)
        callers = [bed.caller(f"caller-{number}") for number in range(8)]
        for caller in callers:
            assert (await caller.open())["ok"]
            await caller.reply(await caller.append())
        on_doomed = {order.session_id for order, _ in doomed.submitted}
        assert len(on_doomed) == 4
        doomed.accepts = doomed.confirms = doomed.beats = False
        waiting = {c: await c.append() for c in callers if c.session_id in on_doomed}
        for caller in callers:
            if caller.session_id in on_doomed:
                assert (await caller.heard("closed"))["reason"] == "stage_lost"
                assert caller.find_reply(waiting[caller])["code"] == "failed_precondition"
                assert caller.lifecycle() == ["opened", "closed"]
                code = await doomed.say(caller.session_id, request_id(caller.session_id, 0, 0, 0), fence())
                assert code is Published.STOP, "when it wakes it can publish nothing"
            else:
                assert (await caller.reply(await caller.append()))["ok"]
                assert caller.lifecycle() == ["opened"]
        assert len({order.session_id for order, _ in safe.submitted}) == 4
        await until_free(bed, "ear-1")

        async def is_forgotten() -> bool:
            return not await bed.redis.hexists(keys.STAGES, "ear-1")

        await until(is_forgotten)


async def test_the_cleanups_of_a_lost_stage_count_as_done_and_the_others_clean_up(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(stages=2, partitions=1)) as bed:
        await bed.control("control-a")
        ear, mouth = await bed.stage("ear-1", 0), await bed.stage("mouth-1", 1)
        caller = bed.caller("Ada")
        assert (await caller.open())["ok"]
        await caller.reply(await caller.append())
        ear.confirms = mouth.confirms = False
        cancel = await caller.cancel(fence(), fence(1))
        await until(lambda: ear.seen_aborts and mouth.seen_aborts)
        mouth.beats = False
        await caller.heard("closing")
        assert cancel not in caller.replies(), "the ear still holds it"
        ear.confirms = True
        assert (await caller.heard("closed"))["reason"] == "stage_lost"
        await caller.reply(cancel)
        assert caller.replies()[cancel] == 1
        assert mouth.aborted == []


async def test_s3_sessions_beyond_the_slots_are_refused_and_one_that_ends_makes_room(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline()) as bed:
        await bed.control("control-a")
        await bed.control("control-b", whole=False)
        await bed.until_owned(*bed.controls)
        await bed.stage(capacity=3)
        callers = [bed.caller(f"caller-{number}") for number in range(8)]
        opening = [await c.send("open", capabilities={"input_modes": ["append_tokens"]}) for c in callers]
        replies = [await c.reply(control_id) for c, control_id in zip(callers, opening, strict=True)]
        good = [c for c, reply in zip(callers, replies, strict=True) if reply["ok"]]
        assert len(good) == 3
        assert {reply["code"] for reply in replies if not reply["ok"]} == {"resource_exhausted"}
        assert all(reply["retryable"] for reply in replies if not reply["ok"])
        assert await bed.redis.hlen(keys.worker_slots("ear-1")) == 3
        await good[0].call("close")
        late = next(c for c, reply in zip(callers, replies, strict=True) if not reply["ok"])

        async def is_in() -> bool:
            return (await late.open())["ok"]

        await until(is_in)
        assert await bed.redis.hlen(keys.worker_slots("ear-1")) == 3


async def test_i9_the_limit_of_sessions_holds_across_workers(redis_url: str) -> None:
    async with Bed(redis_url, local(max_sessions=5, partitions=8)) as bed:
        await bed.control("control-a")
        await bed.control("control-b", whole=False)
        await bed.until_owned(*bed.controls)
        callers = [bed.caller(f"caller-{number}") for number in range(20)]
        opening = [await caller.send("open") for caller in callers]
        replies = [await c.reply(control_id) for c, control_id in zip(callers, opening, strict=True)]
        assert sum(reply["ok"] for reply in replies) == 5
        assert await bed.redis.hlen(keys.ADMISSION_SLOTS) == 5


async def test_a_placement_goes_elsewhere_when_the_chosen_worker_is_full_after_all(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(partitions=1)) as bed:
        worker = await bed.control("control-a")
        await bed.stage("ear-1", capacity=1)
        await bed.stage("ear-2", capacity=1)
        # The worker doesn't look again: what it knows of ear-1 is old.
        worker.observer.directory = type(worker.directory)(1)
        await bed.redis.hset(keys.worker_slots("ear-1"), "somebody else", "0 1")
        caller = bed.caller("Ada")
        assert (await caller.open())["ok"]
        assert await bed.redis.hkeys(keys.worker_slots("ear-2")) == [b"Ada"]
        assert b"Ada" not in await bed.redis.hkeys(keys.worker_slots("ear-1"))


async def test_s2_a_slot_that_could_not_be_given_back_is_asked_for_until_it_is(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(partitions=1, max_sessions=5)) as bed:
        await bed.control("control-a")
        await bed.stage("ear-1", capacity=2)
        first, second = bed.caller("Ada"), bed.caller("Bob")
        assert (await first.open())["ok"]
        held = await bed.redis.hgetall(keys.worker_slots("ear-1"))
        await bed.redis.delete(keys.worker_slots("ear-1"))
        await bed.redis.set(keys.worker_slots("ear-1"), "not ours")
        assert (await first.call("close"))["ok"]

        async def owes_one() -> bool:
            return not await bed.redis.exists(keys.ADMISSION_SLOTS)

        await until(owes_one)
        again = await first.send("open", at=fence(incarnation=1), capabilities={"input_modes": ["append_tokens"]})
        assert not (await second.open())["ok"], "I11: and others are answered meanwhile"
        assert await first.listen()
        assert again not in first.replies(), "it waits for the slot of its last life"
        await bed.redis.delete(keys.worker_slots("ear-1"))
        await bed.redis.hset(keys.worker_slots("ear-1"), mapping=held)
        reply = await first.reply(again)
        assert reply["ok"], reply
        assert await bed.redis.hkeys(keys.worker_slots("ear-1")) == [b"Ada"]


async def test_s1_a_producer_that_gives_up_while_placement_is_under_way_leaves_nothing(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(partitions=1, max_sessions=5)) as bed:
        worker = await bed.control("control-a", Stalled)
        await bed.stage()
        worker.gate.clear()
        caller = bed.caller("Ada")
        opening = await caller.send("open", capabilities={"input_modes": ["append_tokens"]})
        closing = await caller.send("close")
        await until(lambda: worker.held)
        worker.gate.set()
        assert (await caller.reply(opening))["code"] == "failed_precondition"
        assert (await caller.reply(closing))["ok"]
        await until_free(bed)
        assert caller.lifecycle() == []
        assert (await caller.open(1))["ok"]


async def test_i11_a_stuck_stage_delays_no_session_of_another(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(partitions=1)) as bed:
        await bed.control("control-a")
        stuck, well = await bed.stage("ear-1", capacity=1), await bed.stage("ear-2", capacity=1)
        first, second = bed.caller("Ada"), bed.caller("Bob")
        assert (await first.open())["ok"]
        assert (await second.open())["ok"]
        slow, quick = (first, second) if (await first.append()) and await is_at(bed, stuck, first) else (second, first)
        await slow.reply(await slow.append())
        stuck.accepts = stuck.confirms = False
        for _ in range(5):
            await slow.append()
        await slow.cancel(fence(), fence(1))
        await slow.heard("interrupted")
        for _ in range(10):
            assert (await quick.reply(await quick.append()))["ok"]
        assert (await quick.call("close"))["ok"]
        assert well.aborted


async def is_at(bed: Bed, stage: Any, caller: Caller) -> bool:
    return await bed.redis.hexists(keys.worker_slots(stage.worker_id), caller.session_id)


async def test_i2_a_request_is_released_only_once_every_stage_of_its_route_has_confirmed(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(stages=2, partitions=1)) as bed:
        await bed.control("control-a")
        ear, mouth = await bed.stage("ear-1", 0), await bed.stage("mouth-1", 1)
        caller = bed.caller("Ada")
        await caller.open()
        await caller.reply(await caller.append())
        names = [request_id("Ada", 0, 0, stage_id) for stage_id in range(2)]
        for stage, name in zip((ear, mouth), names, strict=True):
            assert await stage.say("Ada", name, fence()) is Published.DELIVERED
        mouth.confirms = False
        cancel = await caller.cancel(fence(), fence(1))
        await until(lambda: ear.aborted and mouth.seen_aborts)
        await bed.until_drained()
        assert (await caller.call("touch", at=fence(1), activity="heartbeat"))["ok"]
        assert cancel not in caller.replies()
        assert set(await bed.redis.hkeys(caller.keys.outputs)) == {name.encode() for name in names}
        mouth.confirms = True
        assert (await caller.reply(cancel))["ok"]
        assert not await bed.redis.exists(caller.keys.outputs)


async def test_s51_a_session_whose_worker_is_in_no_index_any_more_is_told_after_lost_writes(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(partitions=1, session={"cleanup_backoff_s": 0.1})) as bed:
        await bed.control("control-a")
        ear = await bed.stage()
        ear.confirms = False
        caller = bed.caller("Ada")
        await caller.open()
        await caller.reply(await caller.append())
        closing = await caller.send("close")
        await caller.heard("closing")
        # What the server has lost: that the worker was judged, and who held its slots.
        await ear.stop()
        bed.stages.remove(ear)
        await bed.redis.delete(keys.worker_state("ear-1"), keys.worker_slots("ear-1"))
        await bed.redis.hdel(keys.STAGES, "ear-1")
        assert (await caller.heard("closed"))["reason"] == "client_close"
        assert await caller.reply(closing)


async def test_a_worker_that_somebody_struck_off_the_index_is_put_back_and_its_sessions_live(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(partitions=1, session={"cleanup_backoff_s": 0.1})) as bed:
        worker = await bed.control("control-a")
        ear = await bed.stage()
        ear.confirms = False
        caller = bed.caller("Ada")
        await caller.open()
        await caller.reply(await caller.append())
        await caller.cancel(fence(), fence(1))
        await bed.redis.delete(keys.STAGES)
        await until(lambda: "ear-1" not in worker.observer.indexed)
        await until(lambda: "ear-1" in worker.observer.indexed)
        ear.confirms = True
        assert (await caller.reply(await caller.append(fence(1))))["ok"]
        assert "closed" not in caller.lifecycle()
