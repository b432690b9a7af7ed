"""A real Prometheus on real workers under load: every query of every panel and rule is answered with data."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode
from urllib.request import urlopen

import msgspec
import pytest
import yaml
from redis.asyncio import Redis

from bargein_client import AsyncBargein, BargeinError
from control.store.keys import PartitionKeys, partition_of
from tests.clusters import free_port
from tests.observe.test_rules import ALERTS, PROMETHEUS, RECORDS, ROOT, RULES, metrics_in
from tests.workers.cli_process import Bargein
from tests.workers.metrics.test_cli_metrics import address_of

if TYPE_CHECKING:
    from pathlib import Path

DASHBOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
PATIENCE_S = 90.0
WELL_S = 6.0
PARTITIONS = 4


def panels() -> list[tuple[str, dict[str, Any]]]:
    return [(file.stem, panel) for file in DASHBOARDS for panel in json.loads(file.read_text())["panels"]]


def queries() -> list[str]:
    return sorted({target["expr"] for _, panel in panels() for target in panel["targets"]})


def selectors(expression: str) -> list[str]:
    """What an expression asks of the metrics, without what it does with that."""
    return re.findall(r"(?:[a-z]+:bargein_|bargein[_:])[a-z0-9_:]*(?:\{[^}]*\})?", expression)


def test_the_dashboards_are_whole_and_ask_for_what_there_is() -> None:
    assert [file.stem for file in DASHBOARDS] == ["bargein-night", "bargein-service", "bargein-stages"]
    known = {name for rule in (*ALERTS.values(), *RECORDS.values()) for name in metrics_in(rule["expr"])}
    known |= set(RECORDS)
    for file in DASHBOARDS:
        content = json.loads(file.read_text())
        assert content["uid"] == file.stem
        assert len({panel["id"] for panel in content["panels"]}) == len(content["panels"])
    for name, panel in panels():
        assert panel["title"], name
        assert panel["description"], f"{name}: {panel['title']}"
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert all(target["datasource"]["uid"] == "prometheus" for target in panel["targets"])
    asked = {name for expr in queries() for name in metrics_in(expr)}
    alerts = {name for rule in ALERTS.values() for name in metrics_in(rule["expr"])}
    assert set(RECORDS) <= asked | alerts, "no rule is there for nothing"


class Load(threading.Thread):
    """Callers who speak, interrupt and close, one that is too late, and something that is no command."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._told = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as error:  # noqa: BLE001  told where the test ends
            self.error = error

    def stop(self) -> None:
        self._told.set()
        self.join(30)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error

    async def _run(self) -> None:
        async with AsyncBargein(self._url) as client, Redis.from_url(self._url) as redis:
            while not self._told.is_set():
                await asyncio.gather(*(self._call(client) for _ in range(4)))
                await self._spoil(redis)
                await asyncio.sleep(0.2)

    @staticmethod
    async def _call(client: AsyncBargein) -> None:
        try:
            session = await client.open()
            for _ in range(3):
                await session.append(bytes(3_200), final=True)
                await session.interrupt()
            await session.close()
        except BargeinError as error:
            # Opened before the stages were there, or cleaned up by a stage that says no at first.
            if not error.retryable and error.code not in {"timeout", "cleanup_failed"}:
                raise

    @staticmethod
    async def _spoil(redis: Any) -> None:
        keys = PartitionKeys(partition_of("nobody", PARTITIONS))
        await redis.xadd(keys.commands, {"b": b"no command"})
        late = {
            "v": 1,
            "op": "append",
            "control_id": f"late-{time.time()}",
            "session_id": "nobody",
            "mode": "turn_commit_only",
            "fence": {"incarnation": 0, "epoch": 0, "turn_id": 0, "response_seq": 0},
        }
        await redis.xadd(keys.commands, {"b": msgspec.msgpack.encode(late)})


