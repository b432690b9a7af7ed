"""Watching the stage workers: who is live with how many free slots, and whose life is over.

Responsible for the directory that placement chooses from, and for judging a loss once and never by one's own silence
(S71, S76): a worker is suspect when its heartbeat stood still for the heartbeat time by this machine's monotonic clock
while every read of ours was answered; a script on the worker's key then ends that life for everyone. Leaves fencing it
in the partitions to `control.py`. Talks to Redis. Keeps I2 by telling a loss only after `dead` was read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from redis.exceptions import RedisError

from control.store import keys
from control.store.link import LOST
from control.store.lives import end_life, fetch_lives
from workers.placement import Candidate, Directory

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from redis.asyncio import Redis

    from control.store.lives import Life

log = logging.getLogger("bargein.observer")

HURRIED_S = 0.05


@dataclass(slots=True)
class _Pulse:
    beat: int
    since_s: float


@dataclass(slots=True)
class Observer:
    """`lost` collects lives that are over, with the sessions that hold a slot there; `wake` says so."""

    redis: Redis
    directory: Directory
    stage_count: int
    heartbeat_ms: int
    wake: Callable[[], None]
    lost: dict[str, tuple[str, ...]] = field(default_factory=dict)
    lives: list[Life] = field(default_factory=list)
    _pulses: dict[str, _Pulse] = field(default_factory=dict, init=False)
    _looked_s: float = field(default=0.0, init=False)

    async def run(self) -> None:
        """Look around until cancelled."""
        interval_s = max(HURRIED_S, min(1.0, self.heartbeat_ms / 10_000))
        while True:
            try:
                await self.look()
            except LOST as error:
                log.warning("observer: no connection (%s); nobody is judged meanwhile", error)
                self._pulses.clear()
            except RedisError as error:
                log.warning("observer: %s", error)
                self._pulses.clear()
            # Opens are refused while a stage has no room: learn of a new worker or a freed slot soon.
            await asyncio.sleep(interval_s if self.directory.has_room else HURRIED_S)

    async def look(self) -> None:
        """One look at every stage worker."""
        lives = await fetch_lives(self.redis)
        now_s = time.monotonic()
        if (now_s - self._looked_s) * 1000 > self.heartbeat_ms / 2:
            # We were stopped, or the server was: what happened meanwhile nobody has watched.
            self._pulses.clear()
        self._looked_s = now_s
        stages: list[list[Candidate]] = [[] for _ in range(self.stage_count)]
        seen: set[str] = set()
        for life in lives:
            seen.add(life.worker_id)
            if life.state == "dead" or await self._is_over(life, now_s):
                await self._mourn(life)
                continue
            if life.state == "live" and life.stage_id < self.stage_count:
                stages[life.stage_id].append(Candidate(life.worker_id, life.capacity, life.used_slots))
        self._pulses = {worker_id: pulse for worker_id, pulse in self._pulses.items() if worker_id in seen}
        # Told, and out of the index: nobody has to be told any more. Each restart leaves one behind.
        for worker_id in [w for w, sessions in self.lost.items() if w not in seen and not sessions]:
            del self.lost[worker_id]
        self.lives = lives
        self.directory.replace(stages)

    async def _is_over(self, life: Life, now_s: float) -> bool:
        pulse = self._pulses.get(life.worker_id)
        if pulse is None or pulse.beat != life.beat:
            self._pulses[life.worker_id] = _Pulse(life.beat, now_s)
            return False
        if (now_s - pulse.since_s) * 1000 < self.heartbeat_ms:
            return False
        log.warning("stage worker %s has not moved for %.1f s; ending its life", life.worker_id, now_s - pulse.since_s)
        return await end_life(self.redis, life.worker_id, life.beat)

    async def _mourn(self, life: Life) -> None:
        """Tell the owners once, and again while sessions still hold slots there; then forget the record."""
        held = await cast("Awaitable[list[Any]]", self.redis.hkeys(keys.worker_slots(life.worker_id)))
        sessions = tuple(name.decode() if isinstance(name, bytes) else name for name in held)
        if sessions or life.worker_id not in self.lost:
            self.lost[life.worker_id] = sessions
            self.wake()
        else:
            await cast("Awaitable[int]", self.redis.hdel(keys.STAGES, life.worker_id))
