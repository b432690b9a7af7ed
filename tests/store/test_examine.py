"""The doctor's judgement, finding by finding."""

from __future__ import annotations

from typing import Any

import pytest

from control.store.examine import (
    Finding,
    judge_brakes,
    judge_config,
    judge_controls,
    judge_info,
    judge_stages,
    judge_work,
)
from control.store.inspect import BrakeRow, CleanupRow, ControlRow, PartitionRow, StageRow, StoredConfig

INFO: dict[str, Any] = {
    "redis_version": "7.2.4",
    "maxmemory_policy": "noeviction",
    "maxmemory": 1 << 30,
    "used_memory": 1 << 28,
    "role": "master",
    "aof_enabled": 1,
    "tcp_port": 7001,
}


def info(**changed: Any) -> dict[str, Finding]:
    return {each.check: each for each in judge_info({**INFO, **changed}, "redis://x", several=False)}


def test_a_fit_server_has_nothing_to_be_done() -> None:
    assert {each.verdict for each in info().values()} == {"ok"}
    assert not any(each.advice for each in info().values())
    assert judge_info(INFO, "redis://x", several=True)[0].check == "server of 7001"


@pytest.mark.parametrize(
    ("changed", "check", "verdict", "says"),
    [
        ({"redis_version": "6.2.0"}, "server", "bad", "7.0 or later"),
        ({"maxmemory_policy": "allkeys-lru"}, "server", "bad", "CONFIG SET maxmemory-policy noeviction"),
        ({"role": "slave"}, "role", "bad", "takes no writes"),
        ({"maxmemory": 0}, "memory", "warn", "set maxmemory"),
        ({"used_memory": int(0.85 * (1 << 30))}, "memory", "warn", "raise maxmemory"),
        ({"used_memory": int(0.97 * (1 << 30))}, "memory", "bad", "raise maxmemory"),
        ({"aof_enabled": 0}, "persistence", "bad", "appendonly yes"),
        ({"aof_last_write_status": "err"}, "persistence", "bad", "disk full"),
        ({"rdb_last_bgsave_status": "err"}, "persistence", "bad", "snapshot failed"),
    ],
)
def test_a_server_that_is_not_is_told_what_to_do(changed: dict[str, Any], check: str, verdict: str, says: str) -> None:
    found = info(**changed)
    assert found[check].verdict == verdict
    assert says in f"{found[check].found} {found[check].advice}"
    assert found[check].advice
    assert {each.verdict for name, each in found.items() if name != check} == {"ok"}


def test_what_is_stored_has_to_be_what_this_version_and_this_file_say() -> None:
    stored = StoredConfig(protocol=1, partitions=16, layout=1)
    assert judge_config(stored, None).verdict == judge_config(stored, 16).verdict == "ok"
    assert "partitions is 16 there and 8 here" in judge_config(stored, 8).found
    assert judge_config(StoredConfig(protocol=1, partitions=16, layout=2), None).verdict == "bad"
    assert judge_config(None, 16).verdict == "warn"


def partition(number: int, **more: Any) -> PartitionRow:
    known: dict[str, Any] = dict.fromkeys(
        ("token", "revision", "commands", "acks", "orders", "oldest_ms", "dead_letters", "sessions", "cleanups")
    )
    known |= {"owner": "control-a", "lease_left_ms": 900, **more}
    return PartitionRow(partition=number, **known)


def test_every_partition_needs_an_owner_that_lives() -> None:
    alive = ControlRow(worker_id="control-a", alive_for_ms=900, partitions=(0, 1))
    gone = ControlRow(worker_id="control-b", alive_for_ms=None, partitions=())
    assert [each.verdict for each in judge_controls([alive, gone], [partition(0)])] == ["ok", "ok"]
    assert "1 alive" in judge_controls([alive, gone], [partition(0)])[0].found
    (none,) = judge_controls([gone], [partition(0)])
    assert none.verdict == "bad"
    for row in (partition(1, owner=None), partition(1, lease_left_ms=-5)):
        _, found = judge_controls([alive], [partition(0), row])
        assert (found.verdict, found.found) == ("bad", "1 have no owner, 1 first")


def life(stage: str, **more: Any) -> StageRow:
    known: dict[str, Any] = {"stage_id": 0, "engine": "parrot", "state": "live", "slots_used": 1, "capacity": 10}
    known |= {"beats": 1, "last_beat_ms": 100, "age_ms": 1000, "load": {}, "counters": {}, **more}
    return StageRow(worker_id=f"{stage}-1", stage=stage, **known)


def test_every_stage_needs_a_live_worker_with_room() -> None:
    ok, bad = judge_stages([life("ear"), life("mouth", state="draining"), life("ear", state="dead")])
    assert (ok.verdict, ok.found) == ("ok", "1 live, 1 of 10 slots taken")
    assert (bad.check, bad.verdict) == ("stage mouth", "bad")
    assert "bargein stage --stage mouth" in bad.advice
    (full,) = judge_stages([life("ear", slots_used=10)])
    assert (full.verdict, full.found) == ("warn", "1 live, 10 of 10 slots taken")
    (silent,) = judge_stages([life("ear", last_beat_ms=9_000)])
    assert "ear-1 is silent" in silent.found
    assert judge_stages([])[0].verdict == "warn"


def test_what_waits_for_long_is_bad_and_what_was_set_aside_worth_a_look() -> None:
    assert [each.verdict for each in judge_work([partition(0)], [])] == ["ok", "ok", "ok"]
    cleanup: dict[str, Any] = dict.fromkeys(("number", "partition", "attempts", "retry_in_ms", "owed"), 1)
    cleanup |= {"session_id": "s", "kind": "cancel", "epochs": (0,), "waits_for": ("ear-1",), "failed": True}
    row = partition(0, commands=3, acks=1, oldest_ms=20_000, dead_letters=2)
    backlog, cleaning, dead = judge_work([row], [CleanupRow(age_ms=61_000, **cleanup)])
    assert (backlog.verdict, backlog.found) == ("bad", "4 entries, the oldest 20.0 s old")
    assert (cleaning.verdict, cleaning.found) == ("bad", "s has waited 61 s for ear-1")
    assert dead.verdict == "warn"
    row = partition(0, commands=3, oldest_ms=900)
    young = CleanupRow(age_ms=900, **cleanup)
    assert {each.verdict for each in judge_work([row], [young])} == {"ok"}
    assert judge_work([row], [young])[1].found == "1 pending"
    assert judge_work([row], [young], more=True)[1].found == "more than 1 pending"


def test_many_silent_workers_are_the_brakes_and_one_alone_is_not() -> None:
    def brake(silent: int, workers: int, released_ms: int | None = None) -> BrakeRow:
        return BrakeRow(stage="ear", workers=workers, silent=silent, longest_silence_ms=9_000, released_ms=released_ms)

    assert judge_brakes([brake(1, 1), brake(2, 9), brake(3, 3, released_ms=5)]) == []
    (found,) = judge_brakes([brake(2, 5)])
    assert found.verdict == "bad"
