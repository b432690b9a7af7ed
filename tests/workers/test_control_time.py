"""Deadlines: of commands, appends, cleanups and sessions, by the server's clock."""

from __future__ import annotations

import asyncio
from typing import Any

from control.core.requests import request_id
from control.store.publishing import Published
from tests.workers.control_bed import Bed, Caller, end, fence, local, make_pipeline, until
from tests.workers.control_stalls import Gated


async def test_a_command_older_than_its_own_deadline_is_refused_and_a_cancel_never_is(redis_url: str) -> None:
    async with Bed(redis_url, local(partitions=1)) as bed:
        seconds, _ = await bed.redis.time()
        old = [f"{seconds * 1000 - 60_000 + number}-0" for number in range(5)]
        caller = bed.caller("Ada")
        opening = await caller.send("open", entry_id=old[0], deadline_ms=120_000)
        late = await caller.append(entry_id=old[1], deadline_ms=1_000)
        patient = await caller.append(entry_id=old[2], deadline_ms=120_000)
        cancel = await caller.cancel(fence(), fence(1), entry_id=old[3], deadline_ms=1)
        close = await caller.send("close", at=fence(1), entry_id=old[4], deadline_ms=1)
        await bed.control("control-a")
        await caller.reply(close)
        codes = {control_id: caller.find_reply(control_id)["code"] for control_id in (opening, late, patient, cancel)}
        assert codes == {opening: None, late: "timeout", patient: None, cancel: None}
        assert caller.find_reply(late)["retryable"]
        assert caller.find_reply(patient)["detail"]["seq"] == 1


QUICK = {"idle_ttl_s": 1.2, "append_timeout_s": 0.9, "disconnect_grace_s": 0.7}


async def test_an_idle_session_expires_and_one_that_is_heard_lives_on(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(partitions=1, session=QUICK)) as bed:
        await bed.control("control-a")
        ear = await bed.stage()
        idle, speaking, touching = bed.caller("idle"), bed.caller("speaking"), bed.caller("touching")
        for caller in (idle, speaking, touching):
            await caller.open()
            await caller.reply(await caller.append())
        speaks = asyncio.create_task(speak(ear, speaking))
        touches = asyncio.create_task(touch(touching))
        assert (await idle.heard("expired"))["reason"] == "idle_ttl_expired"
        await asyncio.sleep(1.4)  # another idle TTL: it bounds what is looked at, and hides nothing
        for caller, task in ((speaking, speaks), (touching, touches)):
            await end(task)
            await caller.listen()
            assert caller.lifecycle() == ["opened"]
        assert (await speaking.heard("expired"))["reason"] == "idle_ttl_expired"
        assert (await touching.heard("expired"))["reason"] == "idle_ttl_expired"
        assert {order.session_id for order in ear.aborted} == {"idle", "speaking", "touching"}


async def speak(ear: Any, caller: Caller) -> None:
    while True:
        assert await ear.say(caller.session_id, request_id(caller.session_id, 0, 0, 0), fence()) is Published.DELIVERED
        await asyncio.sleep(0.1)


async def touch(caller: Caller) -> None:
    while True:
        await caller.send("touch", activity="heartbeat")
        await asyncio.sleep(0.1)


async def test_s6_a_detached_session_expires_by_its_grace_though_its_outputs_go_on(redis_url: str) -> None:
    session = {"idle_ttl_s": None, "append_timeout_s": 0.5, "disconnect_grace_s": 0.7}
    async with Bed(redis_url, make_pipeline(partitions=1, session=session)) as bed:
        await bed.control("control-a")
        ear = await bed.stage()
        gone, back = bed.caller("gone"), bed.caller("back")
        for caller in (gone, back):
            await caller.open()
            await caller.reply(await caller.append())
            assert (await caller.call("touch", activity="detach"))["ok"]
        assert (await back.call("resume", expected_lease_generation=0))["ok"]
        request = request_id("gone", 0, 0, 0)

        async def is_stopped() -> bool:
            return await ear.say("gone", request, fence()) is Published.STOP

        await until(is_stopped)
        assert (await gone.heard("expired"))["reason"] == "disconnect_grace_expired"
        await back.listen()
        assert back.lifecycle() == ["opened"]


