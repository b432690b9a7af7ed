"""Fixtures for every test: real servers, shared by the whole run and emptied for each test, and fakeredis.

`redis_url` is the quick choice for one real server, `any_server` runs a test on Valkey and on Redis 7.0, `cluster` is
six nodes of Valkey, `fake` needs no server. A test that stops, kills or fills a server starts its own from
tests.servers or tests.clusters.
Also skips what can't run here, with the reason.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import fakeredis
import hypothesis
import pytest

from tests.clusters import ValkeyCluster
from tests.servers import RealServer, RedisServer, ValkeyServer, why_no_redis

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

# Deadlines by the clock would fail on a busy machine and say nothing; failing examples are printed.
hypothesis.settings.register_profile(
    "bargein",
    deadline=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("bargein")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons = {
        "redis7": why_no_redis(),
        "torch": None if importlib.util.find_spec("torch") else "PyTorch isn't installed (make test TORCH=1)",
    }
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyServer]:
    """The run's Valkey server, with whatever the last test left in it; a test must leave it running."""
    with ValkeyServer() as server:
        yield server


@pytest.fixture(scope="session")
def redis7() -> Iterator[RedisServer]:
    """The run's Redis 7.0 server, likewise; skips where it isn't installed."""
    if reason := why_no_redis():
        pytest.skip(reason)
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[ValkeyCluster]:
    """The run's cluster, with whatever the last test left in it; a test must leave every node and slot where it is."""
    with ValkeyCluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: ValkeyCluster) -> ValkeyCluster:
    """The run's cluster, emptied."""
    shared_cluster.flush()
    return shared_cluster


@pytest.fixture
def redis_url(valkey: ValkeyServer) -> str:
    """The URL of an empty Valkey server."""
    valkey.flush()
    return valkey.url


@pytest.fixture(params=["valkey", pytest.param("redis7", marks=pytest.mark.redis7)])
def any_server(request: pytest.FixtureRequest) -> RealServer:
    """An empty real server: each test that asks for it runs on Valkey and on Redis 7.0."""
    server: RealServer = request.getfixturevalue(request.param)
    server.flush()
    return server


@pytest.fixture
async def fake() -> AsyncIterator[fakeredis.FakeAsyncRedis]:
    """An empty fakeredis with scripts, bytes in and out. It refuses `#!lua` lines and has no cmsgpack."""
    async with fakeredis.FakeAsyncRedis(server=fakeredis.FakeServer(version=(7,))) as client:
        yield client
