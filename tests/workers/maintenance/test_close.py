"""Sessions that an operator ends in bulk: those that were meant when the job looked, and nobody else."""

from __future__ import annotations

from typing import Any

import pytest

from control.store import keys
from tests.workers.control_bed import Bed, local, make_pipeline, until
from tests.workers.maintenance.site import give, maintained, site_of, until_over
from workers.maintenance import arq_jobs, steps
from workers.maintenance.record import Job, JobState
from workers.maintenance.steps import close


async def run(bed: Bed, job: Job, most: int = 200) -> Job:
    """Take steps without a process around them."""
    for _ in range(most):
        job = await close(site_of(bed), job)
        if job.is_over:
            return job
    raise AssertionError(job)


def wanted(*where: str) -> dict[str, Any]:
    return {"where": list(where), "reason": "operator_close"}


async def test_those_that_are_meant_are_ended_and_nobody_else(redis_url: str) -> None:
    async with Bed(redis_url, local()) as bed:
        await bed.control("c1")
        callers = {name: bed.caller(name) for name in ("call-1", "call-2", "chat-1")}
        for caller in callers.values():
            await caller.open()
        async with maintained(redis_url):
            job = await until_over(bed, await give(bed, "close", wanted("id=call-*")))
        assert (job.state, job.done, job.total, job.message) == (JobState.DONE, 2, 2, "sessions ended: 2")
        for name in ("call-1", "call-2"):
            assert (await callers[name].heard("closed"))["reason"] == "operator_close"
        assert (await callers["chat-1"].call("touch", activity="heartbeat"))["ok"]


async def test_s62_a_session_that_is_opened_anew_meanwhile_is_another_one(redis_url: str) -> None:
    async with Bed(redis_url, local()) as bed:
        await bed.control("c1")
        caller = bed.caller("call")
        await caller.open(1)
        job = await close(site_of(bed), await give(bed, "close", wanted("id=call")))
        assert job.total == 1
        await caller.call("close")
        await caller.open(2)
        assert (await run(bed, job)).state is JobState.DONE
        assert (await caller.call("touch", activity="heartbeat"))["ok"]


async def test_more_than_a_portion_are_ended_and_a_stuck_one_holds_nobody_up(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "PORTION", 4)
    # So many steps that chance picks each of those that have ended, before patience is over.
    monkeypatch.setattr(steps, "PATIENCE_MS", 4_000)
    monkeypatch.setattr(arq_jobs, "STEP_S", 0.02)
    async with Bed(redis_url, make_pipeline()) as bed:
        await bed.control("c1")
        stage = await bed.stage()
        stuck = [bed.caller(f"stuck-{n}") for n in range(5)]
        others = [bed.caller(f"other-{n}") for n in range(20)]
        for caller in (*stuck, *others):
            await caller.open()
        for caller in stuck:
            await caller.reply(await caller.append())
        stage.confirms = False
        async with maintained(redis_url):
            job = await give(bed, "close", wanted())
            for caller in others:
                await caller.heard("closed")
            job = await until_over(bed, job)
        assert (job.state, job.done, job.total) == (JobState.FAILED, 20, 25)
        assert "sessions closing for more than 4 s: 5" in job.message
        stage.confirms = True
        for caller in stuck:
            await caller.heard("closed")


async def test_nobody_is_meant_and_the_job_is_done(redis_url: str) -> None:
    async with Bed(redis_url, local()) as bed:
        await bed.control("c1")
        job = await run(bed, await give(bed, "close", wanted("id=nobody")))
        assert (job.state, job.total) == (JobState.DONE, 0)
        assert not await bed.redis.exists(keys.job_targets(job.job_id))


async def test_what_was_ended_by_others_counts_as_ended(redis_url: str) -> None:
    async with Bed(redis_url, local()) as bed:
        await bed.control("c1")
        caller = bed.caller("call")
        await caller.open()
        job = await close(site_of(bed), await give(bed, "close", wanted()))
        await caller.call("close")
        job = await run(bed, job)
        assert (job.state, job.done) == (JobState.DONE, 1)
        await until(lambda: "closed" in caller.lifecycle())
