"""The guarded servers, one of each kind for all tests here, emptied for each test."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.security.guarded import GuardedServer
from tests.servers import why_no_redis
from workers.embedded import require_valkey_binary

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def guarded_valkey() -> Iterator[GuardedServer]:
    with GuardedServer(require_valkey_binary()) as server:
        yield server


@pytest.fixture(scope="session")
def guarded_redis7() -> Iterator[GuardedServer]:
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip(why_no_redis() or "")
    with GuardedServer(Path(binary)) as server:
        yield server


@pytest.fixture(params=["valkey", pytest.param("redis7", marks=pytest.mark.redis7)])
def guarded(request: pytest.FixtureRequest) -> GuardedServer:
    """An empty guarded server; each test that asks for it runs on Valkey and on Redis 7.0."""
    server: GuardedServer = request.getfixturevalue(f"guarded_{request.param}")
    server.flush()
    return server
