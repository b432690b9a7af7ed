"""The server's clock, as seen from here: monotonic time plus an offset learnt from every answer that carries a time.

Responsible for "now" in server milliseconds, and for noticing that the server's clock has jumped. Leaves waiting to
monotonic time. No worker's wall clock decides anything (S56).
"""

from __future__ import annotations

import time

# An answer is read a little after the server wrote it; only more than this is a jump.
JUMP_MS = 1_000


class ServerClock:
    """Server time in whole milliseconds."""

    def __init__(self) -> None:
        self._offset_ms: float | None = None
        self.settled_since = self.monotonic_ms()

    def monotonic_ms(self) -> float:
        """This machine's monotonic time in milliseconds."""
        return time.monotonic() * 1000

    def elapsed_ms(self, since_ms: float) -> float:
        """How long `since_ms`, a monotonic time, is past."""
        return self.monotonic_ms() - since_ms

    def learn(self, server_ms: int) -> None:
        """An answer that was just read carried this time."""
        here_ms = self.monotonic_ms()
        offset_ms = server_ms - here_ms
        if self._offset_ms is not None and abs(offset_ms - self._offset_ms) > JUMP_MS:
            self.settled_since = here_ms
        self._offset_ms = offset_ms

    def unsettle(self) -> None:
        """The connection was lost: nobody knows what was missed meanwhile (S71)."""
        self.settled_since = self.monotonic_ms()

    def is_settled(self, for_ms: float) -> bool:
        """Whether neither a jump nor a reconnection happened within the last `for_ms`."""
        return self.monotonic_ms() - self.settled_since >= for_ms

    def now_ms(self) -> int:
        """Server time now. Before the first `learn` there is none."""
        if self._offset_ms is None:
            raise RuntimeError("the server's clock is not known yet")
        return int(self.monotonic_ms() + self._offset_ms)
