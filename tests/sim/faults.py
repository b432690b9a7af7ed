"""What goes wrong in a run, done when the plan says so.

Responsible for the processes, the network and the server; engines have their troubles by themselves. Leaves drawing
faults to `plan.py`. Everything is over by `CALM_S`: who was killed comes back, who was paused goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.sim.loop import STARTS_S
from tests.sim.network import Cut, role_of
from tests.sim.plan import CALM_S

if TYPE_CHECKING:
    from tests.sim.plan import Item
    from tests.sim.world import World

LOSS_S = 1.0
SLOWEST_DEATH_S = 0.5
BACK_S = 0.2


class Faults:
    """The faults of a world's plan."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pending = 0
        self._back_s: dict[str, float] = {}
        self._done: list[Item] = []

    @property
    def are_pending(self) -> bool:
        """Whether one is still to come, or has not ended."""
        return self._pending > 0

    @property
    def are_over(self) -> bool:
        world = self._world
        return (
            not self._pending and all(not p.dead and not p.paused for p in world.processes.values()) and world.server.up
        )

    def back_s(self, role: str) -> float:
        """How long it takes until the role's next process is there."""
        return self._back_s.pop(role, BACK_S)

    def schedule(self) -> None:
        for item in self._world.plan.faults:
            work = getattr(self, f"_{item.kind}", None)
            if work is not None:
                self._at(STARTS_S + item.at_s, self._run, item, work)
            if item.more.get("loses"):
                self._at(STARTS_S + max(0.0, item.at_s - LOSS_S), self._take_snapshot, item)

    def _run(self, item: Item, work: Any) -> None:
        self._world.trace.say(f"fault {item}")
        work(item)

    def _at(self, when_s: float, work: Any, *args: Any) -> None:
        self._pending += 1

        def do() -> None:
            self._pending -= 1
            work(*args)

        self._world.loop.call_at(when_s, do, context=self._world.server.context)

    def _end_s(self, item: Item) -> float:
        return STARTS_S + min(CALM_S, item.at_s + item.more["for_s"])

    # Processes.

    def _kill(self, item: Item) -> None:
        process = self._world.processes[item.who]
        if process.dead:
            return
        process.dies_at = process.steps + item.more["steps"]
        self._back_s[item.who] = item.more["back_s"]
        self._at(self._world.loop.now_s + SLOWEST_DEATH_S, process.kill)

    def _pause(self, item: Item) -> None:
        process = self._world.processes[item.who]
        process.pause()
        self._at(self._end_s(item), process.go_on)

    def _leave(self, item: Item) -> None:
        world, role = self._world, item.who
        worker, process = world.workers.get(role), world.processes[role]
        if worker is None or process.dead:
            return
        self._back_s[role] = item.more["back_s"]
        stop = worker.stop if role.startswith("control") else lambda: worker.request_stop(item.more["grace_s"])
        world.loop.call_soon(stop, context=process.context)

    def _join(self, item: Item) -> None:
        self._world.begin(f"control-{10 + item.number}")

    # The network.

    def _cut(self, item: Item) -> None:
        more = item.more
        sha = next((sha for sha, name in self._world.server.sha_names.items() if name == more["script"]), b"")
        cut = Cut(item.who, sha, more["nth"], more["mode"], more["delay_s"])
        self._world.network.cuts.append(cut)
        if item.who:
            self._back_s.setdefault(item.who, more["back_s"])
        self._at(STARTS_S + CALM_S, self._uncut, cut)

    def _uncut(self, cut: Cut) -> None:
        if cut in self._world.network.cuts:
            self._world.network.cuts.remove(cut)

    def _stall(self, item: Item) -> None:
        self._world.network.stalled_until_s[item.who] = self._end_s(item)

    def _isolate(self, item: Item) -> None:
        process = self._world.processes[item.who]
        self._world.network.isolate(process, self._end_s(item))
        assert role_of(process) == item.who

    # The server.

    def _take_snapshot(self, item: Item) -> None:
        item.more["state"] = self._world.server.store.snapshot()

    def _server_restart(self, item: Item) -> None:
        server = self._world.server
        if not server.up:
            return
        server.go_down()
        state = item.more.pop("state", None)
        if state is not None:
            self._world.lost_writes = True
            self._world.watch.forget()
        self._at(self._end_s(item), server.come_up, state)

    def _full(self, item: Item) -> None:
        self._world.server.full = True
        self._at(self._end_s(item), self._drain)

    def _drain(self) -> None:
        self._world.server.full = False

    def _forget_scripts(self, item: Item) -> None:
        self._world.server.forget_scripts()

    def _flush(self, item: Item) -> None:
        self._world.lost_writes = True
        self._world.server.store.run([b"FLUSHALL"])
        self._world.server.store.log.clear()
        self._world.watch.forget()
