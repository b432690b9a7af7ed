"""The control worker on a real server: whole lives, takeovers, broken connections, broken keys, and the clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as Lost

from control.core.requests import request_id
from control.core.session import Phase
from control.store import keys
from control.store.commits import Batch
from control.store.keys import FIXED_TYPES, PartitionKeys
from control.store.link import Link
from control.store.publishing import Published
from control.store.scripts import script
from control.store.server import Unusable
from tests.servers import RealServer, ValkeyServer
from tests.store.table import find_undocumented
from tests.workers.control_bed import Bed, Caller, end, fence, make_pipeline, until
from workers.control import ControlWorker


def local(**sections: Any) -> Any:
    """A pipeline without stages: everything is answered by the owner."""
    return make_pipeline(stages=0, **sections)


def numbers(caller: Caller) -> list[int]:
    """The events' numbers, those of strangers' replies aside."""
    return [n for _, n, _ in caller.events if n]


# ---- whole lives


async def test_a_whole_life_of_a_session(any_server: RealServer) -> None:
    async with Bed(any_server.url, make_pipeline(max_sessions=10)) as bed:
        worker = await bed.control("control-a")
        ear = await bed.stage()
        caller = bed.caller("Ada")
        opened = await caller.open(session_config={"voice": "low"})
        request = request_id("Ada", 0, 0, 0)
        assert opened["detail"]["request_id"] == request
        assert await bed.redis.hkeys(keys.worker_slots("ear-1")) == [b"Ada"]
        assert await bed.redis.hkeys(keys.ADMISSION_SLOTS) == [b"Ada"]
        first = await caller.append(payload=b"\x00 any bytes \xff")
        second = await caller.append(final=True)
        assert (await caller.reply(second))["detail"]["seq"] == 2
        assert [(order.seq, payload) for order, payload in ear.submitted] == [
            (1, b"\x00 any bytes \xff"),
            (2, b"tokens"),
        ]
        assert await ear.say("Ada", request, fence()) is Published.DELIVERED
        ear.confirms = False
        cancel = await caller.cancel(fence(), fence(1))
        interrupted = await caller.heard("interrupted")
        assert interrupted["cancelled_fence"]["epoch"] == 0
        assert await ear.say("Ada", request, fence()) is Published.STOP
        assert await bed.redis.hexists(caller.keys.outputs, request), "I2: not released before its stage has confirmed"
        ear.confirms = True
        assert (await caller.reply(cancel))["ok"]
        third = await caller.append(fence(1))
        assert (await caller.reply(third))["detail"]["request_id"] == request_id("Ada", 0, 1, 0)
        assert (await caller.call("close", at=fence(1)))["ok"]
        await caller.heard("closed")
        assert numbers(caller) == list(range(1, len(caller.events) + 1))
        said = [body.get("event") or body.get("op") or body["kind"] for _, _, body in caller.events]
        assert said == [
            *("opened", "open", "append", "append", "text", "interrupted", "signal"),
            *("append", "closing", "close", "closed"),
        ]
        assert caller.replies() == dict.fromkeys((opened["control_id"], first, second, cancel, third), 1) | {
            caller.events[-2][2]["control_id"]: 1
        }
        assert [order.epochs for order in ear.aborted] == [(0,), (1,)]

        async def is_given_back() -> bool:
            return not await bed.redis.exists(keys.worker_slots("ear-1"), keys.ADMISSION_SLOTS, caller.keys.outputs)

        await until(is_given_back)
        assert await find_undocumented(bed.redis) == []
        await bed.leave(worker)
        assert not await bed.redis.exists(keys.CONTROLS)
        assert await find_undocumented(bed.redis) == []


async def test_an_id_lives_again_and_again(redis_url: str) -> None:
    async with Bed(redis_url) as bed:
        await bed.control("control-a")
        await bed.stage()
        caller = bed.caller("Ada")
        for life in range(4):
            closing = await caller.send("close", at=fence(incarnation=life - 1)) if life else None
            assert (await caller.open(life))["ok"]
            assert closing is None or (await caller.reply(closing))["ok"]
            append = await caller.reply(await caller.append(fence(incarnation=life)))
            assert append["detail"]["seq"] == 1
        assert caller.lifecycle() == ["opened", *["closing", "closed", "opened"] * 3]
        again = await caller.call("open", at=fence(incarnation=2))
        assert again["code"] == "invalid_argument", "it exists"
        assert (await caller.call("close", at=fence(incarnation=3)))["ok"]
        again = await caller.call("open", at=fence(incarnation=3))
        assert again["code"] == "stale_fence", "D4: it has lived"


async def test_i10_every_life_ends_with_one_terminal_event(redis_url: str) -> None:
    pipeline = local(session={"idle_ttl_s": 0.5, "append_timeout_s": 0.3})
    async with Bed(redis_url, pipeline) as bed:
        await bed.control("control-a")
        closed, idle = bed.caller("closed"), bed.caller("idle")
        for caller in (closed, idle):
            await caller.open()
        for _ in range(3):
            assert (await closed.call("close"))["ok"]
        await idle.heard("expired")
        assert (await idle.call("close"))["ok"]
        assert closed.lifecycle() == ["opened", "closed"]
        assert idle.lifecycle() == ["opened", "expired"]


async def test_a_server_that_cannot_be_trusted_stops_the_worker() -> None:
    with ValkeyServer(args=("--maxmemory-policy", "allkeys-lru")) as server:
        worker = ControlWorker(server.url, local())
        with pytest.raises(Unusable, match="may evict"):
            await worker.run()
    worker = ControlWorker("redis://127.0.0.1:1", local())
    with pytest.raises(Unusable, match="can't be reached"):
        await worker.run()


async def test_a_worker_set_to_other_partitions_stops(redis_url: str) -> None:
    async with Bed(redis_url, local()) as bed:
        await bed.control("control-a")
        with pytest.raises(Unusable, match="partitions = 4"):
            await ControlWorker(redis_url, local(partitions=8)).run()


# ---- several workers


async def test_two_workers_share_sixteen_partitions_and_one_that_leaves_hands_over_at_once(redis_url: str) -> None:
    # The lease is long: what goes on within the patience of this test was handed over, not waited for.
    pipeline = local(partitions=16, control={"lease_s": 120.0, "heartbeat_s": 0.6, "heartbeat_interval_s": 0.1})
    async with Bed(redis_url, pipeline) as bed:
        first = await bed.control("control-a")
        second = await bed.control("control-b", whole=False)
        await bed.until_owned(first, second)
        assert first.owned
        assert second.owned
        callers = [bed.caller(f"caller-{number}") for number in range(32)]
        for caller in callers:
            await caller.send("open")
        sent: dict[Caller, list[str]] = {caller: [] for caller in callers}

        async def talk() -> None:
            for _ in range(10):
                for caller in callers:
                    sent[caller].append(await caller.append())
                await asyncio.sleep(0.01)

        talking = asyncio.create_task(talk())
        await until(lambda: len(sent[callers[0]]) > 3)
        await bed.leave(first)
        await bed.until_owned(second)
        third = await bed.control("control-c", whole=False)
        await bed.until_owned(second, third)
        await talking
        for caller in callers:
            await caller.reply(sent[caller][-1])
            details = [caller.find_reply(control_id)["detail"]["seq"] for control_id in sent[caller]]
            assert details == list(range(1, 11))
            assert set(caller.replies().values()) == {1}
            assert numbers(caller) == list(range(1, len(caller.events) + 1))


async def test_a_killed_worker_is_replaced_within_its_lease_and_nothing_is_lost(redis_url: str) -> None:
    async with Bed(redis_url) as bed:
        first = await bed.control("control-a")
        ear = await bed.stage()
        callers = [bed.caller(f"caller-{number}") for number in range(12)]
        for caller in callers:
            await caller.open()
        ear.accepts = False
        under_way = [await caller.append() for caller in callers]
        waiting = [await caller.append() for caller in callers]
        await until(lambda: all(first._owned[p].partition.waiting for p in {c.keys.partition for c in callers}))
        second = await bed.control("control-b", whole=False)
        await bed.until_owned(first, second)
        killed_at = time.monotonic()
        await bed.crash(first)
        late = [await caller.append() for caller in callers]
        ear.accepts = True
        for caller, control_id in zip(callers, late, strict=True):
            await caller.reply(control_id)
        lease_s = bed.pipeline.control.lease_s
        assert time.monotonic() - killed_at < lease_s + 5, "generous: the machine may be busy"
        for caller, *sent in zip(callers, under_way, waiting, late, strict=True):
            assert [caller.find_reply(control_id)["detail"]["seq"] for control_id in sent] == [1, 2, 3]
            assert caller.replies().total() == 4
            assert ear.seqs(caller.session_id) == [1, 2, 3]
        assert second.owned == list(range(4))


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
        super().__init__(*args, **more)
        self.gate = asyncio.Event()
        self.gate.set()
        self.held: list[str] = []
        self._ownership._link = GatedLink(self._pool, self.gate, "leases", [])
        self._slots = self._desk.link = GatedLink(self._pool, self.gate, "slots", self.held)

    async def _commit(self, batches: Any, portions: Any, others: Any) -> None:
        if batches and not self.gate.is_set():
            self.held.append("commit")
            await self.gate.wait()
        await super()._commit(batches, portions, others)


async def test_i6_a_deposed_worker_that_wakes_up_with_a_decision_changes_nothing(redis_url: str) -> None:
    pipeline = local(partitions=1)
    async with Bed(redis_url, pipeline) as bed:
        old = await bed.control("control-old", Stalled)
        caller = bed.caller("Ada")
        await caller.open()
        old.gate.clear()
        sent = await caller.append()
        await until(lambda: old.held == ["commit"])
        new = await bed.control("control-new", whole=False)
        assert (await caller.reply(sent))["detail"]["seq"] == 1, "its successor has answered"
        assert new.owned == [0]
        async with Redis.from_url(redis_url) as redis:
            before = await redis.hgetall(caller.keys.owner), await redis.xlen(caller.keys.events("Ada"))
            old.gate.set()
            await until(lambda: old.stats.refused_commits > 0 and old.owned == [])
            assert (await redis.hget(caller.keys.owner, "token"), await redis.xlen(caller.keys.events("Ada"))) == (
                before[0][b"token"],
                before[1],
            )
        assert (await caller.reply(await caller.append()))["detail"]["seq"] == 2
        assert set(caller.replies().values()) == {1}


async def test_s75_a_deposed_worker_that_wakes_up_before_a_placement_takes_no_slot(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(partitions=1)) as bed:
        old = await bed.control("control-old", Stalled)
        await bed.stage()
        caller = bed.caller("Ada")
        gated = old._commit

        async def commit_and_stall(*args: Any) -> None:
            await ControlWorker._commit(old, *args)
            if not old._desk.is_idle:
                old.gate.clear()

        old._commit = commit_and_stall
        opening = await caller.send("open", capabilities={"input_modes": ["append_tokens"]})
        await until(lambda: "slots" in old.held)
        old._commit = gated
        new = await bed.control("control-new", whole=False)
        await until(lambda: new.owned == [0])
        assert (await caller.reply(opening))["ok"]
        assert (await caller.call("close"))["ok"]
        await until_free(bed)
        old.gate.set()
        await until(lambda: old.owned == [])
        await caller.call("touch", activity="heartbeat")
        assert not await bed.redis.exists(keys.worker_slots("ear-1"))


async def until_free(bed: Bed, worker_id: str = "ear-1") -> None:
    """Wait until nobody holds a slot there."""

    async def is_free() -> bool:
        return not await bed.redis.exists(keys.worker_slots(worker_id))

    await until(is_free)


# ---- broken connections, broken servers


async def traffic(bed: Bed, callers: list[Caller], rounds: int, disturb: Any) -> dict[Caller, list[str]]:
    """Appends of every caller, and a disturbance before each round. Producers try again until Redis takes it."""
    sent: dict[Caller, list[str]] = {caller: [] for caller in callers}
    for number in range(rounds):
        await disturb(number)
        for caller in callers:
            control_id = f"{caller.session_id}-{number}"
            await persist(caller, control_id)
            sent[caller].append(control_id)
    return sent


async def persist(caller: Caller, control_id: str) -> None:
    """As a client does: without an answer to the XADD, the same command again."""
    while True:
        try:
            await caller.append(control_id=control_id)
        except (Lost, OSError):
            await asyncio.sleep(0.02)
        else:
            return


def check_traffic(sent: dict[Caller, list[str]], ear: Any) -> None:
    for caller, control_ids in sent.items():
        assert [caller.find_reply(control_id)["detail"]["seq"] for control_id in control_ids] == list(
            range(1, len(control_ids) + 1)
        )
        assert numbers(caller) == list(range(1, len(caller.events) + 1))
        assert ear.seqs(caller.session_id) == list(range(1, len(control_ids) + 1)), "I5: each exactly once, in order"


async def test_i4_connections_cut_in_the_middle_of_traffic_cost_no_reply_and_repeat_none(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(session={"max_waiting_appends": 1000})) as bed:
        worker = await bed.control("control-a")
        ear = await bed.stage()
        callers = [bed.caller(f"caller-{number}") for number in range(10)]
        for caller in callers:
            await caller.open()
        async with Redis.from_url(redis_url, client_name="the-killer") as killer:

            async def cut(number: int) -> None:
                if number % 4 == 0:
                    await killer.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

            sent = await traffic(bed, callers, 20, cut)
        for caller in callers:
            await retrying(caller, sent[caller][-1])
            assert set(caller.replies().values()) == {1}
        assert worker.stats.reconnects > 0
        check_traffic(sent, ear)


async def retrying(caller: Caller, control_id: str) -> dict[str, Any]:
    """As `reply`, over broken connections."""
    while True:
        try:
            return await caller.reply(control_id)
        except (Lost, OSError):
            await asyncio.sleep(0.02)


async def test_s51_a_server_that_is_restarted_with_its_data_goes_on_where_it_was() -> None:
    with ValkeyServer(persist=True, args=("--appendfsync", "always")) as server:
        async with Bed(server.url, make_pipeline(session={"max_waiting_appends": 1000})) as bed:
            worker = await bed.control("control-a")
            ear = await bed.stage()
            callers = [bed.caller(f"caller-{number}") for number in range(4)]
            for caller in callers:
                await caller.open()

            async def restart(number: int) -> None:
                if number in {3, 7}:
                    await asyncio.to_thread(server.restart, crash=True)

            sent = await traffic(bed, callers, 10, restart)
            for caller in callers:
                await retrying(caller, sent[caller][-1])
            check_traffic(sent, ear)
            assert worker.stats.reconnects > 0
            assert (await callers[0].call("close"))["ok"]


async def test_s50_a_server_that_was_flushed_answers_not_found_and_is_asked_no_faster(redis_url: str) -> None:
    async with Bed(redis_url) as bed:
        worker = await bed.control("control-a")
        await bed.stage()
        caller = bed.caller("Ada")
        await caller.open()
        await caller.reply(await caller.append())
        await bed.redis.flushall()
        await bed.redis.script_flush()
        lost = bed.caller("Ada")
        reply = await lost.call("touch", activity="heartbeat")
        assert reply["code"] == "not_found"
        await bed.until_owned(worker)
        stats = await bed.redis.info("stats")
        before, began = stats["total_commands_processed"], time.monotonic()
        for _ in range(10):
            await asyncio.sleep(0.05)
        stats = await bed.redis.info("stats")
        rate = (stats["total_commands_processed"] - before) / (time.monotonic() - began)
        assert rate < 2_000, f"{rate:.0f} commands a second with nothing to do"
        assert worker.stats.refused_commits < 20


async def test_a_server_that_forgot_its_scripts_gets_them_again(redis_url: str) -> None:
    async with Bed(redis_url) as bed:
        await bed.control("control-a")
        ear = await bed.stage()
        caller = bed.caller("Ada")
        await caller.open()
        sent: list[str] = []
        for _ in range(5):
            await bed.redis.script_flush()
            sent.append(await caller.append())
        await caller.reply(sent[-1])
        check_traffic({caller: sent}, ear)
        await bed.redis.script_flush()
        assert (await bed.caller("Bob").open())["ok"], "the slots' script too"


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


@pytest.mark.parametrize(
    "plan",
    [
        ["unsent"],
        ["unanswered"],
        ["unanswered", "unsent", "unsent"],  # the reading that follows fails as well
        ["unsent", "unanswered", "unsent"],
        ["unanswered", "keep", "unsent", "keep", "unanswered"],
    ],
    ids="-".join,
)
async def test_s52_a_commit_without_an_answer_is_found_applied_or_not_and_never_guessed(
    redis_url: str, plan: list[str]
) -> None:
    async with Bed(redis_url, make_pipeline(partitions=2)) as bed:
        worker = ControlWorker(redis_url, bed.pipeline, worker_id="control-a")
        lossy = worker._writer = worker._holdings.writer = Lossy(worker._pool)
        bed.controls[worker] = asyncio.create_task(worker.run())
        await bed.until_owned(worker)
        ear = await bed.stage()
        callers = [bed.caller(f"caller-{number}") for number in range(6)]
        for caller in callers:
            await caller.open()
        lossy.plan = list(plan)
        sent = await traffic(bed, callers, 4, quiet)
        for caller in callers:
            await caller.reply(sent[caller][-1])
            assert set(caller.replies().values()) == {1}
        assert lossy.plan == []
        assert worker.stats.reconnects > 0
        check_traffic(sent, ear)
        await bed.until_drained()


async def quiet(_: int) -> None:
    """No disturbance."""


class Gated(ControlWorker):
    """A worker whose reads wait for the gate, and whose next commit something may happen to."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.gate = asyncio.Event()
        self.gate.set()
        self.before_commit: Any = None

    async def _read(self) -> Any:
        await self.gate.wait()
        return await super()._read()

    async def _commit(self, batches: Any, portions: Any, others: Any) -> None:
        if batches and self.before_commit is not None:
            happen, self.before_commit = self.before_commit, None
            await happen()
        await super()._commit(batches, portions, others)


