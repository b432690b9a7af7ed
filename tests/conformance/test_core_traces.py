"""The recorded runs of the reference class, on the pure core."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.conformance.core_runner import CoreRun
from tests.conformance.run import run_on_core
from tests.conformance.traces import DEFAULT_TRACES, find_differences, load_traces


def test_the_recorded_traces_show_no_difference() -> None:
    traces = load_traces(DEFAULT_TRACES)
    steps, differences = run_on_core(traces)
    assert differences == []
    assert (len(traces), steps) == (300, 9305)


def test_a_file_may_be_gzipped_or_not(tmp_path: Path) -> None:
    few = load_traces(DEFAULT_TRACES)[:3]
    plain = tmp_path / "few.jsonl"
    plain.write_text("\n".join(json.dumps(trace) for trace in few))
    packed = tmp_path / "few.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert load_traces(plain) == load_traces(packed) == few


def test_a_run_that_differs_is_left_at_its_first_difference() -> None:
    trace = next(t for t in load_traces(DEFAULT_TRACES) if t["steps"][0]["expect"]["sessions"])
    session = next(iter(trace["steps"][0]["expect"]["sessions"].values()))
    session["lease_generation"] += 1
    steps, (difference,) = run_on_core([trace])
    assert steps == 1
    assert f"{trace['name']} step 0 (command): sessions: " in difference


@pytest.mark.parametrize("part", ["results", "lifecycle", "submitted", "cleaned", "sessions"])
def test_every_part_of_what_was_seen_is_compared(part: str) -> None:
    for trace in load_traces(DEFAULT_TRACES):
        run = CoreRun(trace["config"])
        for recorded in trace["steps"]:
            seen = run.run(recorded)
            expect = recorded["expect"]
            if not expect[part]:
                continue
            without = {**expect, part: {} if part == "sessions" else []}
            assert [wrong.split(":")[0] for wrong in find_differences(without, seen)] == [part]
            return
    raise AssertionError(f"no trace shows {part}")
