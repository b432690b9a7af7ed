"""The lives of stage workers: registering one, its heartbeat, its end, and who is there.

Responsible for the worker's own record and for the index of workers. Leaves judging a loss to the control workers'
observer and fencing to the owners. Talks to Redis. Keeps part of I2: a life that is over can't beat, take slots or be
begun again; every life has an id of its own. A record that can't be read counts as neither live nor lost (S76).
"""

from __future__ import annotations

import logging
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec import Struct, field
from redis.exceptions import ResponseError

from control.store import keys
from control.store.scripts import script
from control.store.server import fetch_now_ms
from control.store.slots import read_slot

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

    from redis.asyncio import Redis

    from control.store.link import Link

log = logging.getLogger("bargein.lives")

# How long a record outlives the last heartbeat, for operators to look at.
KEPT_MS = 3_600_000

LOAD_FIELDS = (
    "running",
    "waiting",
    "slots_used",
    "utilisation",
    "tick_late_ms",
    "accepts",
    "missed_ticks",
    "memory_bytes",
)
_FIELDS = ("state", "beat", "started_ms", "left", *LOAD_FIELDS)


class LifeState(StrEnum):
    """`draining`: goes on with what it has and takes nothing new."""

    LIVE = "live"
    DRAINING = "draining"
    DEAD = "dead"


class Entry(Struct, frozen=True, kw_only=True):
    """A worker in the index `bargein:stages`."""

    stage_id: int
    stage: str
    capacity: int
    engine: str


class Life(Struct, frozen=True, kw_only=True):
    """One life of a stage worker. `beat` is its heartbeat's counter, `used_slots` the sessions placed on it.

    `has_left`: the worker itself said that its life is over.
    `load` holds the engine's figures of the last heartbeat (`LOAD_FIELDS`), as far as there were any.
    """

    worker_id: str
    stage_id: int
    stage: str
    capacity: int
    engine: str
    state: LifeState
    beat: int
    used_slots: int
    started_ms: int = 0
    has_left: bool = False
    load: dict[str, float] = field(default_factory=dict[str, float])


async def register_life(redis: Redis, worker_id: str, entry: Entry) -> int:
    """Begin a life; the server's time (ms). Placement may choose the worker from now on."""
    now_ms = await fetch_now_ms(redis)
    state = keys.worker_state(worker_id)
    fields = {"state": LifeState.LIVE.value, "beat": 1, "started_ms": now_ms, **msgspec.structs.asdict(entry)}
    async with redis.pipeline(transaction=False) as pipe:
        pipe.hset(state, mapping=cast("dict[Any, Any]", fields))
        pipe.pexpire(state, KEPT_MS)
        # Last: whoever finds the worker in the index finds its record, too.
        pipe.hset(keys.STAGES, worker_id, cast("Any", msgspec.msgpack.encode(entry)))
        await pipe.execute()
    return now_ms


class Beat(IntEnum):
    """What a heartbeat hears. `OVER`: this life is over, nothing was written. `DRAIN`: an operator wants it emptied."""

    OVER = 0
    TAKEN = 1
    DRAIN = 2


async def beat(link: Link, worker_id: str, fields: Mapping[str, str | int | float]) -> Beat:
    """A heartbeat that also writes `fields`."""
    flat = [part for pair in fields.items() for part in pair]
    names = [keys.worker_state(worker_id), keys.worker_drain(worker_id)]
    answer: int = await link.run("beat", names, [KEPT_MS, *flat])
    if answer < 0:
        return Beat.DRAIN
    return Beat.TAKEN if answer else Beat.OVER


async def order_drain(redis: Redis, worker_id: str) -> int:
    """Have a worker take no more sessions; since when it does (server's ms). Repeating it changes nothing (S62)."""
    name = keys.worker_drain(worker_id)
    await redis.set(name, await fetch_now_ms(redis), nx=True, px=KEPT_MS)
    return int(await redis.get(name) or 0)


async def find_drain(redis: Redis, worker_id: str) -> int | None:
    """Since when a worker is to take no more sessions (server's ms); None if it may."""
    value = await redis.get(keys.worker_drain(worker_id))
    return None if value is None else int(value)


async def end_drain(redis: Redis, worker_id: str) -> bool:
    """Have a worker take sessions again; False if it wasn't to be emptied."""
    return await redis.delete(keys.worker_drain(worker_id)) == 1


async def end_life(redis: Redis, worker_id: str, seen_beat: int | None = None) -> bool:
    """End a life for everyone; True if it is over. `seen_beat`: only if its heartbeat still stands there."""
    text, key = script("end_life").text, keys.worker_state(worker_id)
    answer = await cast("Awaitable[int]", redis.eval(text, 1, key, "" if seen_beat is None else str(seen_beat)))
    return answer == 1


async def say_goodbye(redis: Redis, worker_id: str) -> None:
    """A worker ends its own life. The control workers find it in the index, and see to what it has left."""
    await end_life(redis, worker_id)


async def release_brake(redis: Redis, stage: str, for_s: int = 600) -> None:
    """An operator's word: the silent workers of the stage are gone, their sessions may be closed."""
    await redis.set(keys.brake(stage), "released", ex=for_s)


