"""Partitions in memory over a store that is only dictionaries: the owner's decisions at full speed.

The real decoder, the real `Partition` and the real arguments of its commits; the script's part is played here, just far
enough to know what was stored, said, buried and deleted. Stages and slots answer by chance, and at last (`rest`) all of
them. Leaves Redis itself to `server.py`. Notes as findings: an entry that is neither answered nor a dead letter, an
invariant that breaks, a state that can't be read again, an `internal`, and a quiet session that has to wait.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from control.core import commands as c
from control.core import effects as e
from control.core.invariants import find_broken
from control.core.scene import ADMISSION, Settings
from control.store.commits import ACKS_KEY, COMMANDS_KEY, ORDERS_KEY, Batch, decode_answer, decode_session
from control.store.keys import PartitionKeys, partition_of
from control.wire.events import decode_event
from control.wire.limits import Limits
from control.wire.stage import (
    AcceptedAck,
    CleanedAck,
    RejectedAck,
    decode_abort,
    decode_submission,
    encode,
    pack_config,
    unpack_config,
)
from tests.fuzz.damage import Shot
from tests.fuzz.grammar import packed
from tests.fuzz.sections import groups, read_sections, session_of
from workers.partition import Partition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.fuzz.findings import Findings
    from workers.entries import Entry

KEPT = 20  # sessions in memory, few enough that the others are read from the store again
FORGET_EVERY = 4  # turns
STEP_MS = 250
PORTION = 96
PORTION_S = 1.0  # CPU time that one may take, some hundred times what it needs
ROUNDS = 400
Key = tuple[str, str, str]


@dataclass
class Stored:
    """A partition: what a server would hold of it, and its owner."""

    partition: Partition
    states: dict[str, bytes] = field(default_factory=dict[str, bytes])
    cleanups: dict[str, bytes] = field(default_factory=dict[str, bytes])
    answers: dict[str, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    entries: dict[tuple[int, str], Shot] = field(default_factory=dict[tuple[int, str], Shot])
    inbox: deque[tuple[str, c.Event]] = field(default_factory=deque[tuple[str, c.Event]])
    work: list[tuple[str, bytes]] = field(default_factory=list[tuple[str, bytes]])


def configure(runtime_config: Any) -> tuple[Any, ...]:
    """A policy that takes what it can pack, and refuses some of that."""
    if runtime_config.get("a") == "":
        raise ValueError("a has to say something")
    return (runtime_config,)


class Ground:
    """`throw` entries at it, let it `rest`, and look at the findings."""

    def __init__(self, findings: Findings, seed: int = 0, hear: Callable[[dict[str, Any]], None] | None = None) -> None:
        """`findings.partitions`: how many there are. `hear`: is told of each reply."""
        self.findings = findings
        self.now_ms = 1_000_000
        self._random = Random(seed)
        self._hear = hear
        self._last = 0
        # Commands whose reply is still to come, by session, control id and op; those without an id are counted.
        self.owed: dict[Key, Shot] = {}
        self.nameless: dict[Key, int] = defaultdict(int)
        # How many more replies a command may have: as many as it was sent.
        self._may_come: Counter[Key] = Counter()
        self._parts = [
            Stored(Partition(PartitionKeys(p), self._settings(), findings.limits, self._choose_route))
            for p in range(findings.partitions)
        ]
        self.quiet = [find_home(p, findings.partitions) for p in range(findings.partitions)]
        self._beats = 0
        for number, session_id in enumerate(self.quiet):
            self._send(number, session_id, "open", capabilities={"input_modes": ["append_tokens"]})
        self._turn([])
        self._turn([])

    def throw(self, shots: Iterable[Shot]) -> None:
        """Some entries, as one read of the streams would bring them."""
        self._turn(list(shots))
        for stored in self._parts:
            self._do_stage_work(stored, share=0.6)

    def rest(self) -> None:
        """Nothing new comes, stages and slots answer, time goes by: every command has its reply, or is a finding."""
        for _ in range(ROUNDS):
            if not self.owed and not self.nameless and not any(s.entries for s in self._parts):
                break
            for stored in self._parts:
                self._do_stage_work(stored, share=1.0)
            self.now_ms += 1_000
            self._turn([])
        for key, shot in self.owed.items():
            self.findings.note(f"no reply to {key}", shot)
        for key, count in self.nameless.items():
            self.findings.note(f"{count} replies to {key} are missing")
        for stored in self._parts:
            for shot in stored.entries.values():
                self.findings.note("an entry is neither applied nor set aside", shot)
            stored.entries.clear()
        self.owed.clear()
        self.nameless.clear()
        self._may_come.clear()

    # ---- a turn

    def _turn(self, shots: list[Shot]) -> None:
        self.now_ms += STEP_MS
        portions: dict[int, list[tuple[Entry, Shot]]] = defaultdict(list)
        for shot in shots:
            self._add(portions, shot)
        self._beats += 1
        waits = [self._beat(portions, number) for number in range(len(self._parts))]
        began_s = time.thread_time()
        for number, stored in enumerate(self._parts):
            self._decide(stored, portions.get(number, []))
            self._commit(stored)
        took_s = time.thread_time() - began_s
        if took_s > PORTION_S:
            self.findings.note(f"{len(shots)} entries took {took_s:.2f} s to decide")
        for key in waits:
            if key in self.owed:
                self.findings.note(f"the quiet session's {key} had to wait")

    def _add(self, portions: dict[int, list[tuple[Entry, Shot]]], shot: Shot) -> None:
        self._last += 1
        entry_id = f"{self.now_ms}-{self._last}"
        entry = self.findings.decode(shot, entry_id)
        if entry is None:
            return
        self._parts[shot.partition].entries[shot.stream, entry_id] = shot
        portions[shot.partition].append((entry, shot))
        if entry.received is None:
            kind = "orders" if entry.stream == ORDERS_KEY else "acks"
            self.findings.seen["dead letters" if entry.unreadable is not None else kind] += 1
            return
        command = entry.received.command
        self.findings.seen[type(command).__name__] += 1
        key = (command.session_id, command.control_id, c.op_of(command))
        self._may_come[key] += 1
        if command.control_id:
            self.owed[key] = shot
        else:
            self.nameless[key] += 1

    def _beat(self, portions: dict[int, list[tuple[Entry, Shot]]], number: int) -> Key:
        """The quiet session of a partition says something at the end of everything."""
        op = "append" if self._beats % 2 else "touch"
        more = {"mode": "append_tokens"} if op == "append" else {"activity": "heartbeat"}
        control_id = self._send(number, self.quiet[number], op, portions, **more)
        # An append waits for its stage, which answers after the turn.
        return (self.quiet[number], control_id, "touch")

    def _send(self, number: int, session_id: str, op: str, portions: Any = None, **more: Any) -> str:
        control_id = f"quiet-{self._last}"
        fence = {"incarnation": 1, "epoch": 0, "turn_id": 0, "response_seq": 0}
        body = {"v": 1, "op": op, "control_id": control_id, "session_id": session_id, "fence": fence, **more}
        own: dict[int, list[tuple[Entry, Shot]]] = defaultdict(list)
        self._add(own if portions is None else portions, Shot(COMMANDS_KEY, number, [b"b", packed(body)]))
        if portions is None:
            self._decide(self._parts[number], own[number])
            self._commit(self._parts[number])
        return control_id

    def _decide(self, stored: Stored, portion: list[tuple[Entry, Shot]]) -> None:
        partition, now_ms = stored.partition, self.now_ms
        told = [stored.inbox.popleft() for _ in range(len(stored.inbox))]
        due = partition.pop_due(now_ms, 48)
        for session_id in {*due, *(s for s, _ in told), *(x.session_id for x, _ in portion if x.session_id)}:
            if not partition.is_known(session_id):
                self._load(stored, session_id)
        partition.reopen(now_ms)
        for session_id, event in told:
            partition.tell(session_id, event, now_ms)
        for entry, shot in portion:
            try:
                self._take(partition, entry)
            except Exception as error:  # noqa: BLE001  whatever it is, it would end the worker
                self.findings.note(f"the owner raised {error!r}", shot)
        for session_id in due:
            partition.look(session_id, 0, now_ms, may_expire=True)
        if self._beats % FORGET_EVERY == 0:
            partition.forget_some(KEPT)

    def _take(self, partition: Partition, entry: Entry) -> None:
        if entry.unreadable is not None:
            partition.bury(entry, entry.unreadable)
        elif entry.received is not None:
            partition.take_command(entry.entry_id, entry.received, entry.entered_ms, self.now_ms)
        elif entry.event is not None:
            partition.take_word(entry.stream, entry.entry_id, entry.session_id, entry.event, self.now_ms)

    def _load(self, stored: Stored, session_id: str) -> None:
        state = stored.states.get(session_id)
        session = None if state is None else decode_session(state, stored.cleanups.get(session_id))
        stored.partition.learn(session_id, session, [decode_answer(x) for x in stored.answers.get(session_id, ())])

    # ---- a commit

    def _commit(self, stored: Stored) -> None:
        batch = stored.partition.take_batch()
        if batch.is_empty:
            return
        names, argv = batch.arguments("token", 0, 512 * 1024)
        found = read_sections(argv)
        for entry_id in found["commands"]:
            stored.entries.pop((COMMANDS_KEY, entry_id), None)
        for entry_id in found["acks"]:
            stored.entries.pop((ACKS_KEY, entry_id), None)
        for entry_id in found["orders"]:
            stored.entries.pop((ORDERS_KEY, entry_id), None)
        for stream, entry_id, reason, _ in groups(found["dead"], 4):
            stored.entries.pop((stream, entry_id), None)
            if not reason or len(reason) > 1000:
                self.findings.note(f"a dead letter's reason of {len(reason)} characters")
        self._store(stored, names, found)
        for _, _, kind, body in groups(found["events"], 4):
            if kind == "reply":
                self._note_reply(body)
        for _, _, body in groups(found["strangers"], 3):
            self._note_reply(body)
        for _, _, body, payload in groups(found["submissions"], 4):
            order = decode_submission(body)
            assert isinstance(payload, bytes)
            accepted = self._random.random() < 0.85 or order.session_id in self.quiet
            word = (order.session_id, order.fence.incarnation, order.number)
            ack = AcceptedAck(*word) if accepted else RejectedAck(*word, "invalid_argument", "no")
            stored.work.append((order.session_id, encode(ack)))
        for queue, _, body in groups(found["aborts"], 3):
            order = decode_abort(body)
            worker_id = names[queue - 1].rpartition(":")[2]
            word = CleanedAck(order.session_id, order.incarnation, order.number, worker_id)
            stored.work.append((order.session_id, encode(word)))
        self._do_jobs(stored, batch)

    def _store(self, stored: Stored, names: list[str], found: dict[str, list[Any]]) -> None:
        for session_id in found["forgets"]:
            stored.states.pop(session_id, None)
        for session_id in found["cleaned"]:
            stored.cleanups.pop(session_id, None)
        stored.cleanups.update(groups(found["cleanups"], 2))
        for place, answer in groups(found["answers"], 2):
            stored.answers[session_of(names, place)].append(answer)
        for place, dropped in groups(found["trims"], 2):
            del stored.answers[session_of(names, place)][:dropped]
        for session_id, state in groups(found["states"], 2):
            stored.states[session_id] = state
            try:
                session = decode_session(state, stored.cleanups.get(session_id))
            except msgspec.DecodeError as error:
                self.findings.note(f"the state of {session_id!r} can't be read again: {error}")
                continue
            for broken in find_broken(session):
                self.findings.note(f"{session_id!r}: {broken}")

    def _note_reply(self, body: bytes) -> None:
        reply = decode_event(body)
        if self._hear is not None:
            self._hear(reply)
        key = (reply["session_id"], reply["control_id"], reply["op"])
        self.owed.pop(key, None)
        self._may_come[key] -= 1
        if self._may_come[key] < 0:
            self.findings.note(f"I4: {key} has had more replies than it was sent")
        if not reply["control_id"]:
            self.nameless[key] -= 1
            if not self.nameless[key]:
                del self.nameless[key]
        if reply["code"] == "internal":
            self.findings.note(f"an internal error: {reply}")
        self.findings.seen["replies: " + (reply["code"] or "ok")] += 1

    # ---- stages and slots

    def _do_jobs(self, stored: Stored, batch: Batch) -> None:
        for session_id, incarnation, effect in batch.after:
            match effect:
                case e.Place(attempt, holders):
                    refused = self._random.random() < 0.1 and session_id not in self.quiet
                    word: c.Event = c.Placed(incarnation, attempt)
                    if refused:
                        word = c.PlacementRefused(incarnation, attempt, self._random.choice((*holders, ADMISSION)))
                    stored.inbox.append((session_id, word))
                case e.Pay(debts):
                    stored.inbox.extend((session_id, c.DebtPaid(d.incarnation, d.holder)) for d in debts)

    def _do_stage_work(self, stored: Stored, share: float) -> None:
        portions: dict[int, list[tuple[Entry, Shot]]] = defaultdict(list)
        number = stored.partition.keys.partition
        left: list[tuple[str, bytes]] = []
        for session_id, word in stored.work:
            if self._random.random() < share or session_id in self.quiet:
                self._add(portions, Shot(ACKS_KEY, number, [b"b", word]))
            else:
                left.append((session_id, word))
        stored.work = left
        self._decide(stored, portions[number])
        self._commit(stored)

    def _choose_route(self) -> tuple[str, ...] | None:
        return None if self._random.random() < 0.03 else (self._random.choice(("ear-1", "ear-2")),)

    def _settings(self) -> Settings:
        return Settings(
            stage_count=1,
            configure=configure,
            pack_config=pack_config,
            unpack_config=unpack_config,
            limit_sessions=True,
        )


def find_home(partition: int, partitions: int) -> str:
    """An id of a partition that the grammar doesn't know."""
    return next(name for n in range(10_000) if partition_of(name := f"quiet-{n}", partitions) == partition)


LIMITS = Limits(waiting_appends=8, waiting_bytes=4096)
