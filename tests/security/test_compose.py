"""compose.yaml gives every process its own role, and no password to anybody who doesn't need it."""

from __future__ import annotations

import shutil
import stat
import subprocess
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import yaml

from tests.security.guarded import MAKE_ACL, ROLES, ROOT, make_acl

if TYPE_CHECKING:
    from pathlib import Path

    from tests.security.guarded import GuardedServer

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
EXPECTED = {
    "control": "control",
    "thinker": "stage",
    "voice": "stage",
    "maintenance": "maintenance",
    "cli": "observer",
    "operator": "maintenance",
    "producer": "producer",
}


def test_every_process_has_the_password_of_its_role_and_no_other() -> None:
    assert {*SERVICES} == {"redis", "prometheus", "grafana", *EXPECTED}
    assert SERVICES["grafana"]["secrets"] == ["grafana"]
    assert "secrets" not in SERVICES["prometheus"]
    for name, role in EXPECTED.items():
        settings = SERVICES[name]["environment"]
        url = urlsplit(settings["BARGEIN_REDIS_URL"])
        assert (url.username, url.password) == (role, None)
        assert SERVICES[name]["secrets"] == [role]
        assert settings["BARGEIN_REDIS_PASSWORD_FILE"] == f"/run/secrets/{role}"


def test_the_server_has_all_passwords_and_makes_its_users_of_them() -> None:
    redis = SERVICES["redis"]
    assert tuple(redis["secrets"]) == ROLES
    assert tuple(COMPOSE["secrets"]) == (*ROLES, "grafana")
    for role, secret in COMPOSE["secrets"].items():
        assert secret == {"file": f"./deploy/redis/secrets/{role}"}
    for service in SERVICES.values():
        for line in service["volumes"]:
            source = line.split(":")[0]
            assert not source.startswith(".") or (ROOT / source).exists(), source
    assert "--aclfile /run/users.acl" in redis["command"][-1]


def test_the_passwords_are_made_once_and_kept(tmp_path: Path) -> None:
    def make() -> dict[str, str]:
        subprocess.run(["sh", str(MAKE_ACL.with_name("make-secrets.sh")), str(tmp_path / "s")], check=True, timeout=30)
        return {file.name: file.read_text() for file in sorted((tmp_path / "s").iterdir())}

    made = make()
    assert tuple(sorted(made)) == tuple(sorted((*ROLES, "grafana")))
    assert len(set(made.values())) == len(made)
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700
    assert make() == made
    assert make_acl(tmp_path / "s").returncode == 0


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="redis-cli isn't installed")
def test_the_health_check_asks_as_the_observer(guarded: GuardedServer) -> None:
    check = SERVICES["redis"]["healthcheck"]["test"][1].replace("$$", "$")
    check = check.replace("redis-cli", f"redis-cli -p {guarded.port}").replace("/run/secrets", str(guarded.secrets))
    assert subprocess.run(["sh", "-c", check], check=False, timeout=30).returncode == 0
    wrong = check.replace(f"{guarded.secrets}/observer", f"{guarded.secrets}/stage")
    assert subprocess.run(["sh", "-c", wrong], check=False, timeout=30, stderr=subprocess.DEVNULL).returncode != 0
