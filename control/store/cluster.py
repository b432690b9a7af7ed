"""Redis Cluster: which node serves a slot, and links that follow the slots wherever they go.

Responsible for the map of slots, and for MOVED, ASK and a node that is gone (S58). Leaves what a lost connection means
to the link's user, who reads again whatever it relied on: to it, a slot that has moved is one. Talks to Redis. Says no
as `Link` does.

All keys of a partition are in one slot, so nearly every link is for one slot and knows one connection. While a slot is
on its way from node to node, key by key, a script that names keys of both nodes is refused (TRYAGAIN): its partition
waits until the slot has arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import cache
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet

from redis.asyncio.cluster import ClusterParser
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from control.store.link import LOST, Link
from control.store.scripts import SCRIPTS, script

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from redis.asyncio import ConnectionPool
    from redis.asyncio.connection import AbstractConnection

    from control.store.link import Value
    from control.store.scripts import Script

log = logging.getLogger("bargein.cluster")

Address = tuple[str, int]

# How long a node may take to say who serves what; the next one is asked then.
MAP_TIMEOUT_S = 1.0
REDIRECTIONS = 5

# A second ASK: where we were asked to ask, it is elsewhere again.
_UNSETTLED = (TryAgainError, ClusterDownError, MasterDownError, AskError)


def slot_of(key: str) -> int:
    """The slot of a key: of its hash tag, if it has one."""
    return key_slot(key.encode())


class SlotMap:
    """Who serves which slot, as far as is known. `make` gives an unopened connection to a node, and its time-out."""

    def __init__(self, first: Sequence[Address], make: Callable[[Address, float | None], AbstractConnection]) -> None:
        """`first`: the nodes to ask until one has named the others."""
        self._first = list(first)
        self._make = make
        self._nodes: list[Address] = list(first)
        self._served_by: list[Address | None] = []
        self._stale = True
        self._asking = asyncio.Lock()
        self._links: WeakSet[SlotLink] = WeakSet()

    def watch(self, link: SlotLink) -> None:
        """Tell a link when its slot is known to be elsewhere."""
        self._links.add(link)

    async def find(self, slot: int) -> Address:
        """The node that serves `slot`. Raises `ConnectionError` if nobody knows, or nobody does."""
        async with self._asking:
            if self._stale:
                await self._ask_somebody()
        address = self._served_by[slot]
        if address is None:
            self._stale = True
            raise RedisConnectionError(f"no node of the cluster serves slot {slot}")
        return address

    def has_moved(self, slot: int, address: Address) -> bool:
        """Whether another node than this one is known to serve `slot`."""
        return bool(self._served_by) and self._served_by[slot] not in {None, address}

    def note_moved(self, answer: MovedError) -> None:
        """A node has said so. The rest of the map may have changed as well; that shows where it matters."""
        address = _address(answer)
        if self._served_by:
            self._served_by[answer.slot_id] = address
        if address not in self._nodes:
            self._nodes.append(address)
        self._cut_the_moved()

    def doubt(self) -> None:
        """A node doesn't answer, or knows of trouble: ask again before the next connection."""
        self._stale = True

    async def _ask_somebody(self) -> None:
        failures: list[str] = []
        for address in dict.fromkeys([*self._nodes, *self._first]):
            connection = self._make(address, MAP_TIMEOUT_S)
            try:
                await connection.connect()
                await connection.send_command("CLUSTER", "SLOTS")
                ranges = cast("Any", await connection.read_response())
            except (*LOST, ResponseError) as error:
                failures.append(f"{address[0]}:{address[1]}: {str(error) or type(error).__name__}")
                continue
            finally:
                with contextlib.suppress(*LOST):
                    await connection.disconnect(nowait=True)
            self._learn(ranges, address)
            return
        raise RedisConnectionError("no node of the cluster answers: " + "; ".join(failures))

    def _learn(self, ranges: Any, asked: Address) -> None:
        served: list[Address | None] = [None] * 16_384
        nodes: list[Address] = []
        for first, last, *servers in ranges:
            # A node that knows no address of its own leaves it out: it is the one that was asked.
            named = [((server[0] or b"").decode() or asked[0], int(server[1])) for server in servers]
            served[first : last + 1] = [named[0]] * (last + 1 - first)
            nodes += named
        # Whoever has answered is asked first the next time.
        self._nodes = list(dict.fromkeys([asked, *nodes]))
        self._served_by = served
        self._stale = False
        self._cut_the_moved()

    def _cut_the_moved(self) -> None:
        for link in list(self._links):
            link.cut_if_moved()


