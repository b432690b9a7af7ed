"""The checkers that look at the server after every command: what is written must be allowed, whoever wrote it.

Responsible for I2 (a release needs every engine's word), I6 (one writer), I8 (a refusal changes nothing), I9 (slots),
for the core's own invariants of each stored record, and for fences, floors and numbers that never go back. Leaves what
clients see to `histories.py`, what is left over to `endings.py`. Looks into the store model directly.

After writes were lost (`forget`) most of this is not promised any more, and nothing of it is checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from control.core.fence import is_acceptable
from control.core.invariants import find_broken
from control.core.requests import RequestPhase, find_request_name, request_id
from control.core.session import Phase
from control.store import keys
from control.store.commits import decode_session
from control.store.keys import PartitionKeys, partition_of
from tests.sim import endings, histories

if TYPE_CHECKING:
    from control.core.session import Session
    from tests.sim.commands import Args
    from tests.sim.engine import Given
    from tests.sim.world import World

MOST = 40
LIVE = (Phase.OPEN, Phase.CLOSING)
STAGES, ADMISSION_SLOTS = keys.STAGES.encode(), keys.ADMISSION_SLOTS.encode()


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise: which, where and how."""

    rule: str
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.rule} {self.where}: {self.what}"


class Watch:
    """`violations`: all that was found, in order."""

    def __init__(self, world: World) -> None:
        self.violations: list[Violation] = []
        self._world = world
        self._blind = False
        self._owner: tuple[bytes | None, bytes | None] = (None, None)
        self._sessions: dict[tuple[str, str], Session] = {}
        self._commands: dict[tuple[bytes, bytes], tuple[str, str, str]] = {}
        self._released: set[str] = set()

    @property
    def is_hopeless(self) -> bool:
        return len(self.violations) >= MOST

    def note(self, rule: str, where: str, what: str) -> None:
        if not self.is_hopeless:
            self.violations.append(Violation(rule, where, what))
            self._world.trace.say(f"VIOLATION {rule} {where}: {what}")

    def forget(self) -> None:
        """Writes were lost."""
        self._blind = True

    # The server's commands.

    def before(self, role: str, label: str, args: Args) -> None:
        if label == "commit" and not self._blind:
            owner: dict[bytes, bytes] = self._world.server.store.peek(args[3]) or {}
            self._owner = (owner.get(b"token"), owner.get(b"revision"))

    def after(self, role: str, label: str, args: Args, answer: Any) -> None:
        log = self._world.server.store.log
        if not log or self._blind:
            return
        if label == "commit" and isinstance(answer, list) and answer[0] == 0:
            self._look_at_commit(role, args)
        changed: dict[tuple[str, str], None] = {}
        slots: dict[bytes, None] = {}
        for write, _ in log:
            key = write[1]
            if key.endswith((b":sessions", b":cleanups")):
                partition = key[9 : key.index(b"}")].decode()
                for name in write[2::2] if write[0] == b"HSET" else write[2:]:
                    changed[partition, name.decode()] = None
            elif key.endswith(b":slots"):
                slots[key] = None
            elif key == STAGES and write[0] == b"HSET":
                self._world.life_roles[write[2].decode()] = role
        first = {session_id: self._sessions.get((partition, session_id)) for partition, session_id in changed}
        for partition, session_id in changed:
            self._look_at_session(partition, session_id)
        for key in slots:
            self._look_at_slots(key)
        if label == "commit" and changed:
            self._look_at_refusals(log, first)
        self._index_commands(log)

    def _look_at_commit(self, role: str, args: Args) -> None:
        argv = args[3 + int(args[2]) :]
        token, revision = self._owner
        if token != argv[0]:
            self.note("I6", args[3].decode(), f"{role} has committed with {argv[0]!r}, the owner's token is {token!r}")
        elif (revision or b"0") != argv[1]:
            self.note("I6", args[3].decode(), f"{role} has committed on revision {argv[1]!r}, it was {revision!r}")

    # Sessions.

    def find_session(self, partition: str, session_id: str) -> Session | None:
        store, known = self._world.server.store, PartitionKeys(int(partition))
        name = session_id.encode()
        state = (store.peek(known.sessions.encode()) or {}).get(name)
        if state is None:
            return None
        return decode_session(state, (store.peek(known.cleanups.encode()) or {}).get(name))

    def _look_at_session(self, partition: str, session_id: str) -> None:
        before = self._sessions.get((partition, session_id))
        try:
            after = self.find_session(partition, session_id)
        except msgspec.DecodeError as error:
            self.note("record", session_id, f"can't be read: {error}")
            return
        if after is None:
            self._sessions.pop((partition, session_id), None)
        else:
            self._sessions[partition, session_id] = after
            for broken in find_broken(after):
                rule, _, what = broken.partition(": ")
                self.note(rule if what else "record", session_id, what or broken)
            if after.phase is Phase.OPEN and (before is None or before.phase is not Phase.OPEN):
                self._look_at_placement(session_id, after)
        if before is not None and before.phase in LIVE:
            self._look_at_step(partition, session_id, before, after)

    def _look_at_step(self, partition: str, session_id: str, before: Session, after: Session | None) -> None:
        lives_on = after is not None and after.phase in LIVE and after.fence.incarnation == before.fence.incarnation
        left = {request.epoch for request in after.requests} if lives_on and after is not None else set[int]()
        for request in before.requests:
            if request.epoch in left or (lives_on and request.phase is not RequestPhase.CLEANING):
                continue
            for stage_id, worker_id in enumerate(before.route):
                name = request_id(session_id, before.fence.incarnation, request.epoch, stage_id)
                self._released.add(name)
                if self._is_held(name, worker_id) and not self._is_fenced(partition, worker_id):
                    self.note("I2", session_id, f"{name} is released while {worker_id}'s engine holds it")
        if not lives_on or after is None:
            return
        if not is_acceptable(before.fence, after.fence):
            self.note("fence", session_id, f"the accepted fence goes back from {before.fence} to {after.fence}")
        for name in ("floor", "number", "config_generation"):
            if getattr(after, name) < getattr(before, name):
                self.note("fence", session_id, f"{name} falls from {getattr(before, name)} to {getattr(after, name)}")
        if after.lease.generation < before.lease.generation:
            self.note("fence", session_id, "the lease generation falls")

    def _is_held(self, name: str, worker_id: str) -> bool:
        role = self._world.life_roles.get(worker_id)
        return any(name in record.holds and not record.over for record in self._world.records if record.role == role)

    def _is_fenced(self, partition: str, worker_id: str) -> bool:
        fenced: set[bytes] = self._world.server.store.peek(PartitionKeys(int(partition)).fenced.encode()) or set()
        return worker_id.encode() in fenced

    def look_at_given(self, given: Given) -> None:
        """An engine has taken an input: not of a request that everybody has been told is gone (I2, S34)."""
        if given.request_id in self._released and not self._blind:
            name = find_request_name(given.request_id)
            partition = partition_of(given.session_id, self._world.plan.pipeline.partitions)
            if name is not None and not self._is_fenced(str(partition), given.worker_id):
                self.note("I2", given.session_id, f"{given.worker_id} takes {given.request_id} after its release")

    # Slots.

    def _look_at_placement(self, session_id: str, session: Session) -> None:
        for holder in session.holders:
            key = keys.ADMISSION_SLOTS if holder == "admission" else keys.worker_slots(holder)
            held: bytes | None = (self._world.server.store.peek(key.encode()) or {}).get(session_id.encode())
            if held is None or held.split(b" ")[0] != b"%d" % session.fence.incarnation:
                self.note("I9", session_id, f"it is open, and its slot at {holder} is {held!r}")

    def _look_at_slots(self, key: bytes) -> None:
        held: dict[bytes, bytes] = self._world.server.store.peek(key) or {}
        if key == ADMISSION_SLOTS:
            holder, bound = "admission", self._world.plan.pipeline.max_sessions
        else:
            holder = key[len(b"bargein:{w:") : -len(b"}:slots")].decode()
            state: dict[bytes, bytes] = self._world.server.store.peek(keys.worker_state(holder).encode()) or {}
            bound = int(state.get(b"capacity", b"0"))
        if bound is not None and len(held) > bound:
            self.note("I9", holder, f"{len(held)} sessions have a slot, {bound} may")
        for (_, session_id), session in self._sessions.items():
            if session.phase in LIVE and holder in session.holders:
                slot = held.get(session_id.encode())
                if slot is None or slot.split(b" ")[0] != b"%d" % session.fence.incarnation:
                    self.note(
                        "I9", session_id, f"it is {session.phase.name.lower()}, and its slot at {holder} is {slot!r}"
                    )

    # Refusals.

    def _index_commands(self, log: list[tuple[Args, Any]]) -> None:
        for write, done in log:
            if write[0] == b"XADD" and write[1].endswith(b":commands"):
                body = msgspec.msgpack.decode(write[write.index(b"b") + 1])
                self._commands[write[1], done] = (body["session_id"], body["control_id"], body["op"])

    def _look_at_refusals(self, log: list[tuple[Args, Any]], first: dict[str, Session | None]) -> None:
        """I8, where one commit shows it: all that was handled of a session was refused, and something of it changed."""
        handled: dict[str, list[str]] = {}
        refused: set[str] = set()
        told: set[str] = set()
        for write, _ in log:
            if write[0] == b"XDEL" and write[1].endswith(b":commands"):
                for entry_id in write[2:]:
                    session_id, control_id, _ = self._commands.pop((write[1], entry_id), ("", "", ""))
                    handled.setdefault(session_id, []).append(control_id)
            elif write[0] == b"XADD" and b":events:" in write[1]:
                at = write.index(b"t")
                body = msgspec.msgpack.decode(write[at + 5])
                if write[at + 1] == b"reply" and not body["ok"]:
                    refused.add(body["control_id"])
                else:
                    told.add(body["session_id"])
        for (_, session_id), after in self._sessions.items():
            before = first.get(session_id)
            if before is None or session_id in told or not handled.get(session_id):
                continue
            if before.phase is not Phase.OPEN or after.phase is not Phase.OPEN or _core_of(before) == _core_of(after):
                continue
            if all(control_id in refused for control_id in handled[session_id]):
                self.note("I8", session_id, f"{handled[session_id]} were refused, and the session changed")

    # The end.

    def is_at_rest(self) -> bool:
        return not endings.find_left(self._world, lossy=self._blind)

    def judge_end(self) -> None:
        """Everything is over: what clients saw, what engines were given, what is left."""
        for rule, where, what in endings.find_left(self._world, lossy=self._blind):
            self.note(rule, where, what)
        for account in self._world.traffic.accounts.values():
            for rule, what in histories.judge(account, self._world, lossy=self._blind):
                self.note(rule, account.session_id, what)


def _core_of(session: Session) -> tuple[Any, ...]:
    return (session.fence, session.config, session.config_generation, session.lease.generation)
