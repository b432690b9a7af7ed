"""The way to Redis, by its URL: one server, the master that Sentinels name, or a cluster.

Responsible for reading the URL, and for what has to be apart on a cluster: which partitions one read can cover, and
which connection serves a key. Leaves connections to `link.py` and `cluster.py`. Says no with `ValueError` for a URL
that can't be used; connects to nothing by itself.

    redis://host:port  rediss://host:port  unix:///path                  one server
    redis+sentinel://host:port[,host:port ...]/service  rediss+...       the service's master, wherever it is
    redis+cluster://host:port[,host:port ...]  rediss+cluster://...      a cluster; any of its nodes
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, cast
from urllib.parse import urlsplit, urlunsplit

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import SSLConnection
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool

from control.store.cluster import SlotLink, SlotMap, SpreadLink, connection_to, slot_of
from control.store.keys import PartitionKeys
from control.store.link import Link, make_pool

if TYPE_CHECKING:
    from collections.abc import Sequence

CLUSTER, SENTINEL = "+cluster", "+sentinel"
SCHEMES = ("redis", "rediss", "unix", *(plain + kind for kind in (CLUSTER, SENTINEL) for plain in ("redis", "rediss")))
SENTINEL_PORT, NODE_PORT = 26379, 6379


class _Cluster(RedisCluster):
    """redis-py's client, which forgets every node that doesn't answer: in a bad moment all of them, for good."""

    first: Sequence[tuple[str, int]] = ()

    async def initialize(self) -> Self:
        if not self.nodes_manager.startup_nodes:
            kwargs = self.nodes_manager.connection_kwargs
            nodes = [ClusterNode(host, port, **kwargs) for host, port in self.first]
            self.nodes_manager.startup_nodes = {node.name: node for node in nodes}
        await super().initialize()
        return self


class Access:
    """One server, or one master behind Sentinels. `redis`: a client for whatever is neither hot nor blocking."""

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
        cluster = cast("Any", _Cluster)(startup_nodes=nodes, require_full_coverage=False, **kwargs)
        cluster.first = first
        # Only what both clients have is used of it.
        self.redis = cast("Redis", cluster)
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
        return Access(_sentinel_pool(plain, hosts, timeout_s, name))
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


def _sentinel_pool(plain: str, hosts: Sequence[tuple[str, int]], timeout_s: float, name: str) -> ConnectionPool:
    parts = urlsplit(plain)
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError("names no service; write redis+sentinel://host:port/service")
    template = make_pool(urlunsplit(parts._replace(path=f"/{database}")), timeout_s=timeout_s, name=name)
    kwargs = _without(cast("Any", template.connection_kwargs), "host", "port")
    sentinel = Sentinel(list(hosts), sentinel_kwargs={"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s})
    is_tls = issubclass(template.connection_class, SSLConnection)
    return SentinelConnectionPool(service, sentinel, ssl=is_tls, check_connection=True, **kwargs)
