"""`bargein up`: everything in one command, a conversation with it, and an end that leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from typing import TYPE_CHECKING, Any

from redis import Redis

from control.core.cleanup import Cleanup, CleanupKind
from control.store.keys import PartitionKeys, partition_of
from control.wire.stage import encode
from tests.test_servers import is_gone
from tests.workers.cli_process import Bargein, run, wait_until

if TYPE_CHECKING:
    from pathlib import Path

PARTITIONS = 4
TWO_PARROTS = f"""
partitions: {PARTITIONS}
stages:
  - {{name: thinker, engine: parrot, options: {{pace: realtime, frame_ms: 20}}}}
  - {{name: voice, engine: parrot, options: {{pace: fast, reply: stream}}}}
"""
NO_STAGES = f"partitions: {PARTITIONS}\npolicy: null\n"


def running_on(up: Bargein) -> str:
    """Its server's URL, once everything is there."""
    assert up.says("ready, on"), up.log
    return up.output.strip()


def pids_of(up: Bargein) -> dict[str, int]:
    """The last process id that each child has told."""
    return {name: int(pid) for name, pid in re.findall(r"^(\w+) +\| .*\(pid (\d+)\)", up.log, re.MULTILINE)}


def children_of(pid: int) -> list[int]:
    """Direct children, whatever they are."""
    found = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in found.splitlines() if int(line.split()[1]) == pid]


def ask(command: str, url: str, *flags: str) -> list[dict[str, Any]]:
    done = run(command, "--json", *flags, redis_url=url)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def send(url: str, *commands: dict[str, Any]) -> list[dict[str, Any]]:
    done = run("send", "--json", *[json.dumps(command) for command in commands], redis_url=url)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_conversation_with_two_parrots_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(TWO_PARROTS)
    session = {"session_id": "talk"}
    with Bargein("up", "--port", "0", "--pipeline", str(file)) as up:
        url = running_on(up)
        assert f"export BARGEIN_REDIS_URL={url}" in up.log
        send(url, {"op": "open", "capabilities": {"input_modes": ["append_tokens"]}, **session})
        with Bargein("tail", "--json", "talk", redis_url=url) as tail:
            send(url, {"op": "append", "mode": "append_tokens", "payload": list(range(200)), "final": True, **session})
            assert wait_until(lambda: tail.output.count('"t":"output"') >= 3), tail.output
            rows = {row["stage"]: row for row in ask("workers", url) if row["role"] == "stage"}
            assert set(rows) == {"thinker", "voice"}
            assert {(row["state"], row["engine"], row["slots_used"]) for row in rows.values()} == {
                ("live", "parrot", 1)
            }
            assert all(row["last_beat_ms"] < 5_000 for row in rows.values())
            (row,) = ask("sessions", url)
            assert (row["phase"], row["submitted"], len(row["route"])) == ("open", 1, 2)
            (reply,) = send(url, {"op": "signal", "event": "barge_in", **session})
            assert reply["accepted_fence"]["epoch"] == 1
            assert ask("cleanups", url) == []
            send(url, {"op": "close", **session})
            assert tail.process.wait(10) == 0
            events = [json.loads(line) for line in tail.output.splitlines()]
        told = [e["body"].get("event") for e in events]
        outputs = [index for index, e in enumerate(events) if e["t"] == "output"]
        assert max(outputs) < told.index("interrupted"), "nothing old after the interruption (I1)"
        assert [e["n"] for e in events] == list(range(1, len(events) + 1))
        # Counters come with the next heartbeat.
        assert wait_until(lambda: "outputs_delivered=" in run("workers", redis_url=url).stdout)
        pids = [*pids_of(up).values(), *children_of(up.pid)]
        assert up.end() == 0, up.log
    assert all(is_gone(pid) for pid in pids)


def test_what_dies_is_started_again_and_everything_ends_with_it_even_if_it_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(NO_STAGES)
    flags = ["--port", "0", "--dir", str(tmp_path / "data"), "--persist"]
    with Bargein("up", *flags, pipeline=file) as up:
        url = running_on(up)
        send(url, {"op": "open", "session_id": "kept"})
        first = pids_of(up)["control"]
        os.kill(first, signal.SIGKILL)
        assert up.says("ended with signal SIGKILL; starting it again in 0.5 s")
        assert wait_until(lambda: pids_of(up)["control"] != first), up.log
        assert wait_until(lambda: all((row["lease_left_ms"] or 0) > 0 for row in ask("partitions", url))), up.log
        with Redis.from_url(url) as client:
            info: Any = client.info("server")
        os.kill(info["process_id"], signal.SIGKILL)
        assert up.says("the server is gone; starting it again")
        assert wait_until(lambda: run("sessions", redis_url=url).exit_code == 0), up.log
        assert [row["session_id"] for row in ask("sessions", url)] == ["kept"]
        send(url, {"op": "close", "session_id": "kept"})
        pids = children_of(up.pid)
        assert pids_of(up)["control"] in pids
        assert up.end(signal.SIGKILL) == -signal.SIGKILL
    assert all(is_gone(pid) for pid in pids)


def test_a_stage_that_can_never_start_ends_it_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(f"partitions: {PARTITIONS}\nstages: [{{name: owl, engine: 'tests.no_such:Owl'}}]\n")
    with Bargein("up", "--port", "0", pipeline=file) as up:
        assert up.process.wait(20) == 2, up.log
        assert "owl         | bargein: engine 'tests.no_such:Owl': there is no module" in up.log
        assert up.log.splitlines()[-1] == "bargein: owl can't run with this configuration; see above"


def test_a_port_that_is_taken_is_refused(redis_url: str, tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(NO_STAGES)
    port = redis_url.rpartition(":")[2].partition("/")[0]
    done = run("up", "--port", port, pipeline=file)
    assert done.exit_code == 3
    assert f"didn't start on port {port}" in done.stderr


def test_a_pending_cleanup_is_shown_with_whom_it_waits_for(redis_url: str) -> None:
    cleanup = Cleanup(2, CleanupKind.CANCEL, (0, 1, 2), ("thinker-1", "voice-1"), 4, 1, 2)
    with Redis.from_url(redis_url) as client:
        client.hset("bargein:config", mapping={"protocol": 1, "partitions": PARTITIONS, "layout": 1})
        known: Any = client
        known.hset(PartitionKeys(partition_of("stuck\x1b", PARTITIONS)).cleanups, "stuck\x1b", encode((cleanup,)))
    (row,) = ask("cleanups", redis_url)
    assert (row["session_id"], row["waits_for"], row["attempts"]) == ("stuck\x1b", ["thinker-1", "voice-1"], 4)
    header, line = run("cleanups", redis_url=redis_url).stdout.splitlines()
    assert header.split()[:4] == ["SESSION", "P", "NO", "KIND"]
    assert line.split()[0] == "stuck\\x1b"
    assert "cancel  0-2" in line
    assert line.rstrip().endswith("thinker-1 voice-1")
