"""A connection of one's own: order, errors in their places, and what happens when it breaks."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as TimedOut

from control.store.keys import PartitionKeys
from control.store.link import LOST, Link, make_pool
from control.store.scripts import script
from tests.servers import RealServer, ValkeyServer

KEYS = PartitionKeys(0)


@pytest.fixture
async def link(any_server: RealServer) -> AsyncIterator[Link]:
    pool = make_pool(any_server.url)
    link = Link(pool)
    yield link
    await link.close()
    await pool.disconnect()


async def test_answers_come_in_the_order_of_the_commands(link: Link) -> None:
    answers = await link.call_all([("SET", "n", 0), *[("INCR", "n")] * 500, ("GET", "n")])
    assert answers == [b"OK", *range(1, 501), b"500"]


async def test_every_kind_of_value_arrives_as_it_is(link: Link) -> None:
    blob = bytes(range(256)) * 5_000
    await link.call("HSET", "h", "bytes", blob, "text", "grüße\x00\r\n", "int", 2**53 - 1, "float", 0.25, "empty", b"")
    answer = await link.call("HGETALL", "h")
    found = dict(zip(answer[::2], answer[1::2], strict=True))
    assert found == {
        b"bytes": blob,
        b"text": "grüße\x00\r\n".encode(),
        b"int": b"9007199254740991",
        b"float": b"0.25",
        b"empty": b"",
    }


async def test_an_error_stands_in_its_place_and_the_others_are_answered(link: Link) -> None:
    first, wrong, last = await link.try_all([("SET", "text", "x"), ("INCR", "text"), ("GET", "text")])
    assert (first, last) == (b"OK", b"x")
    assert isinstance(wrong, ResponseError)
    with pytest.raises(ResponseError, match="not an integer"):
        await link.call_all([("INCR", "text"), ("SET", "after", "1")])
    assert await link.call("GET", "after") == b"1", "the answers were all read"


async def test_an_unknown_script_is_loaded_and_run_after_the_others(link: Link) -> None:
    calls = [(script("join"), ["controls"], ["control-a", 60_000]), (script("acquire"), [KEYS.owner], ["a", 1, "r"])]
    joined, taken = await link.run_all(calls)
    assert joined[2:] == [b"control-a"]
    assert taken[0] == 1
    await link.call("SCRIPT", "FLUSH")
    joined, wrong, again = await link.try_run_all(
        [calls[0], (script("acquire"), ["controls"], ["a", 1, "r"]), calls[0]]
    )
    assert joined[2:] == again[2:] == [b"control-a"]
    assert isinstance(wrong, ResponseError)


async def test_run_all_raises_the_first_error_answer(link: Link) -> None:
    await link.call("SET", KEYS.owner, "not ours")
    with pytest.raises(ResponseError):
        await link.run_all([(script("acquire"), [KEYS.owner], ["a", 1, "r"])])
    assert await link.call("PING") == b"PONG"


async def test_s52_a_cut_connection_is_an_error_and_the_next_call_opens_another(
    link: Link, any_server: RealServer
) -> None:
    first = await link.call("CLIENT", "ID")
    with any_server.client() as admin:
        admin.client_kill_filter(_id=str(first))
    with pytest.raises(LOST):
        await link.call("PING")
    assert await link.call("CLIENT", "ID") != first


async def test_s52_a_cancelled_read_never_answers_the_next_call(link: Link) -> None:
    await link.call("PING")
    waiting = asyncio.create_task(link.call("XREAD", "BLOCK", 4_000, "STREAMS", "nothing", "0-0"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await link.call("PING") == b"PONG"


async def test_s52_a_server_that_hangs_is_a_timeout_and_its_late_answer_is_nobodys() -> None:
    with ValkeyServer() as server:
        pool = make_pool(server.url, timeout_s=0.3)
        link = Link(pool)
        assert await link.call("SET", "n", 1) == b"OK"
        os.kill(server.pid, signal.SIGSTOP)
        try:
            with pytest.raises((TimedOut, *LOST)):
                await link.call("GET", "n")
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert await link.call("PING") == b"PONG"
        await link.close()
        await pool.disconnect()


async def test_s52_a_server_that_is_gone_is_lost_and_found_again_once_it_is_back() -> None:
    with ValkeyServer(persist=True) as server:
        pool = make_pool(server.url)
        link = Link(pool)
        await link.call("SET", "n", 1)
        server.kill()
        for _ in range(2):
            with pytest.raises(LOST):
                await link.call("GET", "n")
        server.start()
        assert await link.call("GET", "n") == b"1"
        await link.close()
        await pool.disconnect()


async def test_closing_twice_is_fine_and_a_call_after_it_opens_anew(link: Link) -> None:
    await link.call("PING")
    await link.close()
    await link.close()
    assert await link.call("PING") == b"PONG"


async def test_s57_the_time_out_is_set_on_reads_and_on_connecting(any_server: RealServer) -> None:
    pool = make_pool(any_server.url, timeout_s=7.5, name="someone")
    assert pool.connection_kwargs["socket_timeout"] == 7.5
    assert pool.connection_kwargs["socket_connect_timeout"] == 7.5
    link = Link(pool)
    assert await link.call("CLIENT", "GETNAME") == b"someone"
    await link.close()
    await pool.disconnect()
