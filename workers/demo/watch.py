"""Watching the session from outside while it talks: its requests, its owner, its stages, its stream.

Responsible for what the demo knows beyond what any listener knows, learnt from Redis a few times a second. Leaves the
conversation to `dialogue.py`, the conclusions to `findings.py`. Talks to Redis and never writes.

The session's stream is read a second time, entry by entry and as it is stored, so that the audit doesn't rest on the
client alone, which would hide a stale output.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from control.core.requests import RequestPhase, request_id
from control.core.session import Phase
from control.store import keys
from control.store.commits import decode_session
from control.store.inspect import fetch_stage_workers
from control.store.keys import PartitionKeys
from control.store.lives import fetch_figures
from control.wire.events import decode_event
from workers.demo.audit import Audit
from workers.demo.board import RequestState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from redis.asyncio import Redis

    from control.core.session import Session
    from workers.demo.board import Board

LOOK_S = 0.1
LOOKS_A_FIGURE = 5
LOOKS_AN_AUDIT = 10
SETTLE_S = 5.0
PAGE = 500

STATES = {RequestPhase.RESERVED: "reserved", RequestPhase.SUBMITTED: "running", RequestPhase.CLEANING: "cleaning"}

# What a stage worker may do with something stale: its counters, and what they mean for an output.
DROPPED = ("outputs_dropped", "outputs_stopped", "outputs_late", "discarded")


class Watch:
    """`board` gets what is seen."""

    def __init__(
        self, redis: Redis, session_id: str, incarnation: int, partition: int, stages: Sequence[str], board: Board
    ) -> None:
        self.audit = Audit()
        self.opened: set[tuple[int, int]] = set()  # epoch, stage
        self.aborted_ms: dict[str, float] = {}  # request id -> when the engine had dropped it, by the server's clock
        self.counters: dict[str, dict[str, Any]] = {}
        self.is_open = True
        self._redis = redis
        self._session_id = session_id
        self._incarnation = incarnation
        self._keys = PartitionKeys(partition)
        self._stages = tuple(stages)
        self._board = board
        self._read_to = "-"
        self._registered: dict[int, str] = {}
        board.partition = partition

    async def run(self) -> None:
        """Look until cancelled."""
        looks = 0
        while True:
            await self.look()
            if looks % LOOKS_A_FIGURE == 0:
                await self.look_at_stages()
            if looks % LOOKS_AN_AUDIT == 0:
                await self.read_stream()
            looks += 1
            await asyncio.sleep(LOOK_S)

    async def fetch_owner(self) -> str:
        """The id of the control worker that owns the session's partition."""
        return _text(await self._redis.execute_command("HGET", self._keys.owner, "holder"))

    async def look(self) -> None:
        """The session's requests, and who owns its partition."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hget(self._keys.sessions, self._session_id)
            pipe.hget(self._keys.owner, "holder")
            pipe.zrange(keys.CONTROLS, 0, -1)
            state, holder, controls = await pipe.execute()
        session = None if state is None else decode_session(state, None)
        self._note_requests(session)
        self._board.owner = _text(holder)
        self._board.controls = [_text(name) for name in controls]

    @property
    def stage_count(self) -> int:
        """How many stages the session's route has."""
        return len(self._stages)

    def note_epoch(self, epoch: int) -> None:
        """An input of that epoch was accepted: it has a request at every stage."""
        self.opened.update((epoch, stage_id) for stage_id in range(len(self._stages)))

    def request_id(self, epoch: int, stage_id: int) -> str:
        """The id under which a stage runs an epoch's request."""
        return request_id(self._session_id, self._incarnation, epoch, stage_id)

    def find_registered(self) -> set[tuple[int, int]]:
        """The requests that the session still has, as `(epoch, stage)`."""
        return {(epoch, stage_id) for epoch in self._registered for stage_id in range(len(self._stages))}

    async def look_at_stages(self) -> None:
        """The stage workers' counters and their log of aborts, as of their last heartbeat."""
        for row in (await fetch_stage_workers(self._redis)).rows:
            self.counters[row.worker_id] = {**row.counters, **row.load, "beats": row.beats or 0}
            figures = await fetch_figures(self._redis, row.worker_id)
            for each in json.loads(figures.get("abort_log", "[]")):
                self.aborted_ms.setdefault(each["request_id"], float(each["engine_ms"]))
        board = self._board
        board.outputs_dropped = self.count(*DROPPED)
        for epoch, sent_ms in board.signals_ms.items():
            aborted_ms = self.find_aborted_ms(epoch)
            if aborted_ms is not None:
                board.barge_in_ms = max(0.0, aborted_ms - sent_ms)

    def count(self, *names: str) -> int:
        """The sum of counters over the stage workers."""
        return sum(int(figures.get(name, 0)) for figures in self.counters.values() for name in names)

    def find_aborted_ms(self, epoch: int) -> float | None:
        """When the last stage had dropped the epoch's request (server's clock, ms); None: not all have said so."""
        times = [self.aborted_ms.get(self.request_id(epoch, stage_id)) for stage_id in range(len(self._stages))]
        known = [each for each in times if each is not None]
        return max(known) if len(known) == len(times) and known else None

    async def read_stream(self) -> None:
        """Everything in the session's stream that has not been read yet."""
        key = self._keys.events(self._session_id)
        while True:
            entries = await self._redis.xrange(key, min=self._read_to, count=PAGE)
            for entry_id, fields in entries or ():
                self._read_to = f"({_text(entry_id)}"
                self.audit.entry(_text(fields[b"t"]), int(fields[b"n"]), decode_event(fields[b"b"]))
            if len(entries or ()) < PAGE:
                self._board.stale_delivered = max(self._board.stale_delivered, self.audit.stale)
                return

    async def settle(self) -> None:
        """After the session's end: wait until its record is gone and every stage worker has beaten twice since."""
        begun = {worker_id: figures["beats"] for worker_id, figures in self.counters.items()}
        give_up_s = asyncio.get_running_loop().time() + SETTLE_S
        while asyncio.get_running_loop().time() < give_up_s:
            await self.look()
            await self.look_at_stages()
            beaten = all(self.counters[worker_id]["beats"] >= beats + 2 for worker_id, beats in begun.items())
            if beaten and not self._registered and not self.is_open:
                return
            await asyncio.sleep(LOOK_S)

    def _note_requests(self, session: Session | None) -> None:
        self.is_open = session is not None and session.phase is not Phase.VACANT
        present = {} if session is None else {each.epoch: STATES[each.phase] for each in session.requests}
        for epoch in present:
            self.note_epoch(epoch)
        self._registered = present
        self._board.requests = [
            RequestState(epoch, self._stages[stage_id], present.get(epoch, "released"))
            for epoch, stage_id in sorted(self.opened)
        ]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "")
