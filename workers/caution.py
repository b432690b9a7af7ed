"""After a crash: the backlog that the dead owner left is handled one entry at a time, and what kills is set aside.

Responsible for which entries are handled alone and for when one has done enough harm. Leaves naming the entry in Redis
to `holdings.py`, counting the crashes to `lua/acquire.lua`. Pure. Keeps I11: a command that ends its worker ends three
more at most, and no other command is set aside for having waited beside it (S83).
"""

from __future__ import annotations

from dataclasses import dataclass, field

CRASHES = 3


@dataclass(slots=True)
class Caution:
    """`backlog`: the last entry of each stream at the takeover, by the stream's number.

    `suspect` is what the last owner was handling alone when it died, in `crashes` such deaths.
    """

    backlog: dict[int, str] = field(default_factory=dict[int, str])
    suspect: str = ""
    crashes: int = 0

    @property
    def is_over(self) -> bool:
        """Whether everything is as usual."""
        return not self.backlog

    def covers(self, stream: int, entry_id: str) -> bool:
        """Whether this entry was there at the takeover, and so is handled alone."""
        last = self.backlog.get(stream)
        return last is not None and _order(entry_id) <= _order(last)

    def is_condemned(self, stream: int, entry_id: str) -> bool:
        """Whether this entry has ended enough owners."""
        return self.crashes >= CRASHES and self.suspect == name_of(stream, entry_id)


def name_of(stream: int, entry_id: str) -> str:
    """How an entry is named in the owner's record."""
    return f"{stream}/{entry_id}"


def _order(entry_id: str) -> tuple[int, int]:
    ms, _, number = entry_id.partition("-")
    return int(ms), int(number)
