"""The web side: three paths, a format that parsers take, and no way to hold it up."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from tests.workers.metrics.scraped import PATIENCE_S, fetch, scrape
from workers.metrics import declared as d
from workers.metrics.families import Families
from workers.metrics.histogram import Histogram
from workers.metrics.readiness import Check
from workers.metrics.serving import MetricsServer, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


class Little:
    """Somebody to watch. `fails`: has a bug."""

    role = "control"

    def __init__(self) -> None:
        self.ready = True
        self.fails = False

    async def run(self) -> None:
        if self.fails:
            raise RuntimeError("told to fail")
        await asyncio.Event().wait()

    def checks(self) -> list[Check]:
        return [Check("something", self.ready, 3.5, 5.0)]

    def collect(self) -> Families:
        if self.fails:
            raise RuntimeError("told to fail")
        families, histogram = Families(), Histogram()
        histogram.note_ms(3)
        families.put(d.COMMANDS, 7, "open", "ok")
        families.put_histogram(d.COMMAND_SECONDS, histogram, "open")
        return families


@pytest.fixture
def watched() -> Little:
    return Little()


@pytest.fixture
def server(watched: Little) -> Iterator[MetricsServer]:
    server = MetricsServer(watched, "127.0.0.1", 0)
    yield server
    server.close()


def test_the_text_is_what_prometheus_s_own_parser_reads(server: MetricsServer) -> None:
    status, content_type, body = fetch(server.url)
    assert status == 200
    assert content_type.startswith("text/plain")
    shown = scrape(server.url)
    assert shown["bargein_commands_total", "op=open", "outcome=ok"] == 7
    assert shown["bargein_command_seconds_bucket", "op=open", "le=0.002"] == 0
    assert shown["bargein_command_seconds_bucket", "op=open", "le=0.005"] == 1
    assert shown["bargein_command_seconds_bucket", "op=open", "le=+Inf"] == 1
    assert "# HELP bargein_command_seconds From a command's entry" in body
    assert "process_cpu_seconds_total" in shown.names


def test_openmetrics_is_spoken_to_whoever_asks_for_it(server: MetricsServer) -> None:
    _, content_type, body = fetch(server.url, OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith("# EOF\n")
    assert "bargein_commands" in {family.name for family in parse_openmetrics(body)}


def test_health_is_that_it_answers_and_readiness_is_a_matter_of_the_checks(
    server: MetricsServer, watched: Little
) -> None:
    base = server.url.removesuffix("/metrics")
    assert fetch(f"{base}/healthz")[0] == 200
    assert fetch(f"{base}/readyz")[0] == 200
    watched.ready = False
    status, content_type, body = fetch(f"{base}/readyz")
    assert (status, content_type) == (503, "application/json")
    assert json.loads(body) == {
        "ready": False,
        "role": "control",
        "checks": {"something": {"ok": False, "value": 3.5, "bound": 5.0}},
    }
    assert fetch(f"{base}/healthz")[0] == 200
    assert scrape(server.url)["bargein_ready"] == 0


def test_other_paths_are_not_there_and_a_head_has_no_body(server: MetricsServer) -> None:
    base = server.url.removesuffix("/metrics")
    assert fetch(f"{base}/")[0] == fetch(f"{base}/metrics/x")[0] == 404
    assert fetch(f"{base}/metrics?name[]=up")[0] == 200
    with urlopen(Request(server.url, method="HEAD"), timeout=PATIENCE_S) as answer:
        assert (answer.status, answer.read()) == (200, b"")


def test_a_bug_in_a_scrape_is_an_error_and_the_next_one_works(server: MetricsServer, watched: Little) -> None:
    watched.fails = True
    assert fetch(server.url)[0] == 500
    watched.fails = False
    assert fetch(server.url)[0] == 200


def test_a_client_that_says_nothing_holds_nobody_up(server: MetricsServer) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
    assert fetch(server.url)[0] == 200
    for each in idle:
        each.close()


def test_a_port_that_is_taken_is_said_at_once(server: MetricsServer, watched: Little) -> None:
    with pytest.raises(OSError, match="in use"):
        MetricsServer(watched, "127.0.0.1", server.port)


def test_it_listens_on_ipv6_too(watched: Little) -> None:
    try:
        server = MetricsServer(watched, "::1", 0)
    except OSError:
        pytest.skip("this machine has no IPv6")
    assert server.url == f"http://[::1]:{server.port}/metrics"
    assert fetch(server.url)[0] == 200
    server.close()


async def test_nothing_is_left_after_serving(watched: Little) -> None:
    server = MetricsServer(watched, "127.0.0.1", 0)
    async with serving(watched, server):
        assert (await asyncio.to_thread(fetch, server.url))[0] == 200
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(fetch, server.url)
    assert [task.get_name() for task in asyncio.all_tasks() if task.get_name() == "metrics"] == []


async def test_a_process_goes_on_when_its_sampling_has_a_bug(watched: Any, caplog: pytest.LogCaptureFixture) -> None:
    watched.fails = True
    server = MetricsServer(watched, "127.0.0.1", 0)
    async with serving(watched, server):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        watched.fails = False
        assert (await asyncio.to_thread(fetch, server.url))[0] == 200
    assert "sampling for metrics has ended" in caplog.text
