"""The server under test: a Valkey whose disk can be filled, and which is started again if it ends by itself.

Responsible for the limit on its files, which stands for a full disk wherever there is no small file system at hand.
Leaves when to `faults.py`. Starts processes. Units: `_bytes`.
"""

from __future__ import annotations

import contextlib
import resource
import time
from typing import TYPE_CHECKING

from workers.embedded import ServerProcess, require_valkey_binary

if TYPE_CHECKING:
    from pathlib import Path

# A write beyond the limit also sends this signal, which would end the server; a full disk does not.
IGNORING = 'trap "" XFSZ; exec "$@"'


def why_no_full_disk() -> str | None:
    """Why a disk can't be filled here, or None."""
    return None if hasattr(resource, "prlimit") else "this system can't limit the files of another process"


class ChaosServer(ServerProcess):
    """Keeps its data with `appendfsync always`: what it has acknowledged is there after a crash."""

    def __init__(self, directory: Path) -> None:
        super().__init__(require_valkey_binary(), directory, persist=True, args=("--appendfsync", "always"))

    def command_line(self) -> list[str]:
        return ["/bin/sh", "-c", IGNORING, "sh", *super().command_line()]

    def fill_disk(self, room_bytes: int = 0) -> None:
        """From now on no file of the server grows beyond what the largest has, and `room_bytes` more."""
        largest = max((file.stat().st_size for file in self.directory.rglob("*") if file.is_file()), default=0)
        self._limit(largest + room_bytes)

    def empty_disk(self) -> None:
        """There is room again."""
        self._limit(None)

    def revive(self) -> bool:
        """Start it again if it has ended by itself, as whatever runs it in production does; whether it had."""
        if self.running:
            return False
        self.kill()
        self.start()
        return True

    def wait_end(self, within_s: float) -> bool:
        """Whether it ends by itself in that time."""
        deadline_s = time.monotonic() + within_s
        while self.running and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return not self.running

    def _limit(self, size_bytes: int | None) -> None:
        """None: as far as this user may go at all."""
        with contextlib.suppress(ProcessLookupError):
            _, most = resource.prlimit(self.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (most if size_bytes is None else size_bytes, most))