async def test_s21_an_append_without_an_answer_times_out_and_its_epoch_is_lost(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(partitions=1, session=QUICK)) as bed:
        await bed.control("control-a")
        ear = await bed.stage()
        caller = bed.caller("Ada")
        await caller.open()
        ear.accepts = False
        first, second = await caller.append(), await caller.append()
        assert (await caller.reply(first))["code"] == "timeout"
        assert (await caller.reply(second))["code"] == "failed_precondition"
        await caller.heard("epoch_lost")
        await until(lambda: ear.aborted)
        ear.accepts = True
        cancel = await caller.cancel(fence(), fence(1))
        assert (await caller.reply(cancel))["ok"]
        assert (await caller.reply(await caller.append(fence(1))))["detail"]["seq"] == 1


async def test_s30_a_cleanup_that_nobody_confirms_is_answered_by_its_deadline_and_asked_for_again(
    redis_url: str,
) -> None:
    session = {"cleanup_timeout_s": 0.4, "cleanup_backoff_s": 0.1, "cleanup_backoff_max_s": 0.3}
    async with Bed(redis_url, make_pipeline(partitions=1, session=session)) as bed:
        await bed.control("control-a")
        ear = await bed.stage()
        caller = bed.caller("Ada")
        await caller.open()
        await caller.reply(await caller.append())
        ear.confirms = False
        reply = await caller.reply(await caller.cancel(fence(), fence(1)))
        assert (reply["code"], reply["retryable"]) == ("timeout", True)

        async def is_asked_again() -> bool:
            return await bed.redis.xlen(caller.keys.aborts("ear-1")) > 2

        await until(is_asked_again)
        ear.confirms = True
        again = await caller.reply(await caller.cancel(fence(), fence(1)))
        assert again["ok"]
        await bed.until_drained()
        assert {order.epochs for order in ear.aborted} == {(0,)}
        assert (await caller.reply(await caller.append(fence(1))))["ok"]


async def test_no_deadline_fires_before_the_backlog_was_read_and_a_heartbeat_time_has_passed(redis_url: str) -> None:
    pipeline = local(partitions=1, session=QUICK, control={"batch_max": 2})
    async with Bed(redis_url, pipeline) as bed:
        first = await bed.control("control-a")
        caller, strangers = bed.caller("Ada"), [bed.caller(f"stranger-{number}") for number in range(20)]
        await caller.open()
        await bed.crash(first)
        await asyncio.sleep(1.3)  # its idle TTL passes while nobody owns it
        for stranger in strangers:
            await stranger.send("touch", activity="heartbeat")
        sent = await caller.send("touch", activity="heartbeat")
        await bed.control("control-b")
        assert (await caller.reply(sent))["ok"]
        assert caller.lifecycle() == ["opened"], "its touch came in time, far back in the stream"
        assert (await caller.heard("expired"))["reason"] == "idle_ttl_expired"


async def test_an_expiry_that_an_output_overtakes_is_decided_anew(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(partitions=1, session=QUICK)) as bed:
        worker = await bed.control("control-a", Gated)
        ear = await bed.stage()
        caller = bed.caller("Ada")
        await caller.open()
        await caller.reply(await caller.append())
        request = request_id("Ada", 0, 0, 0)
        said: list[Published] = []

        async def say() -> None:
            said.append(await ear.say("Ada", request, fence()))

        worker.before_commit = say
        await until(lambda: said)
        assert said == [Published.DELIVERED]
        await until(lambda: worker.stats.refused_commits > 0)
        await caller.listen()
        assert caller.lifecycle() == ["opened"]
        assert (await caller.heard("expired"))["reason"] == "idle_ttl_expired"
