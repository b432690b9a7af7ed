"""Redis over TLS with client certificates: who gets in, and what the others are told. On Debian's Redis 7.0."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis
from redis.exceptions import RedisError

from bargein_client import AsyncBargein, Bargein, Lifecycle, Options, Output, UnreachableError
from control.store.server import Unusable
from stages.pipeline import Pipeline
from tests.servers import RealServer, why_no_redis
from tests.system import RunningSystem
from tests.workers.cli_process import run
from workers.control import ControlWorker
from workers.stage import StageWorker

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.redis7,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="the command openssl isn't installed"),
]

FRAME = bytes(range(256)) * 2 + bytes(128)
PATIENCE_S = 20.0
# In TLS 1.3 a client has said its first words before it hears that it isn't wanted; the reset may overtake the reason.
GONE = "closed|reset"


def openssl(*words: str, into: Path) -> None:
    subprocess.run(["openssl", *words], cwd=into, check=True, capture_output=True, timeout=30)


class Authority:
    """A certificate authority of a test's own, in a directory; `issue` makes `<name>.pem` and `<name>.key`."""

    def __init__(self, directory: Path, name: str) -> None:
        directory.mkdir()
        self.directory = directory
        self.certificate = directory / "ca.pem"
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "ca.key")
        openssl("req", "-x509", *key, "-out", "ca.pem", "-days", "2", "-subj", f"/CN={name}", into=directory)

    def issue(self, name: str, *addresses: str) -> tuple[Path, Path]:
        """A certificate for a host or a client, and its key."""
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{name}.key")
        openssl("req", *key, "-out", f"{name}.csr", "-subj", f"/CN={name}", into=self.directory)
        (self.directory / "extra").write_text(f"subjectAltName={','.join(addresses) or f'DNS:{name}'}\n")
        authority = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "extra")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *authority, into=self.directory)
        return self.directory / f"{name}.pem", self.directory / f"{name}.key"


class TlsServer(RealServer):
    """Redis 7.0 that speaks TLS only, to clients with a certificate of `authority`."""

    def __init__(self, binary: Path, authority: Authority) -> None:
        super().__init__(binary)
        self.authority = authority
        self._own = authority.issue("server", "IP:127.0.0.1")
        self._client = authority.issue("worker")

    @property
    def url(self) -> str:
        certificate, key = self._client
        return self.url_with(ssl_ca_certs=self.authority.certificate, ssl_certfile=certificate, ssl_keyfile=key)

    def url_with(self, host: str = "127.0.0.1", /, **options: Any) -> str:
        """Where to connect, with these options of redis-py; the host's name is checked unless they say otherwise."""
        words = {"ssl_check_hostname": "true", **options}
        return f"rediss://{host}:{self.port}/0?" + "&".join(f"{name}={value}" for name, value in words.items())

    def command_line(self) -> list[str]:
        certificate, key = self._own
        settings = {
            "port": "0",
            "tls-port": str(self.port),
            "tls-cert-file": str(certificate),
            "tls-key-file": str(key),
            "tls-ca-cert-file": str(self.authority.certificate),
            "tls-auth-clients": "yes",
        }
        return [*super().command_line(), *(word for name, value in settings.items() for word in (f"--{name}", value))]

    def _answers(self, pid: int) -> bool:
        with contextlib.suppress(RedisError, OSError), self.client() as client:
            about: Any = client.info("server")
            return about["process_id"] == pid
        return False


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    """Ours, and somebody else's under the same name."""
    directory = tmp_path_factory.mktemp("tls")
    return Authority(directory / "ours", "authority"), Authority(directory / "other", "authority")


@pytest.fixture(scope="module")
def server(authorities: tuple[Authority, Authority]) -> Iterator[TlsServer]:
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip(why_no_redis() or "")
    with TlsServer(Path(binary), authorities[0]) as server:
        yield server


@pytest.fixture(autouse=True)
def _empty(server: TlsServer) -> None:
    server.flush()


async def test_a_conversation_with_a_barge_in_over_tls(server: TlsServer) -> None:
    async with RunningSystem(server.url), AsyncBargein(server.url) as client, asyncio.timeout(PATIENCE_S):
        talk = await client.open(input_modes=["append_audio_chunk"])
        await talk.append(FRAME, final=True)
        assert (await talk.interrupt()).ok
        await talk.append(FRAME, final=True)
        async for event in talk.events():
            if isinstance(event, Output) and event.fence.epoch == 1:
                break
        assert (await talk.close()).ok
        async for event in talk.events():
            if isinstance(event, Lifecycle) and event.terminal:
                break


def test_the_command_line_and_the_synchronous_client_speak_tls(server: TlsServer) -> None:
    assert run("partitions", redis_url=server.url).exit_code == 0
    with server.client() as client:
        client.hset("bargein:config", mapping={"protocol": 1, "partitions": 1})
    with Bargein(server.url):
        pass


@pytest.fixture(params=["wrong authority", "no client certificate", "a stranger's certificate", "another host"])
def refusal(
    request: pytest.FixtureRequest, server: TlsServer, authorities: tuple[Authority, Authority]
) -> tuple[str, str]:
    """A URL that won't do, and what the message must say."""
    ours, others = authorities
    certificate, key = server._client
    options: dict[str, Any]
    match request.param:
        case "wrong authority":
            options = {"ssl_ca_certs": others.certificate, "ssl_certfile": certificate, "ssl_keyfile": key}
            return server.url_with(**options), "certificate verify failed|CERTIFICATE_VERIFY_FAILED"
        case "no client certificate":
            return server.url_with(ssl_ca_certs=ours.certificate), f"certificate required|CERTIFICATE_REQUIRED|{GONE}"
        case "a stranger's certificate":
            certificate, key = others.issue("stranger")
            options = {"ssl_ca_certs": ours.certificate, "ssl_certfile": certificate, "ssl_keyfile": key}
            return server.url_with(**options), f"unknown ca|UNKNOWN_CA|decrypt error|DECRYPT_ERROR|{GONE}"
        case _:
            options = {"ssl_ca_certs": ours.certificate, "ssl_certfile": certificate, "ssl_keyfile": key}
            return server.url_with("localhost", **options), "[Hh]ostname mismatch"


async def test_workers_that_can_not_trust_or_are_not_trusted_say_why(
    server: TlsServer, refusal: tuple[str, str]
) -> None:
    url, says = refusal
    for worker in (ControlWorker(url, Pipeline.example()), StageWorker(url, Pipeline.example(), 0)):
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(Unusable, match=f"can't be reached.*({says})"):
                await worker.run()


async def test_a_client_that_can_not_trust_or_is_not_trusted_says_why(
    server: TlsServer, refusal: tuple[str, str]
) -> None:
    url, says = refusal
    client = AsyncBargein(url, options=Options(unreachable_after_s=1.0))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(UnreachableError, match=says):
            await client.connect()
    await client.aclose()


def test_the_command_line_says_why(server: TlsServer, refusal: tuple[str, str]) -> None:
    url, _ = refusal
    done = run("partitions", redis_url=url)
    assert done.exit_code == 3
    assert "can't be reached" in done.output
    assert "ssl_keyfile" not in done.output


def test_without_tls_nobody_gets_in(server: TlsServer) -> None:
    with redis.Redis(port=server.port, socket_timeout=5) as client, pytest.raises(RedisError):
        client.ping()
