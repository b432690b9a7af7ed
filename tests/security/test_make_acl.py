"""The script that makes the server's ACL file out of passwords: what it accepts, and changing a password."""

from __future__ import annotations

import shutil
from hashlib import sha256
from typing import TYPE_CHECKING

import pytest
from redis.exceptions import AuthenticationError

from tests.security.guarded import ROLES, GuardedServer, make_acl
from workers.embedded import require_valkey_binary

if TYPE_CHECKING:
    from pathlib import Path

    import redis


def put(directory: Path, **passwords: str) -> Path:
    for name, password in passwords.items():
        (directory / name.replace("_", ".")).write_text(password)
    return directory


def test_the_file_holds_hashes_and_no_password(tmp_path: Path) -> None:
    made = make_acl(put(tmp_path, producer="p" * 20 + "\n", control="c" * 20, producer_old="o" * 20 + "\r\n"))
    assert made.returncode == 0
    lines = made.stdout.splitlines()
    assert [line.split()[1] for line in lines] == ["default", "producer", "control"]
    for letter in "po":
        assert f"#{sha256((letter * 20).encode()).hexdigest()}" in lines[1]
    assert "pppp" not in made.stdout


def test_a_password_may_hold_anything_but_a_line_end(tmp_path: Path) -> None:
    odd = "  a%s\\n$HOME `id` \"'#>~é  "
    made = make_acl(put(tmp_path, stage=odd + "\n"))
    assert f"#{sha256(odd.encode()).hexdigest()}" in made.stdout


@pytest.mark.parametrize(
    ("passwords", "message"),
    [
        ({}, "no password of any role"),
        ({"intruder": "x" * 20}, "no password of any role"),
        ({"control": ""}, "is empty"),
        ({"control": "short"}, "too short"),
        ({"control": "x" * 20 + "\n" + "y" * 20}, "more than one line"),
        ({"control": "x" * 20, "control_old": "short"}, "too short"),
        ({"control": "x" * 20, "producer": "x" * 20}, "the password of another role"),
    ],
)
def test_a_password_that_is_none_is_refused_and_nothing_is_written(
    tmp_path: Path, passwords: dict[str, str], message: str
) -> None:
    made = make_acl(put(tmp_path, **passwords))
    assert made.returncode == 1
    assert message in made.stderr
    assert made.stdout == ""
    assert "xxxx" not in made.stderr


def test_a_wrong_option_or_directory_is_refused(tmp_path: Path) -> None:
    assert "not a directory" in make_acl(tmp_path / "nowhere").stderr
    assert "unknown option" in make_acl(tmp_path, "--what").stderr


def test_a_server_that_knows_setinfo_may_be_told_the_library() -> None:
    with GuardedServer(require_valkey_binary(), "--setinfo") as server:
        for role in ROLES:
            with server.client_of(role) as client:
                assert client.execute_command("CLIENT", "SETINFO", "LIB-NAME", "x") in (True, b"OK")


def test_a_password_is_changed_while_everybody_stays_connected() -> None:
    with GuardedServer(require_valkey_binary()) as server:
        old = server.passwords["producer"]
        with server.client_of("producer") as before:
            before.time()
            shutil.copy(server.secrets / "producer", server.secrets / "producer.old")
            (server.secrets / "producer").write_text("the new one of 24 bytes.\n")
            load(server)
            # The one is valid, and so is the other.
            with server.client_of("producer") as still:
                still.time()
            server.passwords["producer"] = "the new one of 24 bytes."
            with server.client_of("producer") as after:
                after.time()
                (server.secrets / "producer.old").unlink()
                load(server)
                after.time()
        server.passwords["producer"] = old
        with server.client_of("producer") as late, pytest.raises(AuthenticationError):
            late.time()


def load(server: GuardedServer) -> None:
    """As the maintenance user does it."""
    server.write_acl()
    client: redis.Redis
    with server.client_of("maintenance") as client:
        client.acl_load()
