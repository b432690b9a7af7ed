"""Watching the stage workers: who is live with how many free slots, and whose life is over.

Responsible for the directory that placement chooses from, and for judging a loss once and never by one's own silence
(S71, S76): a worker is suspect when its heartbeat stood still for the heartbeat time by this machine's monotonic clock
while every read of ours was answered; a script on the worker's key then ends that life for everyone. Leaves to
`brake.py` whether too many went at once, fencing in the partitions to `control.py`. Talks to Redis. Keeps I2 by telling
a loss only after `dead` was read.
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
from control.store.lives import end_life, fetch_index, is_brake_released, put_back, sweep_queues
from workers.brake import Brake
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
    """`lost` collects lives that are over, with the sessions that hold a slot there; `wake` says so.

    `indexed`: every name in the index at the last look. Whoever misses one there puts it into `suspects`; `gone` are
    those of them that are no more.
    """

    redis: Redis
    directory: Directory
    stage_count: int
    heartbeat_ms: int
    wake: Callable[[], None]
    brake_ms: int = 60_000
    partitions: int = 1
    interval_ms: int = 1_000  # between two heartbeats of a worker
    note_trouble: Callable[[bool], None] = lambda _: None  # told whether the connection was lost
    lost: dict[str, tuple[str, ...]] = field(default_factory=dict)
    lives: list[Life] = field(default_factory=list)
    indexed: frozenset[str] = frozenset()
    suspects: set[str] = field(default_factory=set[str])
    gone: set[str] = field(default_factory=set[str])
    _pulses: dict[str, _Pulse] = field(default_factory=dict, init=False)
    _looked_s: float = field(default=0.0, init=False)
    _brakes: dict[str, Brake] = field(default_factory=dict[str, Brake], init=False)
    _held: set[str] = field(default_factory=set[str], init=False)

    @property
    def looked_s(self) -> float:
        """When every stage worker was last looked at, in monotonic seconds."""
        return self._looked_s

    @property
    def braked(self) -> frozenset[str]:
        """The stages whose silent workers are not given up, since too many fell silent at once."""
        return frozenset(self._held)

    async def run(self) -> None:
        """Look around until cancelled."""
        while True:
            try:
                await self.look()
            except LOST as error:
                log.warning("observer: no connection (%s); nobody is judged meanwhile", error)
                self.note_trouble(True)
                self._pulses.clear()
            except RedisError as error:
                log.warning("observer: %s", error)
                self.note_trouble(False)
                self._pulses.clear()
            # Opens are refused while a stage has no room: learn of a new worker or a freed slot soon.
            await asyncio.sleep(self._look_s if self.directory.has_room else HURRIED_S)

    def start_over(self) -> None:
        """For a moment nobody could be heard: count every silence anew."""
        self._pulses.clear()

    @property
    def _look_s(self) -> float:
        return max(HURRIED_S, min(1.0, self.heartbeat_ms / 10_000))

    async def look(self) -> None:
        """One look at every stage worker."""
        lives, self.indexed = await fetch_index(self.redis)
        now_s = time.monotonic()
        if (now_s - self._looked_s) * 1000 > self.heartbeat_ms / 2:
            # We were stopped, or the server was: what happened meanwhile nobody has watched.
            self._pulses.clear()
        self._looked_s = now_s
        stages: list[list[Candidate]] = [[] for _ in range(self.stage_count)]
        seen: set[str] = set()
        silent = self._find_silent(lives, now_s)
        for life in lives:
            seen.add(life.worker_id)
            if life.state == "dead" or (life in silent and await self._give_up(life, lives, silent, now_s)):
                self._note_lost(life, now_s)
                await self._mourn(life)
                continue
            if life in silent:
                continue
            if life.state == "live" and life.stage_id < self.stage_count:
                stages[life.stage_id].append(_candidate(life))
        self._pulses = {worker_id: pulse for worker_id, pulse in self._pulses.items() if worker_id in seen}
        # Told, and out of the index: nobody has to be told any more. Each restart leaves one behind.
        for worker_id in [w for w, sessions in self.lost.items() if w not in seen and not sessions]:
            del self.lost[worker_id]
        if not silent:
            self._held.clear()
        self.lives = lives
        self.directory.replace(stages)
        await self._look_for_suspects()

    async def _look_for_suspects(self) -> None:
        """Workers that sessions are placed on and that are in no index: gone, or only struck off it by somebody."""
        while self.suspects:
            worker_id = self.suspects.pop()
            if worker_id in self.indexed:
                continue
            lives = await put_back(self.redis, worker_id)
            if lives:
                log.warning("stage worker %s lives and was in no index; put back", worker_id)
            elif lives is False:
                log.warning("stage worker %s is gone, and sessions are still placed on it", worker_id)
                self.gone.add(worker_id)

    def _find_silent(self, lives: list[Life], now_s: float) -> list[Life]:
        """The workers whose heartbeat has stood still for the heartbeat time, under our own eyes."""
        silent: list[Life] = []
        for life in lives:
            if life.state == "dead":
                continue
            pulse = self._pulses.get(life.worker_id)
            if pulse is None or pulse.beat != life.beat:
                self._pulses[life.worker_id] = _Pulse(life.beat, now_s)
            elif (now_s - pulse.since_s) * 1000 >= self.heartbeat_ms:
                silent.append(life)
        return silent

    async def _give_up(self, life: Life, lives: list[Life], silent: list[Life], now_s: float) -> bool:
        """End the life of a silent worker, unless the brake holds; True if it is over."""
        silent_s = now_s - self._pulses[life.worker_id].since_s
        brake = self._brakes.setdefault(life.stage, Brake(self.brake_ms / 1000))
        # Heartbeats are not in step: of those that stop in one instant, the last seems to do so an interval, and a look
        # of ours, later. A worker that is well is never still for so long.
        still_s = max(
            (self.heartbeat_ms - self.interval_ms) / 1000 - self._look_s, 1.5 * (self.interval_ms / 1000 + self._look_s)
        )
        pulses = self._pulses
        holds = brake.holds(
            silent=sum(
                other.stage == life.stage
                and (
                    other in silent or (other.worker_id in pulses and now_s - pulses[other.worker_id].since_s > still_s)
                )
                for other in lives
            ),
            present=sum(other.stage == life.stage and other.state != "dead" for other in lives),
            now_s=now_s,
        )
        if holds and silent_s < self.heartbeat_ms / 1000 + brake.hold_s:
            if not await is_brake_released(self.redis, life.stage):
                self._tell_held(life, brake)
                return False
            log.warning("the brake of stage %s is released", life.stage)
        log.warning("stage worker %s has not moved for %.1f s; ending its life", life.worker_id, silent_s)
        return await end_life(self.redis, life.worker_id, life.beat)

    def _tell_held(self, life: Life, brake: Brake) -> None:
        if life.stage not in self._held:
            self._held.add(life.stage)
            log.error(
                "more than a third of stage %s fell silent within a minute; no session is closed for %g s, since the "
                "fault may be on the way to them. If the workers are gone: bargein brake release %s",
                life.stage,
                brake.hold_s,
                life.stage,
            )

    def _note_lost(self, life: Life, now_s: float) -> None:
        """Count a loss once; who has said goodbye is not lost."""
        if self._pulses.pop(life.worker_id, None) is not None and not life.has_left:
            self._brakes.setdefault(life.stage, Brake(self.brake_ms / 1000)).note_lost(now_s)

    async def _mourn(self, life: Life) -> None:
        """Tell the owners once, and again while sessions still hold slots there; then forget the record."""
        held = await cast("Awaitable[list[Any]]", self.redis.hkeys(keys.worker_slots(life.worker_id)))
        sessions = tuple(name.decode(errors="replace") for name in held)
        if sessions or life.worker_id not in self.lost:
            self.lost[life.worker_id] = sessions
            self.wake()
        else:
            await sweep_queues(self.redis, life.worker_id, self.partitions)
            await cast("Awaitable[int]", self.redis.hdel(keys.STAGES, life.worker_id))


def _candidate(life: Life) -> Candidate:
    load = life.load
    return Candidate(
        life.worker_id,
        life.capacity,
        life.used_slots,
        utilisation=load.get("utilisation", 0.0),
        waiting=int(load.get("waiting", 0)),
        accepts=load.get("accepts", 1.0) > 0,
    )
