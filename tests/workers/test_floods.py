"""Floods: more commands, sessions or bytes than anybody should send. Memory stays bounded, nothing is lost (S14, S24).

Real processes on a real server; the memory is what the kernel says of the process at its highest.
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import redis

from control.store.keys import PartitionKeys, partition_of
from control.wire.events import decode_event
from tests.workers.cli_process import Bargein, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable

PARTITIONS = 8
FENCE = {"incarnation": 0, "epoch": 0, "turn_id": 0, "response_seq": 0}
MIB = 1024 * 1024
PATIENCE_S = 120.0
PIPELINE = f"partitions: {PARTITIONS}\npolicy: null\nstages: []\n"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux how much memory a process has had")


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    path = tmp_path / "pipeline.yaml"
    path.write_text(PIPELINE)
    return path


@pytest.fixture
def server(redis_url: str) -> Any:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def highest_mib(worker: Bargein) -> float:
    """The most memory that the process has had so far."""
    lines = Path(f"/proc/{worker.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def send(server: Any, commands: Iterable[dict[str, Any]], payload: bytes | None = None) -> int:
    """Commands, each into its partition's stream; how many."""
    sent = 0
    with server.pipeline(transaction=False) as pipe:
        for command in commands:
            fields: dict[Any, Any] = {"b": msgspec.msgpack.encode({"v": 1, "fence": FENCE, **command})}
            if payload is not None:
                fields["p"] = payload
            pipe.xadd(PartitionKeys(partition_of(command["session_id"], PARTITIONS)).commands, fields)
            sent += 1
            if sent % 1_000 == 0:
                pipe.execute()
        pipe.execute()
    return sent


def open_all(server: Any, names: Iterable[str]) -> None:
    send(server, ({"op": "open", "control_id": f"open-{s}", "session_id": s, "capabilities": {}} for s in names))


def backlog(server: Any) -> int:
    return sum(server.xlen(PartitionKeys(p).commands) for p in range(PARTITIONS))


def replies(server: Any, session_id: str) -> dict[str, str | None]:
    """Code of each reply by control id, as far as the session's stream still has them."""
    keys = PartitionKeys(partition_of(session_id, PARTITIONS))
    entries = server.xrange(keys.events(session_id))
    bodies = [decode_event(fields[b"b"]) for _, fields in entries if fields[b"t"] == b"reply"]
    return {body["control_id"]: body["code"] for body in bodies}


def in_partition(partition: int, count: int) -> list[str]:
    names = (f"call-{number}" for number in range(100_000))
    return list(islice((name for name in names if partition_of(name, PARTITIONS) == partition), count))


def test_a_partition_with_100_000_commands_waiting_is_worked_off_in_little_memory(server: Any, pipeline: Path) -> None:
    sessions = in_partition(3, 50)
    open_all(server, sessions)
    touches = (
        {"op": "touch", "control_id": f"t{n}", "session_id": sessions[n % 50], "activity": "heartbeat"}
        for n in range(100_000)
    )
    assert send(server, touches) == 100_000
    with Bargein("control", "--pipeline", str(pipeline), redis_url=server_url(server)) as worker:
        assert wait_until(lambda: backlog(server) < 99_000, PATIENCE_S), worker.log
        before = highest_mib(worker)
        # Others are served meanwhile.
        neighbour = in_partition(4, 1)[0]
        open_all(server, [neighbour])
        assert wait_until(lambda: bool(replies(server, neighbour)), PATIENCE_S), worker.log
        assert backlog(server) > 0, "the flood was over before it could disturb anybody"
        assert wait_until(lambda: backlog(server) == 0, PATIENCE_S), worker.log
        assert highest_mib(worker) < before + 100
    assert all(replies(server, session)[f"open-{session}"] is None for session in sessions[:1])
    assert server.xlen(PartitionKeys(3).dead) == 0


def test_a_flood_of_large_appends_is_read_in_bounded_portions(server: Any, pipeline: Path) -> None:
    sessions = [name for partition in range(PARTITIONS) for name in in_partition(partition, 5)]
    open_all(server, sessions)
    appends = [
        {"op": "append", "control_id": f"a{n}", "session_id": session, "mode": "turn_commit_only"}
        for n in range(8)
        for session in sessions
    ]
    count = send(server, appends, payload=bytes(MIB))
    assert count == 320
    with Bargein("control", "--pipeline", str(pipeline), redis_url=server_url(server)) as worker:
        assert wait_until(lambda: backlog(server) == 0, PATIENCE_S), worker.log
        highest = highest_mib(worker)
    for session in sessions:
        assert [replies(server, session)[f"a{n}"] for n in range(8)] == [None] * 8
    # In one read they would have been 320 MiB beside the 60 of the process.
    assert highest < 220, highest


def test_a_flood_of_appends_to_one_session_is_refused_retryably_and_its_order_stays(
    server: Any, pipeline: Path, redis_url: str
) -> None:
    pipeline.write_text("partitions: 8\nstages: [{name: ear, engine: parrot}]\n")
    victim = in_partition(2, 1)[0]
    with (
        Bargein("control", "--pipeline", str(pipeline), redis_url=redis_url) as worker,
        Bargein("stage", "--stage", "ear", "--pipeline", str(pipeline), redis_url=redis_url),
    ):

        def is_open() -> bool:
            modes = {"input_modes": ["append_tokens"]}
            opening = {"op": "open", "control_id": "open", "session_id": victim, "capabilities": modes}
            send(server, [opening])
            return wait_until(lambda: replies(server, victim).get("open", "") is None, 1.0)

        assert wait_until(is_open), worker.log
        appends = (
            {"op": "append", "control_id": f"a{n}", "session_id": victim, "mode": "append_tokens"} for n in range(3_000)
        )
        send(server, appends, payload=msgspec.msgpack.encode([1]))
        assert wait_until(lambda: backlog(server) == 0, PATIENCE_S), worker.log
        answered = replies(server, victim)
        codes = [answered.get(f"a{n}", "cut") for n in range(3_000)]
        assert set(codes) <= {None, "resource_exhausted", "cut"}
        assert "resource_exhausted" in codes
        assert wait_until(lambda: send(server, [_touch(victim, "after")]) == 1 and "after" in replies(server, victim))


def test_a_flood_of_sessions_is_held_in_bounded_memory(server: Any, pipeline: Path) -> None:
    names = [f"call-{number}" for number in range(20_000)]
    with Bargein("control", "--pipeline", str(pipeline), redis_url=server_url(server)) as worker:
        open_all(server, names[:100])
        assert wait_until(lambda: backlog(server) == 0, PATIENCE_S), worker.log
        before = highest_mib(worker)
        open_all(server, names[100:])
        assert wait_until(lambda: backlog(server) == 0, PATIENCE_S), worker.log
        # About 2.5 kB for each that is kept, and as much again while it is decided and committed.
        assert highest_mib(worker) < before + 150
        assert replies(server, names[-1]) == {f"open-{names[-1]}": None}


def _touch(session_id: str, control_id: str) -> dict[str, Any]:
    return {"op": "touch", "control_id": control_id, "session_id": session_id, "activity": "heartbeat"}


def server_url(server: Any) -> str:
    kwargs = server.connection_pool.connection_kwargs
    return f"redis://{kwargs['host']}:{kwargs['port']}/0"
