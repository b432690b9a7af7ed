"""compose.yaml asks each worker whether it is ready, with a command line that tells yes from no."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import yaml

from tests.workers.cli_process import ROOT, Bargein, wait_until
from tests.workers.metrics.scraped import ready
from tests.workers.metrics.test_cli_metrics import address_of

SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
WORKERS = ("control", "thinker", "voice")


def test_every_worker_is_asked_and_nothing_of_it_is_published() -> None:
    for name in WORKERS:
        service = SERVICES[name]
        assert service["environment"]["BARGEIN_METRICS_PORT"] == "9464"
        assert service["healthcheck"]["test"][0] == "CMD"
        assert "http://127.0.0.1:9464/readyz" in service["healthcheck"]["test"][-1]
        assert "ports" not in service
    assert not any("healthcheck" in SERVICES[name] for name in ("cli", "producer"))


def test_the_health_check_says_yes_to_a_worker_that_is_ready_and_no_to_one_that_is_gone(redis_url: str) -> None:
    _, _, *arguments = SERVICES["control"]["healthcheck"]["test"]
    with Bargein("control", "--metrics-port", "0", redis_url=redis_url) as process:
        url = address_of(process)
        port = url.rpartition(":")[2].partition("/")[0]
        command = [sys.executable, *(argument.replace("9464", port) for argument in arguments)]
        assert wait_until(lambda: ready(url)[0] == 200)
        assert subprocess.run(command, check=False, timeout=20).returncode == 0
        process.end()
        gone = subprocess.run(command, check=False, timeout=20, stderr=subprocess.DEVNULL)
    assert gone.returncode != 0
