"""A control worker's metrics: every number right for a scripted conversation, and no series more for a thousand."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from bargein_client import AsyncBargein
from control.store.keys import PartitionKeys, partition_of
from control.wire.stage import CleanupFailedAck, encode
from stages.pipeline import Pipeline
from tests.system import RunningSystem
from tests.workers.control_bed import Bed, fence, local, make_pipeline, until
from tests.workers.metrics.scraped import read, scrape
from workers.metrics.control import ControlMetrics
from workers.metrics.serving import MetricsServer, serving
from workers.metrics.stage import StageMetrics
from workers.metrics.table import METRICS

if TYPE_CHECKING:
    from tests.workers.metrics.scraped import Scrape
    from workers.control import ControlWorker


def metrics_of(bed: Bed, worker: ControlWorker, **more: Any) -> ControlMetrics:
    return ControlMetrics(worker, bed.pipeline, bed.url, **more)


async def sampled(metrics: ControlMetrics, looks: int = 1) -> Scrape:
    """A scrape after that many more samples of each kind."""
    sampler = metrics.sampler
    task = asyncio.create_task(metrics.run())
    wanted = sampler.rounds + looks
    quick_s = sampler.quick_s
    await until(lambda: sampler.rounds >= wanted and sampler.quick_s > quick_s)
    task.cancel()
    await asyncio.wait([task])
    return read(metrics.collect())


async def test_commands_are_counted_by_op_and_outcome_with_how_long_they_took(redis_url: str) -> None:
    async with Bed(redis_url, local()) as bed:
        worker = await bed.control("control-a")
        caller = bed.caller("call")
        assert (await caller.open())["ok"]
        for _ in range(3):
            assert (await caller.reply(await caller.append()))["ok"]
        assert (await caller.call("append", at=fence(0, incarnation=9), mode="turn_commit_only"))[
            "code"
        ] == "stale_fence"
        assert (await caller.call("touch", activity="heartbeat"))["ok"]
        assert (await caller.call("resume", expected_lease_generation=0))["ok"]
        assert (await caller.call("signal", event="nonsense"))["code"] == "invalid_argument"
        assert (await caller.reply(await caller.cancel(fence(), fence(1))))["ok"]
        assert (await caller.call("dance"))["code"] == "invalid_argument"
        assert (await caller.call("close", at=fence(1)))["ok"]
        assert (await bed.caller("nobody").call("touch", activity="heartbeat"))["code"] == "not_found"
        await bed.redis.xadd(bed.keys("call").commands, {"b": b"\xc1"})
        await until(lambda: worker.stats.dead_letters == 1)
        await bed.until_drained()
        shown = read(metrics_of(bed, worker).collect())
    assert shown.nonzero("bargein_commands_total") == {
        "op=open,outcome=ok": 1,
        "op=append,outcome=ok": 3,
        "op=append,outcome=stale_fence": 1,
        "op=touch,outcome=ok": 1,
        "op=touch,outcome=not_found": 1,
        "op=resume,outcome=ok": 1,
        "op=signal,outcome=invalid_argument": 1,
        "op=signal,outcome=ok": 1,
        "op=other,outcome=invalid_argument": 1,
        "op=close,outcome=ok": 1,
    }
    counts = shown.nonzero("bargein_command_seconds_count")
    assert counts == {"op=open": 1, "op=append": 4, "op=touch": 2, "op=resume": 1, "op=signal": 2, "op=other": 1,
                      "op=close": 1}  # fmt: skip
    assert shown["bargein_command_seconds_sum", "op=open"] < 10
    assert shown["bargein_inputs_total", "stream=commands"] == 12
    assert shown["bargein_dead_letters_total"] == 1
    # There was nothing to stop, so nothing had to be confirmed.
    assert shown["bargein_barge_in_fenced_seconds_count"] == 1
    assert shown["bargein_barge_in_confirmed_seconds_count"] == 0
    assert shown.nonzero("bargein_cleanups_total") == {}


async def test_a_command_sent_twice_is_timed_from_where_it_first_came(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline()) as bed:
        worker = await bed.control("control-a")
        stage = await bed.stage()
        caller = bed.caller("call")
        await caller.open()
        stage.accepts = False
        first = await caller.append(control_id="again")
        await until(lambda: worker.stats.commands == 2)
        await asyncio.sleep(0.06)
        await caller.append(control_id="again")
        await until(lambda: worker.stats.commands == 3)
        stage.accepts = True
        assert (await caller.reply(first))["ok"]
        await bed.until_drained()
        shown = read(metrics_of(bed, worker).collect())
    assert shown["bargein_commands_total", "op=append", "outcome=ok"] == 1
    assert shown["bargein_command_seconds_count", "op=append"] == 1
    assert shown["bargein_command_seconds_sum", "op=append"] >= 0.06


async def test_a_barge_in_is_timed_to_its_fence_and_to_the_last_stage_s_word(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline()) as bed:
        worker = await bed.control("control-a")
        stage = await bed.stage()
        caller = bed.caller("call")
        await caller.open()
        await caller.reply(await caller.append())
        stage.confirms = False
        cancel = await caller.cancel(fence(), fence(1))
        await until(lambda: len(stage.seen_aborts) == 1)
        await bed.until_drained()
        between = await sampled(metrics_of(bed, worker))
        no = CleanupFailedAck("call", 0, 2, 1, stage.worker_id, timed_out=False, message="told to say no")
        await bed.redis.xadd(caller.keys.acks, {"b": encode(no)})
        assert (await caller.reply(cancel))["code"] == "cleanup_failed"
        await until(lambda: worker.stats.cleanups["cancel"].attempts == 2)
        stage.confirms = True
        await until(lambda: worker.stats.cleanups["cancel"].confirmed == 1)
        await bed.until_drained()
        shown = await sampled(metrics_of(bed, worker))
    assert between["bargein_barge_in_fenced_seconds_count"] == 1
    assert between["bargein_barge_in_confirmed_seconds_count"] == 0
    assert between.nonzero("bargein_pending_cleanups") == {"kind=cancel": 1}
    assert between.nonzero("bargein_requests") == {"state=cleaning": 1}
    assert between["bargein_oldest_cleanup_age_seconds", "kind=cancel"] < 10
    assert shown.nonzero("bargein_pending_cleanups") == {}
    assert shown["bargein_barge_in_confirmed_seconds_count"] == 1
    assert shown["bargein_barge_in_confirmed_seconds_sum"] > shown["bargein_barge_in_fenced_seconds_sum"]
    assert shown.nonzero("bargein_cleanups_total") == {"kind=cancel": 1}
    assert shown.nonzero("bargein_cleanup_confirmations_total") == {"kind=cancel": 1}
    assert shown.nonzero("bargein_cleanup_failures_total") == {"kind=cancel,reason=refused": 1}
    assert shown["bargein_cleanup_attempts_total", "kind=cancel"] == 2
    assert shown["bargein_commands_total", "op=signal", "outcome=cleanup_failed"] == 1


async def test_a_close_joins_what_is_pending_and_its_end_is_confirmed(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline()) as bed:
        worker = await bed.control("control-a")
        stage = await bed.stage()
        caller = bed.caller("call")
        await caller.open()
        await caller.reply(await caller.append())
        stage.confirms = False
        await caller.cancel(fence(), fence(1))
        await until(lambda: len(stage.seen_aborts) == 1)
        close = await caller.send("close", at=fence(1))
        await until(lambda: worker.stats.cleanups["end"].begun == 1)
        stage.confirms = True
        assert (await caller.reply(close))["ok"]
        await bed.until_drained()
        shown = await sampled(metrics_of(bed, worker))
    assert shown.nonzero("bargein_cleanups_total") == {"kind=cancel": 1, "kind=end": 1}
    assert shown.nonzero("bargein_cleanup_joins_total") == {"kind=cancel": 1}
    assert shown.nonzero("bargein_cleanup_confirmations_total") == {"kind=end": 1}
    assert shown["bargein_barge_in_confirmed_seconds_count"] == 0
    assert shown.nonzero("bargein_pending_cleanups") == {}
    assert shown["bargein_sessions", "phase=vacant"] == 1


async def test_backlog_and_the_oldest_command_s_age_are_sampled_by_partition(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline()) as bed:
        worker = await bed.control("control-a")
        stage = await bed.stage()
        caller = bed.caller("call")
        await caller.open()
        stage.accepts = False
        await caller.append()
        for _ in range(3):
            await caller.append()  # these wait in the stream for the first
        await until(lambda: worker.stats.commands == 5)
        await asyncio.sleep(0.05)
        shown = await sampled(metrics_of(bed, worker))
        number = f"partition={partition_of('call', 4)}"
        stage.accepts = True
        await until(lambda: len(stage.submitted) == 4)
        await bed.until_drained()
        after = await sampled(metrics_of(bed, worker))
    assert shown.nonzero("bargein_backlog") == {f"{number},stream=commands": 3}
    assert 0.05 <= shown["bargein_oldest_command_age_seconds", number] < 10
    assert shown.nonzero("bargein_requests") == {"state=submitted": 1}
    assert after.nonzero("bargein_backlog") == after.nonzero("bargein_oldest_command_age_seconds") == {}


async def test_partitions_handovers_and_takeovers_are_counted_where_they_happen(redis_url: str) -> None:
    async with Bed(redis_url, local()) as bed:
        a = await bed.control("control-a")
        b = await bed.control("control-b", whole=False)
        await bed.until_owned(a, b)
        shown_a, shown_b = read(metrics_of(bed, a).collect()), read(metrics_of(bed, b).collect())
        owned_a, owned_b = len(a.owned), len(b.owned)
        await bed.crash(a)
        await until(lambda: len(b.owned) == 4)
        late = read(metrics_of(bed, b).collect())
    assert (owned_a + owned_b, owned_a > 0, owned_b > 0) == (4, True, True)
    assert shown_a["bargein_partitions_owned"] == owned_a
    assert shown_a["bargein_handovers_total"] == owned_b
    assert (shown_b["bargein_partitions_owned"], shown_b["bargein_takeovers_total"]) == (owned_b, 0)
    assert (late["bargein_takeovers_total"], late["bargein_partitions"]) == (owned_a, 4)
    assert shown_b["bargein_control_workers"] == 2
    # What is of the whole system comes from the owner of partition 0 alone, so that a sum is right.
    seen = [("bargein_slots_capacity" in shown.names) for shown in (shown_a, shown_b)]
    assert sorted(seen) == [False, True]


async def test_s43_slots_that_drift_from_their_sessions_show(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(max_sessions=10)) as bed:
        worker = await bed.control("control-a")
        stage = await bed.stage()
        caller = bed.caller("call")
        await caller.open()
        await caller.reply(await caller.append())
        metrics = metrics_of(bed, worker, interval_s=0.05)
        well = await sampled(metrics, 2)
        slots = f"bargein:{{w:{stage.worker_id}}}:slots"
        await bed.redis.hset(slots, "ghost", "1 1")
        await bed.redis.hdel(slots, "call")
        # Once may be chance: samples are of several moments.
        once = await sampled(metrics, 1)
        twice = await sampled(metrics, 2)
        await bed.redis.hset(slots, "call", "0 1")
        await bed.redis.hdel(slots, "ghost")
        put_right = await sampled(metrics, 2)
    assert well["bargein_slots_used", "stage=stage0"] == 1
    assert well["bargein_slots_capacity", "stage=stage0"] == 64
    assert (well["bargein_admission_used"], well["bargein_admission_limit"]) == (1, 10)
    assert [s["bargein_slots_unowned"] for s in (well, once, twice, put_right)] == [0, 0, 1, 0]
    assert [s["bargein_slots_missing"] for s in (well, once, twice, put_right)] == [0, 0, 1, 0]


async def test_a_census_ends_at_its_cap_and_says_so(redis_url: str) -> None:
    async with Bed(redis_url, local(partitions=1)) as bed:
        worker = await bed.control("control-a")
        record = None
        caller = bed.caller("call")
        await caller.open()
        record = await bed.redis.hget(caller.keys.sessions, "call")
        await bed.redis.hset(PartitionKeys(0).sessions, mapping={f"more-{n}": record for n in range(2000)})
        whole = await sampled(metrics_of(bed, worker))
        part = await sampled(metrics_of(bed, worker, most=300))
    assert whole["bargein_sessions", "phase=open"] == 2001
    assert (whole["bargein_sample_capped", "sample=census"], part["bargein_sample_capped", "sample=census"]) == (0, 1)
    assert 300 <= part["bargein_sessions", "phase=open"] < 1000


@pytest.mark.cluster
async def test_samples_are_taken_on_a_cluster_too(cluster: Any) -> None:
    pipeline = Pipeline.example()
    async with RunningSystem(cluster.url, pipeline) as system, AsyncBargein(cluster.url) as producer:
        await producer.open("call", input_modes=["append_audio_chunk"])
        metrics = ControlMetrics(system.controls[0], pipeline, cluster.url, interval_s=0.1)
        shown = await sampled(metrics, 2)
    assert shown["bargein_sessions", "phase=open"] == 1
    assert shown["bargein_slots_missing"] == shown["bargein_slots_unowned"] == 0
    assert metrics.sampler.written_s > 0
    assert len(shown.nonzero("bargein_backlog")) == 0


async def test_a_real_run_gives_every_metric_data_and_a_thousand_sessions_no_series_more(redis_url: str) -> None:
    pipeline = Pipeline.example().model_copy(update={"max_sessions": 5000})
    stages = tuple(stage.model_copy(update={"capacity": 5000}) for stage in pipeline.stages)
    pipeline = pipeline.model_copy(update={"stages": stages})
    async with RunningSystem(redis_url, pipeline) as system, AsyncBargein(redis_url) as producer:
        watched: list[Any] = [
            ControlMetrics(system.controls[0], pipeline, redis_url, interval_s=0.1),
            StageMetrics(system.stages[0], pipeline, 0),
        ]
        servers = [MetricsServer(each, "127.0.0.1", 0) for each in watched]
        async with serving(watched[0], servers[0]), serving(watched[1], servers[1]):

            async def both() -> list[Any]:
                return [await asyncio.to_thread(scrape, server.url) for server in servers]

            async def talk(name: str) -> None:
                session = await producer.open(name, input_modes=["append_audio_chunk"])
                await session.append(bytes(640), final=True)
                await session.interrupt()
                await session.close()

            await talk("first")
            sampler = watched[0].sampler
            await until(lambda: sampler.rounds > 2 and watched[1].pulse.beat_s > 0)
            before = await both()
            for first in range(0, 1000, 50):
                await asyncio.gather(*(talk(f"call-{n}") for n in range(first, first + 50)))
            rounds = sampler.rounds
            await until(lambda: sampler.rounds > rounds + 1)
            after = await both()
    for role, shown in zip(("control", "stage"), before, strict=True):
        for metric in METRICS:
            if role in metric.roles:
                family = shown.families[metric.name.removesuffix("_total")]
                assert (family.type, family.documentation) == (metric.kind, metric.help)
                assert family.samples, metric.name
                for sample in family.samples:
                    assert set(sample.labels) - {"le"} == set(metric.labels), metric.name
    assert [shown.series for shown in after] == [shown.series for shown in before]
    assert after[0]["bargein_commands_total", "op=open", "outcome=ok"] == 1001
    assert after[0]["bargein_barge_in_fenced_seconds_count"] == 1001
    assert after[0]["bargein_sessions", "phase=vacant"] == 1001
    assert after[0]["bargein_slots_unowned"] == after[0]["bargein_slots_missing"] == 0
    assert not [family for shown in after for family in shown.families if family not in known_families()]


def known_families() -> set[str]:
    ours = {metric.name.removesuffix("_total") for metric in METRICS}
    theirs = {"process_virtual_memory_bytes", "process_resident_memory_bytes", "process_start_time_seconds",
              "process_cpu_seconds", "process_open_fds", "process_max_fds", "python_gc_objects_collected",
              "python_gc_objects_uncollectable", "python_gc_collections"}  # fmt: skip
    return ours | theirs


async def test_what_a_refused_commit_had_decided_is_counted_once(redis_url: str) -> None:
    async with Bed(redis_url, local()) as bed:
        worker = await bed.control("control-a")
        caller = bed.caller("call")
        await bed.redis.hincrby(caller.keys.owner, "revision", 1)
        assert (await caller.open())["ok"]
        await bed.until_drained()
        shown = read(metrics_of(bed, worker).collect())
    assert shown["bargein_commits_total", "outcome=refused"] == 1
    assert shown["bargein_commands_total", "op=open", "outcome=ok"] == 1
    assert shown["bargein_command_seconds_count", "op=open"] == 1


async def test_a_reply_to_what_came_before_a_takeover_is_counted_and_not_timed(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline()) as bed:
        first = await bed.control("control-a")
        stage = await bed.stage()
        caller = bed.caller("call")
        await caller.open()
        stage.accepts = False
        control_id = await caller.append()
        await until(lambda: first.stats.commands == 2)
        await bed.until_drained()
        await bed.crash(first)
        second = await bed.control("control-b")
        stage.accepts = True
        assert (await caller.reply(control_id))["ok"]
        await bed.until_drained()
        shown = read(metrics_of(bed, second).collect())
    assert shown["bargein_commands_total", "op=append", "outcome=ok"] == 1
    assert shown["bargein_command_seconds_count", "op=append"] == 0


async def test_a_barge_in_is_timed_across_a_takeover(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline()) as bed:
        first = await bed.control("control-a")
        stage = await bed.stage()
        caller = bed.caller("call")
        await caller.open()
        await caller.reply(await caller.append())
        stage.confirms = False
        await caller.cancel(fence(), fence(1))
        await until(lambda: first.stats.fenced.count == 1)
        await bed.crash(first)
        second = await bed.control("control-b")
        stage.confirms = True
        await until(lambda: second.stats.let_go.count == 1)
        shown = read(metrics_of(bed, second).collect())
    # From when the cleanup was made, which is in its record.
    assert 0 < shown["bargein_barge_in_confirmed_seconds_sum"] < 60
    assert shown["bargein_barge_in_fenced_seconds_count"] == 0