class SlotLink(Link):
    """A connection to whichever node serves one slot. A slot that moves looks like a lost connection."""

    def __init__(self, slots: SlotMap, pool: ConnectionPool, slot: int, timeout_s: float | None = None) -> None:
        super().__init__(pool)
        self._slots = slots
        self._slot = slot
        self._timeout_s = timeout_s
        self._address: Address | None = None
        slots.watch(self)

    def cut_if_moved(self) -> None:
        """End what is under way at a node that no longer serves the slot: it may hang, and never say so."""
        if self._address is not None and self._slots.has_moved(self._slot, self._address):
            writer: asyncio.StreamWriter | None = getattr(self._connection, "_writer", None)
            if writer is not None:
                writer.transport.abort()

    async def try_all(self, commands: Sequence[Sequence[Value]]) -> list[Any]:
        """As `Link.try_all`. Raises `ConnectionError` where the node sends us to another."""
        if self._address is not None and self._slots.has_moved(self._slot, self._address):
            # Whoever sends what has no key (CLIENT UNBLOCK) is never told by the node.
            await self.close()
            raise RedisConnectionError(f"slot {self._slot} has moved to another node")
        try:
            answers = await super().try_all(commands)
        except LOST:
            self._slots.doubt()
            raise
        for index, answer in enumerate(answers):
            if isinstance(answer, AskError) and not isinstance(answer, MovedError):
                answers[index] = await _ask_there(self._slots, answer, commands[index], self._pool, self._timeout_s)
            unsettled = answers[index]
            if isinstance(unsettled, MovedError):
                self._slots.note_moved(unsettled)
                await self.close()
                raise RedisConnectionError(f"slot {self._slot} has moved to another node: {unsettled}")
            if isinstance(unsettled, _UNSETTLED):
                self._slots.doubt()
                await self.close()
                raise RedisConnectionError(f"slot {self._slot} is not settled: {unsettled}")
        return answers

    async def close(self) -> None:
        """Close the connection; the next call opens another."""
        self._address = None
        await super().close()

    async def _make_connection(self) -> AbstractConnection:
        self._address = await self._slots.find(self._slot)
        return connection_to(self._pool, self._address, self._timeout_s)


