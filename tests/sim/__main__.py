"""The simulation from the command line: `python -m tests.sim --seeds 20000`.

Responsible for running seeds on all cores, for telling how far it is, and for a failing seed's smallest trace. Its last
line is `N seeds, N violations`; the exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SHOWN = 5


def main() -> int:
    """The exit status."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Else the order of sets, and with it the run, would differ from process to process.
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.sim", *sys.argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"}
        )
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many (1000)")
    parser.add_argument("--first", type=int, default=0, help="the first one (0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once (one a core)")
    parser.add_argument("--replay", type=int, metavar="SEED", help="one seed, with everything that happens in it")
    parser.add_argument("--only", help="with --replay: the numbers of the plan's items that are done, as in 3,7,9")
    parser.add_argument("--session", help="with --replay: tell of this session only")
    parser.add_argument("--digests", help="only the digests of these runs, as in 3,7,9")
    options = parser.parse_args()
    if options.digests is not None:
        return _print_digests([int(seed) for seed in options.digests.split(",")])
    if options.replay is not None:
        return _replay(options.replay, options.only, options.session)
    return _run_all(options.first, options.seeds, options.jobs)


def _replay(seed: int, only: str | None, session: str | None) -> int:
    from tests.sim.plan import draw  # noqa: PLC0415  not before the hash seed is fixed
    from tests.sim.world import World  # noqa: PLC0415

    plan = draw(seed)
    if only is not None:
        plan = plan.only({int(number) for number in only.split(",") if number})
    print(*plan.items, sep="\n")
    result = World(plan, telling=True).run()
    print(*_about(result.lines, session), sep="\n")
    print(f"{result.ended_s:.2f} s, {result.commands} commands, digest {result.digest:08x}")
    print(*result.violations, sep="\n")
    print(f"1 seeds, {len(result.violations)} violations")
    return 1 if result.violations else 0


def _print_digests(seeds: list[int]) -> int:
    from tests.sim.plan import draw  # noqa: PLC0415
    from tests.sim.world import World  # noqa: PLC0415

    for seed in seeds:
        print(seed, f"{World(draw(seed)).run().digest:08x}")
    return 0


def _run_all(first: int, count: int, jobs: int) -> int:
    from tests.sim.runs import run_portions  # noqa: PLC0415

    began_s = told_s = time.monotonic()
    done, lossy, commands, failed = 0, 0, 0, dict[int, list[tuple[str, str]]]()
    for portion in run_portions(range(first, first + count), jobs):
        for seed, loses, executed, violations in portion:
            done, lossy, commands = done + 1, lossy + loses, commands + executed
            if violations:
                failed[seed] = violations
                print(f"seed {seed}: {violations[0][1]}" + f" (and {len(violations) - 1} more)" * (len(violations) > 1))
        if time.monotonic() - told_s > 5 or done == count:
            told_s = time.monotonic()
            speed = done / (told_s - began_s)
            print(f"{done} of {count} seeds, {speed:.1f} a second, {len(failed)} failed", file=sys.stderr, flush=True)
    for seed in list(failed)[:SHOWN]:
        _tell_smallest(seed, failed[seed][0][0])
    rules = Counter(rule for violations in failed.values() for rule in {rule for rule, _ in violations})
    print(
        f"{commands} commands at the server; in {lossy} of the seeds writes were lost: only liveness is checked there"
    )
    if rules:
        print("broken: " + ", ".join(f"{rule} in {times} seeds" for rule, times in rules.most_common()))
    print(f"{done} seeds, {sum(map(len, failed.values()))} violations")
    return 1 if failed else 0


def _tell_smallest(seed: int, rule: str) -> None:
    from tests.sim.plan import draw  # noqa: PLC0415
    from tests.sim.shrink import shrink  # noqa: PLC0415

    plan, result = shrink(draw(seed), rule)
    print(f"\n--- seed {seed}: the least that still breaks {rule}")
    print(*plan.items, sep="\n")
    sessions = list(plan.sessions)
    print(*_about(result.lines, sessions[0] if len(sessions) == 1 else None), sep="\n")
    print(*result.violations, sep="\n")
    numbers = ",".join(str(item.number) for item in plan.items)
    print(f"again: python -m tests.sim --replay {seed} --only {numbers}\n")


def _about(lines: list[str], session: str | None) -> Iterator[str]:
    """The lines that are about a session, or about none."""
    for line in lines:
        names = re.findall(r"\bs\d+\b", line)
        if session is None or not names or session in names:
            yield line


if __name__ == "__main__":
    sys.exit(main())
