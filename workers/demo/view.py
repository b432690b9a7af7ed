"""What a person sees: a live panel on a terminal, plain lines everywhere else, and the table at the end.

Responsible for wording and layout. Leaves knowing to `board.py` and `findings.py`. Writes to stdout.

On a terminal, happenings scroll by above the panel and stay. Elsewhere each is a line of its own, without control
codes, and a progress line comes every two seconds.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from workers.demo.findings import describe, verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from workers.demo.board import Board, RequestState
    from workers.demo.findings import Findings

PROGRESS_S = 2.0
REFRESH_HZ = 10
METER_CELLS = 24
METER_FLOOR_DB = -48.0
REQUESTS_SHOWN = 6
COLOURS = {"reserved": "yellow", "running": "green", "cleaning": "red", "released": "dim"}


class View:
    """A context manager: on a terminal the panel is there meanwhile. `name_of` a control worker's id."""

    def __init__(self, board: Board, name_of: Callable[[str | None], str]) -> None:
        self._board = board
        self._name_of = name_of
        console = Console(highlight=False)
        self._is_live = console.is_terminal and not console.is_dumb_terminal
        if not self._is_live:
            console = Console(highlight=False, color_system=None, force_terminal=False, width=_plain_width())
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
            if self._is_live:
                self._console.print(Text(stamp, style="dim") + Text(line))
            else:
                print(stamp + line, flush=True)

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
        print(flush=True)
        for name, value in rows:
            print(f"{name:<{width}}  {value}")
        print(f"\n{verdict(findings)}", flush=True)

    def _progress(self) -> str:
        board = self._board
        if not board.requests:
            return f"... {board.doing}"
        speaking = [
            who for who, level in (("user", board.user_db), ("model", board.model_db)) if level > METER_FLOOR_DB
        ]
        last = "" if board.barge_in_ms is None else f"; last barge-in {board.barge_in_ms:.1f} ms"
        return (
            f"... {board.doing}; speaking: {' and '.join(speaking) or 'nobody'}; turn {board.turn}, epoch {board.epoch};"
            f" requests {_counts(board)};"
            f" outputs {board.outputs_heard} delivered, {board.outputs_dropped} dropped,"
            f" {board.stale_delivered} stale{last}"
        )

    def _draw(self) -> RenderableType:
        board = self._board
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column()
        grid.add_row("now", Text(board.doing))
        grid.add_row("user", _meter(board.user_db, "cyan"))
        grid.add_row("model", _meter(board.model_db, "magenta"))
        grid.add_row("position", Text(f"turn {board.turn}, epoch {board.epoch}, {board.interruptions} interruptions"))
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
        return Panel(grid, title=title, title_align="left", box=box.ROUNDED, height=None)

    def _workers(self) -> Text:
        board, text = self._board, Text()
        for worker_id in board.controls:
            name = self._name_of(worker_id)
            if name == board.killed:
                continue
            owns = f" owns the session (partition {board.partition})" if worker_id == board.owner else ""
            text.append(f"{name}{owns}  ", style="green" if owns else "")
        if board.killed is not None:
            text.append(f"{board.killed} killed  ", style="red")
        text.append("  ".join(board.stages))
        return text


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


def _plain_width() -> int:
    """Lines for programs are not wrapped."""
    return int(os.environ.get("COLUMNS", "0") or 0) or 10_000
