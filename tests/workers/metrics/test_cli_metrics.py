"""The metrics of real processes: where they listen, what they serve, and that they end with them."""

from __future__ import annotations

import re
import signal
import socket
import sys
from typing import TYPE_CHECKING

import pytest

from tests.workers.cli_process import Bargein, run, wait_until
from tests.workers.metrics.scraped import fetch, ready, scrape
from workers.settings import SettingsError, load_settings

if TYPE_CHECKING:
    from pathlib import Path


def address_of(process: Bargein) -> str:
    assert process.says("metrics on "), process.log
    return re.findall(r"metrics on (http://\S+/metrics)", process.log)[-1]


def test_a_control_worker_serves_its_metrics_and_leaves_when_told(redis_url: str) -> None:
    with Bargein("control", "--metrics-port", "0", redis_url=redis_url) as process:
        url = address_of(process)
        assert url.startswith("http://127.0.0.1:")
        assert wait_until(lambda: ready(url)[0] == 200), ready(url)
        shown = scrape(url)
        assert shown["bargein_ready"] == 1
        assert shown["bargein_partitions_owned"] == 16
        assert len(shown.nonzero("bargein_build_info")) == 1
        assert shown["process_cpu_seconds_total"] > 0
        assert fetch(url.replace("/metrics", "/healthz"))[0] == 200
        assert process.end() == 0
        with pytest.raises(OSError, match="refused"):
            fetch(url)


def test_a_stage_worker_serves_its_metrics_where_its_environment_says(redis_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with Bargein("stage", "--stage", "thinker", redis_url=redis_url, metrics_port=port) as process:
        url = address_of(process)
        assert url == f"http://127.0.0.1:{port}/metrics"
        assert wait_until(lambda: ready(url)[0] == 200), ready(url)
        assert scrape(url)["bargein_stage_capacity", "stage=thinker"] == 64
        assert process.end() == 0


def test_a_process_that_is_stopped_by_the_system_answers_again_afterwards(redis_url: str) -> None:
    with Bargein("control", "--metrics-port", "0", redis_url=redis_url) as process:
        url = address_of(process)
        assert wait_until(lambda: ready(url)[0] == 200)
        process.process.send_signal(signal.SIGSTOP)
        process.process.send_signal(signal.SIGCONT)
        assert wait_until(lambda: ready(url)[0] == 200)


def test_a_port_that_is_taken_ends_a_process_before_it_has_begun(redis_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Bargein("control", "--metrics-port", str(port), redis_url=redis_url) as process:
            assert process.process.wait(20) == 2
            assert f"BARGEIN_METRICS_PORT (--metrics-port): 127.0.0.1:{port} can't be had" in process.log
            assert "Traceback" not in process.log


def test_without_a_port_there_is_no_server(redis_url: str) -> None:
    with Bargein("control", redis_url=redis_url) as process:
        assert process.says("partition 0 taken")
        assert "metrics on" not in process.log
        assert process.end() == 0


@pytest.mark.parametrize("port", ["-1", "70000", "many"])
def test_a_port_that_is_none_is_refused(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BARGEIN_METRICS_PORT", port)
    with pytest.raises(SettingsError, match=r"BARGEIN_METRICS_PORT \(--metrics-port\): is '.*'; it must be"):
        load_settings()


def test_what_kubernetes_says_of_a_service_of_the_same_name_is_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BARGEIN_METRICS_PORT", "tcp://10.0.0.1:9100")
    assert load_settings().metrics_port is None


def test_up_gives_every_process_a_free_port_and_says_which(tmp_path: Path) -> None:
    with Bargein("up", "--port", "0", "--dir", str(tmp_path)) as process:
        assert process.says("ready, on", 60), process.log
        urls = re.findall(r"metrics on (http://\S+/metrics)", process.log)
        assert len(set(urls)) == 4
        roles = [next(iter(scrape(url).nonzero("bargein_build_info"))) for url in urls]
        assert sorted(role.partition(",")[0] for role in roles) == [
            "role=control",
            "role=maintenance",
            "role=stage",
            "role=stage",
        ]
        assert process.end(within_s=60) == 0


def test_the_flags_are_in_the_help() -> None:
    for command in ("control", "stage"):
        text = run(command, "--help").output
        assert "--metrics-port" in text, (command, sys.argv)
        assert "--metrics-host" in text
