"""The engine in docs/engines.md is a whole one: it keeps every guarantee, and is about as short as it says."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from stages.conformance import QUESTIONS, check_engine
from stages.pipeline import parse_pipeline

if TYPE_CHECKING:
    import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


async def test_the_engine_on_the_page_keeps_every_guarantee(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "echo_of_the_page.py").write_text(block("python"))
    monkeypatch.syspath_prepend(str(tmp_path))
    options = {"tokens_per_s": 20_000}
    answers = [answer async for answer in check_engine("echo_of_the_page:Echo", options, "tokens")]
    assert [(answer.question, answer.why) for answer in answers if answer.why is not None] == []
    assert len(answers) == len(QUESTIONS)
    sys.modules.pop("echo_of_the_page")


def test_the_pipeline_on_the_page_is_one() -> None:
    described = parse_pipeline(yaml.safe_load(block("yaml")), "docs/engines.md")
    assert described.stages[0].engine == "my.module:Echo"
