"""A stage worker's metrics: inputs, outputs, aborts and lives, each counted once, over all its lives."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.workers.metrics.scraped import read
from tests.workers.scripted import ScriptedEngine
from tests.workers.stage_bed import StageBed, fence, name_of
from workers.metrics.stage import StageMetrics

if TYPE_CHECKING:
    from tests.workers.metrics.scraped import Scrape


async def looked(bed: StageBed) -> Scrape:
    """A scrape with a fresh look at the current life."""
    metrics = StageMetrics(bed.worker, bed.pipeline, bed.stage_id)
    task = asyncio.create_task(metrics.run())
    await bed.until(lambda: metrics.pulse.beat_s > 0)
    task.cancel()
    await asyncio.wait([task])
    return read(metrics.collect())


async def test_what_goes_in_and_what_comes_out_is_counted_by_what_became_of_it(redis_url: str) -> None:
    engine = ScriptedEngine()
    async with StageBed(redis_url, engine) as bed:
        await bed.start("a", "b")
        engine.fail_submits = 1
        await bed.set_fence("c")
        await bed.submit("c")
        await bed.until(lambda: bed.worker.stats.rejected == 1)
        for text in ("one", "two"):
            engine.emit(name_of("a"), text)
        await bed.next_events("a", 2)
        await bed.set_fence("b", fence(0, 1))
        engine.emit(name_of("b"), "of an older turn")
        await bed.until(lambda: bed.worker.stats.outputs_dropped == 1)
        await bed.set_fence("b", fence(1), floor=1)
        engine.emit(name_of("b"), "of an older epoch")
        await bed.until(lambda: bed.worker.stats.outputs_stopped == 1)
        await bed.until(lambda: name_of("b") not in engine.running)
        assert engine.port is not None
        engine.emit(name_of("b"), "after its end", fence=fence())
        await bed.until(lambda: bed.worker.stats.outputs_late == 1)
        engine.fail(name_of("a"))
        shown = await looked(bed)
    stage = "stage=stage0"
    assert shown.nonzero("bargein_stage_inputs_total") == {
        f"outcome=accepted,{stage}": 2,
        f"outcome=rejected,{stage}": 1,
    }
    assert shown.nonzero("bargein_outputs_total") == {
        f"outcome=delivered,{stage}": 2,
        f"outcome=dropped,{stage}": 1,
        f"outcome=stopped,{stage}": 1,
        f"outcome=late,{stage}": 1,
    }
    assert shown["bargein_stage_requests_failed_total", stage] == 1
    assert shown["bargein_stage_capacity", stage] == 4


async def test_aborts_are_timed_from_their_order_to_the_engine_and_to_its_word(redis_url: str) -> None:
    engine = ScriptedEngine()
    async with StageBed(redis_url, engine) as bed:
        await bed.start("a", "b")
        # The server's clock is learnt with a heartbeat.
        await bed.until(lambda: bed.worker._life._heartbeat._time.find_ms(0) is not None)  # type: ignore[union-attr]
        engine.stuck.add(name_of("a"))
        await bed.abort("a", 0)
        await bed.abort("b", 0)
        await engine.until(lambda: name_of("b") in engine.aborted and name_of("a") in engine.abort_calls)
        await asyncio.sleep(0.06)
        engine.free(name_of("a"))
        await bed.until(lambda: bed.worker.stats.cleaned == 2)
        await bed.next_acks("a", 2 if bed.keys("a").acks == bed.keys("b").acks else 1)
        engine.fail_cleanups = 1
        await bed.start("c")
        await bed.abort("c", 0)
        await bed.until(lambda: bed.worker.stats.cleanup_failed == 1)
        shown = await looked(bed)
    stage = "stage=stage0"
    assert shown.nonzero("bargein_aborts_total") == {
        f"outcome=received,{stage}": 3,
        f"outcome=confirmed,{stage}": 2,
        f"outcome=failed,{stage}": 1,
    }
    assert shown["bargein_abort_sent_seconds_count", stage] == 3
    assert shown["bargein_abort_confirmed_seconds_count", stage] == 2
    sent_s, confirmed_s = (shown[f"bargein_abort_{what}_seconds_sum", stage] for what in ("sent", "confirmed"))
    assert confirmed_s >= 0.06
    assert sent_s < 10


async def test_the_engine_s_load_is_that_of_the_last_heartbeat_and_depths_are_of_now(redis_url: str) -> None:
    engine = ScriptedEngine()
    async with StageBed(redis_url, engine) as bed:
        await bed.start("a", "b")
        await bed.until_life(lambda life: life.load.get("running") == 2)
        engine.submit_gate.clear()
        await bed.set_fence("c")
        await bed.submit("c")
        await engine.until(lambda: name_of("c") in engine.submitting)
        shown = await looked(bed)
        engine.submit_gate.set()
    stage = "stage=stage0"
    assert shown["bargein_engine_running", stage] == shown["bargein_engine_requests", stage] == 2
    assert shown["bargein_engine_accepts", stage] == 1
    assert shown["bargein_stage_requests", stage] == 3
    assert shown.nonzero("bargein_stage_queue_depth") == {f"queue=submissions,{stage}": 1}
    assert shown["bargein_stage_heartbeat_age_seconds", stage] < 10


async def test_counters_go_on_over_the_lives_of_a_worker(redis_url: str) -> None:
    engine = ScriptedEngine()
    async with StageBed(redis_url, engine) as bed:
        await bed.start("a")
        engine.die()
        bed.worker_id = await bed.next_life(bed.worker_id)
        assert bed.worker.stats.accepted == 0
        await bed.start("b")
        shown = await looked(bed)
    stage = "stage=stage0"
    assert shown["bargein_stage_inputs_total", stage, "outcome=accepted"] == 2
    assert shown.nonzero("bargein_stage_lives_ended_total") == {f"ending=engine_lost,{stage}": 1}
