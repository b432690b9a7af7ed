"""The server as a whole: is it one that Bargein can trust, and which partitions does it have.

Responsible for refusing a server that would lose state silently, and for `bargein:config`. Talks to Redis. Says no with
`Unusable`, whose message says what to do.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING, Any, cast

from redis.asyncio.cluster import RedisCluster
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from control.store import keys
from control.store.access import CLUSTER
from control.store.link import LOST
from control.wire.commands import PROTOCOL

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from redis.asyncio import Redis

log = logging.getLogger("bargein.server")

OLDEST = (7, 0)
LOADING_S = 0.2
LAYOUT = 1


class Unusable(Exception):
    """The server can't be used as it is: the message says why and what to do."""


async def check_server(redis: Redis, url: str) -> dict[str, Any]:
    """The server's INFO. Raises `Unusable`: out of reach, credentials refused, too old, or free to evict keys.

    A server that is still reading its data answers nothing else yet; that is waited for, however long it takes (S53).
    """
    where = _public(url)
    infos = await fetch_infos(redis, where)
    if any(info.get("loading") for info in infos):
        log.warning("Redis at %s is still loading its data; waiting", where)
    while any(info.get("loading") for info in infos):
        await asyncio.sleep(LOADING_S)
        infos = await fetch_infos(redis, where)
    for info in infos:
        check_info(info, where)
    if infos[0].get("cluster_enabled") and not isinstance(redis, RedisCluster):
        scheme, _, rest = where.partition("://")
        raise Unusable(f"Redis at {where} is a node of a cluster; say so: {scheme}{CLUSTER}://{rest}")
    return infos[0]


def check_info(info: dict[str, Any], where: str) -> None:
    """Raises `Unusable` for a server that is too old, or free to evict keys. `where`: without credentials."""
    version = str(info.get("redis_version", "0"))
    numbers = [int(digits) for digits in re.findall(r"\d+", version)[:2]]
    if tuple(numbers) < OLDEST:
        raise Unusable(f"Redis at {where} is version {version}; 7.0 or later is needed (or any Valkey)")
    policy = info.get("maxmemory_policy")
    if policy not in (None, "noeviction"):
        raise Unusable(
            f"Redis at {where} may evict keys (maxmemory-policy {policy}), so sessions and pending cleanups could "
            "vanish. Set it: CONFIG SET maxmemory-policy noeviction"
        )


async def fetch_infos(redis: Redis, where: str) -> list[dict[str, Any]]:
    """INFO of the server, or of every master of a cluster. Raises `Unusable`; `where`: without credentials."""
    try:
        if isinstance(redis, RedisCluster):
            answers: Any = await redis.info(target_nodes=RedisCluster.PRIMARIES)
            # With one master redis-py leaves out its name.
            return [answers] if "redis_version" in answers else list(answers.values())
        return [await redis.info()]
    except (AuthenticationError, NoPermissionError) as error:
        raise Unusable(f"Redis at {where} refuses the credentials: {error}. Check the user and password") from error
    except ResponseError as error:
        raise Unusable(f"Redis at {where} answers INFO with: {error}") from error
    except LOST as error:
        raise Unusable(
            f"Redis at {where} can't be reached: {error}. Start it, or set BARGEIN_REDIS_URL; "
            "`bargein up` brings one along"
        ) from error


async def fetch_now_ms(redis: Redis) -> int:
    """The server's clock; on a cluster that of one of the nodes."""
    if isinstance(redis, RedisCluster):
        answers = cast("Any", await redis.execute_command("TIME", target_nodes=RedisCluster.DEFAULT_NODE))
        seconds, microseconds = max(answers.values()) if hasattr(answers, "values") else answers
    else:
        seconds, microseconds = await redis.time()
    return int(seconds) * 1000 + int(microseconds) // 1000


async def agree_on_config(redis: Redis, partitions: int) -> None:
    """Write `bargein:config` if nobody has, else compare. Raises `Unusable` on a mismatch."""
    wanted = {"protocol": str(PROTOCOL), "partitions": str(partitions), "layout": str(LAYOUT)}
    try:
        stored = _texts(await cast("Awaitable[dict[Any, Any]]", redis.hgetall(keys.CONFIG)))
        # Not written where it is there already: a server that is full must still be drained.
        if not wanted.keys() <= stored.keys():
            # No transaction: a cluster has none, and a field that is there already stays as it is.
            async with redis.pipeline(transaction=False) as pipe:
                for field, value in wanted.items():
                    pipe.hsetnx(keys.CONFIG, field, value)
                pipe.hgetall(keys.CONFIG)
                stored = _texts((await pipe.execute())[-1])
    except (ResponseError, *LOST) as error:
        raise Unusable(f"{keys.CONFIG} can't be read or written: {error}") from error
    for field, value in wanted.items():
        if stored[field] != value:
            raise Unusable(
                f"{keys.CONFIG} says {field} = {stored[field]}, this process is set to {value}. "
                "All processes of one Redis use the same; stored sessions don't move by themselves"
            )


def _public(url: str) -> str:
    """The address without credentials and options, which may hold a password as well."""
    scheme, _, rest = url.partition("?")[0].rpartition("://")
    address = rest.rpartition("@")[2]
    return f"{scheme}://{address}" if scheme else address


def _texts(found: dict[Any, Any]) -> dict[str, str]:
    return {_text(field): _text(value) for field, value in found.items()}


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
