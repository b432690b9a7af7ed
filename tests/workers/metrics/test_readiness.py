"""S60: /readyz says no when the loop is dead, Redis is frozen, full or a replica; /healthz that the process lives."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from control.store.keys import PartitionKeys
from tests.servers import ValkeyServer
from tests.workers.control_bed import Bed, local, make_pipeline, until
from tests.workers.metrics.scraped import failing, fetch, ready, scrape
from tests.workers.scripted import ScriptedEngine
from tests.workers.stage_bed import StageBed
from workers.metrics.control import ControlMetrics
from workers.metrics.serving import MetricsServer, serving
from workers.metrics.stage import StageMetrics

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

# Short, so that nobody waits; above the second that an idle owner's turn takes.
WITHIN_S = 1.8


@pytest.fixture
def own_server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@asynccontextmanager
async def served(watched: Any) -> AsyncGenerator[str]:
    server = MetricsServer(watched, "127.0.0.1", 0)
    async with serving(watched, server):
        yield server.url


@asynccontextmanager
async def control_on(url: str, **more: Any) -> AsyncGenerator[tuple[Bed, Any, str]]:
    async with Bed(url, more.pop("pipeline", None) or local()) as bed:
        worker = await bed.control("control-a")
        metrics = ControlMetrics(worker, bed.pipeline, url, interval_s=0.2, within_s=more.pop("within_s", WITHIN_S))
        async with served(metrics) as address:
            await until_ready(address)
            yield bed, worker, address


async def until_ready(address: str) -> None:
    async def is_ready() -> bool:
        return (await asyncio.to_thread(ready, address))[0] == 200

    await until(is_ready)


async def until_failing(address: str, *names: str) -> set[str]:
    found: set[str] = set()

    async def fails() -> bool:
        found.clear()
        found.update(await asyncio.to_thread(failing, address))
        return set(names) <= found

    try:
        await until(fails)
    except AssertionError:
        raise AssertionError(f"{found} fail, not {names}") from None
    return found


async def until_passing(address: str, *names: str) -> None:
    async def pass_() -> bool:
        return not set(names) & await asyncio.to_thread(failing, address)

    await until(pass_)


async def test_s60_a_control_worker_that_works_is_ready_and_names_what_it_looked_at(redis_url: str) -> None:
    async with control_on(redis_url) as (_, _, address):
        status, checks = await asyncio.to_thread(ready, address)
        shown = await asyncio.to_thread(scrape, address)
    assert status == 200
    names = {"event_loop", "owner_loops", "ownership", "observer", "redis_writes", "partitions", "staying"}
    assert set(checks) == names
    assert checks["owner_loops"]["bound"] == WITHIN_S
    assert checks["partitions"]["value"] == "owns 4, should own 4"
    assert shown["bargein_ready"] == 1
    assert {f"check={name}": 1 for name in names} == shown.nonzero("bargein_ready_check")


async def test_s60_a_dead_event_loop_is_not_ready_but_alive(redis_url: str) -> None:
    async with control_on(redis_url) as (_, _, address):
        answers: list[Any] = []

        def look() -> None:
            time.sleep(WITHIN_S + 0.3)
            answers.extend((fetch(address.replace("metrics", "healthz"))[0], failing(address), scrape(address)))

        thread = threading.Thread(target=look)
        thread.start()
        while thread.is_alive():
            time.sleep(0.01)  # noqa: ASYNC251  that is the fault
        assert answers[0] == 200
        assert {"event_loop", "owner_loops", "ownership", "observer", "redis_writes"} <= answers[1]
        assert answers[2]["bargein_ready"] == 0
        assert answers[2]["bargein_event_loop_lag_seconds"] > WITHIN_S
        await until_ready(address)


async def test_s60_one_dead_owner_loop_is_not_ready_though_all_else_is_well(redis_url: str) -> None:
    async with control_on(redis_url) as (_, worker, address):
        never = asyncio.Event()
        worker.owners[0]._turn = never.wait  # type: ignore[method-assign]
        assert await until_failing(address, "owner_loops") == {"owner_loops"}
        del worker.owners[0]._turn
        never.set()
        await until_ready(address)


async def test_s60_a_frozen_redis_is_not_ready_and_a_thawed_one_is(own_server: ValkeyServer) -> None:
    async with control_on(own_server.url) as (_, worker, address):
        assert own_server.pid is not None
        os.kill(own_server.pid, signal.SIGSTOP)
        try:
            await until_failing(address, "owner_loops", "ownership", "observer", "redis_writes")
            # The event loop is fine, and the process says so.
            assert (await asyncio.to_thread(ready, address))[1]["event_loop"]["ok"]
            await until(lambda: sum(worker.stats.redis_lost.values()) > 0)
        finally:
            os.kill(own_server.pid, signal.SIGCONT)
        await until_ready(address)
        shown = await asyncio.to_thread(scrape, address)
        assert sum(shown.nonzero("bargein_redis_reconnects_total").values()) > 0


async def test_a_full_redis_takes_no_writes(own_server: ValkeyServer) -> None:
    async with control_on(own_server.url) as (bed, _, address):
        await bed.redis.config_set("maxmemory", 1)
        assert await until_failing(address, "redis_writes") == {"redis_writes"}
        shown = await asyncio.to_thread(scrape, address)
        assert shown["bargein_redis_errors_total", "part=metrics"] > 0
        await bed.redis.config_set("maxmemory", 0)
        await until_ready(address)


async def test_a_replica_takes_no_writes(own_server: ValkeyServer) -> None:
    async with control_on(own_server.url) as (bed, _, address):
        await bed.redis.replicaof("127.0.0.1", 1)
        await until_failing(address, "redis_writes")
        await bed.redis.replicaof("NO", "ONE")
        await until_ready(address)


async def test_a_worker_without_partitions_is_ready_only_if_others_have_them_all(redis_url: str) -> None:
    async with control_on(redis_url, pipeline=local(partitions=1)) as (bed, first, address):
        second = await bed.control("control-b", whole=False)
        await bed.until_owned(first, second)
        idle = second if first.owned else first
        metrics = ControlMetrics(idle, bed.pipeline, redis_url, interval_s=0.2, within_s=WITHIN_S)
        async with served(metrics) as other:
            await until_ready(other)
            await until_ready(address)
            assert (await asyncio.to_thread(ready, other))[1]["partitions"]["value"] == "owns 0, should own 0"


async def test_a_worker_that_should_own_partitions_and_does_not_is_not_ready(redis_url: str) -> None:
    async with Bed(redis_url, local(partitions=1)) as bed:
        owner = PartitionKeys(0).owner
        held = {"token": "9:ghost", "holder": "ghost", "until_ms": 1 << 45, "revision": 0}
        await bed.redis.hset(owner, mapping=held)
        worker = await bed.control("control-a", whole=False)
        async with served(ControlMetrics(worker, bed.pipeline, redis_url, interval_s=0.2)) as address:
            await until(lambda: worker.ownership.share == 1)
            await until(lambda: worker.observer.looked_s > 0)
            await until_passing(address, "redis_writes", "owner_loops", "observer")
            assert await until_failing(address, "partitions") == {"partitions"}
            await bed.redis.hset(owner, "until_ms", 0)
            await until_ready(address)


async def test_a_worker_that_leaves_is_not_ready(redis_url: str) -> None:
    async with control_on(redis_url) as (bed, worker, address):
        await bed.leave(worker)
        assert "staying" in await until_failing(address, "staying")


async def test_a_worker_that_has_never_reached_redis_says_never() -> None:
    bed = Bed("redis://127.0.0.1:1/0", make_pipeline())
    from workers.control import ControlWorker  # noqa: PLC0415

    worker = ControlWorker(bed.url, bed.pipeline)
    async with served(ControlMetrics(worker, bed.pipeline, bed.url, interval_s=0.2)) as address:
        status, checks = await asyncio.to_thread(ready, address)
    await bed.redis.aclose()
    assert status == 503
    assert checks["redis_writes"]["value"] == checks["ownership"]["value"] == "never"


async def test_s60_a_stage_worker_is_ready_while_it_beats_reads_and_its_engine_is_well(redis_url: str) -> None:
    engine = ScriptedEngine()
    async with (
        StageBed(redis_url, engine) as bed,
        served(StageMetrics(bed.worker, bed.pipeline, 0, within_s=WITHIN_S)) as address,
    ):
        await until_ready(address)
        checks = (await asyncio.to_thread(ready, address))[1]
        assert set(checks) == {"event_loop", "life", "engine", "heartbeat", "queues"}
        assert checks["heartbeat"]["bound"] == 2.0
        bed.worker.request_stop(5)
        assert "life" in await until_failing(address, "life")


async def test_s60_a_stage_worker_without_an_engine_is_not_ready(redis_url: str) -> None:
    engine = ScriptedEngine()
    async with (
        StageBed(redis_url, engine) as bed,
        served(StageMetrics(bed.worker, bed.pipeline, 0, within_s=WITHIN_S)) as address,
    ):
        await until_ready(address)
        engine.is_healthy = False
        await until_failing(address, "life")  # until another one has begun
        await until_ready(address)


async def test_s60_a_stage_worker_whose_heartbeat_is_not_taken_is_not_ready(own_server: ValkeyServer) -> None:
    async with (
        StageBed(own_server.url, ScriptedEngine()) as bed,
        served(StageMetrics(bed.worker, bed.pipeline, 0, within_s=WITHIN_S)) as address,
    ):
        await until_ready(address)
        assert own_server.pid is not None
        os.kill(own_server.pid, signal.SIGSTOP)
        try:
            await until_failing(address, "heartbeat", "queues")
        finally:
            os.kill(own_server.pid, signal.SIGCONT)
        await until_ready(address)
