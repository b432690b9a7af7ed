"""Many seeds on several cores.

Responsible for dealing them out. Leaves what a seed means to `plan.py`, telling of it to the command line.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TYPE_CHECKING

from tests.sim.plan import draw
from tests.sim.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator

PORTION = 10

Outcome = tuple[int, bool, int, list[tuple[str, str]]]
"""Seed, whether writes were lost, how many commands, and the violations: rule and text."""


def run_portions(seeds: range, jobs: int) -> Iterator[list[Outcome]]:
    """Their outcomes, some at a time, in no order."""
    portions = [seeds[i : i + PORTION] for i in range(0, len(seeds), PORTION)]
    if jobs <= 1:
        yield from map(run_some, portions)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from (done.result() for done in as_completed([pool.submit(run_some, portion) for portion in portions]))


def run_some(seeds: range) -> list[Outcome]:
    """One after the other."""
    found: list[Outcome] = []
    for seed in seeds:
        try:
            result = World(draw(seed)).run()
        except Exception as error:
            raise RuntimeError(f"seed {seed}") from error
        violations = [(violation.rule, str(violation)) for violation in result.violations]
        found.append((seed, result.loses, result.commands, violations))
    return found