async def test_i5_a_refused_commit_lets_nothing_that_was_read_behind_it_go_first(redis_url: str) -> None:
    pipeline = local(partitions=1, control={"batch_max": 4, "lease_s": 5.0, "heartbeat_s": 0.6})
    async with Bed(redis_url, pipeline) as bed:
        worker = await bed.control("control-a", Gated)
        caller = bed.caller("Ada")
        await caller.open()
        worker.gate.clear()
        await asyncio.sleep(0)
        worker._wake()  # the read that is on its way ends without what comes now
        for _ in range(3):
            await bed.redis.xadd(caller.keys.acks, {"b": b"\xc1 no ack"})
        sent = [await caller.append() for _ in range(4)]

        async def someone_commits() -> None:
            await bed.redis.hincrby(caller.keys.owner, "revision", 1)

        worker.before_commit = someone_commits
        worker.gate.set()
        await caller.reply(sent[-1])
        assert [caller.find_reply(control_id)["detail"]["seq"] for control_id in sent] == [1, 2, 3, 4]
        assert set(caller.replies().values()) == {1}
        assert worker.stats.refused_commits == 1


# ---- broken keys and senseless entries


async def test_s78_a_broken_events_key_ends_only_its_session(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(partitions=1)) as bed:
        worker = await bed.control("control-a", Gated)
        ear = await bed.stage()
        broken, other = bed.caller("broken"), bed.caller("other")
        for caller in (broken, other):
            await caller.open()
            await caller.reply(await caller.append())
        worker.gate.clear()
        worker._wake()
        await bed.redis.delete(broken.keys.events("broken"))
        await bed.redis.set(broken.keys.events("broken"), "not ours")
        await broken.append()
        sent = await other.append()
        worker.gate.set()
        assert (await other.reply(sent))["ok"]
        fresh = bed.caller("broken")
        assert (await fresh.heard("closed"))["reason"] == "command_failed"
        assert (await other.reply(await other.append()))["detail"]["seq"] == 3
        assert other.lifecycle() == ["opened"]
        assert [order.session_id for order in ear.aborted] == ["broken"]
        assert (await fresh.open(1))["ok"]