class Server:
    """Prometheus with our rules, on our workers."""

    def __init__(self, folder: Path, workers: list[Bargein]) -> None:
        self._workers = workers
        targets = [address_of(worker).removeprefix("http://").removesuffix("/metrics") for worker in workers]
        config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
        (job,) = config["scrape_configs"]
        assert job.pop("dns_sd_configs")[0]["port"] == 9464
        job["static_configs"] = [{"targets": targets}]
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(file) for file in RULES]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.port = free_port()
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def ask(self, query: str) -> list[Any]:
        """The answer's series. Raises what says that it can't be asked, as for a query that doesn't parse."""
        address = f"http://127.0.0.1:{self.port}/api/v1/query?{urlencode({'query': query})}"
        with urlopen(address, timeout=10) as answer:
            return json.load(answer)["data"]["result"]

    def until_up(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.ask("up")
            except OSError:
                assert self._process.poll() is None, "it has ended"
                assert time.monotonic() < deadline
                time.sleep(0.1)
            else:
                return

    def logs(self) -> str:
        """What the workers have said, but for the dead letters."""
        lines = [line for worker in self._workers for line in worker.log.splitlines() if "dead letter" not in line]
        return "\n".join(lines[-60:])

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._log.close()


@pytest.fixture(scope="module")
def watched(valkey: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus isn't installed (Debian: apt-get install prometheus)")
    valkey.flush()
    folder = tmp_path_factory.mktemp("prometheus")
    file = folder / "pipeline.yaml"
    spoilt = {"pace": "fast", "fail_aborts": 2}
    stages = [{"name": "thinker", "engine": "parrot", "options": spoilt}, {"name": "voice", "engine": "parrot"}]
    session = {"cleanup_timeout_s": 0.5, "cleanup_backoff_s": 0.2}
    file.write_text(yaml.safe_dump({"partitions": PARTITIONS, "session": session, "stages": stages}))
    with ExitStack() as stack:
        lines = [["control"], ["stage", "--stage", "thinker"], ["stage", "--stage", "voice"], ["maintenance"]]
        # On Debian's Redis or Valkey alike: what is looked at is the workers.
        workers = [
            stack.enter_context(Bargein(*words, "--metrics-port", "0", redis_url=valkey.url, pipeline=file, grace_s=2))
            for words in lines
        ]
        server = Server(folder, workers)
        stack.callback(server.close)
        server.until_up()
        load = Load(valkey.url)
        load.start()
        yield server
        load.stop()
        for worker in workers:
            assert worker.end() == 0, worker.log


def find_unanswered(server: Server, asked: list[str]) -> list[str]:
    """Those that have no data after a while. Each may need what the load has not brought about yet."""
    left = asked
    deadline = time.monotonic() + PATIENCE_S
    while True:
        left = [query for query in left if not server.ask(query)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.5)


@pytest.mark.slow
def test_every_panel_has_data(watched: Server) -> None:
    assert find_unanswered(watched, queries()) == []


@pytest.mark.slow
def test_every_rule_has_what_it_asks_for(watched: Server) -> None:
    asked = [selector for rule in (*ALERTS.values(), *RECORDS.values()) for selector in selectors(rule["expr"])]
    assert find_unanswered(watched, sorted({*asked, *RECORDS, 'up{job="bargein"}'})) == []
    # And the whole of each parses.
    for rule in ALERTS.values():
        watched.ask(rule["expr"])


@pytest.mark.slow
def test_workers_that_are_well_wake_nobody(watched: Server) -> None:
    """Whatever the load does: a thinker that says no to its first aborts, dead letters, a caller who is too late."""
    assert find_unanswered(watched, queries()) == []
    pages = {name: rule["expr"] for name, rule in ALERTS.items() if rule["labels"]["severity"] == "page"}
    lasting = set(pages)
    until_s = time.monotonic() + WELL_S
    # A busy machine may be slow for a moment; what is there all the time would wake somebody.
    while lasting and time.monotonic() < until_s:
        lasting = {name for name in lasting if watched.ask(pages[name])}
        time.sleep(0.5)
    assert not lasting, watched.logs()
