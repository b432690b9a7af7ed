"""What the commands print: tables for people, JSON for programs, on a terminal and elsewhere.

Responsible for widths, colours and the spelling of durations. On a terminal tables fit its width; elsewhere they have
no colours, no frames and no cut cells. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import msgspec
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from control.core.fence import Fence

MIN_WIDTH = 200  # where nobody looks at a terminal


def make_console(*, stderr: bool = False) -> Console:
    """A console of its own for each command: the streams may have been replaced since the import."""
    file = sys.stderr if stderr else sys.stdout
    console = Console(file=file, highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console = Console(file=file, highlight=False, width=MIN_WIDTH, color_system=None)
    return console


def note(message: str) -> None:
    """A line beside the result."""
    print(message, file=sys.stderr)


def print_json(value: Any) -> None:
    """One JSON document; bytes become base64."""
    print(msgspec.json.format(to_json(value), indent=2).decode())


def to_json(value: Any) -> bytes:
    """JSON on one line; bytes become base64, what JSON doesn't know its `repr`."""
    return msgspec.json.encode(value, enc_hook=repr)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
    """A table, or `empty` where there are no rows. A column whose name ends with a `>` is for numbers."""
    console = make_console()
    framed = console.is_terminal
    table = Table(
        title=title if framed else None,
        title_justify="left",
        box=box.SIMPLE_HEAD if framed else None,
        pad_edge=framed,
    )
    for column in columns:
        name = column.removesuffix(">")
        table.add_column(name, justify="right" if column.endswith(">") else "left", overflow="fold", no_wrap=not framed)
    for row in rows:
        table.add_row(*[Text(_cell(value)) for value in row])
    if not table.row_count:
        note(empty)
        return
    if not framed:
        needed = Measurement.get(console, console.options.update(width=1_000_000), table).maximum
        console.width = max(MIN_WIDTH, needed)
    console.print(table)


def spell_ms(ms: int | None) -> str:
    """A length of time, two figures or so: `350 ms`, `12.3 s`, `5 min`, `3.2 h`, `4 d`; None: a dash."""
    if ms is None:
        return "-"
    sign, ms = ("-" if ms < 0 else ""), abs(ms)
    for below_ms, unit_ms, unit, places in (
        (1_000, 1, "ms", 0),
        (120_000, 1_000, "s", 1),
        (7_200_000, 60_000, "min", 0),
        (172_800_000, 3_600_000, "h", 1),
    ):
        if ms < below_ms:
            return f"{sign}{ms / unit_ms:.{places}f} {unit}"
    return f"{sign}{ms / 86_400_000:.0f} d"


def spell_fence(fence: Fence | None) -> str:
    """`incarnation/epoch/turn/response`."""
    return "-" if fence is None else "/".join(map(str, msgspec.structs.astuple(fence)))


def spell_numbers(numbers: Sequence[int]) -> str:
    """`0-3 7`: runs of whole numbers in order."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) or "-"


def _cell(value: object) -> str:
    """Text without control characters: a session's id comes from its producer."""
    text = "-" if value is None else str(value)
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)
