"""A minute of chaos, as `make chaos` runs it. Leave it out with -m "not chaos"."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest

from tests.chaos.processes import ROOT

SECONDS = 60
ENDS_S = 240.0
SHOWN_LINES = 150


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(ENDS_S + 30)
def test_a_minute_of_faults_breaks_no_promise() -> None:
    seed = int(time.time()) % 1_000_000
    print(f"seed {seed}: python -m tests.chaos --seconds {SECONDS} --seed {seed}")
    ended = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--seconds", str(SECONDS), "--seed", str(seed)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "clients" / "python")))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=ENDS_S,
        check=False,
    )
    lines = ended.stdout.splitlines()
    shown = "\n".join(lines[-SHOWN_LINES:])
    assert ended.returncode == 0, shown
    last = re.fullmatch(r"(\d+) faults, 0 violations", lines[-1])
    assert last is not None, shown
    assert int(last[1]) >= SECONDS // 4, shown
