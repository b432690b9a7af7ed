"""The example in the producer's README is run as it stands. `run_readme_example` runs it on any system's URL."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.clients.responder import Responder

CLIENT = Path(__file__).parents[2] / "clients" / "python"


def readme_example() -> str:
    """The first Python block of the README."""
    found = re.search(r"```python\n(.*?)```", (CLIENT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    return found[1]


async def run_readme_example(url: str, timeout_s: float = 30.0) -> str:
    """Run the example against that Redis, in a process of its own; what it printed. Fails if it fails."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        readme_example(),
        env={**os.environ, "BARGEIN_REDIS_URL": url, "PYTHONPATH": str(CLIENT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), timeout_s)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()
    return output.decode()


def test_the_readme_example_has_no_more_than_fifteen_lines() -> None:
    assert len([line for line in readme_example().splitlines() if line.strip()]) <= 15


async def test_the_readme_example_runs(responder: Responder, redis_url: str) -> None:
    running = asyncio.create_task(run_readme_example(redis_url))
    appends = await responder.until_seen("append", 10)
    session_id = appends[0].body["session_id"]
    await responder.speak(session_id, bytes(640))

    assert await running == "heard 640 bytes\n"
    assert [append.payload for append in appends] == [bytes(640)] * 10
    assert [append.body["final"] for append in appends] == [False] * 9 + [True]
    assert [entry.body["op"] for entry in responder.entries[-2:]] == ["signal", "close"]
