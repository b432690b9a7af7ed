"""Connections that break and servers that restart, forget or refuse: no reply is lost, none is given twice."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as Lost

from tests.servers import ValkeyServer
from tests.workers.control_bed import Bed, Caller, local, make_pipeline, numbers, until
from tests.workers.control_stalls import Gated, Lossy
from workers.control import ControlWorker


async def traffic(bed: Bed, callers: list[Caller], rounds: int, disturb: Any) -> dict[Caller, list[str]]:
    """Appends of every caller, and a disturbance before each round. Producers try again until Redis takes it."""
    sent: dict[Caller, list[str]] = {caller: [] for caller in callers}
    for number in range(rounds):
        await disturb(number)
        for caller in callers:
            control_id = f"{caller.session_id}-{number}"
            await persist(caller, control_id)
            sent[caller].append(control_id)
    return sent


async def persist(caller: Caller, control_id: str) -> None:
    """As a client does: without an answer to the XADD, the same command again."""
    while True:
        try:
            await caller.append(control_id=control_id)
        except (Lost, OSError):
            await asyncio.sleep(0.02)
        else:
            return


def check_traffic(sent: dict[Caller, list[str]], ear: Any) -> None:
    for caller, control_ids in sent.items():
        assert [caller.find_reply(control_id)["detail"]["seq"] for control_id in control_ids] == list(
            range(1, len(control_ids) + 1)
        )
        assert numbers(caller) == list(range(1, len(caller.events) + 1))
        assert ear.seqs(caller.session_id) == list(range(1, len(control_ids) + 1)), "I5: each exactly once, in order"


async def test_i4_connections_cut_in_the_middle_of_traffic_cost_no_reply_and_repeat_none(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(session={"max_waiting_appends": 1000})) as bed:
        worker = await bed.control("control-a")
        ear = await bed.stage()
        callers = [bed.caller(f"caller-{number}") for number in range(10)]
        for caller in callers:
            await caller.open()
        async with Redis.from_url(redis_url, client_name="the-killer") as killer:

            async def cut(number: int) -> None:
                if number % 4 == 0:
                    await killer.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

            sent = await traffic(bed, callers, 20, cut)
        for caller in callers:
            await retrying(caller, sent[caller][-1])
            assert set(caller.replies().values()) == {1}
        assert worker.stats.reconnects > 0
        check_traffic(sent, ear)


async def retrying(caller: Caller, control_id: str) -> dict[str, Any]:
    """As `reply`, over broken connections."""
    while True:
        try:
            return await caller.reply(control_id)
        except (Lost, OSError):
            await asyncio.sleep(0.02)


async def test_s51_a_server_that_is_restarted_with_its_data_goes_on_where_it_was() -> None:
    with ValkeyServer(persist=True, args=("--appendfsync", "always")) as server:
        async with Bed(server.url, make_pipeline(session={"max_waiting_appends": 1000})) as bed:
            worker = await bed.control("control-a")
            ear = await bed.stage()
            callers = [bed.caller(f"caller-{number}") for number in range(4)]
            for caller in callers:
                await caller.open()

            async def restart(number: int) -> None:
                if number in {3, 7}:
                    await asyncio.to_thread(server.restart, crash=True)

            sent = await traffic(bed, callers, 10, restart)
            for caller in callers:
                await retrying(caller, sent[caller][-1])
            check_traffic(sent, ear)
            assert worker.stats.reconnects > 0
            assert (await callers[0].call("close"))["ok"]


async def test_s50_a_server_that_was_flushed_answers_not_found_and_is_asked_no_faster(redis_url: str) -> None:
    async with Bed(redis_url) as bed:
        worker = await bed.control("control-a")
        await bed.stage()
        caller = bed.caller("Ada")
        await caller.open()
        await caller.reply(await caller.append())
        await bed.redis.flushall()
        await bed.redis.script_flush()
        lost = bed.caller("Ada")
        reply = await lost.call("touch", activity="heartbeat")
        assert reply["code"] == "not_found"
        await bed.until_owned(worker)
        stats = await bed.redis.info("stats")
        before, began = stats["total_commands_processed"], time.monotonic()
        for _ in range(10):
            await asyncio.sleep(0.05)
        stats = await bed.redis.info("stats")
        rate = (stats["total_commands_processed"] - before) / (time.monotonic() - began)
        assert rate < 2_000, f"{rate:.0f} commands a second with nothing to do"
        assert worker.stats.refused_commits < 20


async def test_a_server_that_forgot_its_scripts_gets_them_again(redis_url: str) -> None:
    async with Bed(redis_url) as bed:
        await bed.control("control-a")
        ear = await bed.stage()
        caller = bed.caller("Ada")
        await caller.open()
        sent: list[str] = []
        for _ in range(5):
            await bed.redis.script_flush()
            sent.append(await caller.append())
        await caller.reply(sent[-1])
        check_traffic({caller: sent}, ear)
        await bed.redis.script_flush()
        assert (await bed.caller("Bob").open())["ok"], "the slots' script too"


@pytest.mark.parametrize(
    "plan",
    [
        ["unsent"],
        ["unanswered"],
        ["unanswered", "unsent", "unsent"],  # the reading that follows fails as well
        ["unsent", "unanswered", "unsent"],
        ["unanswered", "keep", "unsent", "keep", "unanswered"],
    ],
    ids="-".join,
)
async def test_s52_a_commit_without_an_answer_is_found_applied_or_not_and_never_guessed(
    redis_url: str, plan: list[str]
) -> None:
    async with Bed(redis_url, make_pipeline(partitions=2)) as bed:
        worker = ControlWorker(redis_url, bed.pipeline, worker_id="control-a")
        owner = worker.owners[0]
        lossy = owner._writer = owner._holdings.writer = Lossy(worker.access.pool)
        bed.controls[worker] = asyncio.create_task(worker.run())
        await bed.until_owned(worker)
        ear = await bed.stage()
        callers = [bed.caller(f"caller-{number}") for number in range(6)]
        for caller in callers:
            await caller.open()
        lossy.plan = list(plan)
        sent = await traffic(bed, callers, 4, quiet)
        for caller in callers:
            await caller.reply(sent[caller][-1])
            assert set(caller.replies().values()) == {1}
        assert lossy.plan == []
        assert worker.stats.reconnects > 0
        check_traffic(sent, ear)
        await bed.until_drained()


async def quiet(_: int) -> None:
    """No disturbance."""


async def test_i5_a_refused_commit_lets_nothing_that_was_read_behind_it_go_first(redis_url: str) -> None:
    pipeline = local(partitions=1, control={"batch_max": 4, "lease_s": 5.0, "heartbeat_s": 0.6})
    async with Bed(redis_url, pipeline) as bed:
        worker = await bed.control("control-a", Gated)
        caller = bed.caller("Ada")
        await caller.open()
        worker.gate.clear()
        await asyncio.sleep(0)
        worker.wake()  # the read that is on its way ends without what comes now
        for _ in range(3):
            await bed.redis.xadd(caller.keys.acks, {"b": b"\xc1 no ack"})
        sent = [await caller.append() for _ in range(4)]

        async def someone_commits() -> None:
            await bed.redis.hincrby(caller.keys.owner, "revision", 1)

        worker.before_commit = someone_commits
        worker.gate.set()
        await caller.reply(sent[-1])
        assert [caller.find_reply(control_id)["detail"]["seq"] for control_id in sent] == [1, 2, 3, 4]
        assert set(caller.replies().values()) == {1}
        assert worker.stats.refused_commits == 1


async def test_s53_a_server_that_takes_no_writes_is_waited_for_and_nothing_is_lost(redis_url: str) -> None:
    async with Bed(redis_url, local(partitions=1)) as bed:
        worker = await bed.control("control-a", Gated)
        caller = bed.caller("Ada")
        await caller.open()

        async def forbid_writes() -> None:
            await bed.redis.config_set("min-replicas-to-write", 1)

        worker.before_commit = forbid_writes
        sent = await caller.append()
        await until(lambda: worker.stats.reconnects > 1)
        await caller.listen()
        assert sent not in caller.replies()
        await bed.redis.config_set("min-replicas-to-write", 0)
        assert (await caller.reply(sent))["detail"]["seq"] == 1
        await bed.until_drained()
        assert worker.stats.dead_letters == 0
        assert not await bed.redis.exists(caller.keys.dead), "not the batch's fault"
