"""Where Redis is: one server, the master that Sentinels name, or a cluster; and which node of a cluster has a key.

Pure, apart from naming redis-py's classes. Leaves connections to aio_nodes.py and sync_nodes.py.

    redis://host:port  rediss://host:port  unix:///path                  one server
    redis+sentinel://host:port[,host:port ...]/service  rediss+...       the service's master, wherever it is
    redis+cluster://host:port[,host:port ...]  rediss+cluster://...      a cluster; any of its nodes

redis-py's own cluster client isn't used: one node that doesn't answer makes it close every connection, and in a
bad moment it forgets all nodes for good. Here a node that is away costs those whose keys it has a delay.
Units: `_s` seconds. How it says no: ValueError for a URL that can't be used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from redis import exceptions
from redis.crc import key_slot

Address: TypeAlias = tuple[str, int]

CLUSTER, SENTINEL = "+cluster", "+sentinel"
NODE_PORT, SENTINEL_PORT = 6379, 26379
# A URL's user and password are the master's; these are for Sentinels that want to know who asks.
SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")

SLOTS = 16_384
REDIRECTIONS = 5
# How long a node may take to say who serves what; the next one is asked then.
MAP_TIMEOUT_S = 1.0

# What makes the map doubtful: a node that doesn't answer, or one that knows of trouble.
DOUBTFUL: tuple[type[Exception], ...] = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ClusterDownError,
    exceptions.MasterDownError,
    OSError,
)


@dataclass(frozen=True, slots=True)
class Place:
    """What a URL says. `plain`: a URL of one server with all the rest. `service`: for Sentinels, else empty."""

    hosts: tuple[Address, ...]
    plain: str
    service: str = ""
    about_sentinels: dict[str, str] = field(default_factory=dict[str, str])


def read_url(url: str) -> Place:
    """Read a URL; one of one server names no hosts. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme.endswith(CLUSTER):
        if parts.path.strip("/") not in {"", "0"}:
            raise ValueError("a cluster has no databases; leave the path out")
        return Place(_hosts(parts.netloc, NODE_PORT), _plain(url, CLUSTER))
    if parts.scheme.endswith(SENTINEL):
        service, _, database = parts.path.strip("/").partition("/")
        if not service:
            raise ValueError("names no service; write redis+sentinel://host:port/service")
        options = parse_qsl(parts.query, keep_blank_values=True)
        about = {name.removeprefix("sentinel_"): value for name, value in options if name in SENTINEL_OPTIONS}
        query = urlencode([(name, value) for name, value in options if name not in SENTINEL_OPTIONS])
        whole = urlunsplit(parts._replace(path=f"/{database}", query=query))
        return Place(_hosts(parts.netloc, SENTINEL_PORT), _plain(whole, SENTINEL), service, about)
    return Place((), url)


class SlotMap:
    """Which node serves which slot, as far as is known."""

    def __init__(self, first: tuple[Address, ...]) -> None:
        """`first`: the nodes to ask until one has named the others."""
        self.stale = True
        self._first = first
        self._nodes: list[Address] = []
        self._served_by: list[Address | None] = [None] * SLOTS

    @property
    def candidates(self) -> list[Address]:
        """Whom to ask, in this order."""
        return list(dict.fromkeys([*self._nodes, *self._first]))

    def find(self, key: str) -> Address:
        """The node that serves a key. Raises redis-py's ConnectionError if nobody does."""
        address = self._served_by[key_slot(key.encode())]
        if address is None:
            self.stale = True
            raise exceptions.ConnectionError(f"no node of the cluster serves {key}")
        return address

    def learn(self, ranges: Any, asked: Address) -> set[Address]:
        """Take over an answer to CLUSTER SLOTS; the nodes that serve a slot."""
        served: list[Address | None] = [None] * SLOTS
        nodes: list[Address] = []
        for first, last, *servers in ranges:
            # A node that knows no address of its own leaves it out: it is the one that was asked.
            named = [(_text(server[0]) or asked[0], int(server[1])) for server in servers]
            served[first : last + 1] = [named[0]] * (last + 1 - first)
            nodes += named
        self._nodes = list(dict.fromkeys([asked, *nodes]))
        self._served_by = served
        self.stale = False
        return {address for address in served if address is not None}

    def note_moved(self, answer: exceptions.MovedError) -> None:
        """A node has said where a slot is now."""
        self._served_by[answer.slot_id] = address_of(answer)


def address_of(answer: exceptions.AskError) -> Address:
    """Where a node sends us."""
    return str(cast("Any", answer).host), answer.port


def nobody_answers(failures: list[str]) -> exceptions.ConnectionError:
    """What is said if no node did."""
    return exceptions.ConnectionError("no node of the cluster answers: " + "; ".join(failures))


def _hosts(netloc: str, default_port: int) -> tuple[Address, ...]:
    hosts: list[Address] = []
    for each in netloc.rpartition("@")[2].split(","):
        one = urlsplit(f"//{each}")
        if not one.hostname:
            raise ValueError("names no host; write host:port, several with commas between them")
        hosts.append((one.hostname, one.port or default_port))
    return tuple(hosts)


def _plain(url: str, kind: str) -> str:
    parts = urlsplit(url)
    credentials, at, netloc = parts.netloc.rpartition("@")
    netloc = f"{credentials}{at}{netloc.split(',')[0]}"
    return urlunsplit(parts._replace(scheme=parts.scheme.removesuffix(kind), netloc=netloc))


def _text(value: bytes | str | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""
