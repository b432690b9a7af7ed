"""What goes wrong in a run, done when the plan says so.

Responsible for the processes, the network and the server; engines have their troubles by themselves. Leaves drawing
faults to `plan.py`. Everything is over by `CALM_S`: who was killed comes back, who was paused goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from control.store import keys
from control.store.commits import decode_session
from control.store.keys import PartitionKeys, partition_of
from control.wire.orders import DismissOrder, encode_order
from tests.sim.client import Client
from tests.sim.loop import STARTS_S
from tests.sim.network import Cut, role_of
from tests.sim.plan import CALM_S
from tests.sim.values import Failure

if TYPE_CHECKING:
    from tests.sim.plan import Item
    from tests.sim.world import World

LOSS_S = 1.0
SLOWEST_DEATH_S = 0.5
BACK_S = 0.2
OPERATOR = "operator"


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

    # Operators.

    def _dismiss(self, item: Item) -> None:
        self._world.start(self._order_end(item))
        if item.more["again_s"] is not None:
            self._at(self._world.loop.now_s + item.more["again_s"], lambda: self._world.start(self._order_end(item)))

    async def _order_end(self, item: Item) -> None:
        """End the life that the session has now, or its former one."""
        world, name = self._world, item.who
        known = PartitionKeys(partition_of(name, world.plan.pipeline.partitions))
        state = (world.server.store.peek(known.sessions.encode()) or {}).get(name.encode())
        incarnation = 0 if state is None else decode_session(state, None).fence.incarnation
        incarnation = max(0, incarnation - item.more["back"])
        world.traffic.accounts[name].dismissed.add(incarnation)
        order = encode_order(DismissOrder(name, incarnation, "operator_close"))
        with contextlib.suppress(ConnectionError, Failure):
            await Client(world, OPERATOR).call(b"XADD", known.orders.encode(), b"*", b"b", order)

    def _drain(self, item: Item) -> None:
        roles = self._world.life_roles
        for raw in self._world.server.store.peek(keys.STAGES.encode()) or {}:
            if roles.get(raw.decode()) == item.who:
                self._pending += 1
                self._world.start(self._empty(raw.decode(), self._end_s(item)))

    async def _empty(self, worker_id: str, until_s: float) -> None:
        client, name = Client(self._world, OPERATOR), keys.worker_drain(worker_id).encode()
        with contextlib.suppress(ConnectionError, Failure):
            await client.call(b"SET", name, b"1")
        await asyncio.sleep(until_s - self._world.loop.now_s)
        while True:
            with contextlib.suppress(ConnectionError, Failure):
                await client.call(b"UNLINK", name)
                break
            await asyncio.sleep(BACK_S)
        self._pending -= 1

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
        self._at(self._end_s(item), self._make_room)

    def _make_room(self) -> None:
        self._world.server.full = False

    def _forget_scripts(self, item: Item) -> None:
        self._world.server.forget_scripts()

    def _flush(self, item: Item) -> None:
        self._world.lost_writes = True
        self._world.server.store.run([b"FLUSHALL"])
        self._world.server.store.log.clear()
        self._world.watch.forget()
