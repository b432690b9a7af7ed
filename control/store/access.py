"""The way to Redis, by its URL: one server, the master that Sentinels name, or a cluster.

Responsible for reading the URL, and for what has to be apart on a cluster: which partitions one read can cover, and
which connection serves a key. Leaves connections to `link.py` and `cluster.py`. Says no with `ValueError` for a URL
that can't be used; connects to nothing by itself.

    redis://host:port  rediss://host:port  unix:///path                  one server
    redis+sentinel://host:port[,host:port ...]/service  rediss+...       the service's master, wherever it is
    redis+cluster://host:port[,host:port ...]  rediss+cluster://...      a cluster; any of its nodes
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.cluster import ClusterNode, ClusterPipeline, RedisCluster
from redis.asyncio.connection import SSLConnection
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError

from control.store.cluster import SlotLink, SlotMap, SpreadLink, connection_to, slot_of
from control.store.keys import PartitionKeys
from control.store.link import Link, make_pool

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

CLUSTER, SENTINEL = "+cluster", "+sentinel"
SCHEMES = ("redis", "rediss", "unix", *(plain + kind for kind in (CLUSTER, SENTINEL) for plain in ("redis", "rediss")))
SENTINEL_PORT, NODE_PORT = 26379, 6379
# For the Sentinels themselves, where they want to know who asks; a URL's user and password are the master's.
SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")


class _Known(dict[str, ClusterNode]):
    """The nodes to ask who serves what. redis-py forgets every one that doesn't answer: in a bad moment all, for good.

    Here it is asked last the next time. And whoever walks through them isn't disturbed by one that is.
    """

    def pop(self, name: str, *default: Any) -> Any:
        is_known = name in self
        found = super().pop(name, *default)
        if default and is_known:
            self[name] = found
        return found

    def values(self) -> Any:
        return list(super().values())


class _Cluster(RedisCluster):
    """redis-py's client. What it stumbles over while another task has found a node gone is said as a lost connection.

    Each such find closes all connections and forgets the default node, under the feet of whoever else uses them.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.nodes_manager.startup_nodes = _Known(self.nodes_manager.startup_nodes)

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        with _steadily():
            return await super().execute_command(*args, **kwargs)

    def pipeline(self, transaction: Any = None, shard_hint: Any = None) -> _ClusterPipeline:
        del transaction, shard_hint  # a cluster has none
        return cast("Any", _ClusterPipeline)(self)


class _ClusterPipeline(ClusterPipeline):
    async def execute(self, raise_on_error: bool = True, allow_redirections: bool = True) -> list[Any]:
        with _steadily():
            return await super().execute(raise_on_error, allow_redirections)


@contextmanager
def _steadily() -> Generator[None]:
    try:
        yield
    except (AttributeError, KeyError, RuntimeError) as error:
        raise RedisConnectionError(f"the cluster's nodes are changing: {type(error).__name__}: {error}") from error


class _Sentinels(Sentinel):
    """redis-py's, which puts whoever has answered first in its list; two tasks at that at once lose one of them."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._asking = asyncio.Lock()

    async def discover_master(self, service_name: str) -> Any:
        async with self._asking:
            return await cast("Any", super()).discover_master(service_name)


class Access:
    """One server. `redis`: a client for whatever is neither hot nor blocking."""

    is_cluster = False

    def __init__(self, pool: ConnectionPool) -> None:
        self.pool = pool
        self.redis = Redis(connection_pool=pool)

    def link(self, key: str, timeout_s: float | None = None) -> Link:
        """A connection for the keys in `key`'s slot. `timeout_s`: less patience than the others, on a cluster."""
        del key, timeout_s
        return Link(self.pool)

    def spread(self) -> Link:
        """A connection for keys of several slots in one call; on a cluster an answer may be a lost connection."""
        return Link(self.pool)

    def groups(self, partitions: int) -> list[tuple[int, ...]]:
        """The partitions, in groups of those that one read can cover."""
        return [tuple(range(partitions))]

    async def close(self) -> None:
        """Close what `redis` and the pool hold; links are closed by whoever asked for them."""
        await self.redis.aclose()
        await self.pool.disconnect()


class SentinelAccess(Access):
    """The master that Sentinels name. A new connection asks them."""

    def __init__(self, pool: SentinelConnectionPool) -> None:
        super().__init__(pool)
        self._sentinels: list[Redis] = cast("Any", pool).sentinel_manager.sentinels

    async def close(self) -> None:
        """See `Access.close`."""
        await super().close()
        for sentinel in self._sentinels:
            await sentinel.aclose()


