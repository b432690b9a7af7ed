"""Keys that hold something else, entries that make no sense: they cost what is broken, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from control.core.requests import request_id
from control.core.session import Phase
from control.store import keys
from control.store.commits import COMMANDS_KEY, Batch
from control.store.keys import FIXED_TYPES, PartitionKeys
from control.store.publishing import Published
from control.wire.stage import AcceptedAck, encode
from tests.servers import RealServer
from tests.store.table import find_undocumented
from tests.workers.control_bed import Bed, Caller, fence, local, make_pipeline, numbers, until
from tests.workers.control_stalls import Gated


async def test_s78_a_broken_events_key_ends_only_its_session(redis_url: str) -> None:
    async with Bed(redis_url, make_pipeline(partitions=1)) as bed:
        worker = await bed.control("control-a", Gated)
        ear = await bed.stage()
        broken, other = bed.caller("broken"), bed.caller("other")
        for caller in (broken, other):
            await caller.open()
            await caller.reply(await caller.append())
        worker.gate.clear()
        worker.wake()
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
        worker.wake()
        sent: dict[Caller, list[str]] = {caller: [] for caller in others}
        bad = ""
        for number in range(10):
            if number == 5:
                await poisonous.append()
                bad = (await bed.redis.xrevrange(poisonous.keys.commands, count=1))[0][0].decode()
            for caller in others:
                sent[caller].append(await caller.append())
        refuse_to_commit(monkeypatch, lambda batch: bad in batch._done[COMMANDS_KEY])
        worker.gate.set()
        for caller in others:
            await caller.reply(sent[caller][-1])
            seqs = [caller.find_reply(control_id)["detail"]["seq"] for control_id in sent[caller]]
            assert seqs == list(range(1, 11))
            assert set(caller.replies().values()) == {1}
            assert caller.lifecycle() == ["opened"]
        assert (await poisonous.heard("closed"))["reason"] == "command_failed"
        assert poisonous.codes()[1:] == [("append", "internal")]
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


async def test_sessions_whose_deadlines_were_lost_still_expire(redis_url: str) -> None:
    session = {"idle_ttl_s": 1.0, "append_timeout_s": 0.5}
    async with Bed(redis_url, local(partitions=1, session=session)) as bed:
        first = await bed.control("control-a")
        callers = [bed.caller("Ada"), bed.caller("Bob")]
        for caller in callers:
            await caller.open()
        await bed.leave(first)
        await bed.redis.set(callers[0].keys.deadlines, "not ours")
        await bed.control("control-b")
        for caller in callers:
            assert (await caller.heard("expired"))["reason"] == "idle_ttl_expired"


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
        assert codes <= {None, "not_found", "stale_fence"}
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


async def test_s55_an_append_that_was_deleted_by_hand_while_it_waited_is_noticed_and_nothing_stalls(
    redis_url: str,
) -> None:
    async with Bed(redis_url, make_pipeline(partitions=1)) as bed:
        worker = await bed.control("control-a")
        ear = await bed.stage()
        caller, other = bed.caller("Ada"), bed.caller("Bob")
        for each in (caller, other):
            await each.open()
        ear.accepts = False
        sent = [await caller.append() for _ in range(3)]
        await until(lambda: worker.owners[0].owned[0].partition.waiting == 2)
        entries = await bed.redis.xrange(caller.keys.commands)
        assert len(entries) == 2
        await bed.redis.xdel(caller.keys.commands, entries[0][0])
        ear.accepts = True
        under_way = worker.owners[0].owned[0].partition.find("Ada").append
        await bed.redis.xadd(caller.keys.acks, {"b": encode(AcceptedAck("Ada", 0, under_way.number))})
        assert (await caller.reply(sent[0]))["detail"]["seq"] == 1
        assert (await caller.reply(sent[2]))["detail"]["seq"] == 2
        assert worker.stats.missing_entries == 1
        assert (await other.reply(await other.append()))["ok"]
        assert sent[1] not in caller.replies()
