"""`bargein`: the list of commands.

Responsible for which commands there are and what each is called in `bargein --help`. Leaves each to its own module,
which is imported when the command is called: help and completion must not wait for a model's libraries. A command's
module is imported by name, so its function may not be there yet, or not in this installation (the demo).
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup


class Entry(NamedTuple):
    """Where a command is, and its line in the help."""

    place: str
    summary: str
    panel: str


RUN, SPEAK, LOOK, ACT = "Run", "Speak with a session", "Look", "Act"

COMMANDS = {
    "up": Entry("workers.cli.up:up", "Everything at once on a server of its own, for development.", RUN),
    "control": Entry("workers.cli.run:control", "A control worker: owns partitions and decides.", RUN),
    "stage": Entry("workers.cli.run:stage", "A stage worker: runs one stage's engine.", RUN),
    "maintenance": Entry("workers.cli.upkeep:maintenance", "Upkeep, and the operators' jobs.", RUN),
    "demo": Entry("workers.demo.cli:demo", "A conversation with interruptions, from a WAV file.", RUN),
    "send": Entry("workers.cli.send:send", "Send commands as JSON and wait for their replies.", SPEAK),
    "tail": Entry("workers.cli.tail:tail", "Follow a session's events.", SPEAK),
    "sessions": Entry("workers.cli.look:sessions", "The sessions and what each is doing.", LOOK),
    "cleanups": Entry("workers.cli.look:cleanups", "The pending cleanups, oldest first.", LOOK),
    "workers": Entry("workers.cli.look:workers", "The control workers and stage workers.", LOOK),
    "partitions": Entry("workers.cli.look:partitions", "The partitions: owner, lease, backlog.", LOOK),
    "doctor": Entry("workers.cli.doctor:doctor", "Is all well? What is wrong, and what to do about it.", LOOK),
    "drain": Entry("workers.cli.jobs:drain", "Empty a stage worker: no new sessions, the others end in time.", ACT),
    "close": Entry("workers.cli.jobs:close", "End the sessions that fulfil some conditions.", ACT),
    "retry": Entry("workers.cli.act:retry", "Try a session's pending cleanups again now.", ACT),
    "brake": Entry("workers.cli.act:brake_app", "Whether silent stage workers are given up; release it.", ACT),
    "dead-letters": Entry("workers.cli.act:letters_app", "Entries that nobody could answer; drop them.", ACT),
    "jobs": Entry("workers.cli.jobs:app", "The jobs that drain and close have begun.", ACT),
    "engine": Entry("workers.cli.engine:app", "Check whether an engine keeps the contract.", LOOK),
    "config": Entry("workers.cli.config:app", "Check a pipeline file; show the settings.", LOOK),
}


class LazyGroup(TyperGroup):
    """A group whose commands are stubs until one is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, entry in COMMANDS.items():
            if _is_there(entry):
                stub = TyperCommand(name, help=entry.summary, rich_help_panel=entry.panel)
                self.add_command(stub, name)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """The command that `args` name, for once the real one."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, None if name is None or command is None else load_command(name), rest


def load_command(name: str) -> Any:
    """The command from its module."""
    module, _, attribute = COMMANDS[name].place.partition(":")
    found: Any = getattr(importlib.import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        single = typer.Typer(add_completion=False, rich_markup_mode="rich")
        single.command(name)(found)
        found = single
    command = typer.main.get_command(found)
    command.name = name
    return command


def _is_there(entry: Entry) -> bool:
    module = entry.place.partition(":")[0]
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even its package
        return False


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            print(f"bargein {version('bargein')}")
        except PackageNotFoundError:
            print("bargein (not installed: run from its sources)")
        raise typer.Exit


app = typer.Typer(cls=LazyGroup, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False)


@app.callback()
def bargein(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """A durable control plane for full-duplex inference sessions, over Redis.

    Every command takes its settings from BARGEIN_* variables or from flags; `bargein config show` prints them.
    """
