"""The command line without a server: help, the version, the configuration, and how a user's errors read."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from stages.pipeline import SHIPPED
from tests.workers.cli_process import ROOT, clean_environment, run
from workers.cli.main import COMMANDS, load_command
from workers.cli.output import spell_ms, spell_numbers

if TYPE_CHECKING:
    from pathlib import Path

# The demo is a command of its own package.
OURS = [name for name in COMMANDS if name != "demo"]

BAD_PIPELINE = "partitions: 0\npolicy: null\nsession: {cleanup_timeout_s: 90, colour: red}\n"
BAD_POLICY = "policy: tests.no_such:Policy\nstages: [{name: thinker, engine: parrot}]\n"


def no_server() -> str:
    """A URL at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"redis://127.0.0.1:{probe.getsockname()[1]}/0"


def test_the_help_names_every_command_and_imports_none() -> None:
    script = (
        "import sys\nfrom workers.cli.main import app\n"
        "try:\n app(['--help'], prog_name='bargein')\nexcept SystemExit: pass\n"
        "costly = ('workers.cli.', 'stages', 'control', 'redis', 'numpy', 'torch')\n"
        "print([name for name in sys.modules if name.startswith(costly)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT, env=clean_environment()
    )
    for name in OURS:
        assert f" {name} " in done.stdout
    assert done.stdout.splitlines()[-1] == "['workers.cli.main']"


@pytest.mark.parametrize("name", OURS)
def test_every_command_has_a_help_of_its_own(name: str) -> None:
    done = run(name, "--help")
    assert done.exit_code == 0
    assert load_command(name).name == name


def test_the_version_is_the_package_s() -> None:
    done = run("--version")
    assert done.exit_code == 0
    assert done.stdout.startswith("bargein ")


def test_a_command_that_there_is_not_is_refused_with_one_that_there_is() -> None:
    done = run("session")
    assert done.exit_code == 2
    assert "sessions" in done.stderr


def test_a_pipeline_file_that_is_fine_is_shown_with_every_default() -> None:
    done = run("config", "check", str(SHIPPED / "demo-parrot.yaml"))
    assert done.exit_code == 0
    shown = yaml.safe_load(done.stdout)
    assert shown["control"]["lease_s"] == 3.0
    assert [stage["name"] for stage in shown["stages"]] == ["thinker", "voice"]


def test_a_pipeline_file_that_is_not_is_refused_with_every_key_and_what_is_allowed(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(BAD_PIPELINE)
    done = run("config", "check", str(file))
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "partitions: is 0; it must be at least 1" in done.stderr
    assert "session.colour: unknown key" in done.stderr
    assert "Traceback" not in done.stderr
    done = run("config", "check", "--json", str(file))
    assert done.exit_code == 2
    told = json.loads(done.stdout)
    assert not told["ok"]
    assert len(told["problems"]) >= 2


def test_a_check_imports_the_policy_and_engines_only_if_asked(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(BAD_POLICY)
    assert "policy: 'tests.no_such:Policy': there is no module" in run("config", "check", str(file)).stderr
    file.write_text("stages: [{name: thinker, engine: 'tests.no_such:Engine'}]\n")
    assert run("config", "check", str(file)).exit_code == 0
    done = run("config", "check", "--imports", str(file))
    assert done.exit_code == 2
    assert "stages.0.engine: engine 'tests.no_such:Engine': there is no module" in done.stderr


def test_the_settings_are_shown_with_their_origin_and_without_the_password() -> None:
    secret = "redis://me:hush@h:1/2"
    done = run("config", "show", "--grace-s", "4", "--json", redis_url=secret)
    assert done.exit_code == 0
    shown = json.loads(done.stdout)["settings"]
    assert shown["redis_url"] == {"value": "redis://h:1/2", "origin": "environment"}
    assert shown["grace_s"] == {"value": 4.0, "origin": "flag"}
    assert shown["log_level"] == {"value": "info", "origin": "default"}
    done = run("config", "show", redis_url=secret, redis_ulr="x")
    assert "BARGEIN_REDIS_URL=redis://h:1/2   # environment" in done.stdout
    assert "BARGEIN_REDIS_ULR is not a setting; did you mean BARGEIN_REDIS_URL?" in done.stderr
    assert "hush" not in done.output


@pytest.mark.parametrize("command", [["control"], ["stage", "--stage", "thinker"], ["up"], ["config", "show"]])
def test_a_wrong_configuration_stops_every_process_at_its_start(command: list[str], tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(BAD_PIPELINE)
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"pipeline": file}, "partitions: is 0; it must be at least 1"),
        ({"pipeline": tmp_path / "none.yaml"}, "cannot be read"),
        ({"log_level": "loud"}, "BARGEIN_LOG_LEVEL (--log-level): is 'loud'"),
        ({"grace_s": "soon"}, "BARGEIN_GRACE_S (--grace-s): is 'soon'; it must be a number"),
    )
    for settings, said in cases:
        done = run(*command, **settings)
        assert done.exit_code == 2
        assert said in done.stderr
        assert "Traceback" not in done.output


