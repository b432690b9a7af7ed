"""`bargein control` as a process, and what can be sent to it and seen of it from the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from redis import Redis

from control.store import keys
from control.store.keys import PartitionKeys, partition_of
from tests.servers import ValkeyServer
from tests.workers.cli_process import ROOT, Bargein, clean_environment, run, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PARTITIONS = 4
# Nobody's stages are needed: appends are counted and answered at once.
PIPELINE = f"partitions: {PARTITIONS}\npolicy: null\ncontrol: {{lease_s: 2}}\n"


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("cli") / "pipeline.yaml"
    file.write_text(PIPELINE)
    return file


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture(scope="module")
def url(server: ValkeyServer, pipeline: Path) -> Iterator[str]:
    """A server with a control worker that runs for the whole module; every test takes sessions of its own."""
    with Bargein("control", redis_url=server.url, pipeline=pipeline) as worker:
        assert wait_until(lambda: len(owners(server.url)) == PARTITIONS), worker.log
        yield server.url
        assert worker.end() == 0, worker.log


def owners(url: str) -> dict[int, str]:
    """Which partitions are owned, and by whom."""
    with Redis.from_url(url) as client:
        held: dict[int, Any] = {p: client.hget(PartitionKeys(p).owner, "holder") for p in range(PARTITIONS)}
        return {partition: holder.decode() for partition, holder in held.items() if holder}


def ask(command: str, url: str, *flags: str) -> list[dict[str, Any]]:
    done = run(command, "--json", *flags, redis_url=url)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def send(url: str, *commands: dict[str, Any], flags: tuple[str, ...] = ()) -> tuple[int, list[dict[str, Any]]]:
    done = run("send", "--json", *flags, *[json.dumps(command) for command in commands], redis_url=url)
    return done.exit_code, json.loads(done.stdout)


# ---- the process


def test_s45_a_term_hands_the_partitions_over_and_ends_well(pipeline: Path) -> None:
    with (
        ValkeyServer() as server,
        Redis.from_url(server.url) as client,
        Bargein("control", redis_url=server.url, pipeline=pipeline) as first,
    ):
        assert wait_until(lambda: len(owners(server.url)) == PARTITIONS), first.log
        mine = set(owners(server.url).values())
        with Bargein("control", "--log-json", redis_url=server.url, pipeline=pipeline) as second:
            assert wait_until(lambda: client.zcard(keys.CONTROLS) == 2), second.log
            assert first.end() == 0, first.log
            assert "SIGTERM: leaving within 30 s" in first.log
            # At once, not when the leases have run out.
            assert client.zcard(keys.CONTROLS) == 1
            assert not mine & set(owners(server.url).values())
            assert wait_until(lambda: len(owners(server.url)) == PARTITIONS)
            assert second.end(signal.SIGINT) == 0, second.log
            assert owners(server.url) == {}
            lines = [json.loads(line) for line in second.log.splitlines()]
            assert {"at", "level", "logger", "message"} <= set(lines[0])


def test_s45_a_second_signal_ends_it_at_once(pipeline: Path) -> None:
    with ValkeyServer() as server, Bargein("control", redis_url=server.url, pipeline=pipeline) as worker:
        assert wait_until(lambda: len(owners(server.url)) == PARTITIONS), worker.log
        os.kill(server.pid, signal.SIGSTOP)  # so that handing over takes until the sockets give up
        worker.process.terminate()
        assert worker.says("once more leaves at once")
        began_s = time.monotonic()
        assert worker.end(signal.SIGTERM) == 128 + signal.SIGTERM
        assert time.monotonic() - began_s < 3
        os.kill(server.pid, signal.SIGCONT)


def test_what_cannot_end_in_time_is_cut_short_and_says_so(pipeline: Path) -> None:
    with (
        ValkeyServer() as server,
        Bargein("control", "--grace-s", "0.2", redis_url=server.url, pipeline=pipeline) as worker,
    ):
        assert wait_until(lambda: len(owners(server.url)) == PARTITIONS), worker.log
        os.kill(server.pid, signal.SIGSTOP)
        assert worker.end() == 1
        assert "not finished within 0.2 s" in worker.log
        os.kill(server.pid, signal.SIGCONT)


def test_a_server_that_may_evict_keys_is_refused_with_what_to_do(pipeline: Path) -> None:
    with ValkeyServer() as server, Redis.from_url(server.url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        with Bargein("control", redis_url=server.url, pipeline=pipeline, log_level="error") as worker:
            assert worker.process.wait(20) == 3
            (line,) = worker.log.splitlines()
            assert "CONFIG SET maxmemory-policy noeviction" in line


def test_a_server_with_another_number_of_partitions_is_refused(url: str, tmp_path: Path) -> None:
    file = tmp_path / "other.yaml"
    file.write_text("partitions: 5\npolicy: null\n")
    with Bargein("control", redis_url=url, pipeline=file, log_level="error") as worker:
        assert worker.process.wait(20) == 3
        assert f"says partitions = {PARTITIONS}, this process is set to 5" in worker.log


def test_a_password_from_a_file_opens_the_server_and_is_in_no_process_title(pipeline: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hush\n")
    with ValkeyServer() as server:
        with Redis.from_url(server.url) as client:
            client.config_set("requirepass", "hush")
        settings: dict[str, Any] = {"redis_url": server.url, "redis_password_file": secret, "pipeline": pipeline}

        def is_owned() -> bool:
            rows = json.loads(run("partitions", "--json", **settings).stdout)
            return bool(rows) and all(row["owner"] for row in rows)

        with Bargein("control", **settings) as worker:
            assert wait_until(is_owned), worker.log
            title = subprocess.run(["ps", "-o", "args=", "-p", str(worker.pid)], capture_output=True, check=True).stdout
            assert b"workers.cli" in title
            assert b"hush" not in title
            assert worker.end() == 0
            assert "hush" not in worker.log
        done = run("partitions", redis_url=server.url)
        assert done.exit_code == 3
        assert "refuses the credentials" in done.stderr


# ---- what can be seen


def test_the_partitions_show_their_owner(url: str) -> None:
    rows = ask("partitions", url)
    assert [row["partition"] for row in rows] == list(range(PARTITIONS))
    assert {row["owner"] for row in rows} == set(owners(url).values())
    assert all(0 < row["lease_left_ms"] <= 2_000 for row in rows)
    table = run("partitions", redis_url=url).stdout
    assert table.splitlines()[0].split()[:3] == ["P", "OWNER", "LEASE"]
    assert len(table.splitlines()) == 1 + PARTITIONS


def test_the_control_worker_is_shown_with_what_it_owns(url: str) -> None:
    (row,) = ask("workers", url)
    assert (row["role"], row["partitions"]) == ("control", list(range(PARTITIONS)))
    done = run("workers", redis_url=url)
    assert "0-3" in done.stdout
    assert "no stage workers" in done.stderr


def test_a_session_is_listed_while_it_lives_and_remembered_as_vacant(url: str) -> None:
    name = "listed-" + "x" * 100
    assert (
        send(url, {"op": "open", "session_id": name}, {"op": "touch", "activity": "detach", "session_id": name})[0] == 0
    )
    (row,) = [row for row in ask("sessions", url) if row["session_id"] == name]
    assert (row["phase"], row["partition"]) == ("open", partition_of(name, PARTITIONS))
    assert row["detached_ms"] is not None
    # Elsewhere than on a terminal no cell is cut, and there are no control codes.
    table = run("sessions", redis_url=url).stdout
    assert name in table
    assert "\x1b" not in table
    assert ask("sessions", url, "--phase", "closing") == []
    assert send(url, {"op": "close", "session_id": name})[0] == 0
    assert name not in {row["session_id"] for row in ask("sessions", url)}
    assert name in {row["session_id"] for row in ask("sessions", url, "--phase", "vacant")}


def test_a_limit_is_pointed_out(url: str) -> None:
    names = ["limited-1", "limited-2", "limited-3"]
    assert send(url, *[{"op": "open", "session_id": name} for name in names])[0] == 0
    done = run("sessions", "--limit", "2", "--json", redis_url=url)
    assert len(json.loads(done.stdout)) == 2
    assert "--limit shows more" in done.stderr


def test_an_empty_server_is_shown_as_empty(redis_url: str) -> None:
    for command in ("sessions", "cleanups", "workers", "partitions"):
        assert ask(command, redis_url) == []
        done = run(command, redis_url=redis_url)
        assert done.exit_code == 0
        assert done.stdout == ""
        assert done.stderr.startswith("no ")


# ---- what can be sent


def test_what_a_command_leaves_out_is_put_in(url: str) -> None:
    session = {"session_id": "sent"}
    status, replies = send(
        url,
        {"op": "open", **session},
        {"op": "append", "mode": "turn_commit_only", "payload": [1], **session},
        {"op": "signal", "event": "barge_in", **session},
        {"op": "append", "mode": "turn_commit_only", "payload": [2], "final": True, **session},
        {"op": "close", **session},
    )
    assert status == 0
    assert [reply["op"] for reply in replies] == ["open", "append", "signal", "append", "close"]
    assert replies[2]["detail"]["next_fence"] == {"incarnation": 0, "epoch": 1, "turn_id": 1, "response_seq": 0}
    assert replies[3]["fence"]["epoch"] == 1
    # The id lives again, in its next life.
    status, replies = send(url, {"op": "open", **session})
    assert (status, replies[0]["fence"]["incarnation"]) == (0, 1)


def test_what_a_command_says_is_sent_as_it_is(url: str) -> None:
    session = {"session_id": "exact"}
    fence = {"incarnation": 7, "epoch": 0, "turn_id": 3, "response_seq": 0}
    status, replies = send(
        url,
        {"op": "open", "v": 1, "control_id": "mine", "fence": fence, **session},
        {"op": "touch", "activity": "heartbeat", "fence": {"incarnation": 6}, **session},
        {"op": "touch", "activity": "heartbeat", "fence": [], **session},
        {"op": "touch", "v": 99, "activity": "heartbeat", **session},
        {"op": "sing", **session},
    )
    assert status == 1
    assert (replies[0]["control_id"], replies[0]["fence"]) == ("mine", fence)
    codes = ["stale_fence", "invalid_argument", "unsupported_version", "invalid_argument"]
    assert [reply["code"] for reply in replies[1:]] == codes


def test_commands_come_from_stdin_on_as_many_lines_as_they_like(url: str) -> None:
    text = '{"op": "open",\n "session_id": "piped"}\n\n{"op": "close", "session_id": "piped"} '
    done = run("send", "-", given=text, redis_url=url)
    assert done.exit_code == 0
    assert [json.loads(line)["op"] for line in done.stdout.splitlines()] == ["open", "close"]


def test_a_payload_comes_from_a_file(url: str, tmp_path: Path) -> None:
    file = tmp_path / "frame.raw"
    file.write_bytes(bytes(range(256)) * 10)
    assert send(url, {"op": "open", "session_id": "loaded"})[0] == 0
    append = {"op": "append", "mode": "turn_commit_only", "session_id": "loaded"}
    assert send(url, append, flags=("--payload-file", str(file)))[0] == 0
    # Both at once is something that only an entry with a raw payload can be refused for.
    status, replies = send(url, {**append, "payload": 1}, flags=("--payload-file", str(file)))
    assert (status, replies[0]["code"]) == (1, "invalid_argument")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{"], "command 1 is not JSON"),
        (['{"session_id": "s", "n": NaN}'], "NaN is no JSON"),
        (['{"session_id": "s"} [1]'], "command 2 is not a JSON object but list"),
        (['{"op": "open"}'], "command 1: session_id is missing"),
        (['{"session_id": 5}'], "command 1: session_id is missing or no text"),
        ([" "], "no command given"),
        (["--payload-file", "x", '{"session_id": "s", "op": "open"}'], "goes with one command, an append"),
        (["--payload-file", "/nowhere/x", '{"session_id": "s", "op": "append"}'], "/nowhere/x cannot be read"),
    ],
)
def test_what_is_no_command_is_refused_before_it_is_sent(words: list[str], said: str, url: str) -> None:
    done = run("send", *words, redis_url=url)
    assert done.exit_code == 2
    assert said in done.stderr


def test_no_reply_in_time_has_a_status_of_its_own(redis_url: str) -> None:
    with Redis.from_url(redis_url) as client:
        client.hset(keys.CONFIG, mapping={"protocol": 1, "partitions": PARTITIONS, "layout": 1})
        done = run("send", "--timeout-s", "0.1", '{"op": "open", "session_id": "s"}', redis_url=redis_url)
        assert done.exit_code == 4
        assert "within 0.1 s" in done.stderr
        assert client.xlen(PartitionKeys(partition_of("s", PARTITIONS)).commands) == 1
        done = run("send", "--timeout-s", "0", '{"op": "open", "session_id": "s"}', redis_url=redis_url)
        assert (done.exit_code, done.output) == (0, "")


def test_where_no_process_has_ever_run_there_is_nobody_to_send_to(redis_url: str) -> None:
    for command in (["send", '{"op": "open", "session_id": "s"}'], ["tail", "s"]):
        done = run(*command, redis_url=redis_url)
        assert done.exit_code == 3
        assert "no process of bargein has started" in done.stderr


# ---- what can be heard


def test_the_tail_of_a_session_that_has_ended_is_its_whole_story(url: str) -> None:
    session = {"session_id": "told"}
    send(url, {"op": "open", **session}, {"op": "signal", "event": "barge_in", **session}, {"op": "close", **session})
    done = run("tail", "--json", "told", redis_url=url)
    assert done.exit_code == 0
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["n"] for event in events] == list(range(1, len(events) + 1))
    assert {event["t"] for event in events} == {"reply", "lifecycle"}
    lifecycle = [event["body"]["event"] for event in events if event["t"] == "lifecycle"]
    assert lifecycle[:2] == ["opened", "interrupted"]
    assert lifecycle[-1] == "closed"
    told = run("tail", "told", redis_url=url).stdout
    assert "interrupted, cancelled 0/0/0/0" in told
    assert "gap" not in told


def test_a_tail_points_out_what_is_missing(url: str) -> None:
    session = {"session_id": "cut"}
    send(
        url,
        {"op": "open", **session},
        *[{"op": "touch", "activity": "heartbeat", **session}] * 3,
        {"op": "close", **session},
    )
    with Redis.from_url(url) as client:
        name = PartitionKeys(partition_of("cut", PARTITIONS)).events("cut")
        entries = client.xrange(name)
        client.xdel(name, entries[0][0], entries[3][0], entries[4][0])
    done = run("tail", "cut", redis_url=url)
    assert [line.strip() for line in done.stdout.splitlines() if "missing" in line] == [
        "-- 1 event is missing here: cut before read",
        "-- 2 events are missing here: cut before read",
    ]
    lines = [json.loads(line) for line in run("tail", "--json", "cut", redis_url=url).stdout.splitlines()]
    assert [line["missing"] for line in lines if line["t"] == "gap"] == [1, 2]


def test_a_tail_follows_until_the_end_and_into_the_next_life_if_asked(url: str) -> None:
    session = {"session_id": "followed"}
    with (
        Bargein("tail", "followed", redis_url=url) as to_the_end,
        Bargein("tail", "followed", "--follow", redis_url=url) as further,
    ):
        assert to_the_end.says("no events of session 'followed' yet")
        assert further.says("no events of session 'followed' yet")
        send(url, {"op": "open", **session}, {"op": "close", **session})
        assert to_the_end.process.wait(10) == 0
        assert "closed, client_close" in to_the_end.output
        send(url, {"op": "open", **session})
        assert wait_until(lambda: further.output.count("opened") == 2), further.output
        with Bargein("tail", "followed", "--from", "now", redis_url=url) as late:
            assert late.says("waiting")
            send(url, {"op": "touch", "activity": "heartbeat", **session})
            assert wait_until(lambda: "touch" in late.output)
            assert "opened" not in late.output
            assert "missing" not in late.output + further.output
            assert late.end(signal.SIGINT) == 0
        assert further.end(signal.SIGINT) == 0
        assert further.log.count("\n") == 1


def test_a_tail_survives_a_restart_of_redis(pipeline: Path) -> None:
    with ValkeyServer() as server:
        with Redis.from_url(server.url) as client:
            client.hset(keys.CONFIG, mapping={"protocol": 1, "partitions": PARTITIONS, "layout": 1})
        with Bargein("tail", "s", redis_url=server.url) as tail:
            assert tail.says("waiting")
            server.restart(crash=True)
            assert tail.says("the connection to Redis is lost")
            assert tail.says("Redis is back")
            with Redis.from_url(server.url) as client:
                name = PartitionKeys(partition_of("s", PARTITIONS)).events("s")
                client.xadd(name, {"t": "poem", "n": 1, "b": b"\x81\xa1a\x01"})
                client.xadd(name, {"b": b"\xff"})
            assert wait_until(lambda: "poem" in tail.output and "unreadable" in tail.output), tail.output


def test_a_reader_that_has_gone_is_no_trouble_with_redis(redis_url: str) -> None:
    with Redis.from_url(redis_url) as client:
        client.hset(keys.CONFIG, mapping={"protocol": 1, "partitions": PARTITIONS, "layout": 1})
        name = PartitionKeys(partition_of("s", PARTITIONS)).events("s")
        for number in range(1, 3_000):
            client.xadd(name, {"t": "output", "n": number, "b": b"\x80"})
    command = [sys.executable, "-m", "workers.cli", "tail", "s"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=clean_environment(redis_url=redis_url)
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert b"output" in process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(20) == 1