class SpreadLink(Link):
    """Commands of many keys, each sent to its node, all nodes at once. What is lost stands in its command's place.

    For what isn't hot: the scripts and keys of several slots in one call. A command's key is its first argument, a
    script's its first key.
    """

    def __init__(self, slots: SlotMap, pool: ConnectionPool, timeout_s: float | None = None) -> None:
        super().__init__(pool)
        self._slots = slots
        self._timeout_s = timeout_s
        self._links: dict[Address, Link] = {}

    async def try_all(self, commands: Sequence[Sequence[Value]]) -> list[Any]:
        """An error answer or a lost connection stands in its place in the list."""
        return await self._spread(commands, lambda link, some: link.try_all([commands[i] for i in some]))

    async def try_run_all(self, calls: Sequence[tuple[Script, Sequence[str], Sequence[Value]]]) -> list[Any]:
        """As `Link.try_run_all`: each node is told of the scripts that it doesn't know, as after a failover."""
        commands = [("EVALSHA", s.sha, len(keys), *keys, *args) for s, keys, args in calls]
        return await self._spread(commands, lambda link, some: link.try_run_all([calls[i] for i in some]))

    async def close(self) -> None:
        """Close every connection."""
        links, self._links = list(self._links.values()), {}
        for link in links:
            await link.close()

    async def _spread(
        self, commands: Sequence[Sequence[Value]], send: Callable[[Link, list[int]], Awaitable[list[Any]]]
    ) -> list[Any]:
        """`send` sends the commands of some places to one node."""
        answers: list[Any] = [None] * len(commands)
        left = list(range(len(commands)))
        for _ in range(REDIRECTIONS):
            places: dict[Address, list[int]] = {}
            for index in left:
                try:
                    address = await self._slots.find(slot_of(_key_of(commands[index])))
                except RedisConnectionError as error:
                    answers[index] = error
                    continue
                places.setdefault(address, []).append(index)
            found = await asyncio.gather(*(self._send_to(address, some, send) for address, some in places.items()))
            left = []
            for some, part in zip(places.values(), found, strict=True):
                for index, answer in zip(some, part, strict=True):
                    answers[index] = answer
                    if isinstance(answer, AskError) and not isinstance(answer, MovedError):
                        answers[index] = await self._ask(answer, commands[index])
                    unsettled = answers[index]
                    if isinstance(unsettled, MovedError):
                        self._slots.note_moved(unsettled)
                        left.append(index)
                    elif isinstance(unsettled, _UNSETTLED):
                        self._slots.doubt()
            if not left:
                break
        return answers

    async def _send_to(
        self, address: Address, places: list[int], send: Callable[[Link, list[int]], Awaitable[list[Any]]]
    ) -> list[Any]:
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = _NodeLink(self._pool, address, self._timeout_s)
        try:
            return await send(link, places)
        except LOST as error:
            self._slots.doubt()
            return [_as_lost(error)] * len(places)

    async def _ask(self, asked: AskError, command: Sequence[Value]) -> Any:
        try:
            return await _ask_there(self._slots, asked, command, self._pool, self._timeout_s)
        except LOST as error:
            return _as_lost(error)


class _NodeLink(Link):
    """A connection to one node."""

    def __init__(self, pool: ConnectionPool, address: Address, timeout_s: float | None) -> None:
        super().__init__(pool)
        self._address = address
        self._timeout_s = timeout_s

    async def _make_connection(self) -> AbstractConnection:
        return connection_to(self._pool, self._address, self._timeout_s)


def connection_to(pool: ConnectionPool, address: Address, timeout_s: float | None = None) -> AbstractConnection:
    """An unopened connection to a node, with the credentials, TLS and time-outs of the pool."""
    kwargs: dict[str, Any] = {**cast("dict[str, Any]", pool.connection_kwargs), "parser_class": ClusterParser}
    kwargs |= {"host": address[0], "port": address[1]}
    if timeout_s is not None:
        kwargs |= {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    return cast("Any", pool.connection_class)(**kwargs)


async def _ask_there(
    slots: SlotMap, asked: AskError, command: Sequence[Value], pool: ConnectionPool, timeout_s: float | None
) -> Any:
    """The answer of the node that a key has gone to already, ahead of its slot."""
    link = _NodeLink(pool, _address(asked), timeout_s)
    try:
        # ASKING holds for one command: a script is loaded before, whether the node knows it or not.
        load = [("SCRIPT", "LOAD", text)] if command[0] == "EVALSHA" and (text := _texts().get(command[1])) else []
        return (await link.try_all([*load, ("ASKING",), command]))[-1]
    except LOST:
        slots.doubt()
        raise
    finally:
        await link.close()


def _address(answer: AskError) -> Address:
    return cast("str", answer.host), answer.port


def _as_lost(error: BaseException) -> RedisConnectionError | RedisTimeoutError:
    return error if isinstance(error, RedisConnectionError | RedisTimeoutError) else RedisTimeoutError(str(error))


@cache
def _texts() -> dict[Value, str]:
    """The scripts by what EVALSHA names them with."""
    return {known.sha: known.text for known in map(script, SCRIPTS)}


def _key_of(command: Sequence[Value]) -> str:
    if str(command[0]).upper() in {"EVAL", "EVALSHA"}:
        return str(command[3])
    if str(command[0]).upper() == "XREAD":
        return str(command[list(command).index("STREAMS") + 1])
    return str(command[1])
