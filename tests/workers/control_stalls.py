"""Control workers and links that stop, or lose something, at a moment that a test chooses."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.exceptions import ConnectionError as Lost

from control.store.link import Link
from control.store.scripts import script
from workers.control import ControlWorker
from workers.owner import Owner


class GatedLink(Link):
    """A link on which nothing goes out while the gate is closed; `held` is told its name."""

    def __init__(self, pool: Any, gate: asyncio.Event, name: str, held: list[str]) -> None:
        super().__init__(pool)
        self._gate, self._name, self._held = gate, name, held

    async def try_all(self, commands: Any) -> list[Any]:
        if not self._gate.is_set():
            self._held.append(self._name)
            await self._gate.wait()
        return await super().try_all(commands)


class Stalled(ControlWorker):
    """A worker that can be made to stop where it stands: before it commits, before it speaks to slots or of leases."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, owner=StalledOwner, **more)
        self.gate = asyncio.Event()
        self.gate.set()
        self.held: list[str] = []
        self.ownership._link = GatedLink(self.access.pool, self.gate, "leases", [])
        for group in self.ownership._groups:
            group.link = GatedLink(self.access.pool, self.gate, "leases", [])
        self._slots = self.desk.link = GatedLink(self.access.pool, self.gate, "slots", self.held)
        for owner in self.owners:
            assert isinstance(owner, StalledOwner)
            owner.gate, owner.held = self.gate, self.held


class StalledOwner(Owner):
    """See `Stalled`."""

    gate: asyncio.Event
    held: list[str]

    async def _commit(self, batches: Any, portions: Any, others: Any) -> None:
        if batches and not self.gate.is_set():
            self.held.append("commit")
            await self.gate.wait()
        await super()._commit(batches, portions, others)


class Gated(ControlWorker):
    """A worker whose reads wait for the gate, and whose next commit something may happen to."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, owner=GatedOwner, **more)
        self.gate = asyncio.Event()
        self.gate.set()
        self.before_commit: Any = None
        for owner in self.owners:
            assert isinstance(owner, GatedOwner)
            owner.worker = self


class GatedOwner(Owner):
    """See `Gated`."""

    worker: Gated

    async def _read(self) -> Any:
        await self.worker.gate.wait()
        return await super()._read()

    async def _commit(self, batches: Any, portions: Any, others: Any) -> None:
        if batches and self.worker.before_commit is not None:
            happen, self.worker.before_commit = self.worker.before_commit, None
            await happen()
        await super()._commit(batches, portions, others)


class Lossy(Link):
    """A link that loses what it is told to: commands that never arrive, or answers that never come back.

    `plan`: what happens to the next writes, in order: "keep", "unsent" or "unanswered". Only commits are lost first;
    once one was, whatever comes next follows the plan.
    """

    def __init__(self, pool: Any) -> None:
        super().__init__(pool)
        self.plan: list[str] = []
        self.losing = False

    async def try_all(self, commands: Any) -> list[Any]:
        is_commit = any(command[:2] == ("EVALSHA", script("commit").sha) for command in commands)
        self.losing = self.losing or (bool(self.plan) and is_commit)
        fate = self.plan.pop(0) if self.losing and self.plan else "keep"
        self.losing = self.losing and bool(self.plan)
        if fate == "unsent":
            await self.close()
            raise Lost("it was never sent")
        answers = await super().try_all(commands)
        if fate == "unanswered":
            await self.close()
            raise Lost("its answer was lost")
        return answers
