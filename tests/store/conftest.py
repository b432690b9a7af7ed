"""Fixtures of the store suite: `store` runs a test on fakeredis, Valkey, Redis 7.0 and a cluster of Valkeys.

`real_store` runs it on the servers, `one_server` on those that are one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import fakeredis
import pytest
from redis.asyncio import Redis

from control.store.access import open_access
from control.store.link import Link, make_pool
from tests.clusters import ValkeyCluster
from tests.servers import RealServer
from tests.store.desk import FakeLink, Store

SERVERS = ["valkey", pytest.param("redis7", marks=pytest.mark.redis7)]
CLUSTER = pytest.param("shared_cluster", id="cluster", marks=pytest.mark.cluster)


@pytest.fixture(params=["fake", *SERVERS, CLUSTER])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """An empty store of each kind."""
    if request.param == "fake":
        async with fakeredis.FakeAsyncRedis(server=fakeredis.FakeServer(version=(7,))) as client:
            yield Store(client, FakeLink(client), is_fake=True)
        return
    async for each in _open(request.getfixturevalue(request.param)):
        yield each


@pytest.fixture(params=[*SERVERS, CLUSTER])
async def real_store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """An empty store on real servers, for what fakeredis can't do."""
    async for each in _open(request.getfixturevalue(request.param)):
        yield each


@pytest.fixture(params=SERVERS)
async def one_server(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """An empty store on one real server, for what is about a server's own settings and memory."""
    async for each in _open(request.getfixturevalue(request.param)):
        yield each


async def _open(servers: RealServer | ValkeyCluster) -> AsyncIterator[Store]:
    servers.flush()
    if isinstance(servers, ValkeyCluster):
        access = open_access(servers.url)
        link = access.spread()
        yield Store(access.redis, link, is_fake=False)
        await link.close()
        await access.close()
        return
    pool = make_pool(servers.url)
    link = Link(pool)
    async with Redis(connection_pool=pool) as redis:
        yield Store(redis, link, is_fake=False, server=servers)
        await link.close()
    await pool.disconnect()
