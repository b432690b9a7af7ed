"""`python -m tests.conformance.run [FILE]`: the recorded traces on the pure core and on the whole system.

Prints every difference, and last `N traces, N steps, 0 differences`; exit status 1 if there are any.
"""

from __future__ import annotations

import sys
from typing import Any

from tests.conformance.core_runner import CoreRun
from tests.conformance.traces import DEFAULT_TRACES, find_differences, load_traces


def run_on_core(traces: list[dict[str, Any]]) -> tuple[int, list[str]]:
    """How many steps were run, and what differed."""
    steps, differences = 0, []
    for trace in traces:
        run = CoreRun(trace["config"])
        for index, recorded in enumerate(trace["steps"]):
            steps += 1
            wrong = find_differences(recorded["expect"], run.run(recorded))
            differences += [f"{trace['name']} step {index} ({recorded['do']}): {w}" for w in wrong]
            if wrong:
                break
    return steps, differences


def main(path: str | None = None) -> int:
    traces = load_traces(path or DEFAULT_TRACES)
    steps, differences = run_on_core(traces)
    for difference in differences:
        print(difference)
    print(f"{len(traces)} traces, {steps} steps, {len(differences)} differences")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