async def test_s78_broken_answers_end_only_their_session(redis_url: str) -> None:
    async with Bed(redis_url, local(partitions=1)) as bed:
        first = await bed.control("control-a")
        broken, garbled, other = bed.caller("broken"), bed.caller("garbled"), bed.caller("other")
        for caller in (broken, garbled, other):
            await caller.open()
        await bed.leave(first)
        await bed.redis.delete(broken.keys.answers("broken"))
        await bed.redis.set(broken.keys.answers("broken"), "not ours")
        await bed.redis.rpush(garbled.keys.answers("garbled"), b"\xc1 no answer")
        await bed.control("control-b")
        for caller in (broken, garbled):
            await caller.send("touch", activity="heartbeat")
            assert (await caller.heard("closed"))["reason"] == "command_failed"
        assert (await other.call("touch", activity="heartbeat"))["ok"]
        assert other.lifecycle() == ["opened"]


def refuse_to_commit(monkeypatch: pytest.MonkeyPatch, is_bad: Callable[[Batch], bool]) -> None:
    """The script fails for some batches, before it has written anything, as it would by a mistake in it."""
    arguments = Batch.arguments

    def poisoned(batch: Batch, *more: Any) -> Any:
        names, argv = arguments(batch, *more)
        return (names, [*argv[:4], "no number"]) if is_bad(batch) else (names, argv)

    monkeypatch.setattr(Batch, "arguments", poisoned)


