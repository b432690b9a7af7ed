"""`/metrics`, `/healthz` and `/readyz` over HTTP, from a thread of their own.

Responsible for answering also while the event loop stands still, which is when it matters, and for saying so. Leaves
the numbers and the checks to whoever is watched. Listens on one address, by default this machine only; there is no
password and no TLS, so nobody else should reach it. `/healthz`: the process lives. `/readyz`: 200, or 503 with a JSON
body that names each check, what was found and its bound. Says no with `OSError` for an address that is taken.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from contextlib import asynccontextmanager
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError, version
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder

from workers.metrics import declared as d
from workers.tasks import end_tasks

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable

    from workers.metrics.families import Families, Family
    from workers.metrics.readiness import Check

log = logging.getLogger("bargein.metrics")

_POLL_S = 0.05
_CLIENT_S = 10.0


class Watched(Protocol):
    """Whose metrics they are. `run` on the event loop, until cancelled; the others from any thread."""

    role: str

    async def run(self) -> None:
        """Keep what the other two need up to date."""
        ...

    def checks(self) -> list[Check]:
        """The checks behind `/readyz`."""
        ...

    def collect(self) -> Families:
        """The metrics as of now."""
        ...


class MetricsServer:
    """Listens from its construction on; `close` it. `port` is the real one where 0 was asked for."""

    def __init__(self, watched: Watched, host: str, port: int) -> None:
        registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)
        registry.register(_Collector(watched))
        self._server = _Server(watched, registry, host, port)
        self.host = host
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": _POLL_S}, name="metrics", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Of the metrics."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop listening. What is being answered is not waited for."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@asynccontextmanager
async def serving(watched: Watched, server: MetricsServer | None) -> AsyncGenerator[None]:
    """Keep what is served up to date meanwhile, then close the server. Without one there is nothing to do."""
    if server is None:
        yield
        return
    log.info("metrics on %s", server.url)
    task = asyncio.create_task(watched.run(), name="metrics")
    task.add_done_callback(_note_end)
    try:
        yield
    finally:
        await end_tasks(task)
        server.close()


def _note_end(task: asyncio.Task[None]) -> None:
    # The process goes on without; /readyz says so as soon as the figures are old.
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.error("sampling for metrics has ended", exc_info=error)


class _Collector:
    def __init__(self, watched: Watched) -> None:
        self._watched = watched

    def collect(self) -> Iterable[Family]:
        families, checks = self._watched.collect(), self._watched.checks()
        families.put(d.BUILD_INFO, 1, self._watched.role, _version())
        families.put(d.READY, all(check.ok for check in checks))
        for check in checks:
            families.put(d.CHECK, check.ok, check.name)
        return families


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, watched: Watched, registry: CollectorRegistry, host: str, port: int) -> None:
        self.watched = watched
        self.registry = registry
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Answer)

    def server_bind(self) -> None:
        # The library's own asks for the host's full name, which may take a name server's time-out.
        TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        del request
        log.debug("an answer to %s came to nothing", client_address)


class _Answer(BaseHTTPRequestHandler):
    timeout = _CLIENT_S
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]  only this one makes them
    server_version = "bargein"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        try:
            match path:
                case "/metrics":
                    encode, content_type = choose_encoder(self.headers.get("Accept", ""))
                    self._say(200, encode(self.server.registry), content_type)
                case "/healthz":
                    self._say_json(200, {"alive": True, "role": self.server.watched.role})
                case "/readyz":
                    checks = self.server.watched.checks()
                    ready = all(check.ok for check in checks)
                    found = {c.name: {"ok": c.ok, "value": c.value, "bound": c.bound} for c in checks}
                    body = {"ready": ready, "role": self.server.watched.role, "checks": found}
                    self._say_json(200 if ready else 503, body)
                case _:
                    self._say_json(404, {"error": "there are /metrics, /healthz and /readyz"})
        except OSError:
            raise
        except Exception:
            log.exception("%s can't be answered", path)
            self._say_json(500, {"error": "see the log of the process"})

    do_HEAD = do_GET  # noqa: N815  the library's name

    def _say_json(self, status: int, body: dict[str, Any]) -> None:
        self._say(status, json.dumps(body, indent=1).encode() + b"\n", "application/json")

    def _say(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the library's name
        log.debug(format, *args)


@lru_cache(maxsize=1)
def _version() -> str:
    try:
        return version("bargein")
    except PackageNotFoundError:
        return "unknown"
