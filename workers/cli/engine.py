"""`bargein engine check`: whether an engine of one's own keeps the contract, before it meets a session.

Responsible for the options, for what is shown while it runs, and for the exit status. Leaves the questions to
`stages/conformance.py`. Needs no Redis. Status 1 if a guarantee isn't kept, 2 if the engine can't be built.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from stages.conformance import PATIENCE_S, check_engine
from workers.cli.endings import WRONG_SETTINGS, Failure, Status, plainly
from workers.cli.options import AsJson
from workers.cli.output import make_console, print_json
from workers.cli.run import read_engine_options

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from stages.conformance import Answer

app = typer.Typer(add_completion=False, rich_markup_mode="rich", no_args_is_help=True)


class Input(StrEnum):
    """What the prompts are."""

    AUDIO = "audio"
    TOKENS = "tokens"


@app.callback()
def engine() -> None:
    """Engines: what runs the model inside of a stage worker."""


@app.command()
@plainly
def check(
    engine: Annotated[str, typer.Argument(metavar="ENGINE", help="Built in, or package.module:Class")],
    option: Annotated[
        list[str] | None,
        typer.Option("--option", help="An engine option as key=value, the value in YAML; key.key=value goes deeper"),
    ] = None,
    input_kind: Annotated[
        Input, typer.Option("--input", help="What its prompts are: audio is 16 kHz s16le bytes, tokens a list of ints")
    ] = Input.AUDIO,
    patience_s: Annotated[
        float, typer.Option("--patience-s", min=0.1, max=3600, help="How long an answer may take (s)")
    ] = PATIENCE_S,
    as_json: AsJson = False,
) -> None:
    """Ask an engine for every guarantee of the contract in stages/engine.py that can be asked for.

    It is built with the options, started, spoken to, interrupted and stopped, as a stage worker would, many times over.
    """
    options = read_engine_options(option or [])
    answers = asyncio.run(_check(engine, options, input_kind, patience_s, quiet=as_json))
    if as_json:
        print_json(answers)
    kept = sum(answer.why is None for answer in answers)
    if not as_json:
        print(f"{kept} of {len(answers)} guarantees are kept")
    if kept < len(answers):
        raise typer.Exit(int(Status.REFUSED))


async def _check(
    engine: str, options: Mapping[str, Any], input_kind: Input, patience_s: float, *, quiet: bool
) -> list[Answer]:
    console = make_console()
    answers: list[Answer] = []
    make_console(stderr=True).print(f"starting {engine} ...", highlight=False)
    try:
        async for answer in check_engine(engine, options, input_kind.value, patience_s):
            answers.append(answer)
            if quiet:
                continue
            mark = ("ok  ", "green") if answer.why is None else ("NO  ", "bold red")
            console.print(Text.assemble(mark, f"{answer.question} ({answer.took_s:.2f} s)"), soft_wrap=True)
            if answer.why is not None:
                console.print(Text(f"    {answer.why}"), soft_wrap=True)
    except WRONG_SETTINGS:
        raise
    except Exception as error:
        # The model is missing, the device is full: what kept it from starting is the engine's to say.
        raise Failure(f"{engine}: could not start: {type(error).__name__}: {error}", Status.SETTINGS) from error
    return answers
