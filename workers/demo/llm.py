"""The demo with a language model: a tiny model made on the spot, the pipeline that runs it, the crowd that talks to it.

Responsible for the model's folder, for the pipeline file with the noting engine in it, and for what is kept for the
conclusions. Leaves running to `system.py`, users to `crowd.py`, conclusions to `llm_findings.py`. Starts a process that
makes the model; says no with `Failure`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from bargein_client import AsyncBargein, BargeinError
from control.core.requests import request_id
from stages.pipeline import SHIPPED
from workers.cli.endings import Failure, Status
from workers.demo.crowd import BargeIn, search
from workers.demo.llm_findings import conclude_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from workers.demo.board import Board
    from workers.demo.crowd import Crowd
    from workers.demo.findings import Findings

PIPELINE = SHIPPED / "demo-vllm.yaml"
CONTEXT, HIDDEN, LAYERS = 4096, 256, 4
MAKE_S = 120.0
READY_S = 240.0  # vLLM's import alone may take half a minute
BEYOND_GRACE_S = 30.0
MOST_S = 180.0
_LOG_LENGTH = 1_000


@dataclass(slots=True)
class ModelRun:
    """One run with a language model. `most`: how many sessions at once are tried; 0: no crowd."""

    folder: Path
    out: Path
    most: int
    board: Board
    say: Callable[[str], None]
    _barge_ins: list[BargeIn] = field(default_factory=list[BargeIn])
    _crowds: list[Crowd] = field(default_factory=list["Crowd"])

    @property
    def pipeline_path(self) -> Path:
        """Of the pipeline file that `prepare` writes."""
        return self.folder / "pipeline.yaml"

    @property
    def _journal(self) -> Path:
        return self.folder / "journal"

    async def prepare(self) -> None:
        """Make the model and the pipeline file. Raises `Failure` and OSError."""
        self.board.doing = "making a tiny model of random weights"
        model = await make_model(self.out)
        write_pipeline(PIPELINE, model, self._journal, self.pipeline_path)
        self.say(f"the model is in {model}: random weights, so it says nothing, at the speed of a small one")

    def note_barge_in(self, session_id: str, incarnation: int, epoch: int, at_s: float) -> None:
        """The conversation was interrupted."""
        self._barge_ins.append(BargeIn(request_id(session_id, incarnation, epoch, 0), at_s))

    async def meet_crowd(self, url: str, speech: bytes) -> None:
        """Ever more users at once. Raises `Failure`."""
        if not self.most:
            return
        self.board.requests = []

        def begin(sessions: int) -> None:
            self.board.doing = f"{sessions} sessions at once"

        def note(crowd: Crowd) -> None:
            self._crowds.append(crowd)
            found = f"{len(crowd.missed)} missed" if crowd.missed else "none missed"
            self.say(f"{crowd.sessions} sessions at once: {crowd.turns} turns, {found}")

        async with AsyncBargein(url) as client:
            try:
                await search(client, self.most, speech, note, begin)
            except BargeinError as error:
                raise Failure(f"the crowd can't go on: {error}") from None

    def complete(self, findings: Findings) -> Findings:
        """The findings with the model's, once its engine has stopped."""
        return findings.with_model(conclude_model(self._journal, self._barge_ins, self._crowds))


def require_vllm() -> None:
    """Raises `Failure` where vLLM or PyTorch is missing."""
    missing = [name for name in ("vllm", "torch", "transformers") if find_spec(name) is None]
    if missing:
        raise Failure(
            f"--vllm needs {', '.join(missing)}, which this Python doesn't have. `make demo-vllm` makes an environment "
            "that has (docs/vllm.md)",
            Status.SETTINGS,
        )


async def make_model(folder: Path) -> Path:
    """The tiny model below `folder`, made unless it is there already. Raises `Failure`."""
    model = folder / f"model-{HIDDEN}x{LAYERS}"
    if (model / "config.json").is_file():
        return model
    with tempfile.TemporaryDirectory(dir=folder, prefix="model-") as place:
        words = ["--context", str(CONTEXT), "--hidden", str(HIDDEN), "--layers", str(LAYERS)]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "stages.tiny_model", f"{place}/whole", *words),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        try:
            async with asyncio.timeout(MAKE_S):
                said, _ = await process.communicate()
        except TimeoutError:
            raise Failure(f"making the tiny model took longer than {MAKE_S:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            raise Failure(f"the tiny model can't be made:\n{said.decode(errors='replace')[-_LOG_LENGTH:]}")
        # Whole or not at all.
        (Path(place) / "whole").rename(model)
    return model


def write_pipeline(source: Path, model: Path, journal: Path, to: Path) -> None:
    """The pipeline with this model, and with an engine that notes what it does. Raises OSError."""
    content: Any = yaml.safe_load(source.read_text(encoding="utf-8"))
    stage = content["stages"][0]
    stage["engine"] = "workers.demo.noting:NotingVllm"
    stage["options"] |= {"model": str(model.absolute()), "journal": str(journal.absolute())}
    to.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
