"""The control worker: one process that owns its share of the partitions.

Responsible for putting the parts together, for what they tell each other, and for the end: hand over, close. Leaves the
loop over the partitions to `owner.py` (one on one server; on a cluster one a partition, so that a node that is away
holds up no other), leases to `ownership.py`, stage workers' lives to `observer.py`, slots to `slot_desk.py`. Talks to
Redis. Says no with `Unusable` for a server that can't be trusted, and with `ValueError` for a URL that is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from typing import TYPE_CHECKING

from redis.exceptions import RedisError

from control.core import commands as c
from control.store.access import open_access
from control.store.keys import partition_of
from control.store.link import LOST
from control.store.scripts import script
from control.store.server import Unusable, agree_on_config, check_server
from workers.admission_audit import AdmissionAudit
from workers.clock import ServerClock
from workers.control_setup import core_settings, wire_limits
from workers.control_stats import ControlStats
from workers.observer import Observer
from workers.owner import Owner, Surroundings
from workers.ownership import Ownership
from workers.placement import Directory
from workers.slot_desk import SlotDesk
from workers.tasks import end_tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from control.core.scene import Settings
    from stages.pipeline import Pipeline
    from workers.ownership import Claim

log = logging.getLogger("bargein.control")


class ControlWorker:
    """One control worker process, or one task in a test."""

    def __init__(
        self,
        redis_url: str,
        pipeline: Pipeline,
        *,
        worker_id: str | None = None,
        make_clock: Callable[[], ServerClock] = ServerClock,
        settings: Settings | None = None,
        owner: type[Owner] = Owner,
    ) -> None:
        """`make_clock`, `settings` and `owner` are for tests that need their own time, policy or loop."""
        self.worker_id = worker_id or f"control-{secrets.token_hex(4)}"
        self.stats = ControlStats()
        self._url = redis_url
        self._pipeline = pipeline
        self.access = access = open_access(redis_url, name=self.worker_id)
        stage_count, control = len(pipeline.stages), pipeline.control
        groups = access.groups(pipeline.partitions)
        clocks = [make_clock() for _ in groups]
        self._slots = access.spread()
        self.directory = Directory(stage_count)
        self.ownership = Ownership(access, self.worker_id, pipeline.partitions, control.lease_ms, clocks, self.wake)
        self.observer = Observer(
            access.redis,
            self.directory,
            stage_count,
            control.heartbeat_ms,
            self._spread_losses,
            control.brake_ms,
            pipeline.partitions,
            control.heartbeat_interval_ms,
        )
        self.desk = SlotDesk(
            self._slots, self.directory, pipeline.max_sessions, control.batch_max, self._is_ours, self._tell
        )
        stats = self.stats
        self.ownership.note_trouble = self._note_lease_trouble
        self.observer.note_trouble = lambda lost: stats.note_trouble("observer", lost=lost)
        self.desk.note_trouble = lambda lost: stats.note_trouble("slots", lost=lost)
        common = Surroundings(
            access=access,
            pipeline=pipeline,
            settings=settings or core_settings(pipeline),
            limits=wire_limits(pipeline),
            stats=self.stats,
            directory=self.directory,
            observer=self.observer,
            ask=self.desk.ask,
        )
        self.owners = [
            owner(numbers, common, self.ownership, clock) for numbers, clock in zip(groups, clocks, strict=True)
        ]
        self._owner_of = {number: each for each in self.owners for number in each.numbers}

    @property
    def owned(self) -> list[int]:
        """The partitions that this worker owns now."""
        return sorted(number for owner in self.owners for number in owner.owned)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is decided or under way here beyond what the streams hold."""
        return self.desk.is_idle and all(owner.is_quiet for owner in self.owners)

    @property
    def last_turn_ms(self) -> float:
        """Monotonic time of the loops' last sign of life, of the one that has been silent for longest (S60)."""
        return min(owner.last_turn_ms for owner in self.owners)

    async def run(self) -> None:
        """Work until `stop`, then hand over. Raises `Unusable` for a server that can't be trusted."""
        tasks: list[asyncio.Task[None]] = []
        try:
            redis = self.access.redis
            await check_server(redis, self._url)
            await agree_on_config(redis, self._pipeline.partitions)
            try:
                # Else the first commits would be decided twice, and would choose a route twice.
                for name in ("commit", "slot"):
                    await redis.script_load(script(name).text)
                await self.observer.look()
            except (*LOST, RedisError) as error:
                raise Unusable(f"Redis went away while the worker started ({error}); start it again") from None
            tasks += [
                asyncio.create_task(self.ownership.run(), name="ownership"),
                asyncio.create_task(self.observer.run(), name="observer"),
                asyncio.create_task(self.desk.run(), name="slots"),
            ]
            if self._pipeline.max_sessions is not None:
                audit = AdmissionAudit(
                    redis, self._pipeline.partitions, self._pipeline.control.audit_s, lambda: 0 in self.owned
                )
                tasks.append(asyncio.create_task(audit.run(), name="admission audit"))
            owners = [asyncio.create_task(owner.run(), name="owner") for owner in self.owners]
            tasks += owners
            await self._until_ended(owners, tasks)
            await self._hand_over_all()
        finally:
            # Whoever cancels us may do so again and again; what was opened is closed all the same.
            closing = asyncio.ensure_future(self._close(tasks))
            while not closing.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.shield(closing)
            closing.result()

    def stop(self) -> None:
        """Hand over and return from `run`. Safe to call more than once."""
        for owner in self.owners:
            owner.stop()

    def wake(self) -> None:
        """There is something for the owners."""
        for owner in self.owners:
            owner.wake()

    async def _until_ended(self, owners: list[asyncio.Task[None]], tasks: list[asyncio.Task[None]]) -> None:
        """Wait for every owner to return. Whatever else ends is a bug, and ends the worker."""
        while not all(task.done() for task in owners):
            done, _ = await asyncio.wait({t for t in tasks if not t.done()}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def _hand_over_all(self) -> None:
        try:
            await self.ownership.leave()
        except (*LOST, RedisError) as error:
            log.warning("could not take leave (%s); the others see it in a moment", error)
        await asyncio.gather(*(owner.hand_over_all() for owner in self.owners))

    async def _close(self, tasks: list[asyncio.Task[None]]) -> None:
        await end_tasks(*tasks, *(task for owner in self.owners for task in owner.tasks))
        for owner in self.owners:
            await owner.close()
        await self._slots.close()
        await self.ownership.close()
        await self.access.close()

    # ---- what the parts tell each other

    def _spread_losses(self) -> None:
        """Each lost stage worker's sessions are told by their owners, who fence it first."""
        for worker_id, sessions in self.observer.lost.items():
            for session_id in sessions:
                self._tell(partition_of(session_id, self._pipeline.partitions), session_id, [c.StageLost(worker_id)])
            # Looked at again until no session holds a slot there any more.
            self.observer.lost[worker_id] = ()
        self.wake()

    def _note_lease_trouble(self, lost: bool) -> None:
        """A server that takes no write of ours takes no heartbeat either."""
        self.stats.note_trouble("ownership", lost=lost)
        self.observer.start_over()

    def _is_ours(self, claim: Claim) -> bool:
        return self._owner_of[claim.partition].is_ours(claim)

    def _tell(self, number: int, session_id: str, events: Iterable[c.Event]) -> None:
        self._owner_of[number].tell(number, session_id, events)
