"""`bargein doctor` on real servers: a healthy one, an unfit one, a system that has lost its parts."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from stages.pipeline import Pipeline
from tests.system import RunningSystem
from tests.workers.cli_process import run
from tests.workers.test_cli import no_server

if TYPE_CHECKING:
    from pathlib import Path

    from tests.clusters import ValkeyCluster
    from tests.servers import RealServer


def ask(url: str, *words: str) -> tuple[int, dict[str, dict[str, Any]]]:
    done = run("doctor", "--json", *words, redis_url=url)
    return done.exit_code, {each["check"]: each for each in json.loads(done.stdout)}


async def test_what_runs_well_is_well_and_what_is_gone_is_missed(any_server: RealServer) -> None:
    async with RunningSystem(any_server.url, Pipeline.example()) as system:
        _, found = await asyncio.to_thread(ask, any_server.url)
        for check in ("server", "scripts", "configuration", "control workers", "partitions", "cleanups", "stage voice"):
            assert found[check]["verdict"] == "ok", found[check]
        assert found["partitions"]["found"] == "each has an owner"
        assert "compile" in found["scripts"]["found"]
        # The tests' servers keep no file.
        assert found["persistence"]["verdict"] == "bad"
        assert system.stages
    status, found = await asyncio.to_thread(ask, any_server.url)
    assert status == 1
    assert found["control workers"]["verdict"] == "bad"
    assert "bargein control" in found["control workers"]["advice"]


def test_a_server_that_nobody_has_used_and_a_table_for_people(redis_url: str) -> None:
    _, found = ask(redis_url)
    assert found["configuration"]["found"] == "nothing has ever run here"
    assert "control workers" not in found
    done = run("doctor", "--quiet", redis_url=redis_url)
    assert "nothing has ever run here" in done.stdout
    assert "way there" not in done.stdout
    assert "appendonly yes" in done.stdout


async def test_another_number_of_partitions_is_bad(redis_url: str, tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text("partitions: 3\npolicy: null\n")
    async with RunningSystem(redis_url, Pipeline.example()):
        status, found = await asyncio.to_thread(ask, redis_url, "--pipeline", str(file))
    assert status == 1
    assert found["configuration"]["found"] == "partitions is 16 there and 3 here"


def test_no_server_is_an_error_in_a_line() -> None:
    done = run("doctor", redis_url=no_server())
    assert done.exit_code == 3
    assert "can't be reached" in done.output


@pytest.mark.cluster
def test_every_master_of_a_cluster_is_examined(cluster: ValkeyCluster) -> None:
    _, found = ask(cluster.url)
    for node in cluster.masters():
        assert found[f"server of {node.port}"]["verdict"] == "ok"
    assert found["scripts"]["verdict"] == "ok"
