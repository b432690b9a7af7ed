"""What is known about redis-py: which errors pass, how long a read may block, what its answers look like."""

from __future__ import annotations

import pytest
from redis import exceptions

from bargein_client import transport
from bargein_client.mailbox import Options

ENTRY = (b"1-0", {b"t": b"reply"})


@pytest.mark.parametrize("answer", [[[b"key", [ENTRY]]], {b"key": [[ENTRY]]}])
def test_entries_are_found_in_either_protocol_of_redis(answer: object) -> None:
    assert transport.entries_of(answer) == [ENTRY]


@pytest.mark.parametrize("answer", [None, [], {}])
def test_an_empty_read_has_no_entries(answer: object) -> None:
    assert transport.entries_of(answer) == []


def test_s57_a_read_blocks_shorter_than_its_socket_waits() -> None:
    own_s = transport.socket_settings(Options())["socket_timeout"]
    assert transport.block_ms(1e9, own_s) < own_s * 1000
    assert transport.block_ms(1e9, 0.4) == 200
    assert transport.block_ms(0.0, 0.4) == 1
    assert transport.block_ms(0.05, 10.0) == 50


@pytest.mark.parametrize(
    "error",
    [
        exceptions.ConnectionError("gone"),
        exceptions.TimeoutError("hangs"),
        exceptions.BusyLoadingError("loading"),
        exceptions.OutOfMemoryError("full"),
        exceptions.ReadOnlyError("a replica"),
        exceptions.ClusterDownError("down"),
        exceptions.ResponseError("BUSY running a script"),
        OSError("no route"),
    ],
)
def test_what_passes_is_waited_out(error: Exception) -> None:
    assert transport.passes(error)
    assert transport.unreachable(error).retryable


@pytest.mark.parametrize(
    "error",
    [
        exceptions.AuthenticationError("who are you"),
        exceptions.NoPermissionError("NOPERM"),
        exceptions.ResponseError("WRONGTYPE"),
    ],
)
def test_what_will_not_pass_is_not(error: Exception) -> None:
    assert not transport.passes(error)
    assert isinstance(error, transport.FAILED)
    assert not transport.unreachable(error).retryable


def test_the_clock_of_a_cluster_is_its_newest() -> None:
    assert transport.time_ms_of((12, 345_678)) == 12_345
    assert transport.time_ms_of({"a": (12, 0), "b": (13, 1_000)}) == 13_001
