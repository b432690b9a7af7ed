"""`bargein` as other programs meet it: as a process with arguments, an environment, output and an exit status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from typer.testing import CliRunner

from workers.cli.main import app

if TYPE_CHECKING:
    from collections.abc import Callable

    from typer.testing import Result

ROOT = Path(__file__).parent.parent.parent
PATIENCE_S = 20.0


def clean_environment(**settings: Any) -> dict[str, str]:
    """The environment without anybody's settings, and with these: `redis_url=...` is BARGEIN_REDIS_URL."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BARGEIN_")}
    ours = {f"BARGEIN_{name.upper()}": str(value) for name, value in settings.items()}
    return {**kept, "PYTHONPATH": str(ROOT), **ours}


def run(*arguments: str, given: str | None = None, **settings: Any) -> Result:
    """Call a command in this process."""
    hidden: dict[str, str | None] = {name: None for name in os.environ if name.startswith("BARGEIN_")}
    environment = {**hidden, **{f"BARGEIN_{name.upper()}": str(value) for name, value in settings.items()}}
    return CliRunner().invoke(app, list(arguments), input=given, env=environment)


def wait_until(holds: Callable[[], bool], within_s: float = PATIENCE_S) -> bool:
    """Whether it holds in time."""
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class Bargein:
    """A long-lived `bargein` process; a context manager that kills what is left of it."""

    def __init__(self, *arguments: str, **settings: Any) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by __exit__
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "workers.cli", *arguments],
            cwd=ROOT,
            env=clean_environment(**settings),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._log,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        """What it has written to stderr so far."""
        return _read(self._log.fileno())

    @property
    def output(self) -> str:
        """What it has written to stdout so far."""
        return _read(self._output.fileno())

    def says(self, text: str, within_s: float = PATIENCE_S) -> bool:
        """Whether `text` turns up in its log in time."""
        return wait_until(lambda: text in self.log or self.process.poll() is not None, within_s) and text in self.log

    def end(self, by: signal.Signals = signal.SIGTERM, within_s: float = PATIENCE_S) -> int:
        """Its exit status after a signal."""
        self.process.send_signal(by)
        return self.process.wait(within_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._log.close()
        self._output.close()


def _read(descriptor: int) -> str:
    return os.pread(descriptor, 1 << 22, 0).decode(errors="replace")
