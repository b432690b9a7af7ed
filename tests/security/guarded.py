"""Servers that let in only who has a name and a password, made as deploy/redis says; and what a refusal looks like.

`GuardedServer` has the shipped rules with fresh passwords, and a user `root` of the tests' own who may do anything:
to play the rest of the world and to look behind the scenes.
"""

from __future__ import annotations

import contextlib
import secrets
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis
from redis.exceptions import NoPermissionError, RedisError, ResponseError

from tests.servers import RealServer

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parent.parent.parent
MAKE_ACL = ROOT / "deploy" / "redis" / "make-acl.sh"
RULES = ROOT / "deploy" / "redis" / "users.acl"
ROLES = ("producer", "listener", "control", "stage", "maintenance", "observer")


def make_acl(directory: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run the script on a directory of password files."""
    return subprocess.run(
        ["sh", str(MAKE_ACL), str(directory), *flags], capture_output=True, text=True, check=False, timeout=30
    )


class GuardedServer(RealServer):
    """A real server with the shipped ACL file; a context manager. `passwords` by role."""

    def __init__(self, binary: Path, *flags: str) -> None:
        super().__init__(binary)
        self.passwords = {role: secrets.token_urlsafe(24) for role in (*ROLES, "root")}
        self.secrets = self.directory / "secrets"
        self.secrets.mkdir()
        for role in ROLES:
            (self.secrets / role).write_text(self.passwords[role] + "\n")
        self.acl = self.directory / "users.acl"
        self.write_acl(*flags)
        self.args = ("--aclfile", str(self.acl))

    def write_acl(self, *flags: str) -> None:
        """Make the file anew from the passwords' files."""
        made = make_acl(self.secrets, *flags)
        assert made.returncode == 0, made.stderr
        self.acl.write_text(f"{made.stdout}user root on >{self.passwords['root']} ~* &* +@all\n")

    def url_of(self, role: str) -> str:
        """Where and as whom to connect."""
        return f"redis://{role}:{self.passwords[role]}@127.0.0.1:{self.port}/0"

    def client_of(self, role: str) -> redis.Redis:
        """A new synchronous client, bytes in and out; the caller closes it."""
        return redis.Redis.from_url(self.url_of(role), socket_timeout=10)

    def flush(self) -> None:
        with self.client_of("root") as root:
            root.flushall()
            root.script_flush()
            root.acl_log_reset()

    def fetch_denials(self) -> list[str]:
        """What was refused since `flush`: user, why and what. But for the library's name, which a client may not say
        where the server might not know that command."""
        with self.client_of("root") as root:
            found: Any = root.acl_log()
        entries = [{_text(name): _text(value) for name, value in entry.items()} for entry in found]
        return [
            f"{entry['username']}: {entry['reason']} {entry['object']}"
            for entry in entries
            if entry["object"] != "client|setinfo"
        ]

    def _answers(self, pid: int) -> bool:
        with contextlib.suppress(RedisError), self.client_of("root") as root:
            about: Any = root.info("server")
            return about["process_id"] == pid
        return False


def assert_refused(client: redis.Redis, *commands: Iterable[Any]) -> None:
    """Each of the commands is refused for want of rights, and for nothing else."""
    for command in commands:
        with pytest.raises(NoPermissionError):
            client.execute_command(*command)


def assert_refused_in_script(client: redis.Redis, key: str, *commands: str) -> None:
    """Each command (Lua) is refused inside of a script, with its key declared and undeclared."""
    for command in commands:
        for keys in ([key], []):
            with pytest.raises(ResponseError, match=r"ACL failure|The user executing the script"):
                client.eval(f"local key = '{key}' return redis.call({command})", len(keys), *keys)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
