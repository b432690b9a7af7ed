"""Which servers are refused, and with what advice; and what all processes of one server must agree on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from control.store import keys
from control.store.server import LAYOUT, Unusable, agree_on_config, check_server
from control.wire.commands import PROTOCOL
from tests.servers import RealServer, ValkeyServer
from tests.store.desk import Store


class Informant:
    """A server as far as its INFO goes."""

    def __init__(self, **info: Any) -> None:
        self._info = info

    async def info(self) -> dict[str, Any]:
        return self._info


def informant(**info: Any) -> Redis:
    return cast("Redis", Informant(**info))


@pytest.fixture
async def redis(any_server: RealServer) -> AsyncIterator[Redis]:
    async with Redis.from_url(any_server.url) as client:
        yield client


async def test_a_server_as_it_should_be_is_accepted(any_server: RealServer, redis: Redis) -> None:
    info = await check_server(redis, any_server.url)
    assert info["maxmemory_policy"] == "noeviction"


async def test_a_server_that_is_not_there_is_refused_with_what_to_do() -> None:
    async with Redis.from_url("redis://user:secret@127.0.0.1:1/0") as client:
        with pytest.raises(Unusable, match=r"can't be reached.*BARGEIN_REDIS_URL") as refusal:
            await check_server(client, "redis://user:secret@127.0.0.1:1/0")
    assert "redis://127.0.0.1:1/0" in str(refusal.value)
    assert "secret" not in str(refusal.value), "a password must not get into a log"


async def test_wrong_credentials_are_named_as_such() -> None:
    with ValkeyServer() as server:
        with server.client() as admin:
            admin.config_set("requirepass", "right")
        for url in (server.url, server.url.replace("://", "://:wrong@")):
            async with Redis.from_url(url) as client:
                with pytest.raises(Unusable, match="refuses the credentials"):
                    await check_server(client, url)


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "volatile-lru"])
async def test_a_server_that_may_evict_keys_is_refused(any_server: RealServer, redis: Redis, policy: str) -> None:
    await redis.config_set("maxmemory-policy", policy)
    try:
        with pytest.raises(Unusable, match=f"{policy}.*CONFIG SET maxmemory-policy noeviction"):
            await check_server(redis, any_server.url)
    finally:
        await redis.config_set("maxmemory-policy", "noeviction")


@pytest.mark.parametrize(
    ("version", "good"),
    [
        ("6.2.14", False),
        ("5", False),
        ("", False),
        ("unstable", False),
        ("7.0.0", True),
        ("7.0.15", True),
        ("7.2-rc1", True),
        ("8", True),
        ("10.1.2", True),
        ("255.255.255", True),
    ],
)
async def test_a_server_that_is_too_old_is_refused(version: str, good: bool) -> None:
    server = informant(redis_version=version, maxmemory_policy="noeviction")
    if good:
        assert (await check_server(server, "redis://somewhere"))["redis_version"] == version
        return
    with pytest.raises(Unusable, match=r"7\.0 or later is needed"):
        await check_server(server, "redis://somewhere")


async def test_a_server_that_does_not_tell_its_policy_is_given_the_benefit_of_the_doubt() -> None:
    await check_server(informant(redis_version="7.4.0"), "redis://somewhere")


async def test_the_first_process_writes_what_the_others_compare_with(store: Store) -> None:
    await agree_on_config(store.redis, 16)
    wanted = {b"protocol": b"%d" % PROTOCOL, b"partitions": b"16", b"layout": b"%d" % LAYOUT}
    assert await store.redis.hgetall(keys.CONFIG) == wanted
    await agree_on_config(store.redis, 16)
    with pytest.raises(Unusable, match="partitions = 16, this process is set to 8"):
        await agree_on_config(store.redis, 8)
    assert await store.redis.hgetall(keys.CONFIG) == wanted


@pytest.mark.parametrize("field", ["protocol", "layout"])
@pytest.mark.parametrize("value", ["2", "seven", "\xff"])
async def test_another_protocol_or_layout_stops_a_process(store: Store, field: str, value: str) -> None:
    await agree_on_config(store.redis, 16)
    await store.redis.hset(keys.CONFIG, field, value)
    with pytest.raises(Unusable, match=f"bargein:config says {field} = "):
        await agree_on_config(store.redis, 16)


async def test_a_config_that_is_no_hash_stops_a_process(store: Store) -> None:
    await store.redis.set(keys.CONFIG, "not ours")
    with pytest.raises(Unusable, match="bargein:config can't be read or written"):
        await agree_on_config(store.redis, 16)


async def test_s77_a_full_server_whose_config_is_written_lets_a_process_start(real_store: Store) -> None:
    await agree_on_config(real_store.redis, 16)
    await real_store.redis.config_set("maxmemory", 1)
    try:
        await agree_on_config(real_store.redis, 16)
    finally:
        await real_store.redis.config_set("maxmemory", 0)


async def test_s53_a_server_that_is_still_loading_is_waited_for() -> None:
    class Loading(Informant):
        asked = 0

        async def info(self) -> dict[str, Any]:
            self.asked += 1
            return {**self._info, "loading": 1 if self.asked < 3 else 0}

    server = Loading(redis_version="7.2.0", maxmemory_policy="noeviction")
    async with asyncio.timeout(10):
        info = await check_server(cast("Redis", server), "redis://somewhere")
    assert (info["loading"], server.asked) == (0, 3)


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:sekret@127.0.0.1:1/0",
        "redis://127.0.0.1:1/0?password=sekret",
        "redis://:sekret@127.0.0.1:1/0?password=sekret&username=x",
    ],
)
async def test_no_password_is_in_what_is_said_about_a_server(url: str) -> None:
    async with Redis.from_url(url) as redis:
        with pytest.raises(Unusable) as refused:
            await check_server(redis, url)
    assert "sekret" not in str(refused.value)
    assert "redis://127.0.0.1:1/0" in str(refused.value)
