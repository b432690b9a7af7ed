"""The same entries for a real control worker on a real server.

A stage played by hand takes and confirms everything. After each load the streams must run dry, every entry be answered
on its session's events or be a dead letter (or be counted as unheard, beyond what is kept for ids without a session),
and the worker be alive. A quiet session in each partition talks meanwhile; how long it waits is measured.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Self

from redis.asyncio import Redis

from control.core import commands as c
from control.store.commits import ACKS_KEY, COMMANDS_KEY, ORDERS_KEY
from control.store.keys import PartitionKeys, partition_of
from control.wire.events import decode_event
from tests.fuzz.ground import Key, find_home
from tests.workers.control_bed import Bed, Caller, make_pipeline
from workers.control_setup import wire_limits

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from tests.fuzz.damage import Shot
    from tests.fuzz.findings import Findings

LOAD = 1000
PATIENCE_S = 30.0
QUIET_S = 10.0  # how long the quiet session may wait on a busy machine
POLL_S = 0.01


class Served:
    """`async with Served(url, findings) as served`; then `throw` entries at it."""

    def __init__(self, url: str, findings: Findings, hear: Callable[[dict[str, Any]], None] | None = None) -> None:
        """`url`: of an empty server. `findings` gets the worker's limits and partitions."""
        self.findings = findings
        self.slowest_s = 0.0
        pipeline = make_pipeline(session={"append_timeout_s": 2.0, "cleanup_timeout_s": 1.0, "max_waiting_appends": 8})
        findings.partitions, findings.limits = pipeline.partitions, wire_limits(pipeline)
        self._bed = Bed(url, pipeline)
        self._hear = hear
        self._owed: dict[Key, Shot] = {}
        self._nameless: dict[Key, int] = defaultdict(int)
        # How many more replies a command may have: as many as it was sent.
        self._may_come: Counter[Key] = Counter()
        self._read_to: dict[str, str] = {}
        self._buried_to = ["0-0"] * pipeline.partitions
        self._doomed: dict[tuple[int, int, str], Shot] = {}
        self._callers: list[Caller] = []

    async def __aenter__(self) -> Self:
        await self._bed.__aenter__()
        self._redis: Redis = self._bed.redis
        self._worker = await self._bed.control("fuzzed")
        await self._bed.stage("ear-1", capacity=1000)
        partitions = self._bed.pipeline.partitions
        self._callers = [self._bed.caller(find_home(p, partitions)) for p in range(partitions)]
        for caller in self._callers:
            await caller.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._bed.__aexit__(kind, error, trace)

    async def throw(self, shots: list[Shot]) -> None:
        """A load of entries, until nothing of it is left to do."""
        unheard = await self._count_unheard()
        async with self._redis.pipeline(transaction=False) as pipe:
            for shot in shots:
                keys = PartitionKeys(shot.partition)
                name = {COMMANDS_KEY: keys.commands, ACKS_KEY: keys.acks, ORDERS_KEY: keys.orders}[shot.stream]
                pipe.execute_command("XADD", name, "*", *shot.fields)
            entry_ids = await pipe.execute()
        for shot, entry_id in zip(shots, entry_ids, strict=True):
            self._expect(shot, entry_id.decode())
        await asyncio.gather(*(self._talk(caller) for caller in self._callers))
        if not await self._until_done(unheard):
            self.findings.note(f"not done within {PATIENCE_S:g} s")
        await self._judge(unheard)

    async def _until_done(self, unheard_before: int) -> bool:
        """Whether everything was applied and said in time."""
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            if await self._is_done():
                return True
            if self._bed.controls[self._worker].done():
                self.findings.note("the control worker has ended")
                return False
            await asyncio.sleep(POLL_S)
            if await self._are_streams_dry() and self._missing() <= await self._count_unheard() - unheard_before:
                await self._is_done()
                return True
        return False

    def _expect(self, shot: Shot, entry_id: str) -> None:
        entry = self.findings.decode(shot, entry_id)
        if entry is None:
            return
        if entry.unreadable is not None:
            self.findings.seen["dead letters"] += 1
            self._doomed[shot.partition, shot.stream, entry_id] = shot
        elif entry.received is None:
            self.findings.seen["orders" if shot.stream == ORDERS_KEY else "acks"] += 1
        else:
            command = entry.received.command
            self.findings.seen[type(command).__name__] += 1
            key = (command.session_id, command.control_id, c.op_of(command))
            self._may_come[key] += 1
            if command.control_id:
                self._owed[key] = shot
            else:
                self._nameless[key] += 1

    async def _talk(self, caller: Caller) -> None:
        """The quiet session says something behind the whole load."""
        began_s = time.monotonic()
        touched = await caller.call("touch", activity="heartbeat")
        appended = await caller.reply(await caller.append())
        took_s = time.monotonic() - began_s
        caller.events.clear()
        self.slowest_s = max(self.slowest_s, took_s)
        if not (touched["ok"] and appended["ok"]):
            self.findings.note(f"a quiet session was refused: {touched}, {appended}")
        if took_s > QUIET_S:
            self.findings.note(f"a quiet session waited {took_s:.1f} s")

    # ---- what came of it

    async def _is_done(self) -> bool:
        await self._read_replies()
        await self._read_dead_letters()
        return not (self._owed or self._nameless or self._doomed) and await self._are_streams_dry()

    async def _are_streams_dry(self) -> bool:
        async with self._redis.pipeline(transaction=False) as pipe:
            for keys in self._all_keys():
                pipe.xlen(keys.commands)
                pipe.xlen(keys.acks)
                pipe.xlen(keys.orders)
            return not any(await pipe.execute())

    def _missing(self) -> int:
        return len(self._owed) + sum(self._nameless.values())

    async def _read_replies(self) -> None:
        wanted = sorted({key[0] for key in (*self._owed, *self._nameless)})
        async with self._redis.pipeline(transaction=False) as pipe:
            for session_id in wanted:
                keys = self._keys(session_id)
                pipe.xrange(keys.events(session_id), "(" + self._read_to.get(session_id, "0-0"), "+")
            answers = await pipe.execute()
        for session_id, entries in zip(wanted, answers, strict=True):
            for entry_id, fields in entries:
                self._read_to[session_id] = entry_id.decode()
                if fields[b"t"] == b"reply":
                    self._note_reply(decode_event(fields[b"b"]))

    def _note_reply(self, reply: dict[str, Any]) -> None:
        if self._hear is not None:
            self._hear(reply)
        key = (reply["session_id"], reply["control_id"], reply["op"])
        self._owed.pop(key, None)
        self._may_come[key] -= 1
        if self._may_come[key] < 0:
            self.findings.note(f"I4: {key} has had more replies than it was sent")
        if not reply["control_id"] and key in self._nameless:
            self._nameless[key] -= 1
            if not self._nameless[key]:
                del self._nameless[key]
        if reply["code"] == "internal":
            self.findings.note(f"an internal error: {reply}")
        self.findings.seen["replies: " + (reply["code"] or "ok")] += 1

    async def _read_dead_letters(self) -> None:
        for partition, keys in enumerate(self._all_keys()):
            for entry_id, fields in await self._redis.xrange(keys.dead, "(" + self._buried_to[partition], "+"):
                self._buried_to[partition] = entry_id.decode()
                stream = {b"commands": COMMANDS_KEY, b"acks": ACKS_KEY, b"orders": ORDERS_KEY}[fields[b"stream"]]
                shot = self._doomed.pop((partition, stream, fields[b"entry"].decode()), None)
                if shot is None:
                    self.findings.note(f"a dead letter that should be none: {fields}")

    async def _judge(self, unheard_before: int) -> None:
        for shot in self._doomed.values():
            self.findings.note("no dead letter", shot)
        unheard = await self._count_unheard() - unheard_before
        self.findings.seen["unheard"] += unheard
        if self._missing() > unheard:
            for key, shot in self._owed.items():
                self.findings.note(f"no reply to {key}, {unheard} unheard", shot)
            for key, count in self._nameless.items():
                self.findings.note(f"{count} replies to {key} are missing, {unheard} unheard")
        self._owed.clear()
        self._nameless.clear()
        self._doomed.clear()

    async def _count_unheard(self) -> int:
        counts = [await self._redis.hget(keys.owner, "unheard") for keys in self._all_keys()]  # type: ignore[misc]
        return sum(int(count or 0) for count in counts)

    def _all_keys(self) -> list[PartitionKeys]:
        return [PartitionKeys(p) for p in range(self._bed.pipeline.partitions)]

    def _keys(self, session_id: str) -> PartitionKeys:
        return PartitionKeys(partition_of(session_id, self._bed.pipeline.partitions))
