"""The server of the chaos run: what a full disk does to it, and that it is started again with all that it had said."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from tests.chaos.server import ChaosServer, why_no_full_disk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(why_no_full_disk() is not None, reason=str(why_no_full_disk()))
ENTRY: dict[str, str] = {"b": "x" * 200}
PATIENCE_S = 10.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ChaosServer]:
    server = ChaosServer(tmp_path)
    server.start()
    yield server
    server.kill()


def add(redis: Redis, most: int) -> int:
    """How many entries the server has acknowledged before it could not."""
    for count in range(most):
        try:
            redis.xadd("commands", ENTRY)  # pyright: ignore[reportArgumentType]
        except (RedisConnectionError, ResponseError):
            return count
    return most


def test_a_server_that_must_keep_everything_ends_when_its_disk_is_full_and_has_it_all_afterwards(
    server: ChaosServer,
) -> None:
    with Redis(port=server.port) as redis:
        before = add(redis, 10)
        server.fill_disk(1000)
        kept = add(redis, 100)
        assert before == 10
        assert kept < 100
    assert server.wait_end(PATIENCE_S)
    assert server.revive()
    assert not server.revive()
    with Redis(port=server.port) as redis:
        assert redis.xlen("commands") == before + kept
        assert add(redis, 100) == 100


def test_with_another_policy_it_refuses_writes_until_there_is_room(server: ChaosServer) -> None:
    with Redis(port=server.port) as redis:
        redis.config_set("appendfsync", "everysec")
        server.fill_disk()
        assert add(redis, 1000) < 1000
        assert server.running
        with pytest.raises(ResponseError, match="MISCONF"):
            redis.xadd("commands", ENTRY)  # pyright: ignore[reportArgumentType]
        server.empty_disk()
        while redis.info("persistence")["aof_last_write_status"] != "ok":
            pass
        assert add(redis, 10) == 10
