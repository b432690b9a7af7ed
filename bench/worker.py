"""The control worker under test, as a process: `python -m bench.worker URL PARTITIONS`.

BENCH_PROFILE=FILE writes where its CPU time went, for `python -m pstats`; end it with SIGTERM then.
"""

from __future__ import annotations

import asyncio
import cProfile
import os
import signal
import sys
import time

from stages.pipeline import parse_pipeline
from workers.control import ControlWorker
from workers.control_setup import ease_garbage_collection


async def main(url: str, partitions: int) -> None:
    pipeline = parse_pipeline(
        {"partitions": partitions, "stages": [{"name": "bench", "engine": "parrot", "capacity": 1_000_000}]}, "bench"
    )
    ease_garbage_collection()
    worker = ControlWorker(url, pipeline)
    running = asyncio.create_task(worker.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
    owning = asyncio.create_task(_own_all(worker, partitions))
    await asyncio.wait({running, owning}, return_when=asyncio.FIRST_COMPLETED)
    print("ready", flush=True)
    path = os.environ.get("BENCH_PROFILE")
    profile = cProfile.Profile(time.process_time)
    if path:
        profile.enable()
    await running
    if path:
        profile.disable()
        profile.dump_stats(path)


async def _own_all(worker: ControlWorker, partitions: int) -> None:
    while len(worker.owned) < partitions:  # noqa: ASYNC110  the worker tells nobody
        await asyncio.sleep(0.02)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
