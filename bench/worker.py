"""The control worker under test, as a process: `python -m bench.worker URL PARTITIONS`."""

from __future__ import annotations

import asyncio
import os
import sys

from stages.pipeline import parse_pipeline
from workers.control import ControlWorker


async def main(url: str, partitions: int) -> None:
    pipeline = parse_pipeline(
        {"partitions": partitions, "stages": [{"name": "bench", "engine": "parrot", "capacity": 1_000_000}]}, "bench"
    )
    worker = ControlWorker(url, pipeline)
    running = asyncio.create_task(worker.run())
    while len(worker.owned) < partitions and not running.done():
        await asyncio.sleep(0.02)
    print("ready", flush=True)
    if os.environ.get("BENCH_PROFILE"):
        import cProfile

        profile = cProfile.Profile()
        profile.enable()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(15, worker.stop)
        await running
        profile.disable()
        profile.dump_stats(os.environ["BENCH_PROFILE"])
        return
    await running


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
