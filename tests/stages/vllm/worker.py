"""A process with a vLLM engine that speaks until it is killed: `python -m tests.stages.vllm.worker OPTIONS`."""

from __future__ import annotations

import asyncio
import json
import sys

from tests.stages.vllm.bed import Bed


async def main(options: str) -> None:
    async with Bed(json.loads(options)) as bed:
        name = await bed.say("a", [1, 2, 3], sampling={"max_tokens": 250})
        await bed.ear.until(lambda: bed.ear.heard(name))
        print("speaking", flush=True)
        await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
