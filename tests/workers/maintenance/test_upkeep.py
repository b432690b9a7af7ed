"""Upkeep: what is left where something has died, been deleted or come back, is found and put right by its owner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from control.store import keys
from control.store.keys import PartitionKeys, partition_of
from control.store.lives import Entry, end_life, register_life
from tests.workers.control_bed import Bed, local, make_pipeline, until
from tests.workers.maintenance.site import maintained, site_of
from tests.workers.metrics.scraped import read
from workers.maintenance import upkeep
from workers.maintenance.upkeep import (
    DEAD_LETTERS_KEPT_MS,
    UPKEEP,
    prune_dead_letters,
    reconcile_slots,
    sweep_queues,
    wake_forgotten,
)
from workers.metrics.maintenance import MaintenanceMetrics

if TYPE_CHECKING:
    from workers.maintenance.steps import Site

ENTRY = Entry(stage_id=0, stage="stage0", capacity=4, engine="hand")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "LOOK_AGAIN_S", 0.05)


async def all_of(site: Site) -> dict[str, int]:
    return {duty.name: await duty.work(site) for duty in UPKEEP}


async def test_s43_where_all_is_well_upkeep_finds_nothing_and_changes_nothing(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(max_sessions=8)) as bed:
        await bed.control("c1")
        stage = await bed.stage()
        caller = bed.caller("call")
        await caller.open()
        await caller.reply(await caller.append())
        gone = bed.caller("gone")
        await gone.open()
        await gone.call("close")  # a tombstone
        assert set((await all_of(site_of(bed))).values()) == {0}
        assert (await caller.call("touch", activity="heartbeat"))["ok"]
        assert not stage.aborted


async def test_s43_a_slot_of_nobody_at_a_worker_that_is_gone_comes_back(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline()) as bed:
        await bed.control("c1")
        await bed.stage()
        # Its sessions are gone without a trace, so nobody pays the slot back, and it keeps the life in the index.
        await register_life(bed.redis, "dead-1", ENTRY)
        await bed.redis.hset(keys.worker_slots("dead-1"), "nobody", "3 5")
        await end_life(bed.redis, "dead-1")
        assert await reconcile_slots(site_of(bed)) == 1
        await until(lambda: _is_gone(bed, keys.worker_slots("dead-1")))
        await until(lambda: _is_unindexed(bed, "dead-1"))


async def test_s43_a_session_that_lost_its_place_within_the_limit_gets_it_back(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(max_sessions=8)) as bed:
        await bed.control("c1")
        await bed.stage()
        await bed.caller("call").open()
        await bed.redis.delete(keys.ADMISSION_SLOTS)
        assert await reconcile_slots(site_of(bed)) == 1
        await until(lambda: bed.redis.hexists(keys.ADMISSION_SLOTS, "call"))


async def test_a_slot_that_is_on_its_way_is_not_astray(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Bed(redis_url, make_pipeline()) as bed:
        await bed.control("c1")
        await bed.stage()
        slots = keys.worker_slots("ear-1")
        await bed.redis.hset(slots, "passing", "0 1")
        looks: list[int] = []
        find = upkeep._find_astray

        async def find_and_pass_by(site: Site) -> Any:
            found = await find(site)
            looks.append(len(found))
            await bed.redis.hdel(slots, "passing")
            return found

        monkeypatch.setattr(upkeep, "_find_astray", find_and_pass_by)
        assert await reconcile_slots(site_of(bed)) == 0
        assert looks == [1, 0]


async def test_queues_that_outlived_their_worker_are_swept_and_those_of_the_living_are_not(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline()) as bed:
        await bed.control("c1")
        await register_life(bed.redis, "idle-1", ENTRY)
        for worker_id in ("dead-1", "idle-1", "back-1"):
            await bed.redis.sadd(PartitionKeys(1).fenced, worker_id)
            for partition in (0, 3):
                await bed.redis.xadd(PartitionKeys(partition).submissions(worker_id), {"b": b"x", "p": b""}, id="9-9")
        # One that is back in nobody's index, and lives.
        await bed.redis.hset(keys.worker_state("back-1"), "state", "live")
        assert await sweep_queues(site_of(bed)) == 1
        left = {name.decode().rpartition(":")[2] async for name in bed.redis.scan_iter("*:submissions:*")}
        assert left == {"idle-1", "back-1"}
        assert await sweep_queues(site_of(bed)) == 0


async def test_s62_a_tombstone_that_lost_its_deadline_is_forgotten_and_one_with_it_is_left_alone(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Bed(redis_url, local()) as bed:
        worker = await bed.control("c1")
        for name in ("lost", "kept"):
            await bed.caller(name).open()
            await bed.caller(name).call("close")
        known = bed.keys("lost")
        (owner,) = worker.owners
        number = partition_of("lost", bed.pipeline.partitions)
        owner.owned[number].partition._due_ms.pop("lost")
        await bed.redis.zrem(known.deadlines, "lost")
        assert await wake_forgotten(site_of(bed)) == 1
        # Its hour isn't over: it has its deadline again.
        await until(lambda: bed.redis.zscore(known.deadlines, "lost"))
        assert await wake_forgotten(site_of(bed)) == 0
        monkeypatch.setattr(upkeep, "OVERDUE_MS", -10_000_000)
        assert await wake_forgotten(site_of(bed)) == 2, "overdue by now, if it were so late"


async def test_what_is_left_of_a_session_that_somebody_deleted_goes(redis_url: str) -> None:
    async with Bed(redis_url, local()) as bed:
        worker = await bed.control("c1")
        caller = bed.caller("call")
        await caller.open()
        await bed.redis.hdel(caller.keys.sessions, "call")
        (owner,) = worker.owners
        owner.owned[partition_of("call", bed.pipeline.partitions)].partition.forget_some(0)
        assert await wake_forgotten(site_of(bed)) == 1
        await until(lambda: _has_no_field(bed, caller.keys.marks, "call"))
        assert await bed.redis.pttl(caller.keys.events("call")) > 0


async def test_dead_letters_are_kept_for_a_week(redis_url: str) -> None:
    async with Bed(redis_url, local()) as bed:
        await bed.control("c1")
        dead = PartitionKeys(2).dead
        seconds, _ = await bed.redis.time()
        for age_ms in (DEAD_LETTERS_KEPT_MS + 60_000, DEAD_LETTERS_KEPT_MS - 60_000, 0):
            await bed.redis.xadd(dead, {"reason": "x"}, id=f"{seconds * 1000 - age_ms}-0")
        assert await prune_dead_letters(site_of(bed)) == 1
        assert await bed.redis.xlen(dead) == 2


async def test_keys_that_hold_something_else_are_left_to_their_owner(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline()) as bed:
        known = PartitionKeys(0)
        await bed.redis.set(known.fenced, "nonsense")
        await bed.redis.set(known.deadlines, "nonsense")
        await bed.redis.hset(known.sessions, "odd", b"\xc1")
        site = site_of(bed)
        assert await sweep_queues(site) == await wake_forgotten(site) == await reconcile_slots(site) == 0


async def test_a_maintenance_process_counts_what_it_did_and_says_whether_it_goes_on(redis_url: str) -> None:
    async with Bed(redis_url, local()) as bed:
        await bed.control("c1")
        async with maintained(redis_url) as maintenance:
            metrics = MaintenanceMetrics(maintenance)
            await until(lambda: maintenance.polled_s > 0)
            assert maintenance._runner is not None
            for duty in maintenance._runner.duties:
                await maintenance._runner.do(duty)
            await bed.redis.delete(PartitionKeys(0).dead)
            await bed.redis.set(PartitionKeys(0).dead, "nonsense")
            await maintenance._runner.do(next(d for d in UPKEEP if d.name == "prune_dead_letters"))
            shown = read(metrics.collect())
            ok = shown.nonzero("bargein_upkeep_runs_total")
            assert {key: value for key, value in ok.items() if "outcome=ok" in key} == {
                f"duty={duty.name},outcome=ok": 1 for duty in maintenance._runner.duties
            }
            assert shown["bargein_upkeep_runs_total", "duty=prune_dead_letters", "outcome=failed"] == 1
            assert shown["bargein_redis_errors_total", "part=maintenance"] == 1
            assert 0 <= shown["bargein_maintenance_poll_age_seconds"] < 10
            checks = {check.name: check.ok for check in metrics.checks()}
            assert checks["polls"]
            assert checks["staying"]
        assert not {check.name: check.ok for check in metrics.checks()}["staying"]


async def _is_gone(bed: Bed, name: str) -> bool:
    return not await bed.redis.exists(name)


async def _is_unindexed(bed: Bed, worker_id: str) -> bool:
    return not await bed.redis.hexists(keys.STAGES, worker_id)


async def _has_no_field(bed: Bed, name: str, field: str) -> Any:
    return not await bed.redis.hexists(name, field)
