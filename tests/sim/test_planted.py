"""Every checker has fired: a planted bug is found within a bounded number of seeds, by the promise that it breaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sim.planted import BUGS, MOST_SEEDS

PATIENCE_S = 600

pytestmark = [pytest.mark.slow, pytest.mark.timeout(PATIENCE_S)]


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """What the simulation has found of each, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.sim.planted", "--jobs", "2"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(BUGS), done.stderr[-5_000:]
    return {line["bug"]: line for line in lines}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(found: dict[str, dict[str, Any]], bug: Any) -> None:
    outcome = found[bug.name]
    assert outcome["rule"] in bug.rules, f"not within {MOST_SEEDS} seeds: {outcome['what']}"


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_without_the_bug_the_same_seed_is_clean(found: dict[str, dict[str, Any]], bug: Any) -> None:
    assert found[bug.name]["clean"], found[bug.name]