async def hold_brake(redis: Redis, stage: str) -> bool:
    """Take that word back; False if it wasn't there any more."""
    return await redis.delete(keys.brake(stage)) == 1


async def is_brake_released(redis: Redis, stage: str) -> bool:
    """Whether an operator has said so lately."""
    return bool(await redis.exists(keys.brake(stage)))


async def count_slots(redis: Redis, worker_id: str) -> int:
    """How many sessions are placed on a worker."""
    return await cast("Awaitable[int]", redis.hlen(keys.worker_slots(worker_id)))


async def fetch_slots(redis: Redis, worker_id: str) -> dict[str, int]:
    """The sessions that are placed on a worker, with their incarnations."""
    found = await cast("Awaitable[dict[Any, Any]]", redis.hgetall(keys.worker_slots(worker_id)))
    slots = {_text(name): read_slot(value) for name, value in found.items()}
    return {name: incarnation for name, incarnation in slots.items() if incarnation is not None}


async def put_back(redis: Redis, worker_id: str) -> bool | None:
    """A worker that is in no index: put back if its own record says that it lives; False if it doesn't.

    None if the record can't be read: then nobody knows (S76).
    """
    fields = (*Entry.__struct_fields__, "state")
    try:
        values = await cast("Awaitable[list[Any]]", redis.hmget(keys.worker_state(worker_id), list(fields)))
        found = {name: _text(value) for name, value in zip(fields, values, strict=True) if value is not None}
        if found.pop("state", LifeState.DEAD) == LifeState.DEAD:
            return False
        entry = msgspec.convert(found, Entry, strict=False)
    except (ResponseError, msgspec.ValidationError) as error:
        log.warning("the record of stage worker %s can't be read: %s", worker_id, error)
        return None
    await cast("Awaitable[int]", redis.hsetnx(keys.STAGES, worker_id, cast("Any", msgspec.msgpack.encode(entry))))
    return True


async def sweep_queues(redis: Redis, worker_id: str, partitions: int) -> None:
    """Remove the queues of a life that is over, once no session is placed on it: nobody reads or fills them again."""
    async with redis.pipeline(transaction=False) as pipe:
        for partition in range(partitions):
            known = keys.PartitionKeys(partition)
            # One at a time: on a cluster they are in different slots.
            pipe.unlink(known.submissions(worker_id))
            pipe.unlink(known.aborts(worker_id))
        await pipe.execute()


async def fetch_lives(redis: Redis) -> list[Life]:
    """Every life in the index, those that are over too. One whose record can't be read is left out."""
    return (await fetch_index(redis))[0]


async def fetch_index(redis: Redis) -> tuple[list[Life], frozenset[str]]:
    """As `fetch_lives`, and every name in the index, those whose record can't be read among them."""
    index = await cast("Awaitable[dict[Any, Any]]", redis.hgetall(keys.STAGES))
    workers = [(_text(name), blob) for name, blob in index.items()]
    names = frozenset(worker_id for worker_id, _ in workers)
    if not workers:
        return [], names
    async with redis.pipeline(transaction=False) as pipe:
        for worker_id, _ in workers:
            pipe.hmget(keys.worker_state(worker_id), list(_FIELDS))
            pipe.hlen(keys.worker_slots(worker_id))
        answers: list[Any] = await pipe.execute(raise_on_error=False)
    lives: list[Life] = []
    for number, (worker_id, blob) in enumerate(workers):
        values, used_slots = answers[2 * number : 2 * number + 2]
        life = _read(worker_id, blob, values, used_slots)
        if life is not None:
            lives.append(life)
    return lives, names


async def fetch_figures(redis: Redis, worker_id: str) -> dict[str, str]:
    """All that a worker has written into its record, counters included; empty if there is none."""
    found = await cast("Awaitable[dict[Any, Any]]", redis.hgetall(keys.worker_state(worker_id)))
    return {_text(name): _text(value) for name, value in found.items()}


def _read(worker_id: str, blob: bytes, values: Any, used_slots: Any) -> Life | None:
    for answer in (values, used_slots):
        if isinstance(answer, ResponseError):
            log.warning("the record of stage worker %s can't be read: %s", worker_id, answer)
            return None
        if isinstance(answer, Exception):
            raise answer
    try:
        entry = msgspec.msgpack.decode(blob, type=Entry)
        found = {name: _text(value) for name, value in zip(_FIELDS, values, strict=True) if value is not None}
        # No record at all: it was silent for so long that the server has forgotten it.
        state = LifeState(found.get("state", LifeState.DEAD))
        counter, started_ms = int(found.get("beat", 0)), int(found.get("started_ms", 0))
        load = {name: float(found[name]) for name in LOAD_FIELDS if name in found}
    except (msgspec.DecodeError, ValueError) as error:
        log.warning("the record of stage worker %s can't be read: %s", worker_id, error)
        return None
    return Life(
        worker_id=worker_id,
        stage_id=entry.stage_id,
        stage=entry.stage,
        capacity=entry.capacity,
        engine=entry.engine,
        state=state,
        beat=counter,
        used_slots=used_slots,
        started_ms=started_ms,
        has_left="left" in found,
        load=load,
    )


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
