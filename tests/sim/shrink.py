"""Makes a failing run small: leaves out faults, then sessions, then single commands, as long as it still fails.

Responsible for choosing what to leave out. Leaves running to `world.py`. Pure but for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.world import Result, World

if TYPE_CHECKING:
    from tests.sim.plan import Item, Plan

MOST_RUNS = 120


def shrink(plan: Plan, rule: str) -> tuple[Plan, Result]:
    """The smallest plan that was found to break `rule`, with its run, told in full."""
    return _Shrinking(rule).shrink(plan)


class _Shrinking:
    def __init__(self, rule: str) -> None:
        self._rule = rule
        self._runs = 0

    def shrink(self, plan: Plan) -> tuple[Plan, Result]:
        plan = self._drop(plan, [[item] for item in plan.faults])
        plan = self._drop(plan, list(plan.sessions.values()))
        size = max((len(items) for items in plan.sessions.values()), default=0) // 2
        while size >= 1:
            plan = self._drop(plan, [part for items in plan.sessions.values() for part in _parts(items, size)])
            size //= 2
        plan = self._drop(plan, [[item] for item in plan.faults])
        return plan, World(plan, telling=True).run()

    def _drop(self, plan: Plan, groups: list[list[Item]]) -> Plan:
        """Leave out each group that isn't needed."""
        for group in reversed(groups):
            gone = {item.number for item in group}
            smaller = plan.only({item.number for item in plan.items} - gone)
            if smaller.items and self._fails(smaller):
                plan = smaller
        return plan

    def _fails(self, plan: Plan) -> bool:
        if self._runs >= MOST_RUNS:
            return False
        self._runs += 1
        return any(violation.rule == self._rule for violation in World(plan).run().violations)


def _parts(items: list[Item], size: int) -> list[list[Item]]:
    return [items[i : i + size] for i in range(0, len(items), size)]
