"""What is left when everything has come to rest: it must be nothing (I3), and every command must have its reply.

Responsible for looking at the store, the producers and the engines. Leaves when to look to `world.py`. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from control.core.requests import find_request_name
from control.core.session import Phase
from control.store import keys
from control.store.commits import decode_session
from control.store.keys import PartitionKeys

if TYPE_CHECKING:
    from tests.sim.world import World

Found = tuple[str, str, str]
AUDITED_S = 5.0


def find_left(world: World, *, lossy: bool) -> list[Found]:
    """Rule, where, what. `lossy`: writes were lost; only replies and an empty backlog are promised, and after an audit
    that nothing runs or holds a slot for nobody.
    """
    found: list[Found] = []
    for producer in world.traffic.producers:
        if not producer.done or producer.open_ends:
            open_ends = [sent.control_id for sent in producer.account.sent.values() if sent.answered_s is None]
            found.append(("liveness", producer.account.session_id, f"not done; without a reply: {open_ends}"))
    for partition in range(world.plan.pipeline.partitions):
        found += _find_in_partition(world, PartitionKeys(partition), lossy=lossy)
    if not lossy:
        return [*found, *_find_at_workers(world), *_find_at_engines(world)]
    # Sessions may be back whose end was lost; nobody speaks for them any more. What is theirs is not left over.
    if world.plan.pipeline.control.audit_s < AUDITED_S:
        living = _find_living(world)
        for place in [*_find_at_workers(world), *_find_at_engines(world)]:
            if place[2].startswith("slots") and not set(place[2].split()[4:]) <= living:
                found.append(place)
        for record in world.records:
            if not record.over and any(_session_of(name) not in living for name in record.holds):
                found.append(
                    ("I3", record.role, f"its engine holds {' '.join(sorted(record.holds))}, alive are {living}")
                )
    return found


def _session_of(name: str) -> str:
    found = find_request_name(name)
    return "" if found is None else found.session_id


def _find_living(world: World) -> set[str]:
    living: set[str] = set()
    for partition in range(world.plan.pipeline.partitions):
        stored = world.server.store.peek(PartitionKeys(partition).sessions.encode()) or {}
        living |= {
            name.decode() for name, state in stored.items() if decode_session(state, None).phase is not Phase.VACANT
        }
    return living


def _find_in_partition(world: World, known: PartitionKeys, *, lossy: bool) -> list[Found]:
    peek = world.server.store.peek
    found: list[Found] = []
    for name in (known.commands, known.acks, known.orders):
        length = len(peek(name.encode()) or ())
        if length:
            found.append(("liveness", name, f"{length} entries are left"))
    if lossy:
        return found
    for name in (known.cleanups, known.fences, known.marks, known.heard, known.outputs):
        held: Any = peek(name.encode()) or ()
        if held:
            found.append(("I3", name, f"holds {b' '.join(held).decode()}"))
    for session_id, state in (peek(known.sessions.encode()) or {}).items():
        session = decode_session(state, None)
        if session.phase is not Phase.VACANT or session.debts:
            owed = [debt.holder for debt in session.debts]
            found.append(("I3", session_id.decode(), f"is {session.phase.name.lower()} and owes slots at {owed}"))
    letters = peek(known.dead.encode())
    if letters:
        found.append(("I4", known.dead, f"{len(letters)} dead letters, and every command was well-formed"))
    return found


def _find_at_workers(world: World) -> list[Found]:
    peek = world.server.store.peek
    found: list[Found] = []
    slots = {keys.ADMISSION_SLOTS: "admission"}
    for raw in peek(keys.STAGES.encode()) or {}:
        worker_id = raw.decode()
        slots[keys.worker_slots(worker_id)] = worker_id
        state: dict[bytes, bytes] = peek(keys.worker_state(worker_id).encode()) or {}
        if state.get(b"state") == b"dead":
            found.append(("I3", worker_id, "its life is over, and it is still in the index"))
            continue
        for partition in range(world.plan.pipeline.partitions):
            known = PartitionKeys(partition)
            for name in (known.submissions(worker_id), known.aborts(worker_id)):
                length = len(peek(name.encode()) or ())
                if length:
                    found.append(("I3", name, f"{length} entries are left"))
    for name, holder in slots.items():
        held: dict[bytes, bytes] = peek(name.encode()) or {}
        if held:
            found.append(("I3", holder, f"slots are held by {b' '.join(held).decode()}"))
    return found


def _find_at_engines(world: World) -> list[Found]:
    return [
        ("I3", record.role, f"its engine still holds {' '.join(sorted(record.holds))}")
        for record in world.records
        if record.holds and not record.over
    ]
