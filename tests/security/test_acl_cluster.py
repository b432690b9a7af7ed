"""The shipped roles on a cluster: they may also ask who serves what, and follow what moves. Nothing more is needed."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any

import pytest

from bargein_client import AsyncBargein
from stages.pipeline import Pipeline
from tests.clusters import ValkeyCluster
from tests.security.guarded import ROLES, make_acl
from tests.system import PATIENCE_S
from workers.control import ControlWorker
from workers.stage import StageWorker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def passwords() -> dict[str, str]:
    return {role: secrets.token_urlsafe(24) for role in ROLES}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, passwords: dict[str, str]) -> Iterator[ValkeyCluster]:
    """A cluster with the shipped users on every node; the tests' own user may do anything."""
    directory: Path = tmp_path_factory.mktemp("secrets")
    for role, password in passwords.items():
        (directory / role).write_text(password + "\n")
    made = make_acl(directory)
    assert made.returncode == 0, made.stderr
    users = [line.split() for line in made.stdout.splitlines() if line.startswith("user ")]
    with ValkeyCluster() as cluster:
        for node in cluster.nodes:
            for _, name, *rules in users:
                if name != "default":
                    cluster.client(node).execute_command("ACL", "SETUSER", name, *_joined(rules))
            cluster.client(node).acl_log_reset()
        yield cluster


def _joined(rules: list[str]) -> list[str]:
    """A selector in parentheses is one argument."""
    found: list[str] = []
    open_ = False
    for word in rules:
        if open_:
            found[-1] += f" {word}"
        else:
            found.append(word)
        open_ = (open_ or word.startswith("(")) and not word.endswith(")")
    return found


def denials(cluster: ValkeyCluster) -> list[str]:
    found: list[Any] = [entry for node in cluster.nodes for entry in cluster.client(node).acl_log()]
    # redis-py says its own name, and goes on where it may not.
    return [f"{e['username']}: {e['reason']} {e['object']}" for e in found if e["object"] != "client|setinfo"]


async def test_every_role_does_its_work_on_a_cluster_and_asks_for_nothing_that_it_may_not(
    guarded: ValkeyCluster, passwords: dict[str, str]
) -> None:
    def url(role: str) -> str:
        return guarded.url.replace("://", f"://{role}:{passwords[role]}@")

    pipeline = Pipeline.example()
    workers: list[Any] = [StageWorker(url("stage"), pipeline, number) for number in range(len(pipeline.stages))]
    control = ControlWorker(url("control"), pipeline)
    tasks = [asyncio.create_task(each.run()) for each in (*workers, control)]
    try:
        async with asyncio.timeout(PATIENCE_S):
            for worker in workers:
                await worker.wait_ready()
            while len(control.owned) < pipeline.partitions:  # noqa: ASYNC110  the worker tells nobody
                await asyncio.sleep(0.01)
            await control.observer.look()
        async with AsyncBargein(url("producer")) as client:
            for number in range(6):
                session = await client.open(f"call-{number}", input_modes=["append_tokens"])
                await session.append([1, 2], mode="append_tokens", final=True)
                await session.interrupt()
                await session.close()
        await asyncio.to_thread(guarded.move, "bargein:{3}:owner", _other_master(guarded))
        async with AsyncBargein(url("producer")) as client, await client.open("after the move") as session:
            assert (await session.touch()).ok
    finally:
        control.stop()
        for worker in workers:
            worker.request_stop(0)
        await asyncio.gather(*tasks)
    assert denials(guarded) == []


def _other_master(cluster: ValkeyCluster) -> Any:
    source = cluster.master_of("bargein:{3}:owner")
    return next(node for node in cluster.nodes[:3] if node is not source)
