"""`bargein doctor` with the roles of users.acl: the operators' may ask most, a producer nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.workers.cli_process import run

if TYPE_CHECKING:
    from tests.security.guarded import GuardedServer


def test_an_operator_may_ask_and_what_it_may_not_is_unknown(guarded: GuardedServer) -> None:
    with guarded.client_of("root") as root:
        root.config_set("appendonly", "yes")
        done = run("doctor", "--json", redis_url=guarded.url_of("maintenance"))
        root.config_set("appendonly", "no")
    found = {each["check"]: each for each in json.loads(done.stdout)}
    assert done.exit_code == 0, done.output
    assert found["server"]["verdict"] == found["persistence"]["verdict"] == found["clock"]["verdict"] == "ok"
    assert found["fsync"]["verdict"] == found["scripts"]["verdict"] == "unknown"


def test_a_producer_may_not(guarded: GuardedServer) -> None:
    done = run("doctor", redis_url=guarded.url_of("producer"))
    assert done.exit_code == 3
    assert "refuses the credentials" in done.output
    assert guarded.passwords["producer"] not in done.output
