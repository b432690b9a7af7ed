"""What a person sees: a live panel on a terminal, plain lines everywhere else, and the table at the end.

Responsible for wording and layout. Leaves knowing to `board.py` and `findings.py`. Writes to stdout.

On a terminal, happenings scroll by above the panel and stay. Elsewhere each is a line of its own, without control
codes, and a progress line comes every two seconds.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from workers.demo.findings import describe, verdict

if TYPE_CHECKING:
    from rich.console import RenderableType

    from workers.demo.board import Board, RequestState
    from workers.demo.findings import Findings

PROGRESS_S = 2.0
REFRESH_HZ = 10
MIN_WIDTH = 30
METER_CELLS = 24
METER_FLOOR_DB = -48.0
REQUESTS_SHOWN = 6
COLOURS = {"reserved": "yellow", "running": "green", "cleaning": "red", "released": "dim"}


class View:
    """A context manager: on a terminal the panel is there meanwhile."""

    def __init__(self, board: Board) -> None:
        self._board = board
        # Asked of the stream itself: for rich, variables like FORCE_COLOR make a terminal of anything.
        self._is_live = sys.stdout.isatty() and not Console().is_dumb_terminal
        console = (
            Console(highlight=False)
            if self._is_live
            else Console(highlight=False, color_system=None, force_terminal=False, soft_wrap=True)
        )
        self._console = console
        self._live = Live(
            console=console, auto_refresh=False, get_renderable=self._draw, redirect_stdout=False, transient=True
        )

    def __enter__(self) -> View:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_live:
            self._live.stop()

    def say(self, text: str) -> None:
        """Something has happened."""
        for number, line in enumerate(text.splitlines()):
            stamp = f"[{self._board.elapsed_s:5.1f} s] " if number == 0 else " " * 10
            self._console.print(Text(stamp, style="dim") + Text(line))

    async def run(self) -> None:
        """Keep it up to date until cancelled."""
        while True:
            if self._is_live:
                self._live.refresh()
                await asyncio.sleep(1 / REFRESH_HZ)
            else:
                await asyncio.sleep(PROGRESS_S)
                self.say(self._progress())

    def finish(self, findings: Findings) -> None:
        """The table, after the panel has gone."""
        rows = describe(findings)
        if self._is_live:
            table = Table(box=box.ROUNDED, show_header=False, title="bargein demo", title_justify="left")
            table.add_column(style="bold", no_wrap=True)
            table.add_column(overflow="fold")
            for name, value in rows:
                table.add_row(name, Text(value))
            self._console.print(table)
            self._console.print(Text(verdict(findings), style="bold green" if findings.ok else "bold red"))
            return
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value}" for name, value in rows]
        self._console.print(Text("\n".join(["", *lines, "", verdict(findings)])))

    def _progress(self) -> str:
        board = self._board
        if not board.requests:
            return f"... {board.doing}"
        last = "" if board.barge_in_ms is None else f"; last barge-in {board.barge_in_ms:.1f} ms"
        return (
            f"... {board.doing}; turn {board.turn}, epoch {board.epoch}; requests: {_counts(board)};"
            f" outputs: {board.outputs_heard} delivered, stale ones: {board.outputs_dropped} dropped,"
            f" {board.stale_delivered} delivered{last}"
        )

    def _draw(self) -> RenderableType:
        board = self._board
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column()
        grid.add_row("now", Text(board.doing))
        grid.add_row("user", _meter(board.user_db, "cyan"))
        grid.add_row("model", _meter(board.model_db, "magenta"))
        grid.add_row(
            "position", Text(f"turn {board.turn}, epoch {board.epoch}, interruptions so far: {board.interruptions}")
        )
        grid.add_row("requests", Group(Text(_counts(board)), *_latest(board.requests)))
        grid.add_row(
            "outputs",
            Text(
                f"{board.outputs_heard} delivered, {board.outputs_dropped} stale ones dropped,"
                f" {board.stale_delivered} stale ones delivered"
            ),
        )
        if board.barge_in_ms is not None:
            grid.add_row("barge-in", Text(f"the last one took {board.barge_in_ms:.1f} ms to the engines' abort"))
        grid.add_row("workers", self._workers())
        title = f"bargein demo, {board.elapsed_s:.0f} s"
        # A Ctrl-C is echoed behind the last line; wrapped to the next, it would leave a piece of the panel behind.
        width = max(MIN_WIDTH, self._console.width - 4)
        return Panel(grid, title=title, title_align="left", box=box.ROUNDED, width=width)

    def _workers(self) -> Text:
        board, text = self._board, Text()
        for name, worker_id in sorted((board.name_of(each), each) for each in board.controls):
            if name == board.killed:
                continue
            owns = worker_id == board.owner
            text.append(f"{name} owns the session  " if owns else f"{name}  ", style="green" if owns else "")
        if board.killed is not None:
            text.append(f"{board.killed} killed  ", style="red")
        return text.append("\n" + "  ".join(board.stages))


def _counts(board: Board) -> str:
    return ", ".join(f"{board.count(state)} {state}" for state in COLOURS)


def _latest(requests: list[RequestState]) -> list[Text]:
    """The last few requests, the ids without what is the same in all of them."""
    shown = requests[-REQUESTS_SHOWN:]
    lines: list[Text] = []
    for epoch in sorted({each.epoch for each in shown}):
        line = Text(f"epoch {epoch}  ")
        for each in shown:
            if each.epoch == epoch:
                line.append(f"…e.{epoch}.r.{each.stage} {each.state}  ", style=COLOURS[each.state])
        lines.append(line)
    return lines


def _meter(level_db: float, colour: str) -> Text:
    share = min(1.0, max(0.0, 1 - level_db / METER_FLOOR_DB))
    filled = round(share * METER_CELLS)
    return Text("█" * filled, style=colour) + Text("·" * (METER_CELLS - filled), style="dim")
