"""`bargein maintenance`, `drain`, `close` and `jobs` as processes and commands: what an operator sees, and kill -9."""

from __future__ import annotations

import json
import signal
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from redis import Redis

from bargein_client import Bargein as Client
from bargein_client import ResourceExhaustedError
from control.store import keys
from tests.workers.cli_process import Bargein, run, wait_until

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

PIPELINE = """
partitions: 2
control: {lease_s: 1.0, heartbeat_s: 2.0, heartbeat_interval_s: 0.1}
stages: [{name: ear, engine: parrot, capacity: 16}]
"""


@pytest.fixture
def system(redis_url: str, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A control worker and a stage worker as processes; the settings of the rest."""
    pipeline = tmp_path / "pipeline.yaml"
    pipeline.write_text(PIPELINE)
    settings: dict[str, Any] = {"redis_url": redis_url, "pipeline": pipeline, "grace_s": 10}
    with Bargein("control", **settings), Bargein("stage", "--stage", "ear", **settings) as stage:
        assert stage.says("takes sessions"), stage.log
        yield settings


@pytest.fixture
def client(system: dict[str, Any]) -> Iterator[Client]:
    with Client(system["redis_url"]) as client:
        yield client


@contextmanager
def _maintained(system: dict[str, Any]) -> Generator[Bargein]:
    """A maintenance process that is at work: a command waits only so long for one to take its job."""
    with Bargein("maintenance", **system) as maintenance:
        assert maintenance.says("does its rounds"), maintenance.log
        yield maintenance


def _workers(system: dict[str, Any]) -> list[str]:
    rows = json.loads(run("workers", "--json", **system).stdout)
    return [row["worker_id"] for row in rows if row["role"] == "stage" and row["state"] == "live"]


def _open(client: Client, *names: str) -> None:
    for name in names:

        def is_placed(name: str = name) -> bool:
            try:
                client.open(name, input_modes=["append_tokens"])
            except ResourceExhaustedError:  # the control worker hasn't seen the stage worker yet
                return False
            return True

        assert wait_until(is_placed)


def _job(system: dict[str, Any]) -> dict[str, Any]:
    return json.loads(run("jobs", "--json", **system).stdout)[0]


def test_a_drain_is_followed_to_its_end_and_undone(system: dict[str, Any], client: Client) -> None:
    _open(client, "one", "two")
    (worker,) = _workers(system)
    with _maintained(system) as maintenance:
        result = run("drain", worker, "--grace", "0s", **system)
        assert result.exit_code == 0, result.output
        assert f"done: {worker} is empty and takes no more sessions" in result.stdout
        assert run("sessions", "--json", **system).stdout.strip() == "[]"
        assert _workers(system) == []
        assert "takes sessions again" in run("drain", worker, "--undo", **system).output
        assert wait_until(lambda: _workers(system) == [worker])
        assert maintenance.end() == 0
        assert "maintenance has left" in maintenance.log


def test_a_job_outlives_a_killed_process_and_a_follower_that_left(system: dict[str, Any], client: Client) -> None:
    """What is left of the killed one is arq's lock on the job; here it is taken away instead of waited for."""
    _open(client, "one", "two")
    (worker,) = _workers(system)
    with _maintained(system) as killed, Bargein("drain", worker, "--grace", "1h", **system) as follower:
        assert wait_until(lambda: "may end by themselves" in run("jobs", **system).output)
        assert follower.end(signal.SIGINT) == 1
        assert f"drain-{worker} goes on without you" in follower.log
        killed.end(signal.SIGKILL)
    with Redis.from_url(system["redis_url"]) as redis:
        assert redis.delete(f"arq:in-progress:drain-{worker}") == 1
        redis.decrby(keys.worker_drain(worker), 3_600_000)
        assert redis.hlen(keys.worker_slots(worker)) == 2
    with _maintained(system):
        followed = run("jobs", "follow", f"drain-{worker}", **system)
        assert followed.exit_code == 0, followed.output
        assert "is empty" in followed.stdout
    assert run("sessions", "--json", **system).stdout.strip() == "[]"


def test_sessions_are_closed_by_condition_and_only_after_a_yes(system: dict[str, Any], client: Client) -> None:
    _open(client, "call-1", "call-2", "chat")
    shown = run("close", "--where", "id=call-*", "--dry-run", "--json", **system)
    assert [row["session_id"] for row in json.loads(shown.stdout)] == ["call-1", "call-2"]
    refused = run("close", "--where", "id=call-*", **system)
    assert refused.exit_code == 2
    assert "call-1" in refused.stdout
    assert "say --yes" in refused.output
    with _maintained(system):
        done = run("close", "--where", "id=call-*", "--yes", "--json", "--reason", "fire_drill", **system)
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["message"] == "sessions ended: 2"
    (left,) = json.loads(run("sessions", "--json", **system).stdout)
    assert left["session_id"] == "chat"
    assert "closed, fire_drill" in run("tail", "call-1", **system).output
    nobody = run("close", "--where", "id=nobody", **system)
    assert nobody.exit_code == 0
    assert "no session fulfils that" in nobody.output


def test_without_maintenance_the_command_says_so_and_the_job_waits(system: dict[str, Any], client: Client) -> None:
    _open(client, "one")
    began_s = time.monotonic()
    alone = run("close", "--all", "--yes", **system)
    assert alone.exit_code == 4
    assert "no maintenance process has taken job close-" in alone.output
    assert time.monotonic() - began_s < 60
    job = _job(system)
    assert job["state"] == "queued"
    assert "ends before its next step" in run("jobs", "cancel", job["job_id"], **system).output
    with _maintained(system):
        assert wait_until(lambda: _job(system)["state"] == "cancelled")
    assert len(json.loads(run("sessions", "--json", **system).stdout)) == 1
    over = run("jobs", "cancel", job["job_id"], **system)
    assert over.exit_code == 1
    assert "is over: cancelled" in over.output


def test_a_job_can_be_left_to_itself(system: dict[str, Any], client: Client) -> None:
    _open(client, "one")
    given = run("close", "--all", "--yes", "--no-wait", **system)
    assert given.exit_code == 0
    job_id = given.stdout.strip()
    assert job_id in run("jobs", **system).stdout
    with _maintained(system):
        assert run("jobs", "follow", job_id, **system).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["drain", "nobody"], "there is no stage worker 'nobody': "),
        (["drain", "x", "--grace", "soon"], "--grace: 'soon' is no length of time; write 500ms"),
        (["close"], "say which sessions, with --where, or --all"),
        (["close", "--all", "--where", "id=x"], "say which sessions, with --where, or --all"),
        (["close", "--where", "nose=1"], "--where: 'nose=1' can't be asked; it must be id, worker"),
        (["close", "--all", "--reason", "Not A Word"], "--reason: is 'Not A Word'; it must be a word"),
        (["jobs", "follow", "nope"], "there is no job 'nope'"),
        (["jobs", "cancel", "nope"], "there is no job 'nope'"),
        (["jobs", "--jobs-url", "redis+cluster://h:1"], "the queue of jobs can't be on a cluster"),
        (["jobs", "--jobs-url", "redis://u:p@h:1"], "--jobs-url: a password here would be read by everybody"),
        (["maintenance", "--redis-url", "redis+cluster://h:1"], "BARGEIN_JOBS_URL (--jobs-url): the queue of jobs"),
        (["maintenance", "--jobs-password-file", "/nowhere"], "without BARGEIN_JOBS_URL it is for nothing"),
    ],
)
def test_what_can_not_be_is_said_in_a_line(redis_url: str, arguments: list[str], says: str) -> None:
    more = {} if any(argument.endswith("-url") for argument in arguments) else {"redis_url": redis_url}
    result = run(*arguments, **more)
    assert result.exit_code in {1, 2}
    assert says in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_the_jobs_may_be_on_a_server_of_their_own(system: dict[str, Any], client: Client, own_url: str) -> None:
    _open(client, "one")
    apart = {**system, "jobs_url": own_url}
    with _maintained(apart):
        closed = run("close", "--all", "--yes", **apart)
        assert closed.exit_code == 0, closed.output
    with Redis.from_url(own_url) as jobs, Redis.from_url(system["redis_url"]) as sessions:
        assert {name.split(b":")[0] for name in jobs.scan_iter()} <= {b"bargein", b"arq"}
        assert jobs.exists(keys.JOBS)
        assert not sessions.exists(keys.JOBS)
        assert not [name for name in sessions.scan_iter() if name.startswith((b"arq", b"bargein:job"))]


@pytest.fixture
def own_url() -> Iterator[str]:
    from tests.servers import ValkeyServer  # noqa: PLC0415

    with ValkeyServer() as server:
        yield server.url


def test_two_followers_see_the_same_end(system: dict[str, Any], client: Client) -> None:
    _open(client, "one")
    (worker,) = _workers(system)
    found: list[Any] = []

    def follow() -> None:
        found.append(Bargein("drain", worker, "--grace", "0s", **system))

    threads = [threading.Thread(target=follow) for _ in range(2)]
    with _maintained(system):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for each in found:
            with each as process:
                assert process.process.wait(30) == 0, process.log
                assert "is empty" in process.output
