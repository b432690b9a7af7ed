"""A password stands in a file, and nowhere where others could read it: process list, environment, log, messages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.security.guarded import RULES, GuardedServer
from tests.workers.cli_process import Bargein, run

if TYPE_CHECKING:
    from collections.abc import Iterator

PIPELINE = "partitions: 2\npolicy: null\n"


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    file = tmp_path / "pipeline.yaml"
    file.write_text(PIPELINE)
    return file


@pytest.fixture
def control(guarded: GuardedServer, pipeline: Path) -> Iterator[Bargein]:
    url = f"redis://control@127.0.0.1:{guarded.port}/0"
    flags = ("--redis-url", url, "--redis-password-file", str(guarded.secrets / "control"), "--log-level", "debug")
    with Bargein("control", *flags, pipeline=pipeline) as process:
        assert process.says("taken"), process.log
        yield process


def test_a_control_worker_with_a_password_file_shows_the_password_nowhere(
    guarded: GuardedServer, control: Bargein
) -> None:
    password = guarded.passwords["control"]
    about = Path(f"/proc/{control.pid}")
    if not about.exists():
        pytest.skip("there is no /proc here")
    for place in ("cmdline", "environ", "comm"):
        assert password.encode() not in (about / place).read_bytes(), place
    assert b"--redis-password-file" in (about / "cmdline").read_bytes()
    assert control.end() == 0
    assert "control-" in control.log
    for said in (control.log, control.output):
        assert password not in said


def test_a_password_that_is_refused_is_not_repeated(guarded: GuardedServer, pipeline: Path) -> None:
    wrong = pipeline.with_name("password")
    wrong.write_text("a-wrong-password\n")
    url = f"redis://control@127.0.0.1:{guarded.port}/0"
    settings: dict[str, Any] = {"redis_url": url, "redis_password_file": wrong}
    done = run("partitions", **settings)
    with Bargein("control", pipeline=pipeline, **settings) as process:
        assert process.process.wait(20) == done.exit_code == 3
        said = (done.output, process.log)
    for message in said:
        assert "refuses the credentials" in message
        assert "a-wrong-password" not in message


def test_a_password_on_the_command_line_is_refused(guarded: GuardedServer, pipeline: Path) -> None:
    done = run("control", "--redis-url", guarded.url_of("control"), pipeline=pipeline)
    assert done.exit_code == 2
    assert guarded.passwords["control"] not in done.output


def test_the_server_is_given_no_password_but_its_hash(guarded: GuardedServer) -> None:
    rules = RULES.read_text()
    assert "nopass" not in rules
    assert ">" not in rules
    line = Path(f"/proc/{guarded.pid}/cmdline")
    for role, password in guarded.passwords.items():
        assert role == "root" or password not in guarded.acl.read_text()
        assert not line.exists() or password.encode() not in line.read_bytes()
