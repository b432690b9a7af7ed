"""The whole system on a real cluster: slots that move, masters that die or hang, while calls go on (S58, I11)."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any, cast

import hiredis
import pytest

from control.core import commands as c
from control.store import keys
from control.store.keys import PartitionKeys
from control.store.scripts import script
from stages.pipeline import Pipeline
from tests.cluster.calls import PARTITIONS, Traffic, judge, traffic
from tests.clusters import ValkeyCluster, until
from tests.servers import RealServer
from tests.store.desk import CAPABLE, HALF_EVENTS_BYTES, Desk, Store, command
from tests.system import RunningSystem

pytestmark = pytest.mark.cluster


def served_by(cluster: ValkeyCluster, node: RealServer) -> list[int]:
    """The partitions on a node."""
    return [number for number in range(PARTITIONS) if cluster.master_of(PartitionKeys(number).owner) is node]


def all_wrong(cluster: ValkeyCluster, under_way: Traffic) -> list[str]:
    """What is wrong with any call."""
    found: list[str] = []
    for call in under_way.calls:
        found += judge(call, cluster.client(cluster.master_of(call.keys.owner)))
    return found


def lost_lives(system: RunningSystem) -> dict[str, tuple[str, ...]]:
    """The stage workers that anybody has given up."""
    return {name: sessions for control in system.controls for name, sessions in control.observer.lost.items()}


async def test_calls_on_every_partition_are_served(breakable: ValkeyCluster) -> None:
    async with RunningSystem(breakable.url, controls=2) as system:
        assert len({breakable.master_of(PartitionKeys(p).owner).port for p in range(PARTITIONS)}) == 3
        async with traffic(breakable.url, count=2) as under_way:
            await under_way.until_all_replied(8)
        assert all_wrong(breakable, under_way) == []
        assert lost_lives(system) == {}


@pytest.mark.parametrize("at_once", [False, True], ids=["key by key", "at once"])
async def test_s58_slots_move_while_calls_go_on(breakable: ValkeyCluster, at_once: bool) -> None:
    """Key by key, a partition has keys on both nodes half way, and stands still; then its calls go on."""
    standing_s: list[float] = []
    async with RunningSystem(breakable.url, controls=2), traffic(breakable.url) as under_way:
        for number in range(0, PARTITIONS, 3):
            key = PartitionKeys(number).owner
            to = breakable.another(key)
            began_s = time.monotonic()
            if at_once:
                await asyncio.to_thread(breakable.move_at_once, key, to)
            else:
                await asyncio.to_thread(breakable.move, key, to, lambda: time.sleep(0.3))
            elsewhere = under_way.replies_since(began_s)
            others = [p for p in range(PARTITIONS) if p != number]
            assert sum(elsewhere[call.session_id] for call in under_way.of(others)) > 0
            assert breakable.master_of(key) is to
            await under_way.until_all_replied()
            (call,) = under_way.of([number])
            standing_s.append(call.longest_s(since_s=began_s - 1))
    print(f"longest without a reply: {', '.join(f'{each:.2f}' for each in standing_s)} s")
    assert all_wrong(breakable, under_way) == []


@pytest.mark.parametrize("key", [PartitionKeys(3).owner, keys.CONTROLS, keys.STAGES])
async def test_s58_a_master_dies_and_its_replica_goes_on(breakable: ValkeyCluster, key: str) -> None:
    """Calls on the other masters don't notice (I11); nobody's session is lost, nor is anything that was answered."""
    async with RunningSystem(breakable.url, controls=2) as system, traffic(breakable.url) as under_way:
        held = {number: token for control in system.controls for number, token in control.ownership.held.items()}
        assert len(held) == PARTITIONS
        victim = breakable.master_of(key)
        there = served_by(breakable, victim)
        elsewhere = [number for number in range(PARTITIONS) if number not in there]
        await asyncio.to_thread(breakable.kill_in_step, victim)
        died_s = time.monotonic()
        taking_over = asyncio.create_task(asyncio.to_thread(breakable.until_taken_over, key, victim))
        # While nobody serves it, the others are served, again and again.
        await asyncio.sleep(0.5)
        looked_s = time.monotonic()
        await taking_over
        meanwhile = under_way.replies_since(looked_s)
        for call in under_way.of(elsewhere):
            assert meanwhile[call.session_id] >= 4, f"{call.session_id} waited for a master that isn't its own"
        for call in under_way.of(there):
            assert meanwhile[call.session_id] <= 1
        still = {number: token for control in system.controls for number, token in control.ownership.held.items()}
        assert {number: still.get(number) for number in elsewhere} == {number: held[number] for number in elsewhere}
        await under_way.until_all_replied()
        print(f"{key}: all served again {time.monotonic() - died_s:.1f} s after the kill")
        assert lost_lives(system) == {}
    assert all_wrong(breakable, under_way) == []


async def test_s58_a_late_commit_on_a_master_that_hung_has_no_effect(breakable: ValkeyCluster) -> None:
    """It comes back as a replica, and what it has taken meanwhile is gone: nobody was told of it."""
    known = PartitionKeys(3)
    async with RunningSystem(breakable.url, controls=2) as system, traffic(breakable.url) as under_way:
        victim = breakable.master_of(known.owner)
        there = served_by(breakable, victim)
        replica = breakable.client(breakable.replica_of(victim))
        os.kill(victim.pid, signal.SIGSTOP)
        stopped_s = time.monotonic()
        # As good as any other commit of its owner; it waits in the socket of a master that doesn't run.
        reader, writer = await asyncio.open_connection("127.0.0.1", victim.port)
        writer.write(hiredis.pack_command(late_commit(replica, known)))
        await writer.drain()
        await asyncio.to_thread(breakable.until_taken_over, known.owner, victim)
        took_s = time.monotonic() - stopped_s
        await under_way.until_all_replied()
        served_s = time.monotonic() - stopped_s
        os.kill(victim.pid, signal.SIGCONT)
        answer = await reader.read(200)
        writer.close()
        await asyncio.to_thread(until, lambda: role_of(breakable, victim) == "slave", "it is a replica")
        await asyncio.to_thread(breakable.until_whole)
        print(f"taken over after {took_s:.1f} s, all served after {served_s:.1f} s; the late commit: {answer[:80]!r}")
        assert not breakable.client(breakable.master_of(known.owner)).hexists(known.sessions, "late")
        on_replica = breakable.client(victim)
        on_replica.execute_command("READONLY")
        assert not on_replica.hexists(known.sessions, "late")
        await under_way.until_all_replied()
        assert lost_lives(system) == {}
        assert there
    assert all_wrong(breakable, under_way) == []


def late_commit(replica: Any, known: PartitionKeys) -> tuple[Any, ...]:
    """A commit that opens a session `late`, decided on what a replica holds."""
    replica.execute_command("READONLY")
    until(lambda: len({replica.hget(known.owner, "revision") for _ in range(20)}) == 1, "the replica has everything")
    token, revision = replica.hmget(known.owner, "token", "revision")
    desk = Desk(cast("Store", None), known, token.decode(), int(revision))
    desk.decide(command(c.Open, "late", capabilities=CAPABLE), "late")
    names, argv = desk.batch.arguments(desk.token, desk.revision, HALF_EVENTS_BYTES)
    return "EVAL", script("commit").text, len(names), *names, *argv


def role_of(cluster: ValkeyCluster, node: RealServer) -> str:
    found: Any = cluster.client(node).info("replication")
    return found["role"]


async def test_i11_partitions_whose_nodes_are_all_gone_hold_up_no_other(breakable: ValkeyCluster) -> None:
    """A master and its replica are away for longer than a heartbeat may stand still: nobody is given up for that."""
    pipeline = Pipeline.example()
    control = pipeline.control.model_copy(update={"heartbeat_s": 2.0, "heartbeat_interval_s": 0.5})
    pipeline = pipeline.model_copy(update={"control": control})
    async with RunningSystem(breakable.url, pipeline, controls=2) as system, traffic(breakable.url) as under_way:
        index = {breakable.master_of(key) for key in (keys.STAGES, keys.CONTROLS, keys.OWNERSHIP)}
        for stage in system.stages:
            index.add(breakable.master_of(keys.worker_state(await stage.wait_ready())))
        victim = next((node for node in breakable.masters() if node not in index), breakable.masters()[0])
        there = served_by(breakable, victim)
        replica = breakable.replica_of(victim)
        replica.kill()
        victim.stop()  # in order, so that its file holds all that was acknowledged
        gone_s = time.monotonic()
        await asyncio.sleep(3 * control.heartbeat_s)
        meanwhile = under_way.replies_since(gone_s)
        for call in under_way.calls:
            if call.keys.partition not in there:
                assert meanwhile[call.session_id] >= 8, f"{call.session_id} waited for a master that isn't its own"
        assert lost_lives(system) == {}
        await asyncio.to_thread(breakable.mend)
        await under_way.until_all_replied()
        assert lost_lives(system) == {}
