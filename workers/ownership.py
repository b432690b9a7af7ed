"""Which partitions this control worker owns: sharing out, taking, renewing, handing over.

Responsible for the leases and for telling the main loop what it gained and what it must give up. Leaves the commits to
`control.py`: a partition is handed over only between two of them. Talks to Redis on connections of its own. Keeps I6
together with the commit's token check: losing a lease late can delay a partition, never give it two writers.

Everybody computes the same owner for a partition from the same members (rendezvous hashing), so there is no leader.
A leaving or joining worker wakes the others through a stream of hints.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from redis.exceptions import RedisError, ResponseError

from control.store import keys
from control.store.commits import ACKS_KEY, COMMANDS_KEY
from control.store.keys import PartitionKeys
from control.store.link import LOST, Link
from control.store.mending import load_deadlines, mend
from control.store.scripts import script
from workers.caution import Caution

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from redis.asyncio import ConnectionPool

    from workers.clock import ServerClock

log = logging.getLogger("bargein.ownership")

HINTS_KEPT = 16


@dataclass(frozen=True, slots=True)
class Claim:
    """A partition that was just taken. `unclean`: its last owner didn't hand it over."""

    partition: int
    token: str
    revision: int
    unclean: bool
    deadlines: tuple[tuple[str, int], ...]
    caution: Caution = field(default_factory=Caution)

    @property
    def token_number(self) -> int:
        """The part that rises with every owner; slots compare it."""
        return int(self.token.partition(":")[0])


def rendezvous(partition: int, members: Iterable[str]) -> str | None:
    """The member that should own a partition: the highest hash of both names."""
    return max(members, key=lambda m: (blake2b(f"{partition}/{m}".encode(), digest_size=8).digest(), m), default=None)


@dataclass(slots=True)
class Ownership:
    """The leases of one control worker. `wake` is called when there is something for the main loop."""

    pool: ConnectionPool
    worker_id: str
    partitions: int
    lease_ms: int
    clock: ServerClock
    wake: Callable[[], None]
    members: list[str] = field(default_factory=list)
    held: dict[int, str] = field(default_factory=dict)  # partition -> token
    gained: list[Claim] = field(default_factory=list)
    unwanted: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    takeovers: int = 0
    handovers: int = 0
    _link: Link = field(init=False)
    _hints: Link = field(init=False)
    _leaving: bool = field(default=False, init=False)
    _round_lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def __post_init__(self) -> None:
        self._link = Link(self.pool)
        self._hints = Link(self.pool)

    async def run(self) -> None:
        """Share out and renew until cancelled."""
        interval_ms = max(50, self.lease_ms // 6)
        last_hint = "0-0"
        while True:
            try:
                async with self._round_lock:
                    await self._round()
                # A partition that we want and somebody else still holds is worth asking for again soon.
                wanted = any(self._is_mine(p) and p not in self.held for p in range(self.partitions))
                block_ms = min(interval_ms, 50) if wanted else interval_ms
                answer = await self._hints.call(
                    "XREAD", "COUNT", HINTS_KEPT, "BLOCK", block_ms, "STREAMS", keys.OWNERSHIP, last_hint
                )
                if answer:
                    last_hint = answer[0][1][-1][0].decode()
            except LOST as error:
                log.warning("ownership: no connection (%s); trying again", error)
                self.clock.unsettle()
                await asyncio.sleep(0.2)
            except RedisError as error:
                log.warning("ownership: %s; trying again", error)
                await asyncio.sleep(0.5)

    async def hint(self, link: Link) -> None:
        """Wake the other workers: ownership may move now."""
        await link.call("XADD", keys.OWNERSHIP, "MAXLEN", HINTS_KEPT, "*", "from", self.worker_id)

    async def leave(self) -> None:
        """Stop being a member, so that nobody hands us anything any more."""
        self._leaving = True
        # A round that is under way would use the same connection, and say that we live after we have left.
        async with self._round_lock:
            await self._link.run("join", [keys.CONTROLS], [self.worker_id, 0])

    async def close(self) -> None:
        """Close the connections."""
        await self._link.close()
        await self._hints.close()

    def _is_mine(self, partition: int) -> bool:
        return not self._leaving and rendezvous(partition, self.members) == self.worker_id

    async def _round(self) -> None:
        if self._leaving:
            return
        answer = await self._link.run("join", [keys.CONTROLS], [self.worker_id, self.lease_ms])
        self.clock.learn(answer[0])
        members = sorted(name.decode() for name in answer[1:])
        if self.worker_id not in self.members and members != self.members:
            await self.hint(self._link)
        self.members = members
        await self._renew()
        for partition in range(self.partitions):
            mine = self._is_mine(partition)
            if mine and partition not in self.held:
                try:
                    await self._acquire(partition)
                except ResponseError as error:
                    # One broken key must not keep the other partitions waiting (I11).
                    log.warning("partition %d can't be taken: %s", partition, error)
                    await mend(self._link, PartitionKeys(partition))
            elif not mine and partition in self.held:
                self.unwanted.add(partition)
        if self.gained or self.unwanted or self.lost:
            self.wake()

    def drop(self, partition: int, token: str) -> bool:
        """Give a lease up, if it is still this one; it may have been taken anew meanwhile."""
        if self.held.get(partition) != token:
            return False
        del self.held[partition]
        return True

    async def _renew(self) -> None:
        held = list(self.held.items())
        if not held:
            return
        renew = script("renew")
        calls = [(renew, [PartitionKeys(p).owner], [token, self.lease_ms]) for p, token in held]
        for (partition, token), answer in zip(held, await self._link.try_run_all(calls), strict=True):
            if isinstance(answer, int) and answer > 0:
                continue
            log.warning("partition %d is not ours any more (%s)", partition, answer or "somebody else has it")
            if self.drop(partition, token):
                self.lost.add(partition)

    async def _acquire(self, partition: int) -> None:
        known = PartitionKeys(partition)
        answer = await self._link.run("acquire", [known.owner], [self.worker_id, self.lease_ms, secrets.token_hex(4)])
        if answer[0] != 1:
            return
        token = answer[1].decode()
        deadlines = await load_deadlines(self._link, known)
        self.held[partition] = token
        self.takeovers += answer[4]
        caution = await self._find_caution(known, answer[5].decode(), answer[6]) if answer[4] else Caution()
        self.gained.append(Claim(partition, token, answer[2], bool(answer[4]), deadlines, caution))
        log.info("partition %d taken%s", partition, " over from a worker that is gone" if answer[4] else "")

    async def _find_caution(self, known: PartitionKeys, suspect: str, crashes: int) -> Caution:
        """How far the backlog of an owner that died reaches."""
        streams = {COMMANDS_KEY: known.commands, ACKS_KEY: known.acks}
        last = await self._link.call_all([("XREVRANGE", name, "+", "-", "COUNT", 1) for name in streams.values()])
        backlog = {stream: found[0][0].decode() for stream, found in zip(streams, last, strict=True) if found}
        return Caution(backlog, suspect, crashes)
