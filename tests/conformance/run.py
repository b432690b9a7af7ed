"""`python -m tests.conformance.run [FILE] [--core]`: recorded traces on the pure core and on the whole system.

Prints every difference, and last `N traces, N steps, 0 differences`, counted over both; exit status 1 if there are any.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from rich.progress import track

from tests.conformance.core_runner import CoreRun
from tests.conformance.system_runner import SystemRun
from tests.conformance.traces import DEFAULT_TRACES, find_differences, load_traces
from tests.servers import ValkeyServer


def run_on_core(traces: list[dict[str, Any]]) -> tuple[int, list[str]]:
    """How many steps were run, and what differed. A trace ends at its first difference."""
    steps, differences = 0, []
    for trace in traces:
        run = CoreRun(trace["config"])
        for index, recorded in enumerate(trace["steps"]):
            steps += 1
            wrong = find_differences(recorded["expect"], run.run(recorded))
            differences += [f"core, {trace['name']} step {index} ({recorded['do']}): {w}" for w in wrong]
            if wrong:
                break
    return steps, differences


async def run_on_system(url: str, traces: list[dict[str, Any]]) -> tuple[int, list[str]]:
    """As `run_on_core`, on the server at `url`, which is emptied before each trace."""
    steps, differences = 0, []
    shown = sys.stderr.isatty()
    for trace in track(traces, "on the whole system", disable=not shown):
        async with SystemRun(url, trace["config"]) as run:
            for index, recorded in enumerate(trace["steps"]):
                steps += 1
                wrong = find_differences(recorded["expect"], await run.run(recorded))
                differences += [f"system, {trace['name']} step {index} ({recorded['do']}): {w}" for w in wrong]
                if wrong:
                    break
    return steps, differences


def main() -> int:
    parser = argparse.ArgumentParser(description="recorded traces of the reference class")
    parser.add_argument("file", nargs="?", default=DEFAULT_TRACES, help="one JSON object a line, gzipped or not")
    parser.add_argument("--core", action="store_true", help="only on the pure core")
    wanted = parser.parse_args()
    traces = load_traces(wanted.file)
    steps, differences = run_on_core(traces)
    print(f"core: {len(traces)} traces, {steps} steps, {len(differences)} differences", flush=True)
    if not wanted.core:
        with ValkeyServer() as server:
            more, found = asyncio.run(run_on_system(server.url, traces))
        print(f"system: {len(traces)} traces, {more} steps, {len(found)} differences")
        steps, differences = steps + more, differences + found
    for difference in differences:
        print(difference)
    print(f"{len(traces)} traces, {steps} steps, {len(differences)} differences")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
