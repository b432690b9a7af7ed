"""The synchronous shell's way to Redis: `call` runs a command of one key at whatever server has that key.

Talks to Redis. Responsible for connections, and on a cluster for MOVED, ASK and a map that is out of date. Leaves
patience to sync_link.py: what passes is raised, as redis-py's exceptions, and the next call may go elsewhere.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import redis
import redis.cluster
from redis import exceptions
from redis.backoff import NoBackoff
from redis.connection import SSLConnection
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from bargein_client import places, transport

if TYPE_CHECKING:
    from collections.abc import Callable

    from bargein_client.mailbox import Options
    from bargein_client.places import Address, Place

T = TypeVar("T")

# What knows MOVED and ASK; since version 6 of redis-py every parser does.
PARSER: Any = getattr(redis.cluster, "ClusterParser", None)


class Nodes(Protocol):
    """Redis, however many servers it is. `socket_timeout_s`: of its connections."""

    socket_timeout_s: float

    def call(self, key: str, ask: Callable[[Any], T]) -> T:
        """The answer to `ask`, which is given a client and runs one command of `key`. One try."""
        ...

    def interrupt(self) -> None:
        """Wake whoever is blocked in a read, if the connections are ours."""
        ...

    def close(self) -> None:
        """Close the connections, if they are ours."""
        ...


def open_nodes(url_or_redis: str | redis.Redis | redis.RedisCluster, options: Options) -> OneServer | Cluster:
    """The way to Redis by a URL, or by a client of the caller's. Raises ValueError."""
    if not isinstance(url_or_redis, str):
        return OneServer(url_or_redis, None)
    place = places.read_url(url_or_redis)
    settings = {"retry": Retry(NoBackoff(), 0), **transport.socket_settings(options, place.plain)}
    pool: Any = redis.ConnectionPool.from_url(place.plain, **settings)
    if place.service:
        pool = _sentinel_pool(place, pool)
    elif place.hosts:
        return Cluster(place.hosts, pool)
    return OneServer(redis.Redis(connection_pool=pool), pool)


class OneServer:
    """One server, one master behind Sentinels, or whatever the caller's own client leads to."""

    def __init__(self, client: Any, owned: Any) -> None:
        """`owned`: the pool, if it is ours."""
        self.socket_timeout_s = transport.require_socket_timeout_s(client)
        self._client = client
        self._owned = owned

    def call(self, key: str, ask: Callable[[Any], T]) -> T:
        """See `Nodes`."""
        del key
        return ask(self._client)

    def interrupt(self) -> None:
        """See `Nodes`."""
        if self._owned is not None:
            self._owned.disconnect()

    def close(self) -> None:
        """See `Nodes`."""
        if self._owned is not None:
            self._client.close()
            self._owned.disconnect()
            if isinstance(self._owned, SentinelConnectionPool):
                owned: Any = self._owned
                for sentinel in owned.sentinel_manager.sentinels:
                    sentinel.close()


class Cluster:
    """A cluster's nodes, each with connections of its own."""

    def __init__(self, first: tuple[Address, ...], like: Any) -> None:
        """`like`: a pool with what all connections have in common."""
        settings: dict[str, Any] = like.connection_kwargs
        self.socket_timeout_s: float = settings["socket_timeout"]
        parser = {"parser_class": PARSER} if PARSER else {}
        self._settings: dict[str, Any] = {**settings, **parser, "connection_class": like.connection_class}
        self._slots = places.SlotMap(first)
        self._nodes: dict[Address, Any] = {}
        self._asking = threading.Lock()

    def call(self, key: str, ask: Callable[[Any], T]) -> T:
        """See `Nodes`."""
        asked: Address | None = None
        for _ in range(places.REDIRECTIONS):
            if self._slots.stale:
                self._refresh()
            try:
                if asked is not None:
                    return self._ask_there(asked, ask)
                return ask(self._client(self._slots.find(key)))
            except exceptions.MovedError as moved:
                self._slots.note_moved(moved)
                asked = None
            except exceptions.AskError as elsewhere:
                asked = places.address_of(elsewhere)
            except places.DOUBTFUL:
                self._slots.stale = True
                raise
        raise exceptions.ConnectionError(f"{key} is sent from node to node")

    def interrupt(self) -> None:
        """See `Nodes`."""
        for client in list(self._nodes.values()):
            client.connection_pool.disconnect()

    def close(self) -> None:
        """See `Nodes`."""
        nodes, self._nodes = list(self._nodes.values()), {}
        for client in nodes:
            _close(client)

    def _ask_there(self, address: Address, ask: Callable[[Any], T]) -> T:
        """The answer of the node that a key has gone to already, ahead of its slot."""
        with self._client(address).pipeline(transaction=False) as pipe:
            # It holds for the next command of the same connection.
            pipe.execute_command("ASKING")
            ask(pipe)  # only queued
            answers: list[Any] = pipe.execute()
        return answers[-1]

    def _client(self, address: Address) -> Any:
        client = self._nodes.get(address)
        if client is None:
            client = self._nodes[address] = self._make(address)
        return client

    def _make(self, address: Address, **settings: Any) -> Any:
        whole: dict[str, Any] = {**self._settings, "host": address[0], "port": address[1], **settings}
        pool: Any = redis.ConnectionPool(**whole)
        return redis.Redis(connection_pool=pool)

    def _refresh(self) -> None:
        with self._asking:
            if not self._slots.stale:
                return
            failures: list[str] = []
            for address in self._slots.candidates:
                client = self._make(address, socket_timeout=places.MAP_TIMEOUT_S)
                try:
                    ranges = client.execute_command("CLUSTER", "SLOTS")
                except transport.FAILED as error:
                    if isinstance(error, transport.REFUSED):
                        raise
                    failures.append(f"{address[0]}:{address[1]}: {str(error) or type(error).__name__}")
                    continue
                finally:
                    _close(client)
                # A node that hangs closes no connection: what is under way there ends here, once it isn't served there.
                for gone in self._nodes.keys() - self._slots.learn(ranges, address):
                    _close(self._nodes.pop(gone))
                return
            raise places.nobody_answers(failures)


def _close(client: Any) -> None:
    with contextlib.suppress(*transport.FAILED):
        client.close()
        client.connection_pool.disconnect()


def _sentinel_pool(place: Place, like: Any) -> Any:
    settings = {name: value for name, value in like.connection_kwargs.items() if name not in {"host", "port"}}
    is_tls = issubclass(like.connection_class, SSLConnection)
    about = {name: settings[name] for name in ("socket_timeout", "socket_connect_timeout")} | place.about_sentinels
    if is_tls:
        about |= {"ssl": True, **{name: value for name, value in settings.items() if name.startswith("ssl_")}}
    sentinel = _Sentinels(list(place.hosts), sentinel_kwargs=about)
    return SentinelConnectionPool(place.service, sentinel, ssl=is_tls, check_connection=True, **settings)


class _Sentinels(Sentinel):
    """redis-py's, which puts whoever has answered first in its list; two at that at once lose one of them."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._asking = threading.Lock()

    def discover_master(self, service_name: str) -> Any:
        with self._asking:
            found: Any = super()
            return found.discover_master(service_name)