async def test_i11_an_entry_that_cannot_be_committed_is_set_aside_and_the_rest_goes_on(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Bed(redis_url, local(partitions=1, session={"max_waiting_appends": 100})) as bed:
        worker = await bed.control("control-a", Gated)
        callers = [bed.caller(f"caller-{number}") for number in range(3)]
        for caller in callers:
            await caller.open()
        poisonous, *others = callers
        worker.gate.clear()
        worker._wake()
        sent: dict[Caller, list[str]] = {caller: [] for caller in others}
        bad = ""
        for number in range(10):
            if number == 5:
                await poisonous.append()
                bad = (await bed.redis.xrevrange(poisonous.keys.commands, count=1))[0][0].decode()
            for caller in others:
                sent[caller].append(await caller.append())
        refuse_to_commit(monkeypatch, lambda batch: bad in batch._commands)
        worker.gate.set()
        for caller in others:
            await caller.reply(sent[caller][-1])
            seqs = [caller.find_reply(control_id)["detail"]["seq"] for control_id in sent[caller]]
            assert seqs == list(range(1, 11))
            assert set(caller.replies().values()) == {1}
            assert caller.lifecycle() == ["opened"]
        assert (await poisonous.heard("closed"))["reason"] == "command_failed"
        ((_, letter),) = await bed.redis.xrange(poisonous.keys.dead)
        assert letter[b"entry"].decode() == bad
        assert b"could not be committed" in letter[b"reason"]
        await bed.until_drained()
        assert (await poisonous.open(1))["ok"]


async def test_i11_a_session_whose_placement_cannot_be_committed_ends_and_the_rest_goes_on(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opens_the_bad_one(batch: Batch) -> bool:
        session = batch._last.get("bad")
        return session is not None and session.phase is Phase.OPEN

    refuse_to_commit(monkeypatch, opens_the_bad_one)
    async with Bed(redis_url, make_pipeline(partitions=1)) as bed:
        await bed.control("control-a")
        await bed.stage()
        bad, good = bed.caller("bad"), bed.caller("good")
        assert (await good.open())["ok"]
        opening = await bad.send("open", capabilities={"input_modes": ["append_tokens"]})
        sent = [await good.append() for _ in range(5)]
        assert (await bad.reply(opening))["code"] == "internal"
        await good.reply(sent[-1])
        assert [good.find_reply(control_id)["detail"]["seq"] for control_id in sent] == [1, 2, 3, 4, 5]

        async def is_given_back() -> bool:
            return await bed.redis.hkeys(keys.worker_slots("ear-1")) == [b"good"]

        await until(is_given_back)


async def test_a_state_that_cannot_be_read_is_dropped_and_its_outputs_are_stopped(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(partitions=1)) as bed:
        first = await bed.control("control-a")
        ear = await bed.stage()
        broken, other = bed.caller("broken"), bed.caller("other")
        for caller in (broken, other):
            await caller.open()
            await caller.reply(await caller.append())
        await bed.leave(first)
        await bed.redis.hset(broken.keys.sessions, "broken", b"\xc1 no session")
        await bed.control("control-b")
        assert (await broken.call("touch", activity="heartbeat"))["code"] == "not_found"
        assert await ear.say("broken", request_id("broken", 0, 0, 0), fence()) is Published.STOP
        assert await ear.say("other", request_id("other", 0, 0, 0), fence()) is Published.DELIVERED
        assert (await broken.open(1))["ok"]
        assert (await other.reply(await other.append()))["detail"]["seq"] == 2


@pytest.mark.parametrize("attribute", FIXED_TYPES)
async def test_s78_a_broken_key_of_a_partition_is_mended_by_whoever_takes_it(redis_url: str, attribute: str) -> None:
    async with Bed(redis_url, local(partitions=2)) as bed:
        first = await bed.control("control-a")
        broken, other = next(bed.callers_of(0)), next(bed.callers_of(1))
        for caller in (broken, other):
            await caller.open()
        await bed.leave(first)
        name = getattr(broken.keys, attribute)
        await bed.redis.delete(name)
        await bed.redis.set(name, "not ours")
        await bed.control("control-b")
        assert await bed.redis.type(name) != b"string"
        assert (await other.reply(await other.append()))["ok"]
        if attribute == "sessions":
            assert (await broken.call("touch", activity="heartbeat"))["code"] == "not_found"
            assert (await broken.open(1))["ok"]
        assert (await broken.call("touch", activity="heartbeat"))["ok"]
        assert await find_undocumented(bed.redis) == []


@pytest.mark.parametrize("attribute", FIXED_TYPES)
async def test_s78_a_key_of_a_partition_that_breaks_stops_neither_it_nor_the_others(
    redis_url: str, attribute: str
) -> None:
    async with Bed(redis_url, local(partitions=2)) as bed:
        worker = await bed.control("control-a")
        broken, other = next(bed.callers_of(0)), next(bed.callers_of(1))
        for caller in (broken, other):
            await caller.open()
        name = getattr(broken.keys, attribute)
        await bed.redis.delete(name)
        await bed.redis.set(name, "not ours")

        async def takes_commands() -> bool:
            return await bed.redis.type(broken.keys.commands) != b"string"

        await until(takes_commands)
        # Whatever the key is for, something of this needs it.
        await bed.redis.xadd(broken.keys.commands, {"no": "command"})
        stranger = next(caller for caller in bed.callers_of(0) if caller.session_id != broken.session_id)
        assert (await stranger.call("touch", activity="heartbeat"))["code"] == "not_found"
        sent = [
            await broken.append(),
            await broken.send("touch", activity="detach"),
            await broken.cancel(fence(), fence(1)),
            await broken.send("close", at=fence(1)),
        ]
        for control_id in sent:
            await broken.reply(control_id)
        assert set(broken.replies().values()) == {1}
        # A commit that such a key stops half way can't be undone: the session may be further than its commands know.
        codes = {broken.find_reply(control_id)["code"] for control_id in sent}
        assert codes <= {None, "not_found"}
        for _ in range(3):
            assert (await other.reply(await other.append()))["ok"]
        assert other.lifecycle() == ["opened"]
        assert numbers(other) == list(range(1, len(other.events) + 1))
        await bed.until_drained()
        letters = await bed.redis.xrange(broken.keys.dead)
        assert [fields[b"reason"] for _, fields in letters if b"could not be committed" in fields[b"reason"]] == []
        assert worker.owned == [0, 1]


GARBAGE: list[tuple[str, dict[bytes, bytes], str]] = [
    ("no b", {b"x": b"y"}, "one field b"),
    ("empty", {b"b": b""}, "no MessagePack or JSON map"),
    ("truncated", {b"b": msgspec.msgpack.encode({"v": 1, "op": "open"})[:-2]}, "no MessagePack or JSON map"),
    ("no map", {b"b": msgspec.msgpack.encode([1, 2])}, "no MessagePack or JSON map"),
    ("JSON cut", {b"b": b'{"v": 1, "op":'}, "no MessagePack or JSON map"),
    ("NUL bytes", {b"b": b"\x00" * 100}, "no MessagePack or JSON map"),
    ("no session", {b"b": b'{"v": 1, "op": "touch", "control_id": "c"}'}, "session_id"),
    ("session of a wrong type", {b"b": b'{"v": 1, "op": "touch", "session_id": 7}'}, "session_id"),
    ("control characters", {b"b": b'{"v": 1, "op": "close", "session_id": "a\\u0000b"}'}, "control character"),
    ("deep nesting", {b"b": b"\x91" * 100_000}, "no MessagePack or JSON map"),
    ("10 MiB", {b"b": b"\xc6\x00\xa0\x00\x00" + bytes(10 << 20)}, "no MessagePack or JSON map"),
]


async def test_s54_what_cannot_be_answered_is_a_dead_letter_and_nothing_waits_behind_it(any_server: RealServer) -> None:
    async with Bed(any_server.url, local(partitions=2)) as bed:
        worker = await bed.control("control-a")
        caller = next(bed.callers_of(1))
        await caller.open()
        for _, fields, _ in GARBAGE:
            await bed.redis.xadd(caller.keys.commands, fields)
        # What an XADD through a dict can't say: a field that comes twice.
        body = msgspec.msgpack.encode({"v": 1, "op": "touch", "session_id": caller.session_id, "control_id": "twice"})
        await bed.redis.execute_command("XADD", caller.keys.commands, "*", "b", body, "b", body)
        await bed.redis.execute_command("XADD", caller.keys.commands, "*", "b", body, "p", b"1", "p", b"2")
        stray = next(bed.callers_of(0))
        stray.keys = PartitionKeys(1)
        await stray.send("open")
        await bed.redis.xadd(caller.keys.acks, {"b": b"\xc1 no ack"})
        await bed.redis.xadd(caller.keys.acks, {"x": b"y"})
        assert (await caller.reply(await caller.append()))["ok"]
        await bed.until_drained()
        letters = [fields for _, fields in await bed.redis.xrange(caller.keys.dead)]
        reasons = [fields[b"reason"].decode() for fields in letters if fields[b"stream"] == b"commands"]
        wanted = [reason for _, _, reason in GARBAGE] + ["one field b"] * 2 + ["belongs to partition 0, not to 1"]
        assert len(reasons) == len(wanted)
        for found, reason in zip(reasons, wanted, strict=True):
            assert reason in found
        assert sum(fields[b"stream"] == b"acks" for fields in letters) == 2
        assert all(len(fields[b"b"]) <= 4096 for fields in letters)
        assert worker.stats.dead_letters == len(letters)
        assert not await bed.redis.exists(PartitionKeys(0).dead)


async def test_s54_what_names_a_session_is_answered_with_the_path_of_what_is_wrong(redis_url: str) -> None:
    async with Bed(redis_url, local(limits={"body_bytes": 20_000, "payload_bytes": 1_000})) as bed:
        await bed.control("control-a")
        caller = bed.caller("Ada")
        await caller.open()
        cases: list[tuple[dict[str, Any], str, str]] = [
            ({"op": "touch"}, "invalid_argument", "activity"),
            ({"op": "touch", "activity": 5}, "invalid_argument", "$.activity"),
            ({"op": "dance"}, "invalid_argument", "dance"),
            ({"op": "touch", "activity": "attach", "v": 2}, "unsupported_version", "$.v"),
            ({"op": "close", "reason": "x" * 30_000}, "payload_too_large", "20000 are allowed"),
            ({"op": "append", "mode": "turn_commit_only", "payload": "x" * 2_000}, "payload_too_large", "$.payload"),
            ({"op": "append", "mode": "shout"}, "invalid_argument", "$.mode"),
            ({"op": "signal", "event": "wave"}, "invalid_argument", "$.event"),
        ]
        for number, (body, code, about) in enumerate(cases):
            reply = await caller.call(body.pop("op"), control_id=f"case-{number}", **body)
            assert (reply["code"], about in reply["message"]) == (code, True), reply
        assert caller.lifecycle() == ["opened"]


async def test_two_thousand_waiting_commands_are_worked_off(redis_url: str) -> None:
    pipeline = local(partitions=4)
    async with Bed(redis_url, pipeline) as bed:
        callers = [bed.caller(f"caller-{number}") for number in range(50)]
        async with bed.redis.pipeline(transaction=False) as pipe:
            for caller in callers:
                for number in range(40):
                    body: dict[str, Any] = {"v": 1, "session_id": caller.session_id, "fence": fence()}
                    body |= {"op": "append", "mode": "turn_commit_only"} if number else {"op": "open"}
                    body["control_id"] = f"{caller.session_id}-{number}"
                    pipe.xadd(caller.keys.commands, {"b": msgspec.msgpack.encode(body)})
            await pipe.execute()
        worker = await bed.control("control-a")
        await bed.until_drained()
        for caller in callers:
            await caller.listen()
            assert caller.replies().total() == 40
            assert [body["detail"]["seq"] for _, _, body in caller.events[2:]] == list(range(1, 40))
        assert worker.stats.commits < 200, "in batches"


# ---- stages


async def test_a_lost_stage_ends_its_sessions_and_no_others(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(partitions=4)) as bed:
        await bed.control("control-a")
        await bed.control("control-b", whole=False)
        await bed.until_owned(*bed.controls)
        doomed, safe = await bed.stage("ear-1", capacity=4), await bed.stage("ear-2", capacity=4)
        callers = [bed.caller(f"caller-{number}") for number in range(8)]
        for caller in callers:
            assert (await caller.open())["ok"]
            await caller.reply(await caller.append())
        on_doomed = {order.session_id for order, _ in doomed.submitted}
        assert len(on_doomed) == 4
        doomed.accepts = doomed.confirms = doomed.beats = False
        waiting = {c: await c.append() for c in callers if c.session_id in on_doomed}
        for caller in callers:
            if caller.session_id in on_doomed:
                assert (await caller.heard("closed"))["reason"] == "stage_lost"
                assert caller.find_reply(waiting[caller])["code"] == "failed_precondition"
                assert caller.lifecycle() == ["opened", "closed"]
                code = await doomed.say(caller.session_id, request_id(caller.session_id, 0, 0, 0), fence())
                assert code is Published.STOP, "when it wakes it can publish nothing"
            else:
                assert (await caller.reply(await caller.append()))["ok"]
                assert caller.lifecycle() == ["opened"]
        assert len({order.session_id for order, _ in safe.submitted}) == 4
        await until_free(bed, "ear-1")

        async def is_forgotten() -> bool:
            return not await bed.redis.hexists(keys.STAGES, "ear-1")

        await until(is_forgotten)


async def test_the_cleanups_of_a_lost_stage_count_as_done_and_the_others_clean_up(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(stages=2, partitions=1)) as bed:
        await bed.control("control-a")
        ear, mouth = await bed.stage("ear-1", 0), await bed.stage("mouth-1", 1)
        caller = bed.caller("Ada")
        assert (await caller.open())["ok"]
        await caller.reply(await caller.append())
        ear.confirms = mouth.confirms = False
        cancel = await caller.cancel(fence(), fence(1))
        await until(lambda: ear.seen_aborts and mouth.seen_aborts)
        mouth.beats = False
        await caller.heard("closing")
        assert cancel not in caller.replies(), "the ear still holds it"
        ear.confirms = True
        assert (await caller.heard("closed"))["reason"] == "stage_lost"
        await caller.reply(cancel)
        assert caller.replies()[cancel] == 1
        assert mouth.aborted == []


async def test_s3_sessions_beyond_the_slots_are_refused_and_one_that_ends_makes_room(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline()) as bed:
        await bed.control("control-a")
        await bed.control("control-b", whole=False)
        await bed.until_owned(*bed.controls)
        await bed.stage(capacity=3)
        callers = [bed.caller(f"caller-{number}") for number in range(8)]
        opening = [await c.send("open", capabilities={"input_modes": ["append_tokens"]}) for c in callers]
        replies = [await c.reply(control_id) for c, control_id in zip(callers, opening, strict=True)]
        good = [c for c, reply in zip(callers, replies, strict=True) if reply["ok"]]
        assert len(good) == 3
        assert {reply["code"] for reply in replies if not reply["ok"]} == {"resource_exhausted"}
        assert all(reply["retryable"] for reply in replies if not reply["ok"])
        assert await bed.redis.hlen(keys.worker_slots("ear-1")) == 3
        await good[0].call("close")
        late = next(c for c, reply in zip(callers, replies, strict=True) if not reply["ok"])

        async def is_in() -> bool:
            return (await late.open())["ok"]

        await until(is_in)
        assert await bed.redis.hlen(keys.worker_slots("ear-1")) == 3


async def test_i9_the_limit_of_sessions_holds_across_workers(redis_url: str) -> None:
    async with Bed(redis_url, local(max_sessions=5, partitions=8)) as bed:
        await bed.control("control-a")
        await bed.control("control-b", whole=False)
        await bed.until_owned(*bed.controls)
        callers = [bed.caller(f"caller-{number}") for number in range(20)]
        opening = [await caller.send("open") for caller in callers]
        replies = [await c.reply(control_id) for c, control_id in zip(callers, opening, strict=True)]
        assert sum(reply["ok"] for reply in replies) == 5
        assert await bed.redis.hlen(keys.ADMISSION_SLOTS) == 5


async def test_a_placement_goes_elsewhere_when_the_chosen_worker_is_full_after_all(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(partitions=1)) as bed:
        worker = await bed.control("control-a")
        await bed.stage("ear-1", capacity=1)
        await bed.stage("ear-2", capacity=1)
        # The worker doesn't look again: what it knows of ear-1 is old.
        worker._observer.directory = type(worker._directory)(1)
        await bed.redis.hset(keys.worker_slots("ear-1"), "somebody else", "0 1")
        caller = bed.caller("Ada")
        assert (await caller.open())["ok"]
        assert await bed.redis.hkeys(keys.worker_slots("ear-2")) == [b"Ada"]
        assert b"Ada" not in await bed.redis.hkeys(keys.worker_slots("ear-1"))


async def test_s2_a_slot_that_could_not_be_given_back_is_asked_for_until_it_is(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(partitions=1, max_sessions=5)) as bed:
        await bed.control("control-a")
        await bed.stage("ear-1", capacity=2)
        first, second = bed.caller("Ada"), bed.caller("Bob")
        assert (await first.open())["ok"]
        held = await bed.redis.hgetall(keys.worker_slots("ear-1"))
        await bed.redis.delete(keys.worker_slots("ear-1"))
        await bed.redis.set(keys.worker_slots("ear-1"), "not ours")
        assert (await first.call("close"))["ok"]

        async def owes_one() -> bool:
            return not await bed.redis.exists(keys.ADMISSION_SLOTS)

        await until(owes_one)
        again = await first.send("open", at=fence(incarnation=1), capabilities={"input_modes": ["append_tokens"]})
        assert not (await second.open())["ok"], "I11: and others are answered meanwhile"
        assert await first.listen()
        assert again not in first.replies(), "it waits for the slot of its last life"
        await bed.redis.delete(keys.worker_slots("ear-1"))
        await bed.redis.hset(keys.worker_slots("ear-1"), mapping=held)
        reply = await first.reply(again)
        assert reply["ok"], reply
        assert await bed.redis.hkeys(keys.worker_slots("ear-1")) == [b"Ada"]


async def test_s1_a_producer_that_gives_up_while_placement_is_under_way_leaves_nothing(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(partitions=1, max_sessions=5)) as bed:
        worker = await bed.control("control-a", Stalled)
        await bed.stage()
        worker.gate.clear()
        caller = bed.caller("Ada")
        opening = await caller.send("open", capabilities={"input_modes": ["append_tokens"]})
        closing = await caller.send("close")
        await until(lambda: worker.held)
        worker.gate.set()
        assert (await caller.reply(opening))["code"] == "failed_precondition"
        assert (await caller.reply(closing))["ok"]
        await until_free(bed)
        assert caller.lifecycle() == []
        assert (await caller.open(1))["ok"]


async def test_i11_a_stuck_stage_delays_no_session_of_another(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(partitions=1)) as bed:
        await bed.control("control-a")
        stuck, well = await bed.stage("ear-1", capacity=1), await bed.stage("ear-2", capacity=1)
        first, second = bed.caller("Ada"), bed.caller("Bob")
        assert (await first.open())["ok"]
        assert (await second.open())["ok"]
        slow, quick = (first, second) if (await first.append()) and await is_at(bed, stuck, first) else (second, first)
        await slow.reply(await slow.append())
        stuck.accepts = stuck.confirms = False
        for _ in range(5):
            await slow.append()
        await slow.cancel(fence(), fence(1))
        await slow.heard("interrupted")
        for _ in range(10):
            assert (await quick.reply(await quick.append()))["ok"]
        assert (await quick.call("close"))["ok"]
        assert well.aborted


async def is_at(bed: Bed, stage: Any, caller: Caller) -> bool:
    return await bed.redis.hexists(keys.worker_slots(stage.worker_id), caller.session_id)


async def test_i2_a_request_is_released_only_once_every_stage_of_its_route_has_confirmed(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(stages=2, partitions=1)) as bed:
        await bed.control("control-a")
        ear, mouth = await bed.stage("ear-1", 0), await bed.stage("mouth-1", 1)
        caller = bed.caller("Ada")
        await caller.open()
        await caller.reply(await caller.append())
        names = [request_id("Ada", 0, 0, stage_id) for stage_id in range(2)]
        for stage, name in zip((ear, mouth), names, strict=True):
            assert await stage.say("Ada", name, fence()) is Published.DELIVERED
        mouth.confirms = False
        cancel = await caller.cancel(fence(), fence(1))
        await until(lambda: ear.aborted and mouth.seen_aborts)
        await bed.until_drained()
        assert (await caller.call("touch", at=fence(1), activity="heartbeat"))["ok"]
        assert cancel not in caller.replies()
        assert set(await bed.redis.hkeys(caller.keys.outputs)) == {name.encode() for name in names}
        mouth.confirms = True
        assert (await caller.reply(cancel))["ok"]
        assert not await bed.redis.exists(caller.keys.outputs)


# ---- time


async def test_a_command_older_than_its_own_deadline_is_refused_and_a_cancel_never_is(redis_url: str) -> None:
    async with Bed(redis_url, local(partitions=1)) as bed:
        seconds, _ = await bed.redis.time()
        old = [f"{seconds * 1000 - 60_000 + number}-0" for number in range(5)]
        caller = bed.caller("Ada")
        opening = await caller.send("open", entry_id=old[0], deadline_ms=120_000)
        late = await caller.append(entry_id=old[1], deadline_ms=1_000)
        patient = await caller.append(entry_id=old[2], deadline_ms=120_000)
        cancel = await caller.cancel(fence(), fence(1), entry_id=old[3], deadline_ms=1)
        close = await caller.send("close", at=fence(1), entry_id=old[4], deadline_ms=1)
        await bed.control("control-a")
        await caller.reply(close)
        codes = {control_id: caller.find_reply(control_id)["code"] for control_id in (opening, late, patient, cancel)}
        assert codes == {opening: None, late: "timeout", patient: None, cancel: None}
        assert caller.find_reply(late)["retryable"]
        assert caller.find_reply(patient)["detail"]["seq"] == 1


QUICK = {"idle_ttl_s": 1.0, "append_timeout_s": 0.5, "disconnect_grace_s": 0.7}


async def test_an_idle_session_expires_and_one_that_is_heard_lives_on(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(partitions=1, session=QUICK)) as bed:
        await bed.control("control-a")
        ear = await bed.stage()
        idle, speaking, touching = bed.caller("idle"), bed.caller("speaking"), bed.caller("touching")
        for caller in (idle, speaking, touching):
            await caller.open()
            await caller.reply(await caller.append())
        speaks = asyncio.create_task(speak(ear, speaking))
        touches = asyncio.create_task(touch(touching))
        assert (await idle.heard("expired"))["reason"] == "idle_ttl_expired"
        await asyncio.sleep(1.2)  # another idle TTL: it bounds what is looked at, and hides nothing
        for caller, task in ((speaking, speaks), (touching, touches)):
            await end(task)
            await caller.listen()
            assert caller.lifecycle() == ["opened"]
        assert (await speaking.heard("expired"))["reason"] == "idle_ttl_expired"
        assert (await touching.heard("expired"))["reason"] == "idle_ttl_expired"
        assert {order.session_id for order in ear.aborted} == {"idle", "speaking", "touching"}


async def speak(ear: Any, caller: Caller) -> None:
    while True:
        assert await ear.say(caller.session_id, request_id(caller.session_id, 0, 0, 0), fence()) is Published.DELIVERED
        await asyncio.sleep(0.1)


async def touch(caller: Caller) -> None:
    while True:
        await caller.send("touch", activity="heartbeat")
        await asyncio.sleep(0.1)


async def test_s6_a_detached_session_expires_by_its_grace_though_its_outputs_go_on(redis_url: str) -> None:
    session = {"idle_ttl_s": None, "append_timeout_s": 0.5, "disconnect_grace_s": 0.7}
    async with Bed(redis_url, make_pipeline(partitions=1, session=session)) as bed:
        await bed.control("control-a")
        ear = await bed.stage()
        gone, back = bed.caller("gone"), bed.caller("back")
        for caller in (gone, back):
            await caller.open()
            await caller.reply(await caller.append())
            assert (await caller.call("touch", activity="detach"))["ok"]
        assert (await back.call("resume", expected_lease_generation=0))["ok"]
        request = request_id("gone", 0, 0, 0)

        async def is_stopped() -> bool:
            return await ear.say("gone", request, fence()) is Published.STOP

        await until(is_stopped)
        assert (await gone.heard("expired"))["reason"] == "disconnect_grace_expired"
        await back.listen()
        assert back.lifecycle() == ["opened"]


async def test_s21_an_append_without_an_answer_times_out_and_its_epoch_is_lost(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(partitions=1, session=QUICK)) as bed:
        await bed.control("control-a")
        ear = await bed.stage()
        caller = bed.caller("Ada")
        await caller.open()
        ear.accepts = False
        first, second = await caller.append(), await caller.append()
        assert (await caller.reply(first))["code"] == "timeout"
        assert (await caller.reply(second))["code"] == "failed_precondition"
        await caller.heard("epoch_lost")
        await until(lambda: ear.aborted)
        ear.accepts = True
        cancel = await caller.cancel(fence(), fence(1))
        assert (await caller.reply(cancel))["ok"]
        assert (await caller.reply(await caller.append(fence(1))))["detail"]["seq"] == 1


async def test_s30_a_cleanup_that_nobody_confirms_is_answered_by_its_deadline_and_asked_for_again(
    redis_url: str,
) -> None:
    session = {"cleanup_timeout_s": 0.4, "cleanup_backoff_s": 0.1, "cleanup_backoff_max_s": 0.3}
    async with Bed(redis_url, make_pipeline(partitions=1, session=session)) as bed:
        await bed.control("control-a")
        ear = await bed.stage()
        caller = bed.caller("Ada")
        await caller.open()
        await caller.reply(await caller.append())
        ear.confirms = False
        reply = await caller.reply(await caller.cancel(fence(), fence(1)))
        assert (reply["code"], reply["retryable"]) == ("timeout", True)

        async def is_asked_again() -> bool:
            return await bed.redis.xlen(caller.keys.aborts("ear-1")) > 2

        await until(is_asked_again)
        ear.confirms = True
        again = await caller.reply(await caller.cancel(fence(), fence(1)))
        assert again["ok"]
        await bed.until_drained()
        assert {order.epochs for order in ear.aborted} == {(0,)}
        assert (await caller.reply(await caller.append(fence(1))))["ok"]


async def test_no_deadline_fires_before_the_backlog_was_read_and_a_heartbeat_time_has_passed(redis_url: str) -> None:
    pipeline = local(partitions=1, session=QUICK, control={"batch_max": 2})
    async with Bed(redis_url, pipeline) as bed:
        first = await bed.control("control-a")
        caller, strangers = bed.caller("Ada"), [bed.caller(f"stranger-{number}") for number in range(20)]
        await caller.open()
        await bed.crash(first)
        await asyncio.sleep(1.1)  # its idle TTL passes while nobody owns it
        for stranger in strangers:
            await stranger.send("touch", activity="heartbeat")
        sent = await caller.send("touch", activity="heartbeat")
        await bed.control("control-b")
        assert (await caller.reply(sent))["ok"]
        assert caller.lifecycle() == ["opened"], "its touch came in time, far back in the stream"
        assert (await caller.heard("expired"))["reason"] == "idle_ttl_expired"


async def test_an_expiry_that_an_output_overtakes_is_decided_anew(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(partitions=1, session=QUICK)) as bed:
        worker = await bed.control("control-a", Gated)
        ear = await bed.stage()
        caller = bed.caller("Ada")
        await caller.open()
        await caller.reply(await caller.append())
        request = request_id("Ada", 0, 0, 0)
        said: list[Published] = []

        async def say() -> None:
            said.append(await ear.say("Ada", request, fence()))

        worker.before_commit = say
        await until(lambda: said)
        assert said == [Published.DELIVERED]
        await until(lambda: worker.stats.refused_commits > 0)
        await caller.listen()
        assert caller.lifecycle() == ["opened"]
        assert (await caller.heard("expired"))["reason"] == "idle_ttl_expired"


# ---- repeats


async def test_i4_a_command_sent_again_has_one_effect_and_the_same_reply(redis_url: str) -> None:
    async with Bed(redis_url) as bed:
        first = await bed.control("control-a")
        ear = await bed.stage()
        caller = bed.caller("Ada")
        await caller.open()
        control_id = await caller.append()
        reply = await caller.reply(control_id)
        for _ in range(3):
            await caller.append(control_id=control_id)
        await until_replied(caller, control_id, 4)
        assert [b for kind, _, b in caller.events if kind == "reply" and b["control_id"] == control_id] == [reply] * 4
        assert ear.seqs("Ada") == [1]
        await bed.leave(first)
        await bed.control("control-b")
        await caller.append(control_id=control_id)
        await until_replied(caller, control_id, 5)
        assert caller.events[-1][2] == reply, "a new owner remembers"
        assert ear.seqs("Ada") == [1]
        assert (await caller.reply(await caller.append()))["detail"]["seq"] == 2


async def until_replied(caller: Caller, control_id: str, count: int) -> None:
    async def is_replied() -> bool:
        await caller.listen()
        return caller.replies()[control_id] >= count

    await until(is_replied)


async def test_s53_a_server_that_takes_no_writes_is_waited_for_and_nothing_is_lost(redis_url: str) -> None:
    async with Bed(redis_url, local(partitions=1)) as bed:
        worker = await bed.control("control-a", Gated)
        caller = bed.caller("Ada")
        await caller.open()

        async def forbid_writes() -> None:
            await bed.redis.config_set("min-replicas-to-write", 1)

        worker.before_commit = forbid_writes
        sent = await caller.append()
        await until(lambda: worker.stats.reconnects > 1)
        await caller.listen()
        assert sent not in caller.replies()
        await bed.redis.config_set("min-replicas-to-write", 0)
        assert (await caller.reply(sent))["detail"]["seq"] == 1
        await bed.until_drained()
        assert worker.stats.dead_letters == 0
        assert not await bed.redis.exists(caller.keys.dead), "not the batch's fault"
