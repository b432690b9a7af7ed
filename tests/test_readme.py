"""What the README shows is run as it stands there."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis

from control.store.keys import partition_of
from control.wire.events import decode_event
from tests.system import RunningSystem
from workers.cli.main import COMMANDS, load_command

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parent.parent
READMES = (ROOT / "README.md", ROOT / "clients" / "python" / "README.md")


def blocks(path: Path, language: str) -> list[str]:
    """The fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
async def test_the_python_example_runs_and_hears_the_model(readme: Path, redis_url: str) -> None:
    (code,) = blocks(readme, "python")
    async with RunningSystem(redis_url):
        environment = {**os.environ, "BARGEIN_REDIS_URL": redis_url}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, env=environment, stdout=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(30):
            output, _ = await process.communicate()
    assert process.returncode == 0
    assert b"the model says" in output or b"heard" in output


async def test_the_redis_cli_session_runs_as_it_is_printed(redis_url: str) -> None:
    (text,) = blocks(ROOT / "README.md", "redis")
    *commands, read = [shlex.split(line) for line in text.strip().splitlines()]
    assert read[:2] == ["XREAD", "STREAMS"]
    async with RunningSystem(redis_url) as system:
        redis = Redis.from_url(system.url)
        seen: list[str] = []
        for command in commands:
            await redis.execute_command(*command)
            seen = await _replies(redis, read, len(seen) + 1)
        await redis.aclose()
    assert seen == ["open", "append", "signal"]


async def _replies(redis: Redis, read: Sequence[str], count: int) -> list[str]:
    async with asyncio.timeout(10):
        while True:
            answer: Any = await redis.execute_command(*read)
            entries = answer[0][1] if answer else []
            replies = [decode_event(fields[b"b"]) for _, fields in _pairs(entries) if fields[b"t"] == b"reply"]
            if len(replies) >= count:
                assert all(reply["ok"] for reply in replies), replies
                return [reply["op"] for reply in replies]
            await asyncio.sleep(0.01)


def _pairs(entries: Any) -> list[tuple[Any, dict[bytes, bytes]]]:
    """Entries as redis-py parses them: id and fields, the fields as a map or as a flat list."""
    return [(i, f if isinstance(f, dict) else dict(zip(f[0::2], f[1::2], strict=True))) for i, f in entries]


def test_the_partition_that_the_readme_names_is_the_right_one() -> None:
    assert partition_of("call-1", 16) == 0
    assert "bargein:{0}:commands" in (ROOT / "README.md").read_text()


def commands() -> set[str]:
    """`send`, `config`, `config show`, ... as the command line has them."""
    known = set(COMMANDS)
    for name in COMMANDS:
        known.update(f"{name} {each}" for each in getattr(load_command(name), "commands", ()))
    return known


def test_the_docs_name_commands_that_there_are() -> None:
    known = commands()
    groups = {name.partition(" ")[0] for name in known if " " in name}
    for path in (ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))):
        named = re.findall(r"(?:^|`)bargein ([a-z][a-z-]*)(?: ([a-z][a-z-]*))?", path.read_text(), re.MULTILINE)
        for first, second in named:
            assert first in known, f"{path.name}: bargein {first}"
            assert first not in groups or not second or f"{first} {second}" in known, f"{path.name}: {first} {second}"
