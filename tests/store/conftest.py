"""Fixtures of the store suite: `store` runs a test on fakeredis, Valkey and Redis 7.0, `real_store` on the servers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import fakeredis
import pytest
from redis.asyncio import Redis

from control.store.link import Link, make_pool
from tests.servers import RealServer
from tests.store.desk import FakeLink, Store


@pytest.fixture(params=["fake", "valkey", pytest.param("redis7", marks=pytest.mark.redis7)])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """An empty store of each kind."""
    if request.param == "fake":
        async with fakeredis.FakeAsyncRedis(server=fakeredis.FakeServer(version=(7,))) as client:
            yield Store(client, FakeLink(client), is_fake=True)
        return
    server: RealServer = request.getfixturevalue(request.param)
    server.flush()
    async for each in _real(server):
        yield each


@pytest.fixture(params=["valkey", pytest.param("redis7", marks=pytest.mark.redis7)])
async def real_store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """An empty store on a real server, for what fakeredis can't do."""
    server: RealServer = request.getfixturevalue(request.param)
    server.flush()
    async for each in _real(server):
        yield each


async def _real(server: RealServer) -> AsyncIterator[Store]:
    pool = make_pool(server.url)
    link = Link(pool)
    async with Redis(connection_pool=pool) as redis:
        yield Store(redis, link, is_fake=False, server=server)
        await link.close()
    await pool.disconnect()