@pytest.mark.parametrize("command", [["control"], ["stage", "--stage", "thinker"], ["up"]])
def test_a_policy_that_cannot_be_loaded_stops_a_process_at_its_start(command: list[str], tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(BAD_POLICY)
    done = run(*command, pipeline=file)
    assert done.exit_code == 2
    assert "policy: 'tests.no_such:Policy': there is no module" in done.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "BARGEIN_STAGE (--stage): is missing; this pipeline has thinker, voice"),
        (["--stage", "talker"], "is 'talker'; this pipeline has thinker, voice"),
        (["--stage", "voice", "--option", "pace"], "--option: is 'pace'; it must be key=value"),
        (["--stage", "voice", "--option", "pace=slow"], "stages.1.options.pace: "),
        (["--stage", "voice", "--option", "pace.a=1"], "pace is no mapping"),
        (["--stage", "voice", "--option", "pace=[1"], "--option pace: is not YAML"),
        (["--stage", "voice", "--model", "m"], "stages.1.options.model: unknown option"),
        (["--stage", "voice", "--engine", "owl"], "stages.1.engine: 'owl' is neither built in"),
        (["--stage", "voice", "--engine", "tests.no_such:Engine"], "there is no module"),
        (["--stage", "voice", "--capacity", "0"], "stages.1.capacity: is 0; it must be at least 1"),
    ],
)
def test_a_stage_s_flags_are_checked_like_the_file(flags: list[str], said: str, redis_url: str) -> None:
    done = run("stage", *flags, redis_url=redis_url)
    assert done.exit_code == 2
    assert said in done.stderr
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    "command",
    [
        *[["control"], ["stage", "--stage", "voice"], ["sessions"], ["cleanups"], ["workers"], ["partitions"]],
        *[["tail", "s"], ["send", '{"op": "open", "session_id": "s"}']],
    ],
)
def test_without_redis_every_command_ends_with_one_line(command: list[str]) -> None:
    url = no_server()
    done = run(*command, redis_url=url, log_level="error")
    assert done.exit_code == 3
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"bargein: Redis at {url} can't be reached: ")
    assert "`bargein up` brings one along" in line


def test_a_password_is_in_no_line_about_redis() -> None:
    url = no_server().replace("redis://", "redis://:hush@")
    for command in (["control"], ["sessions"]):
        done = run(*command, redis_url=url)
        assert done.exit_code == 3
        assert "hush" not in done.output


def test_lengths_of_time_read_like_a_person_would_say_them() -> None:
    lengths = [None, 0, 999, 12_300, 119_999, 120_000, 7_100_000, 7_200_000, 172_800_000, -2_000]
    spelt = ["-", "0 ms", "999 ms", "12.3 s", "120.0 s", "2 min", "118 min", "2.0 h", "2 d", "-2.0 s"]
    assert [spell_ms(ms) for ms in lengths] == spelt


def test_runs_of_numbers_are_drawn_together() -> None:
    assert spell_numbers([0, 1, 2, 5, 7, 8]) == "0-2 5 7-8"
    assert spell_numbers([]) == "-"


def test_a_worker_needs_nothing_of_what_only_maintenance_does() -> None:
    """A machine with a GPU has what its engine needs, and may not have the rest."""
    code = "import sys, workers.cli.run, workers.cli.engine; sys.exit('arq' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, env=clean_environment())
    assert done.returncode == 0
