"""What the commands print: tables for people, JSON for programs, on a terminal and elsewhere.

Responsible for widths, colours and the spelling of durations. No cell is ever cut; elsewhere than on a terminal there
are no colours either. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from control.core.fence import Fence

MIN_WIDTH = 200  # where nobody looks at a terminal
NOTHING = "-"


def make_console(*, stderr: bool = False) -> Console:
    """A console of its own for each command: the streams may have been replaced since the import."""
    file = sys.stderr if stderr else sys.stdout
    console = Console(file=file, highlight=False)
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
    """A table, or `empty` where there are no rows. A column whose name ends with a `>` is for numbers.

    A row is one line, as long as it takes: it can be copied and searched for. On a terminal, columns that say nothing
    in any row are left out.
    """
    cells = [[_cell(value) for value in row] for row in rows]
    if not cells:
        note(empty)
        return
    console = make_console()
    shown = [
        place
        for place in range(len(columns))
        if not console.is_terminal or any(row[place] != NOTHING for row in cells) or not place
    ]
    table = Table(title=title if console.is_terminal else None, title_justify="left", box=None, pad_edge=False)
    for place in shown:
        name = columns[place].removesuffix(">")
        table.add_column(name, justify="left" if name == columns[place] else "right", no_wrap=True)
    for row in cells:
        table.add_row(*[Text(row[place]) for place in shown])
    needed = Measurement.get(console, console.options.update(width=1_000_000), table).maximum
    console.width = max(console.width, needed)
    console.print(table, soft_wrap=True)


def spell_ms(ms: int | None) -> str:
    """A length of time, two figures or so: `350 ms`, `12.3 s`, `5 min`, `3.2 h`, `4 d`; None: a dash."""
    if ms is None:
        return NOTHING
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
    return NOTHING if fence is None else "/".join(map(str, msgspec.structs.astuple(fence)))


def spell_numbers(numbers: Sequence[int]) -> str:
    """`0-3 7`: runs of whole numbers in order."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) or NOTHING


def _cell(value: object) -> str:
    """Text without control characters: a session's id comes from its producer."""
    text = NOTHING if value is None else str(value)
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)
