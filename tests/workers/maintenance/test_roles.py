"""Maintenance and the operators' commands do nothing that the maintenance role may not do, and the role is enough."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from bargein_client import AsyncBargein
from stages.pipeline import Pipeline
from tests.security.guarded import GuardedServer
from tests.system import RunningSystem
from tests.workers.cli_process import Bargein
from tests.workers.control_bed import until
from tests.workers.maintenance.site import maintained
from workers.control import ControlWorker
from workers.embedded import require_valkey_binary
from workers.maintenance import upkeep
from workers.stage import StageWorker

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def guarded() -> Iterator[GuardedServer]:
    with GuardedServer(require_valkey_binary()) as server:
        yield server


async def bargein(url: str, *arguments: str) -> tuple[int, str]:
    """A command as a process: its exit status, and what it says."""
    with Bargein(*arguments, redis_url=url) as process:
        status = await asyncio.to_thread(process.process.wait, 30)
        return status, process.output + process.log


async def test_jobs_and_upkeep_need_no_other_rights_than_their_role_has(
    guarded: GuardedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "LOOK_AGAIN_S", 0.05)
    pipeline = Pipeline.example().model_copy(update={"max_sessions": 8})
    system = RunningSystem(guarded.url_of("control"), pipeline)
    system.controls = [ControlWorker(guarded.url_of("control"), pipeline)]
    system.stages = [StageWorker(guarded.url_of("stage"), pipeline, n) for n in range(len(pipeline.stages))]
    url = guarded.url_of("maintenance")
    async with system, AsyncBargein(guarded.url_of("producer")) as producer, maintained(url) as maintenance:
        for name in ("call", "chat"):
            await producer.open(name, input_modes=["append_audio_chunk"])
        await until(lambda: maintenance.polled_s > 0)
        status, said = await bargein(url, "close", "--where", "id=call", "--yes")
        assert status == 0, said
        assert maintenance._runner is not None
        # Something to find for each: an index entry, queues and a slot of a life that is over.
        with guarded.client_of("root") as root:
            root.sadd("bargein:{0}:fenced", "dead-1")
            root.xadd("bargein:{0}:submissions:dead-1", {"b": "x"})
            root.hset("bargein:{0}:marks", "ghost", "1 0 0-0")
            root.xadd("bargein:{0}:dead", {"reason": "old"}, id="1-1")
            root.hset("bargein:{admission}:slots", "nobody", "0 1")
        for duty in maintenance._runner.duties:
            await maintenance._runner.do(duty)
        found = {name: stats.found for name, stats in maintenance.stats.items() if stats.found}
        assert found == {"reconcile_slots": 1, "sweep_queues": 1, "wake_forgotten": 1, "prune_dead_letters": 1}
        worker = system.stages[0].worker_id
        assert worker is not None
        for arguments in (("drain", worker, "--grace", "0s"), ("drain", worker, "--undo"), ("jobs",)):
            status, said = await bargein(url, *arguments)
            assert status == 0, said
        assert sum(stats.failed for stats in maintenance.stats.values()) == maintenance.errors == 0
        with guarded.client_of("root") as root:
            assert await asyncio.to_thread(root.hlen, f"bargein:{{w:{worker}}}:slots") == 0
    assert guarded.fetch_denials() == []


async def test_a_producer_can_not_use_the_operators_commands(guarded: GuardedServer) -> None:
    async with RunningSystem(guarded.url_of("root")) as system:
        worker = system.stages[0].worker_id
        assert worker is not None
        for arguments in (("drain", worker), ("close", "--all", "--yes"), ("jobs",)):
            status, said = await bargein(guarded.url_of("producer"), *arguments)
            assert status == 3, said
            assert "refuses the credentials" in said
        with guarded.client_of("root") as root:
            assert await asyncio.to_thread(root.exists, f"bargein:{{w:{worker}}}:drain", "bargein:jobs") == 0
