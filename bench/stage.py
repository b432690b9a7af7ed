"""A stage worker without a model: answers everything at once, so that the control side is what is measured.

Runs as a process of its own: `python -m bench.stage URL PARTITIONS WORKER_ID`. Prints a line for every abort of which
the producer wants to know the time: the request's session id and the monotonic time, which processes of one machine
share.
"""

from __future__ import annotations

import asyncio
import sys
import time

import msgspec

from control.store import keys
from control.store.keys import PartitionKeys
from control.store.link import Link, make_pool
from control.store.scripts import script
from control.wire.stage import AcceptedAck, CleanedAck, decode_abort, decode_submission, encode

CAPACITY = 1_000_000


async def main(url: str, partitions: int, worker_id: str) -> None:
    pool = make_pool(url, name=worker_id)
    own = Link(pool)
    await own.call(
        "HSET", keys.worker_state(worker_id), "state", "live", "capacity", CAPACITY, "stage_id", 0, "stage", "bench",
        "engine", "none", "beat", 1,
    )  # fmt: skip
    record = {"stage_id": 0, "stage": "bench", "capacity": CAPACITY, "engine": "none"}
    await own.call("HSET", keys.STAGES, worker_id, msgspec.msgpack.encode(record))
    print("ready", flush=True)
    await asyncio.gather(
        _beat(own, worker_id),
        _serve(Link(pool), worker_id, partitions, aborts=False),
        _serve(Link(pool), worker_id, partitions, aborts=True),
    )


async def _beat(link: Link, worker_id: str) -> None:
    while True:
        await link.run("beat", [keys.worker_state(worker_id)], [3_600_000])
        await asyncio.sleep(1)


async def _serve(link: Link, worker_id: str, partitions: int, *, aborts: bool) -> None:
    known = [PartitionKeys(p) for p in range(partitions)]
    names = [(k.aborts if aborts else k.submissions)(worker_id) for k in known]
    places = {name.encode(): index for index, name in enumerate(names)}
    positions = ["0-0"] * partitions
    acknowledge = script("acknowledge")
    while True:
        answer = await link.call("XREAD", "COUNT", 128, "BLOCK", 1000, "STREAMS", *names, *positions)
        calls = []
        for name, entries in answer or ():
            place = places[name]
            positions[place] = entries[-1][0].decode()
            acks = [_ack(worker_id, fields[1], aborts=aborts) for _, fields in entries]
            argv = [worker_id, len(acks), *acks, *(entry[0] for entry in entries)]
            calls.append((acknowledge, [known[place].acks, known[place].fenced, names[place]], argv))
        if calls:
            await link.run_all(calls)


def _ack(worker_id: str, body: bytes, *, aborts: bool) -> bytes:
    if not aborts:
        order = decode_submission(body)
        return encode(AcceptedAck(order.session_id, order.fence.incarnation, order.number))
    order = decode_abort(body)
    if order.session_id.startswith("timed-"):
        print(order.session_id, time.monotonic(), flush=True)
    return encode(CleanedAck(order.session_id, order.incarnation, order.number, worker_id))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
