"""The choice of a route: free slots, then the least loaded, and nobody who has said that there is no room."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from bargein_client import AsyncBargein, ResourceExhaustedError
from stages.pipeline import parse_pipeline
from tests.system import RunningSystem
from tests.workers.control_bed import until
from tests.workers.scripted import ScriptedEngine
from workers.placement import Candidate, Directory


def directory(*candidates: Candidate) -> Directory:
    made = Directory(1)
    made.replace([list(candidates)])
    return made


def test_the_emptier_of_two_is_chosen_and_counts_what_it_was_sent() -> None:
    chosen = directory(Candidate("a", 4, 2), Candidate("b", 4, 1))
    assert [chosen.choose_route() for _ in range(5)] == [("b",), ("a",), ("b",), ("a",), ("b",)]
    assert chosen.choose_route() is None
    assert not chosen.has_room


def test_a_large_worker_takes_more_than_a_small_one() -> None:
    chosen = directory(Candidate("large", 60, 0), Candidate("small", 20, 0))
    shares = Counter(chosen.choose_route() for _ in range(40))
    assert shares == {("large",): 30, ("small",): 10}


def test_an_engine_that_is_busy_is_chosen_after_one_that_is_not() -> None:
    chosen = directory(Candidate("busy", 8, 0, utilisation=0.9), Candidate("idle", 8, 3))
    assert [chosen.choose_route() for _ in range(4)] == [("idle",)] * 4


def test_input_that_waits_decides_between_equals() -> None:
    assert directory(Candidate("a", 8, 1, waiting=3), Candidate("b", 8, 1)).choose_route() == ("b",)


def test_opens_within_one_heartbeat_are_spread_over_engines_that_were_equally_idle() -> None:
    chosen = directory(*(Candidate(name, 10, 0, utilisation=0.2) for name in "abc"))
    assert Counter(chosen.choose_route() for _ in range(9)) == {("a",): 3, ("b",): 3, ("c",): 3}


def test_whoever_has_no_room_is_not_chosen_whatever_slots_are_free() -> None:
    chosen = directory(Candidate("full", 8, 0, accepts=False), Candidate("other", 1, 0))
    assert chosen.choose_route() == ("other",)
    assert chosen.choose_route() is None


def test_a_freed_slot_may_be_chosen_again_and_a_refused_one_not_before_the_next_snapshot() -> None:
    chosen = directory(Candidate("a", 1, 1))
    assert chosen.choose_route() is None
    chosen.note_freed("a")
    assert chosen.choose_route() == ("a",)
    chosen.note_freed("a")
    chosen.note_full("a")
    assert chosen.choose_route() is None


async def test_a_session_is_refused_while_no_engine_has_room_and_placed_once_one_has(redis_url: str) -> None:
    content: dict[str, Any] = {
        "partitions": 2,
        "control": {"heartbeat_s": 2.0, "heartbeat_interval_s": 0.05},
        "stages": [{"name": "ear", "engine": "tests.workers.scripted:ScriptedEngine", "capacity": 4}],
    }
    pipeline = parse_pipeline(content, "test")
    async with RunningSystem(redis_url, pipeline) as system, AsyncBargein(redis_url) as client:
        engine = system.stages[0]._engine
        assert isinstance(engine, ScriptedEngine)
        session = await client.open(input_modes=["append_tokens"])
        engine.accepts = False
        await until(lambda: not system.controls[0].directory.has_room)
        with pytest.raises(ResourceExhaustedError) as refused:
            await client.open(input_modes=["append_tokens"])
        assert refused.value.retryable
        assert (await session.append([1], mode="append_tokens", final=True)).ok, "who is there goes on"
        engine.accepts = True
        await until(lambda: system.controls[0].directory.has_room)
        await (await client.open(input_modes=["append_tokens"])).close()
