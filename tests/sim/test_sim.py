"""The simulation itself, as `make check` wants it: many seeds without a violation, and the same seed the same run.

It runs in processes of its own, since the order of sets has to be fixed from the start (PYTHONHASHSEED).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SEEDS = 2000
"""What two cores do in about four minutes. `make sim` runs more."""
PATIENCE_S = 1500


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.sim", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_S)
def test_no_seed_breaks_a_promise() -> None:
    done = _run("--seeds", str(SEEDS), "--jobs", "2")
    assert done.stdout.rstrip().endswith(f"\n{SEEDS} seeds, 0 violations"), done.stdout[-20_000:] + done.stderr[-5_000:]
    assert done.returncode == 0


def test_the_same_seed_is_the_same_run() -> None:
    first, second = _run("--replay", "7"), _run("--replay", "7")
    assert "seeds, 0 violations" in first.stdout, first.stdout[-5_000:] + first.stderr[-5_000:]
    assert first.stdout == second.stdout


def test_a_run_does_not_depend_on_what_ran_before_it_in_its_process() -> None:
    digests = [
        dict(re.findall(r"(\d+) ([0-9a-f]{8})", _run("--digests", seeds).stdout)) for seeds in ("3,4,5", "5,4,3")
    ]
    assert len(digests[0]) == 3
    assert digests[0] == digests[1]


def test_a_part_of_a_plan_can_be_replayed() -> None:
    done = _run("--replay", "7", "--only", "1,2,3")
    items = [line for line in done.stdout.splitlines() if line.startswith("#")]
    assert [line.split()[0] for line in items] == ["#1", "#2", "#3"]
    assert "seeds, 0 violations" in done.stdout
