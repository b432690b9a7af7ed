"""The processes under test: `bargein control` and `bargein stage`, each behind a proxy of its own.

Responsible for starting, killing, stopping and continuing them, and for leaving none behind: a watcher process ends
each if this process dies, as in workers/embedded.py. Leaves when to `faults.py`. Starts processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

from workers.embedded import WATCH

ROOT = Path(__file__).parent.parent.parent


class Worker:
    """One `bargein` process with a log file; `name` like control-1 or thinker-2. A restart keeps its place."""

    def __init__(self, name: str, arguments: tuple[str, ...], port: int, log: Path) -> None:
        self.name = name
        self.starts = 0
        self.stopped = False
        self._arguments = arguments
        self._port = port
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def status(self) -> int | None:
        """Its exit status, if it has ended; negative for a signal."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Start it, or start it again."""
        self._let_go()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("BARGEIN_")}
        environment |= {
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "clients" / "python"))),
            "PYTHONUNBUFFERED": "1",
            "BARGEIN_REDIS_URL": f"redis://127.0.0.1:{self._port}/0",
        }
        self._watcher = subprocess.Popen(
            ["/bin/sh", "-c", WATCH],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "workers.cli", *self._arguments],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        _write(self._watcher.stdin, f"{self._process.pid}\n")
        self.starts += 1
        self.stopped = False

    def signal(self, number: signal.Signals) -> None:
        if self.running and self._process is not None:
            self._process.send_signal(number)
            self.stopped = number == signal.SIGSTOP if number in (signal.SIGSTOP, signal.SIGCONT) else self.stopped

    def kill(self) -> None:
        """As a crash would."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def end(self, within_s: float) -> int | None:
        """Ask it to leave, or kill it; its exit status."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        if self._process is not None:
            try:
                self._process.wait(within_s)
            except subprocess.TimeoutExpired:
                self.kill()
        self._let_go()
        return self.status

    def _let_go(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            _write(watcher.stdin, "done\n")
            if watcher.stdin is not None:
                with contextlib.suppress(OSError):
                    watcher.stdin.close()
            watcher.wait()


def _write(pipe: IO[bytes] | None, line: str) -> None:
    if pipe is not None:
        with contextlib.suppress(OSError):
            pipe.write(line.encode())
            pipe.flush()
