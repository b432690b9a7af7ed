"""Several real servers as one, on the loopback interface: a Redis Cluster of six nodes, a master behind Sentinels.

Responsible for starting them, for moving slots and for what fails over. Each node is a process of `tests/servers.py`,
from the Valkey binary or from Debian's Redis. Talks to Redis. Says no with `AssertionError` if it doesn't come about.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self, cast

from redis import Redis
from redis.crc import key_slot
from redis.exceptions import RedisError

from tests.servers import RealServer, ValkeyServer

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import TracebackType

PATIENCE_S = 40.0
MASTERS = 3
SLOTS = 16_384
NODE_TIMEOUT_MS = 2_000
# A replica is served at once: by default a master waits 5 s for others that may want the same.
AT_ONCE = ["--repl-diskless-sync-delay", "0"]


def until(holds: Callable[[], object], what: str) -> None:
    """Ask until it holds; a server that doesn't answer yet doesn't."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            if holds():
                return
        except RedisError:
            pass
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Together(ABC):
    """Servers that start and end together."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def start(self) -> None:
        """Start them all; what is started is put on the stack."""

    def close(self) -> None:
        self._stack.close()


class ValkeyCluster(_Together):
    """Three masters with a replica each. `nodes`: the processes, masters first."""

    def __init__(self, make: Callable[..., RealServer] = ValkeyServer) -> None:
        super().__init__()
        self._make = make
        self.nodes: list[RealServer] = []
        self._clients: dict[int, Redis] = {}

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def start(self) -> None:
        for _ in range(2 * MASTERS):
            # The port of the nodes' own talk: by default 10,000 above, which a free port may not have.
            words = ["--cluster-enabled", "yes", "--cluster-port", str(free_port())]
            words += ["--cluster-node-timeout", str(NODE_TIMEOUT_MS), "--cluster-allow-replica-migration", "no"]
            # By default all masters stop serving while one is missing.
            words += ["--cluster-require-full-coverage", "no", *AT_ONCE]
            node = self._make(persist=True, args=words)
            self.nodes.append(self._stack.enter_context(node))
        masters, replicas = self.nodes[:MASTERS], self.nodes[MASTERS:]
        for number, node in enumerate(masters):
            first, last = SLOTS * number // MASTERS, SLOTS * (number + 1) // MASTERS - 1
            self.client(node).execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
            self.client(node).execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in self.nodes[1:]:
            bus = int(node.args[node.args.index("--cluster-port") + 1])
            self.client(masters[0]).execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        for node in self.nodes:
            until(lambda node=node: len(self._lines(node)) == len(self.nodes), "all nodes know each other")
        for master, replica in zip(masters, replicas, strict=True):
            self.client(replica).execute_command("CLUSTER", "REPLICATE", self.id_of(master))
        self.until_whole()

    def until_whole(self) -> None:
        """Wait until every slot is served and every running replica follows its master."""
        running = [node for node in self.nodes if node.running]
        for node in running:
            until(lambda node=node: self._info(node)["cluster_state"] == "ok", "the cluster is whole")
        for node in running:
            about = _replication(self.client(node))
            if about["role"] == "slave":
                until(
                    lambda node=node: _replication(self.client(node))["master_link_status"] == "up",
                    "the replica follows",
                )

    def another(self, key: str) -> RealServer:
        """A master that doesn't serve a key."""
        here = self.master_of(key)
        return next(node for node in self.masters() if node is not here)

    @contextmanager
    def moved(self, key: str) -> Generator[None]:
        """Inside of it, a key's slot is at another master."""
        home = self.master_of(key)
        self.move(key, self.another(key))
        try:
            yield
        finally:
            self.move(key, home)

    @contextmanager
    def half_moved(self, key: str) -> Generator[None]:
        """Inside of it, half of the keys in a key's slot are at another master; then the slot goes back."""
        home, there = self.master_of(key), self.another(key)
        half, go = threading.Event(), threading.Event()

        def between() -> None:
            half.set()
            assert go.wait(PATIENCE_S)

        with ThreadPoolExecutor(1) as pool:
            moving = pool.submit(self.move, key, there, between)
            try:
                assert half.wait(PATIENCE_S)
                yield
            finally:
                go.set()
                moving.result()
                self.move(key, home)

    def kill_in_step(self, node: RealServer) -> None:
        """Kill a master once its replica has all that it has acknowledged. What is on its way meanwhile is lost."""
        _kill_in_step(node, self.client(node), self.client(self.replica_of(node)))

    def mend(self) -> None:
        """Start every node that was killed, and let go on every one that was stopped."""
        for node in self.nodes:
            if node.running:
                os.kill(node.pid, signal.SIGCONT)
            else:
                node.start()
        self.until_whole()

    def client(self, node: RealServer) -> Redis:
        """A client of one node."""
        if node.port not in self._clients:
            self._clients[node.port] = Redis(port=node.port, socket_timeout=5)
            self._stack.callback(self._clients[node.port].close)
        return self._clients[node.port]

    def id_of(self, node: RealServer) -> str:
        return _text(self.client(node).execute_command("CLUSTER", "MYID"))

    def master_of(self, key: str) -> RealServer:
        """The running node that serves a key, as the first that answers sees it."""
        slot = key_slot(key.encode())
        for node in self.nodes:
            if not node.running:
                continue
            try:
                ranges = self._slots(node)
            except RedisError:
                continue
            for first, last, server, *_ in ranges:
                if first <= slot <= last:
                    return next(each for each in self.nodes if each.port == server[1])
        raise AssertionError(f"nobody serves {key}")

    def masters(self) -> list[RealServer]:
        """The nodes that serve slots, as the first that answers sees it."""
        for node in self.nodes:
            if node.running:
                with contextlib.suppress(RedisError):
                    ports = {server[1] for _, _, server, *_ in self._slots(node)}
                    return [each for each in self.nodes if each.port in ports]
        raise AssertionError("no node answers")

    def replica_of(self, master: RealServer) -> RealServer:
        """The master's replica, by the master's own word."""
        about = _replication(self.client(master))["slave0"]
        return next(each for each in self.nodes if each.port == int(about["port"]))

    def until_taken_over(self, key: str, old: RealServer) -> RealServer:
        """Wait until another node than `old` serves a key, as all the others see it; that node."""
        others = [node for node in self.nodes if node.running and node is not old]
        slot = key_slot(key.encode())

        def ports() -> set[int]:
            return {s[1] for node in others for first, last, s, *_ in self._slots(node) if first <= slot <= last}

        until(lambda: len(found := ports()) == 1 and old.port not in found, "a replica has taken over")
        (port,) = ports()
        return next(node for node in others if node.port == port)

    def flush(self) -> None:
        """Empty every master."""
        for node in self.nodes:
            if node.running and _replication(self.client(node))["role"] == "master":
                self.client(node).flushall()
                self.client(node).script_flush()

    def move(self, key: str, to: RealServer, between: Callable[[], None] | None = None) -> None:
        """Move a key's slot to another master, key by key; `between` is called when the first half has moved."""
        slot, source = key_slot(key.encode()), self.master_of(key)
        here, there = self.client(source), self.client(to)
        there.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", self.id_of(source))
        here.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", self.id_of(to))
        names: list[Any] = here.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100_000)
        for name in names[: len(names) // 2]:
            self._carry(here, to, name)
        if between is not None:
            between()
        for name in names[len(names) // 2 :]:
            self._carry(here, to, name)
        # Keys that producers have begun meanwhile are at the new place already; stragglers of the old follow.
        while left := here.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 1_000):
            for name in left:
                self._carry(here, to, name)
        for client in (there, here):
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", self.id_of(to))
        until(lambda: self._agree(slot, to), "all nodes know where the slot is")

    def move_at_once(self, key: str, to: RealServer) -> None:
        """Move a key's slot as Valkey 9 can: all of it is copied first, then it changes hands in one moment."""
        slot, source = key_slot(key.encode()), self.master_of(key)
        self.client(source).execute_command("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", self.id_of(to))
        until(lambda: self._agree(slot, to), "all nodes know where the slot is")

    def _agree(self, slot: int, server: RealServer) -> bool:
        """Whether every running node knows who serves a slot and since which epoch.

        Whoever takes a slot raises the epoch that it has heard of. Two that do so before they have heard of each other
        claim the same epoch, and whoever wins that may be the one that has given the slot away: then it is nobody's.
        """
        running = [node for node in self.nodes if node.running]
        ports = [s[1] for node in running for first, last, s, *_ in self._slots(node) if first <= slot <= last]
        epochs = {self._info(node)["cluster_current_epoch"] for node in running}
        return ports == [server.port] * len(running) and len(epochs) == 1

    @staticmethod
    def _carry(here: Redis, to: RealServer, name: bytes) -> None:
        here.execute_command("MIGRATE", "127.0.0.1", to.port, name, 0, 5_000)

    def _slots(self, node: RealServer) -> list[Any]:
        return self.client(node).execute_command("CLUSTER", "SLOTS")

    def _lines(self, node: RealServer) -> list[str]:
        text = _text(self.client(node).execute_command("CLUSTER", "NODES"))
        return [line for line in text.splitlines() if "handshake" not in line]

    def _info(self, node: RealServer) -> dict[str, str]:
        text = _text(self.client(node).execute_command("CLUSTER", "INFO"))
        return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


class SentinelPair(_Together):
    """A master, its replica, and three Sentinels that watch them. `service`: what they call the master."""

    service = "bargein"

    def __init__(self, make: Callable[..., RealServer] = ValkeyServer) -> None:
        super().__init__()
        self._make = make
        self.servers: list[RealServer] = []
        self.sentinels: list[RealServer] = []

    @property
    def url(self) -> str:
        return "redis+sentinel://" + ",".join(f"127.0.0.1:{s.port}" for s in self.sentinels) + f"/{self.service}"

    def start(self) -> None:
        master = self._stack.enter_context(self._make(persist=True, args=AT_ONCE))
        replica = self._stack.enter_context(
            self._make(persist=True, args=["--replicaof", "127.0.0.1", str(master.port), *AT_ONCE])
        )
        self.servers = [master, replica]
        with replica.client() as client:
            until(lambda: _replication(client)["master_link_status"] == "up", "the replica follows")
        for _ in range(3):
            self.sentinels.append(self._stack.enter_context(_sentinel(self._make, self.service, master.port)))
        for sentinel in self.sentinels:
            with sentinel.client() as client:
                until(lambda client=client: self._sees_all(client), "the Sentinels know the others and the replica")

    def master(self) -> RealServer:
        """The server that the Sentinels call the master."""
        with self.sentinels[0].client() as client:
            _, port = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
        return next(server for server in self.servers if server.port == int(port))

    def kill_master(self) -> RealServer:
        """Kill the master once its replica has all that it has acknowledged; the replica, once it is the master."""
        victim = self.master()
        heir = next(server for server in self.servers if server is not victim)
        with victim.client() as client, heir.client() as replica:
            _kill_in_step(victim, client, replica)
        until(lambda: self.master() is heir, "the Sentinels name the replica")
        with heir.client() as client:
            until(lambda: _replication(client)["role"] == "master", "the replica is the master")
        return heir

    def _sees_all(self, client: Redis) -> bool:
        flat = [_text(each) for each in client.execute_command("SENTINEL", "MASTER", self.service)]
        about = dict(zip(flat[::2], flat[1::2], strict=True))
        return (about["num-slaves"], about["num-other-sentinels"], about["flags"]) == ("1", "2", "master")


def _kill_in_step(node: RealServer, client: Redis, replica: Redis) -> None:
    client.execute_command("CLIENT", "PAUSE", 10_000, "WRITE")
    until(
        lambda: _replication(client)["master_repl_offset"] == _replication(replica)["slave_repl_offset"],
        "the replica has everything",
    )
    node.kill()


def _replication(client: Redis) -> dict[str, Any]:
    return cast("dict[str, Any]", client.info("replication"))


def _sentinel(make: Callable[..., RealServer], service: str, master_port: int) -> RealServer:
    sentinel = make()
    config = sentinel.directory / "sentinel.conf"
    config.write_text(
        f"sentinel monitor {service} 127.0.0.1 {master_port} 2\n"
        f"sentinel down-after-milliseconds {service} 1000\n"
        f"sentinel failover-timeout {service} 5000\n"
    )
    command_line = sentinel.command_line

    def as_sentinel() -> list[str]:
        binary = command_line()[0]
        words = ["--sentinel", "--bind", "127.0.0.1", "--port", str(sentinel.port), "--dir", str(sentinel.directory)]
        return [binary, str(config), *words]

    sentinel.command_line = as_sentinel  # type: ignore[method-assign]
    return sentinel


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
