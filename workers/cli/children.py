"""The child processes of `bargein up`: started, listened to, started again, and never outliving their parent.

Responsible for one child at a time: its log lines go to `say` with its name, a child that died is started again with
backoff, and a watcher process ends it if this process is killed (as `workers/embedded.py` does for its server). Leaves
who the children are to `up.py`. A child that ends with status 2 has a configuration that it will never like: that is
told through `hopeless`, not tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING

from workers.cli.endings import Status
from workers.embedded import WATCH

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

FIRST_WAIT_S = 0.5
MOST_WAIT_S = 10.0
# Having run for this long it counts as healthy, and its next restart waits no longer than its first did.
HEALTHY_S = 20.0
LINE_BYTES = 1 << 20


class Child:
    """One child process: `python -m workers.cli <arguments>`."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        say: Callable[[str, str], None],
    ) -> None:
        """`say(name, line)` gets each of its lines, and what there is to say about it."""
        self.name = name
        self.hopeless = False
        self.starts = 0
        self._arguments = tuple(arguments)
        # It imports what this process would import, wherever that was found.
        path = os.pathsep.join(part for part in sys.path if part)
        self._environment = {**environment, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        self._say = say
        self._process: asyncio.subprocess.Process | None = None
        self._leaving = False
        self._told = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Its process id, if it runs."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    async def run(self) -> None:
        """Keep it running until `stop`, or until it turns out hopeless."""
        wait_s = FIRST_WAIT_S
        loop = asyncio.get_running_loop()
        while not self._leaving:
            began_s = loop.time()
            status = await self._run_once()
            if self._leaving:
                return
            if status == Status.SETTINGS:
                self.hopeless = True
                return
            if loop.time() - began_s >= HEALTHY_S:
                wait_s = FIRST_WAIT_S
            how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
            self._say(self.name, f"ended with {how}; starting it again in {wait_s:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), wait_s)
            wait_s = min(MOST_WAIT_S, 2 * wait_s)

    def stop(self, by: signal.Signals = signal.SIGTERM) -> None:
        """Ask it to leave; `run` returns when it has."""
        self._leaving = True
        self._told.set()
        self.signal(by)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it runs."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _run_once(self) -> int:
        """Start it and wait for its end; its exit status, negative for a signal."""
        watcher = await asyncio.create_subprocess_exec(
            "/bin/sh",
            "-c",
            WATCH,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        assert watcher.stdin is not None
        try:
            # A session of its own: a Ctrl-C in the terminal is for the parent, which stops its children in its order.
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "workers.cli",
                *self._arguments,
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                limit=LINE_BYTES,
                start_new_session=True,
            )
            self._process = process
            self.starts += 1
            watcher.stdin.write(f"{process.pid}\n".encode())
            if self._leaving:
                self.signal(signal.SIGTERM)
            await self._listen(process)
            return await process.wait()
        finally:
            watcher.stdin.write(b"done\n")
            with contextlib.suppress(OSError):
                await watcher.stdin.drain()
            watcher.stdin.close()
            await watcher.wait()

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:
                line = b"(a line of more than a megabyte)\n"
            if not line:
                return
            self._say(self.name, line.decode(errors="replace").rstrip())
