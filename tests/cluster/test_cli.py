"""The command line on a cluster: what it looks at is on several nodes, what it sends goes to the right one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from control.core import commands as c
from control.store.access import open_access
from control.store.keys import PartitionKeys, partition_of
from control.store.lives import Entry, register_life
from control.store.server import agree_on_config
from tests.clusters import ValkeyCluster
from tests.store.desk import STAGE, Store, command, fence
from tests.workers.cli_process import Bargein, run, wait_until

pytestmark = pytest.mark.cluster

PARTITIONS = 16
CALLS = [f"call-{number}" for number in range(8)]


def ask(cluster: ValkeyCluster, *words: str) -> Any:
    done = run(*words, "--json", redis_url=cluster.url)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


async def seed(cluster: ValkeyCluster) -> None:
    """A session in each of some partitions, interrupted while its stage runs it: a cleanup is pending."""
    access = open_access(cluster.url)
    await agree_on_config(access.redis, PARTITIONS)
    await register_life(access.redis, STAGE, Entry(stage_id=0, stage="ear", capacity=64, engine="parrot"))
    for call in CALLS:
        known = PartitionKeys(partition_of(call, PARTITIONS))
        link = access.link(known.owner)
        desk = await Store(access.redis, link, is_fake=False).acquire(known)
        desk.open(call)
        desk.decide(command(c.Append, call, mode="append_tokens"), call)
        await desk.must_commit()
        desk.decide(c.Accepted(0, 1), call)
        desk.decide(command(c.Cancel, call, event="barge_in", next_fence=fence(0, 1)), call)
        await desk.must_commit()
        await link.close()
    await access.close()


def test_sessions_cleanups_workers_and_partitions_of_all_nodes_are_seen(cluster: ValkeyCluster) -> None:
    asyncio.run(seed(cluster))
    partitions = sorted({partition_of(call, PARTITIONS) for call in CALLS})
    assert len({cluster.master_of(PartitionKeys(number).owner).port for number in partitions}) == 3
    sessions = ask(cluster, "sessions")
    assert sorted(row["session_id"] for row in sessions) == CALLS
    assert {(row["phase"], row["cleaning"], row["cleanups"]) for row in sessions} == {("open", 1, 1)}
    cleanups = ask(cluster, "cleanups")
    assert sorted(row["session_id"] for row in cleanups) == CALLS
    assert {tuple(row["waits_for"]) for row in cleanups} == {(STAGE,)}
    workers = ask(cluster, "workers")
    assert {row["role"]: row["worker_id"] for row in workers} == {"control": "control-a", "stage": STAGE}
    rows = ask(cluster, "partitions")
    assert [row["partition"] for row in rows] == list(range(PARTITIONS))
    assert [row["partition"] for row in rows if row["owner"] == "control-a"] == partitions
    assert sum(row["cleanups"] for row in rows) == len(CALLS)


def test_commands_are_sent_and_events_heard(cluster: ValkeyCluster, tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(f"partitions: {PARTITIONS}\npolicy: null\n")
    with Bargein("control", redis_url=cluster.url, pipeline=file) as worker:
        assert wait_until(lambda: worker.process.poll() is None and len(owned(cluster)) == PARTITIONS), worker.log
        for call in CALLS:
            words = [json.dumps({"op": op, "session_id": call}) for op in ("open", "touch", "close")]
            words[1] = words[1].replace("}", ', "activity": "heartbeat"}')
            replies = ask(cluster, "send", *words)
            assert [(reply["op"], reply["ok"]) for reply in replies] == [
                ("open", True),
                ("touch", True),
                ("close", True),
            ]
            done = run("tail", call, "--json", redis_url=cluster.url)
            heard = [json.loads(line) for line in done.stdout.splitlines()]
            assert [line["n"] for line in heard] == list(range(1, len(heard) + 1))
            assert heard[-1]["body"]["event"] == "closed"
        assert worker.end() == 0, worker.log


def owned(cluster: ValkeyCluster) -> set[int]:
    """The partitions that have an owner."""
    done = run("partitions", "--json", redis_url=cluster.url)
    return {row["partition"] for row in json.loads(done.stdout or "[]") if row["owner"]}


def test_a_clusters_url_is_shown_without_its_password() -> None:
    done = run("config", "show", "--json", redis_url="redis+cluster://me:hush@a:1,b:2")
    assert json.loads(done.stdout)["settings"]["redis_url"]["value"] == "redis+cluster://a:1,b:2"
    assert "hush" not in done.output


def test_a_single_url_for_a_node_of_a_cluster_is_refused_with_what_to_write(
    cluster: ValkeyCluster, tmp_path: Path
) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text("policy: null\n")
    url = f"redis://127.0.0.1:{cluster.nodes[0].port}"
    with Bargein("control", redis_url=url, pipeline=file) as worker:
        assert worker.process.wait(20) != 0
        assert f"redis+cluster://127.0.0.1:{cluster.nodes[0].port}" in worker.log