class ClusterAccess(Access):
    """A cluster. A read, like everything in one command, covers one slot: one partition."""

    is_cluster = True

    def __init__(self, pool: ConnectionPool, first: Sequence[tuple[str, int]]) -> None:
        """`pool`: for what all connections have in common. `first`: nodes to begin with."""
        self.pool = pool
        kwargs = _without(cast("Any", pool.connection_kwargs), "host", "port", "db")
        if issubclass(pool.connection_class, SSLConnection):
            kwargs["ssl"] = True
        nodes = [ClusterNode(host, port) for host, port in first]
        # Only what both clients have is used of it.
        self.redis = cast("Any", _Cluster)(startup_nodes=nodes, require_full_coverage=False, **kwargs)
        self._slots = SlotMap(first, lambda address, timeout_s: connection_to(pool, address, timeout_s))

    def link(self, key: str, timeout_s: float | None = None) -> Link:
        """See `Access.link`."""
        return SlotLink(self._slots, self.pool, slot_of(key), timeout_s)

    def spread(self) -> Link:
        """See `Access.spread`."""
        return SpreadLink(self._slots, self.pool)

    def groups(self, partitions: int) -> list[tuple[int, ...]]:
        """Each partition by itself; those that share a slot can't be told apart here, which costs nothing."""
        return [(partition,) for partition in range(partitions)]


def open_access(url: str, *, timeout_s: float = 5.0, name: str = "bargein") -> Access:
    """The way to the Redis of `url`. `timeout_s` must be above every BLOCK that is used (S57).

    Raises ValueError for a URL that can't be used.
    """
    scheme = urlsplit(url).scheme
    if scheme.endswith(CLUSTER):
        hosts, plain = _split_hosts(url, CLUSTER, NODE_PORT)
        if urlsplit(plain).path.strip("/") not in {"", "0"}:
            raise ValueError("a cluster has no databases; leave the path out")
        return ClusterAccess(make_pool(plain, timeout_s=timeout_s, name=name), hosts)
    if scheme.endswith(SENTINEL):
        hosts, plain = _split_hosts(url, SENTINEL, SENTINEL_PORT)
        return SentinelAccess(_sentinel_pool(plain, hosts, timeout_s, name))
    return Access(make_pool(url, timeout_s=timeout_s, name=name))


def example_key(partitions: Sequence[int]) -> str:
    """A key in the slot of a group of `Access.groups`."""
    return PartitionKeys(partitions[0]).owner


def _split_hosts(url: str, kind: str, default_port: int) -> tuple[list[tuple[str, int]], str]:
    """The addresses, and a URL for one server that says all the rest."""
    parts = urlsplit(url)
    credentials, at, netloc = parts.netloc.rpartition("@")
    hosts: list[tuple[str, int]] = []
    for each in netloc.split(","):
        one = urlsplit(f"//{each}")
        if not one.hostname:
            raise ValueError("names no host; write host:port, several with commas between them")
        hosts.append((one.hostname, one.port or default_port))
    plain = parts._replace(scheme=parts.scheme.removesuffix(kind), netloc=f"{credentials}{at}{netloc.split(',')[0]}")
    return hosts, urlunsplit(plain)


def _without(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}


def _sentinel_pool(plain: str, hosts: Sequence[tuple[str, int]], timeout_s: float, name: str) -> SentinelConnectionPool:
    parts = urlsplit(plain)
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError("names no service; write redis+sentinel://host:port/service")
    options = parse_qsl(parts.query, keep_blank_values=True)
    credentials = {key.removeprefix("sentinel_"): value for key, value in options if key in SENTINEL_OPTIONS}
    query = urlencode([(key, value) for key, value in options if key not in SENTINEL_OPTIONS])
    plain = urlunsplit(parts._replace(path=f"/{database}", query=query))
    template = make_pool(plain, timeout_s=timeout_s, name=name)
    kwargs = _without(cast("Any", template.connection_kwargs), "host", "port")
    is_tls = issubclass(template.connection_class, SSLConnection)
    about_sentinels: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s, **credentials}
    if is_tls:
        # Whoever asks for TLS means the Sentinels as well, with the same certificates.
        about_sentinels |= {"ssl": True, **{key: value for key, value in kwargs.items() if key.startswith("ssl_")}}
    sentinel = _Sentinels(list(hosts), sentinel_kwargs=about_sentinels)
    return SentinelConnectionPool(service, sentinel, ssl=is_tls, check_connection=True, **kwargs)
