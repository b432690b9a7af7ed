"""`bargein engine check`: an engine of one's own meets the contract before it meets a session."""

from __future__ import annotations

import json

import pytest

from stages.conformance import QUESTIONS
from tests.workers.cli_process import run


def test_a_good_engine_keeps_every_guarantee() -> None:
    result = run("engine", "check", "parrot", "--option", "pace=fast", "--input", "tokens")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("ok  ") == len(QUESTIONS)
    assert f"{len(QUESTIONS)} of {len(QUESTIONS)} guarantees are kept" in result.stdout


def test_one_that_does_not_is_told_which_and_why() -> None:
    options = ("--option", "pace=fast", "--option", "fail_aborts=1", "--patience-s", "5")
    result = run("engine", "check", "parrot", *options, "--json")
    assert result.exit_code == 1
    answers = json.loads(result.stdout)
    assert len(answers) == len(QUESTIONS)
    bad = [answer for answer in answers if answer["why"] is not None]
    assert 0 < len(bad) < len(QUESTIONS)
    assert all("EngineError" in answer["why"] for answer in bad)
    shown = run("engine", "check", "parrot", *options)
    assert all(f"NO  {answer['question']}" in shown.stdout for answer in bad)
    assert f"{len(QUESTIONS) - len(bad)} of {len(QUESTIONS)} guarantees are kept" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nose"], "engine 'nose' is unknown; built in are parrot, torch, vllm"),
        (["tests.no_such:Owl"], "there is no module"),
        (["json:JSONDecoder"], "json:JSONDecoder"),
        (["parrot", "--option", "pace"], "--option: is 'pace'; it must be key=value"),
        (["parrot", "--option", "pace=slow"], "pace: "),
    ],
)
def test_an_engine_that_can_not_be_built_is_said_in_a_line(arguments: list[str], says: str) -> None:
    result = run("engine", "check", *arguments)
    assert result.exit_code == 2, result.output
    assert says in result.output
    assert "Traceback" not in result.output
