"""A commit's arguments, read back: what the script would be told to do, section by section.

Responsible for the order and the width of the sections, as `control/store/commits.py` writes them. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

# The commit's sections, as `control/store/commits.py` writes them: name and width.
SECTIONS = (
    ("guards", 2), ("sources", 1), ("fenced", 1), ("states", 2), ("forgets", 1), ("fences", 2), ("unfences", 1),
    ("cleanups", 2), ("cleaned", 1), ("deadlines", 2), ("undue", 1), ("begins", 3), ("submissions", 4), ("aborts", 3),
    ("answers", 2), ("trims", 2), ("events", 4), ("strangers", 3), ("ends", 3), ("released", 1), ("dead", 4),
    ("commands", 1), ("acks", 1), ("orders", 1),
)  # fmt: skip


def read_sections(argv: list[Any]) -> dict[str, list[Any]]:
    """The commit's arguments by section, each a flat list."""
    found: dict[str, list[Any]] = {}
    at = 4
    for name, width in SECTIONS:
        count = argv[at]
        found[name] = argv[at + 1 : at + 1 + count * width]
        at += 1 + count * width
    assert at == len(argv)
    return found


def groups(values: list[Any], width: int) -> Iterable[tuple[Any, ...]]:
    """A section's groups."""
    return zip(*[iter(values)] * width, strict=True)


def session_of(names: list[str], place: int) -> str:
    """Whose answers a key holds; `place` counts from 1."""
    return names[place - 1].split(":answers:", 1)[1]
