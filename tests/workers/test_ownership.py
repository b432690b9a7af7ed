"""Who owns which partition: sharing out, keeping, losing, handing over. On a real server, without the main loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from control.store import keys
from control.store.access import open_access
from control.store.keys import PartitionKeys
from control.store.link import Link
from control.store.scripts import script
from tests.workers.control_bed import end, until
from workers.clock import ServerClock
from workers.ownership import Claim, Ownership, rendezvous

PARTITIONS = 8
LEASE_MS = 600


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Any]:
    async with Redis.from_url(redis_url) as client:
        yield client


class Member:
    """A worker that takes part in the sharing out, its main loop played by the test."""

    def __init__(self, url: str, name: str, *, lease_ms: int = LEASE_MS, partitions: int = PARTITIONS) -> None:
        self.access = open_access(url)
        self.wakes = 0
        self.clock = ServerClock()
        self.ownership = Ownership(self.access, name, partitions, lease_ms, [self.clock], self._wake)
        self.claims: dict[int, Claim] = {}
        self.losses: list[int] = []
        self._task: asyncio.Task[None] | None = None

    def _wake(self) -> None:
        self.wakes += 1
        self._settle()

    def _settle(self) -> None:
        """What the main loop does between two turns, without handing over."""
        for partition in self.ownership.lost:
            self.claims.pop(partition, None)
            self.losses.append(partition)
        self.ownership.lost.clear()
        for claim in self.ownership.gained:
            self.claims[claim.partition] = claim
        self.ownership.gained.clear()

    async def give_up_unwanted(self) -> None:
        renew = script("renew")
        for partition in sorted(self.ownership.unwanted):
            claim = self.claims.pop(partition)
            assert self.ownership.drop(partition, claim.token)
            await self.ownership._hints.run_all([(renew, [PartitionKeys(partition).owner], [claim.token, 0])])
        self.ownership.unwanted.clear()

    async def round(self) -> None:
        await self.ownership._round()
        self._settle()

    def start(self) -> None:
        self._task = asyncio.create_task(self.ownership.run())

    async def close(self) -> None:
        if self._task is not None:
            await end(self._task)
        await self.ownership.close()
        await self.access.close()


@pytest.fixture
async def members(redis_url: str) -> AsyncIterator[Any]:
    made: list[Member] = []

    def make(name: str, **more: Any) -> Member:
        made.append(Member(redis_url, name, **more))
        return made[-1]

    yield make
    for member in made:
        await member.close()


# ---- who should own what


def test_everybody_computes_the_same_owner_whatever_the_order() -> None:
    names = [f"control-{number}" for number in range(7)]
    for partition in range(64):
        assert rendezvous(partition, names) == rendezvous(partition, reversed(names))
    assert rendezvous(3, []) is None
    assert rendezvous(3, ["alone"]) == "alone"


def test_partitions_are_shared_out_about_evenly() -> None:
    names = [f"control-{number}" for number in range(4)]
    shares = Counter(rendezvous(partition, names) for partition in range(1_024))
    assert set(shares) == set(names)
    assert min(shares.values()) > 180


def test_only_what_a_leaving_member_had_moves_and_a_new_one_takes_only_its_own() -> None:
    names = [f"control-{number}" for number in range(4)]
    before = {partition: rendezvous(partition, names) for partition in range(256)}
    without = {partition: rendezvous(partition, names[1:]) for partition in range(256)}
    assert {p for p in before if before[p] != without[p]} == {p for p, name in before.items() if name == names[0]}
    more = {partition: rendezvous(partition, [*names, "control-9"]) for partition in range(256)}
    assert {more[p] for p in before if before[p] != more[p]} == {"control-9"}


# ---- taking and keeping


async def test_the_only_member_takes_everything_with_its_deadlines_and_revision(redis: Any, members: Any) -> None:
    await redis.zadd(PartitionKeys(2).deadlines, {"Ada": 5_000, "Bob": 7_000})
    await redis.hset(PartitionKeys(2).owner, "revision", 41)
    member = members("control-a")
    await member.round()
    assert sorted(member.claims) == list(range(PARTITIONS))
    assert member.claims[2].deadlines == (("Ada", 5_000), ("Bob", 7_000))
    assert member.claims[2].revision == 41
    assert not any(claim.unclean for claim in member.claims.values())
    assert member.wakes == 1
    tokens = {p: (await redis.hget(PartitionKeys(p).owner, "token")).decode() for p in range(PARTITIONS)}
    assert member.ownership.held == tokens
    assert all(claim.token_number == int(claim.token.split(":")[0]) for claim in member.claims.values())
    await member.round()
    assert member.ownership.held == tokens, "nothing is taken twice"


async def test_leases_are_renewed_for_as_long_as_the_worker_lives(redis: Any, members: Any) -> None:
    member = members("control-a", lease_ms=300)
    member.start()
    await until(lambda: len(member.claims) == PARTITIONS)
    first = dict(member.ownership.held)
    ends = int(await redis.hget(PartitionKeys(0).owner, "until_ms"))

    async def is_renewed_long_past_it() -> bool:
        return int(await redis.hget(PartitionKeys(0).owner, "until_ms")) > ends + 900

    await until(is_renewed_long_past_it)
    assert member.ownership.held == first
    assert member.losses == []


async def test_a_newcomer_gets_its_share_and_no_partition_has_two_owners(members: Any) -> None:
    old, new = members("control-a"), members("control-b")
    await old.round()
    await new.round()
    assert new.claims == {}, "nobody has handed anything over yet"
    await old.round()
    assert old.ownership.unwanted == {
        p for p in range(PARTITIONS) if rendezvous(p, ["control-a", "control-b"]) == "control-b"
    }
    await old.give_up_unwanted()
    await new.round()
    assert sorted([*old.claims, *new.claims]) == list(range(PARTITIONS))
    assert not any(claim.unclean for claim in new.claims.values())
    assert new.ownership.takeovers == 0


async def test_a_member_that_says_nothing_more_is_replaced_once_its_lease_is_over(members: Any) -> None:
    gone, left = members("control-a", lease_ms=200), members("control-b", lease_ms=200)
    await gone.round()
    left.start()
    await until(lambda: len(left.claims) == PARTITIONS)
    assert all(claim.unclean for claim in left.claims.values())
    assert left.ownership.takeovers == PARTITIONS
    await gone.round()
    assert sorted(gone.losses) == list(range(PARTITIONS)), "it learns that it is deposed"
    assert gone.ownership.held == {}


async def test_a_member_that_leaves_wakes_the_others_at_once(members: Any) -> None:
    # Leases of two minutes: what happens here was handed over.
    leaving, staying = members("control-a", lease_ms=120_000), members("control-b", lease_ms=120_000)
    await leaving.round()
    staying.start()
    await until(lambda: "control-b" in staying.ownership.members)
    await leaving.ownership.leave()
    leaving.ownership.unwanted |= set(leaving.claims)
    await leaving.give_up_unwanted()
    await leaving.ownership.hint()
    await until(lambda: len(staying.claims) == PARTITIONS)
    assert staying.ownership.members == ["control-b"]


class HeldLink(Link):
    """A link whose first write waits for the gate."""

    def __init__(self, pool: Any) -> None:
        super().__init__(pool)
        self.gate = asyncio.Event()
        self.is_held = False

    async def try_all(self, commands: Any) -> list[Any]:
        if not self.is_held:
            self.is_held = True
            await self.gate.wait()
        return await super().try_all(commands)


async def test_leaving_in_the_middle_of_a_round_leaves_for_good(redis: Any, members: Any) -> None:
    member = members("control-a")
    held = member.ownership._link = HeldLink(member.access.pool)
    member.start()
    await until(lambda: held.is_held)
    leaving = asyncio.create_task(member.ownership.leave())
    await asyncio.sleep(0)
    # Whatever leave does now, it doesn't overtake the round, which says that the worker lives.
    await asyncio.wait({leaving}, timeout=0.1)
    held.gate.set()
    await leaving
    assert await redis.zcard(keys.CONTROLS) == 0
    await member.round()
    assert await redis.zcard(keys.CONTROLS) == 0


async def test_a_lost_lease_is_told_and_a_partition_taken_anew_is_not_dropped_by_its_old_token(
    redis: Any, members: Any
) -> None:
    member = members("control-a")
    await member.round()
    first = member.claims[5]
    await redis.hset(
        PartitionKeys(5).owner, mapping={"token": "99999999999999:other", "holder": "other", "until_ms": 0}
    )
    await member.round()
    assert member.losses == [5]
    assert member.claims[5].token != first.token, "nobody else wanted it"
    assert not member.ownership.drop(5, first.token)
    assert member.ownership.held[5] == member.claims[5].token
    assert member.ownership.drop(5, member.claims[5].token)
    assert 5 not in member.ownership.held


async def test_s50_a_server_that_was_flushed_is_shared_out_anew(redis: Any, members: Any) -> None:
    member = members("control-a")
    member.start()
    await until(lambda: len(member.claims) == PARTITIONS)
    before = dict(member.ownership.held)
    await redis.flushall()
    await until(lambda: len(member.ownership.held) == PARTITIONS and member.ownership.held[0] != before[0])
    assert set(before.values()).isdisjoint(member.ownership.held.values())


# ---- trouble


@pytest.mark.parametrize("attribute", ["owner", "deadlines", "fences"])
async def test_i11_a_broken_key_of_one_partition_keeps_no_other_waiting(
    redis: Any, members: Any, attribute: str
) -> None:
    await redis.set(getattr(PartitionKeys(1), attribute), "not ours")
    member = members("control-a")
    await member.round()
    assert set(range(PARTITIONS)) - set(member.claims) <= {1}
    await member.round()
    assert sorted(member.claims) == list(range(PARTITIONS))
    assert await redis.type(getattr(PartitionKeys(1), attribute)) in {b"none", b"hash"}


async def test_i11_an_owner_record_that_breaks_costs_only_that_partition(redis: Any, members: Any) -> None:
    member = members("control-a")
    await member.round()
    held = dict(member.ownership.held)
    await redis.set(PartitionKeys(1).owner, "not ours")
    await member.round()
    assert member.losses == [1]
    await member.round()
    assert member.ownership.held.keys() == held.keys()
    assert {p for p, token in member.ownership.held.items() if token != held[p]} == {1}


async def test_s52_a_lost_connection_unsettles_the_clock_and_is_made_again(redis: Any, members: Any) -> None:
    member = members("control-a")
    member.start()
    await until(lambda: len(member.claims) == PARTITIONS)
    settled = member.clock.settled_since
    await redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    await until(lambda: member.clock.settled_since > settled)
    ends = int(await redis.hget(PartitionKeys(0).owner, "until_ms"))

    async def is_renewed() -> bool:
        return int(await redis.hget(PartitionKeys(0).owner, "until_ms")) > ends

    await until(is_renewed)
