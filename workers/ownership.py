"""Which partitions this control worker owns: sharing out, taking, renewing, handing over.

Responsible for the leases and for telling the owners what they gained and what they must give up. Leaves the commits to
`owner.py`: a partition is handed over only between two of them. Talks to Redis on connections of its own. Keeps I6
together with the commit's token check: losing a lease late can delay a partition, never give it two writers.

Everybody computes the same owner for a partition from the same members (rendezvous hashing), so there is no leader.
A leaving or joining worker wakes the others through a stream of hints. On a cluster the leases are on several nodes;
each is asked on a connection of its own, so that a node that is away takes no other's leases with it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from control.store import keys
from control.store.access import example_key
from control.store.keys import PartitionKeys
from control.store.link import LOST, is_of_the_script
from control.store.mending import load_legacies, mend
from control.store.scripts import script
from workers.caution import Caution

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence, Set

    from control.store.access import Access
    from control.store.link import Link
    from workers.clock import ServerClock

log = logging.getLogger("bargein.ownership")

HINTS_KEPT = 16
ROUND = 1 / 6  # of a lease: how often it is renewed
PATIENCE = 1 / 5  # of a lease: with one node of a cluster
assert 4 * PATIENCE + ROUND / 2 < 1, "a node that hangs everywhere must not cost another node's lease"


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


def _name(numbers: Sequence[int]) -> str:
    return f"partition {numbers[0]}" if len(numbers) == 1 else f"partitions {numbers[0]} to {numbers[-1]}"


def rendezvous(partition: int, members: Iterable[str]) -> str | None:
    """The member that should own a partition: the highest hash of both names."""
    return max(members, key=lambda m: (blake2b(f"{partition}/{m}".encode(), digest_size=8).digest(), m), default=None)


@dataclass(slots=True)
class _Group:
    """Partitions whose leases are asked for on one connection, and the clock of their server."""

    numbers: tuple[int, ...]
    link: Link
    clock: ServerClock
    share: int = 0


@dataclass(slots=True)
class Ownership:
    """The leases of one control worker. `wake` is called when there is something for an owner.

    `clocks`: one for each of the access' groups, in their order; a server's clock is learnt from what it answers.
    """

    access: Access
    worker_id: str
    partitions: int
    lease_ms: int
    clocks: Sequence[ServerClock]
    wake: Callable[[], None]
    members: list[str] = field(default_factory=list)
    held: dict[int, str] = field(default_factory=dict)  # partition -> token
    gained: list[Claim] = field(default_factory=list)
    unwanted: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    takeovers: int = 0
    handovers: int = 0
    note_trouble: Callable[[bool], None] = lambda _: None  # told whether the connection was lost
    # For others to look at: when a round last succeeded (monotonic seconds), how many partitions should be ours then.
    rounded_s: float = field(default=float("-inf"), init=False)
    share: int = field(default=0, init=False)
    _link: Link = field(init=False)
    _hints: Link = field(init=False)
    _groups: list[_Group] = field(init=False)
    _leaving: bool = field(default=False, init=False)
    _next_look_ms: int = field(default=1_000, init=False)
    _round_lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def __post_init__(self) -> None:
        # A node that hangs may cost the leases of the others a part of their time only: a whole round asks three times.
        patience_s = self.lease_ms * PATIENCE / 1000
        self._link = self.access.link(keys.CONTROLS, patience_s)
        self._hints = self.access.link(keys.OWNERSHIP, patience_s)
        groups = self.access.groups(self.partitions)
        self._groups = [
            _Group(numbers, self.access.link(example_key(numbers), patience_s), clock)
            for numbers, clock in zip(groups, self.clocks, strict=True)
        ]

    async def run(self) -> None:
        """Share out and renew until cancelled."""
        interval_ms = max(50, int(self.lease_ms * ROUND))
        if self.access.is_cluster:
            # Well within the patience with the node that has the hints.
            interval_ms = max(50, int(self.lease_ms * ROUND / 2))
        last_hint = "0-0"
        while True:
            try:
                async with self._round_lock:
                    await self._round()
                # A partition that we want and somebody else still holds is worth asking for again soon.
                wanted = any(self._is_mine(p) and p not in self.held for p in range(self.partitions))
                block_ms = min(interval_ms, 50) if wanted else max(1, min(interval_ms, self._next_look_ms))
                answer = await self._hints.call(
                    "XREAD", "COUNT", HINTS_KEPT, "BLOCK", block_ms, "STREAMS", keys.OWNERSHIP, last_hint
                )
                if answer:
                    last_hint = answer[0][1][-1][0].decode()
            except LOST as error:
                log.warning("ownership: no connection (%s); trying again", error)
                self.note_trouble(True)
                await asyncio.sleep(0.2)
            except RedisError as error:
                log.warning("ownership: %s; trying again", error)
                self.note_trouble(False)
                await asyncio.sleep(0.5)

    async def hint(self) -> None:
        """Wake the other workers: ownership may move now. Without it they see it a moment later."""
        fields: dict[Any, Any] = {"from": self.worker_id}
        try:
            await self.access.redis.xadd(keys.OWNERSHIP, fields, maxlen=HINTS_KEPT, approximate=False)
        except (*LOST, RedisError) as error:
            log.info("the others could not be told that ownership moves: %s", error)

    async def leave(self) -> None:
        """Stop being a member, so that nobody hands us anything any more."""
        self._leaving = True
        # A round that is under way would use the same connection, and say that we live after we have left.
        async with self._round_lock:
            await self._link.run("join", [keys.CONTROLS], [self.worker_id, 0])

    async def close(self) -> None:
        """Close the connections."""
        for link in (self._link, self._hints, *(group.link for group in self._groups)):
            await link.close()

    # ---- what the owners take

    def has_news(self, numbers: Set[int]) -> bool:
        """Whether something of these partitions was gained, lost, or is wanted by somebody else."""
        return not numbers.isdisjoint(self.lost | self.unwanted) or any(c.partition in numbers for c in self.gained)

    def take_lost(self, numbers: Set[int]) -> set[int]:
        """Those of these partitions whose lease was lost since."""
        taken = self.lost & numbers
        self.lost -= taken
        return taken

    def take_gained(self, numbers: Set[int]) -> list[Claim]:
        """The claims on these partitions since."""
        taken = [claim for claim in self.gained if claim.partition in numbers]
        self.gained = [claim for claim in self.gained if claim.partition not in numbers]
        return taken

    def _is_mine(self, partition: int) -> bool:
        return not self._leaving and rendezvous(partition, self.members) == self.worker_id

    async def _round(self) -> None:
        if self._leaving:
            return
        # Before anything else: what is held must not wait for a server that only knows who else is there.
        await asyncio.gather(*(self._keep(group, self._renew) for group in self._groups))
        answer = await self._link.run("join", [keys.CONTROLS], [self.worker_id, self.lease_ms])
        # Whoever is silent from now on is gone at that moment, and not a round later.
        self._next_look_ms = answer[1] - answer[0] + 1 if answer[1] else self.lease_ms
        members = sorted(name.decode() for name in answer[2:])
        if self.worker_id not in self.members and members != self.members:
            await self.hint()
        self.members = members
        await asyncio.gather(*(self._keep(group, self._share) for group in self._groups))
        self.share = sum(group.share for group in self._groups)
        self.rounded_s = time.monotonic()
        if self.gained or self.unwanted or self.lost:
            self.wake()

    async def _keep(self, group: _Group, what: Callable[[_Group], Awaitable[None]]) -> None:
        try:
            await what(group)
        except (*LOST, RedisError) as error:
            log.warning("the leases of %s: %s; trying again", _name(group.numbers), error)
            self.note_trouble(isinstance(error, LOST))
            group.clock.unsettle()

    async def _share(self, group: _Group) -> None:
        mine = {partition for partition in group.numbers if self._is_mine(partition)}
        group.share = len(mine)
        self.unwanted.update(p for p in group.numbers if p in self.held and p not in mine)
        wanted = [partition for partition in group.numbers if partition in mine and partition not in self.held]
        if wanted:
            await self._acquire(group, wanted)

    def drop(self, partition: int, token: str) -> bool:
        """Give a lease up, if it is still this one; it may have been taken anew meanwhile."""
        if self.held.get(partition) != token:
            return False
        del self.held[partition]
        return True

    async def _renew(self, group: _Group) -> None:
        held = [(partition, self.held[partition]) for partition in group.numbers if partition in self.held]
        if not held:
            return
        renew = script("renew")
        calls = [(renew, [PartitionKeys(p).owner], [token, self.lease_ms]) for p, token in held]
        for (partition, token), answer in zip(held, await group.link.try_run_all(calls), strict=True):
            if isinstance(answer, int) and answer > 0:
                group.clock.learn(answer)
                continue
            if isinstance(answer, RedisError) and not is_of_the_script(answer):
                raise answer
            log.warning("partition %d is not ours any more (%s)", partition, answer or "somebody else has it")
            if self.drop(partition, token):
                self.lost.add(partition)

    async def _acquire(self, group: _Group, wanted: Sequence[int]) -> None:
        """Take what can be taken. Two round trips however many they are: the sessions of each wait for the last."""
        acquire, link = script("acquire"), group.link
        calls = [
            (acquire, [PartitionKeys(p).owner], [self.worker_id, self.lease_ms, secrets.token_hex(4)]) for p in wanted
        ]
        won: dict[int, Any] = {}
        for partition, answer in zip(wanted, await link.try_run_all(calls), strict=True):
            if isinstance(answer, RedisError):
                # One broken key must not keep the other partitions waiting (I11).
                log.warning("partition %d can't be taken: %s", partition, answer)
                await mend(link, PartitionKeys(partition))
                continue
            group.clock.learn(answer[3])
            if answer[0] == 1:
                won[partition] = answer
        legacies = await load_legacies(link, [PartitionKeys(partition) for partition in won])
        for (partition, answer), legacy in zip(won.items(), legacies, strict=True):
            _, token, revision, _, unclean, suspect, crashes = answer
            self.held[partition] = token.decode()
            self.takeovers += unclean
            caution = Caution(legacy.backlog, suspect.decode(), crashes) if unclean else Caution()
            self.gained.append(Claim(partition, token.decode(), revision, bool(unclean), legacy.deadlines, caution))
            log.info("partition %d taken%s", partition, " over from a worker that is gone" if unclean else "")
