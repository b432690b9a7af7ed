"""The servers that other tests stand on: they start, are ours, restart, and never outlive us."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as ServerGone

from tests.servers import RealServer, RedisServer, ValkeyServer
from workers.embedded import EmbeddedServer, ServerError, ServerProcess, require_valkey_binary

if TYPE_CHECKING:
    import fakeredis

SHIPPED = Path(__file__).parent.parent / "deploy" / "redis" / "redis.conf"
BOTH = pytest.mark.parametrize(
    "kind", [ValkeyServer, pytest.param(RedisServer, marks=pytest.mark.redis7)], ids=["valkey", "redis7"]
)

# What the EmbeddedServer's owner looks like from outside: prints the server's pid, then waits to be killed.
OWNER = """
import asyncio, pathlib, sys
from workers.embedded import EmbeddedServer
async def main():
    server = EmbeddedServer()
    await server.start(pathlib.Path(sys.argv[1]))
    print(server._server.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def is_gone(pid: int, within_s: float = 20) -> bool:
    """Whether the process ends in time; one that only waits to be reaped by an init is gone too."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        command = ["ps", "-o", "stat=", "-p", str(pid)]
        state = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        if not state or state.startswith("Z"):
            return True
        time.sleep(0.05)
    return False


def test_any_server_is_empty_and_runs_scripts(any_server: RealServer) -> None:
    with any_server.client() as client:
        assert client.dbsize() == 0
        script = "#!lua flags=allow-oom\nreturn redis.call('SET', KEYS[1], ARGV[1])"
        assert client.eval(script, 1, "key", "value")
        assert client.get("key") == b"value"


def test_the_server_evicts_nothing_and_keeps_stream_nodes_small(any_server: RealServer) -> None:
    with any_server.client() as client:
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.config_get("stream-node-max-bytes") == {"stream-node-max-bytes": "1024"}


@pytest.mark.redis7
def test_the_redis_under_test_is_a_seven_point_zero(redis7: RedisServer) -> None:
    with redis7.client() as client:
        version = client.info("server")["redis_version"]
    if not version.startswith("7.0."):
        pytest.skip(f"redis-server here is {version}, the tests named redis7 run on it all the same")
    assert version.startswith("7.0.")


async def test_an_embedded_server_answers_at_its_url_until_it_is_stopped(tmp_path: Path) -> None:
    server = EmbeddedServer()
    url = await server.start(tmp_path / "made" / "for" / "it")
    async with Redis.from_url(url) as client:
        assert await client.ping()
    assert server.url == url
    await server.stop()
    await server.stop()
    async with Redis.from_url(url) as client:
        with pytest.raises(ServerGone):
            await client.ping()
    with pytest.raises(ServerError):
        _ = server.url


@pytest.mark.parametrize("persist", [True, False])
async def test_an_embedded_server_keeps_its_keys_only_if_asked(tmp_path: Path, persist: bool) -> None:
    for expected in (None, b"value" if persist else None):
        server = EmbeddedServer()
        async with Redis.from_url(await server.start(tmp_path, persist=persist)) as client:
            assert await client.get("key") == expected
            await client.set("key", "value")
        await server.stop()


async def test_an_embedded_server_that_forgets_leaves_what_a_persistent_one_kept(tmp_path: Path) -> None:
    for persist, expected in ((True, None), (False, None), (True, b"kept")):
        server = EmbeddedServer()
        async with Redis.from_url(await server.start(tmp_path, persist=persist)) as client:
            assert await client.get("key") == expected
            await client.set("key", "kept" if persist else "not kept")
        await server.stop()


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_an_embedded_server_ends_with_its_owner_however_that_ends(tmp_path: Path, by: signal.Signals) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=here) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        owner.send_signal(by)
    assert is_gone(pid)


@BOTH
def test_a_persistent_server_has_its_keys_again_after_a_crash(kind: type[ValkeyServer | RedisServer]) -> None:
    with kind(persist=True) as server:
        url, first = server.url, server.pid
        with server.client() as client:
            client.set("key", "value")
        assert server.restart(crash=True) == url
        assert server.pid != first
        with server.client() as client:
            assert client.get("key") == b"value"


@BOTH
def test_a_server_is_empty_again_after_a_restart(kind: type[ValkeyServer | RedisServer]) -> None:
    with kind() as server:
        with server.client() as client:
            client.set("key", "value")
        server.restart()
        with server.client() as client:
            assert client.dbsize() == 0


def test_a_stopped_process_is_still_ended(tmp_path: Path) -> None:
    server = ServerProcess(require_valkey_binary(), tmp_path)
    server.start()
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    server.stop()
    assert is_gone(pid)
    assert not server.running


def test_arguments_given_last_win() -> None:
    with ValkeyServer(args=["--maxmemory", "8mb", "--databases", "3"]) as server, server.client() as client:
        assert client.config_get("maxmemory") == {"maxmemory": str(8 * 1024 * 1024)}
        assert client.config_get("databases") == {"databases": "3"}


def test_a_wrong_argument_is_refused_with_the_servers_own_words(tmp_path: Path) -> None:
    server = ServerProcess(require_valkey_binary(), tmp_path, args=["--no-such-setting", "1"])
    with pytest.raises(ServerError, match="no-such-setting"):
        server.start()
    assert not server.running


def test_a_taken_port_is_refused_and_whoever_has_it_is_not_mistaken_for_us(
    tmp_path: Path, valkey: ValkeyServer
) -> None:
    server = ServerProcess(require_valkey_binary(), tmp_path, port=valkey.port)
    with pytest.raises(ServerError, match=str(valkey.port)):
        server.start()
    assert valkey.running


def test_another_port_is_tried_if_a_free_one_was_taken_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as free:
        offers = [taken.getsockname()[1], free.getsockname()[1]]
        free.close()
        monkeypatch.setattr("workers.embedded._free_port", lambda: offers.pop(0))
        server = ServerProcess(require_valkey_binary(), tmp_path)
        try:
            server.start()
            assert not offers
        finally:
            server.stop()


def test_a_running_server_is_not_started_twice(tmp_path: Path) -> None:
    server = ServerProcess(require_valkey_binary(), tmp_path)
    server.start()
    try:
        with pytest.raises(ServerError, match="running already"):
            server.start()
        assert server.running
    finally:
        server.stop()


@BOTH
def test_the_shipped_settings_are_understood_by_every_server(kind: type[ValkeyServer | RedisServer]) -> None:
    lines = [line.split(maxsplit=1) for line in SHIPPED.read_text().splitlines() if line and line[0] != "#"]
    wanted = {name: value.strip('"') for name, value in lines}
    words = [[f"--{name}", *(value.split() or [""])] for name, value in wanted.items()]
    server = kind(args=[word for setting in words for word in setting])
    with server, server.client() as client:
        for name in ("appendonly", "appendfsync", "maxmemory-policy", "save", "stream-node-max-bytes"):
            assert client.config_get(name) == {name: wanted[name]}


async def test_the_fake_wakes_a_blocked_reader_and_runs_scripts(fake: fakeredis.FakeAsyncRedis) -> None:
    assert await fake.eval("return redis.call('SET', KEYS[1], ARGV[1])", 1, "key", "value")
    reader = asyncio.ensure_future(fake.xread({"stream": "0"}, block=10_000))
    await asyncio.sleep(0)
    entry = await fake.xadd("stream", {"b": b"\x00\xff"})
    assert await reader == [[b"stream", [(entry, {b"b": b"\x00\xff"})]]]
