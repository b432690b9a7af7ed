"""Both producers against a scripted worker on a real server: replies, re-sends, interruptions, lost connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
import redis.asyncio

import bargein_client
from bargein_client import (
    AsyncBargein,
    Fence,
    Gap,
    Lifecycle,
    NoReplyError,
    NotReadyError,
    Options,
    Output,
    Reply,
    ResourceExhaustedError,
    StaleFenceError,
    UnreachableError,
    UnsupportedVersionError,
)
from tests.clients.conftest import QUICK
from tests.clients.responder import Responder
from tests.servers import ValkeyServer

Connect = Callable[..., Any]


async def heard(session: Any, count: int, **keys: Any) -> list[Any]:
    """The next events of a session."""
    events: list[Any] = []
    async for event in session.events(**keys):
        events.append(event)
        if len(events) == count:
            break
    return events


def said(events: list[Any]) -> list[Any]:
    """What the outputs among some events say, and the names of the others."""
    return [e.data if isinstance(e, Output) else e.event if isinstance(e, Lifecycle) else e for e in events]


async def test_a_session_is_opened_spoken_to_and_closed(responder: Responder, connect: Connect, redis_url: str) -> None:
    async with connect(redis_url) as client:
        session = await client.open(input_modes=["append_audio_chunk", "append_tokens"], session_config={"voice": "b"})
        first = await session.append(b"\x00\xff")
        second = await session.append([1, 2], "append_tokens", final=True, operation_id="o1", deadline_ms=500)
        await session.update(runtime_config={"t": 1})
        await session.heartbeat()
        await responder.speak(session.session_id, b"hello")
        await session.close()
        events = [event async for event in session.events()]

    assert (first.detail["seq"], second.detail["seq"]) == (1, 2)
    assert said(events) == ["opened", b"hello", "closed"]
    assert session.ended
    bodies = [entry.body for entry in responder.entries]
    assert [body["op"] for body in bodies] == ["open", "append", "append", "signal", "touch", "close"]
    assert bodies[0]["capabilities"] == {"input_modes": ["append_audio_chunk", "append_tokens"]}
    assert bodies[0]["session_config"] == {"voice": "b"}
    assert bodies[0]["fence"] == {"incarnation": 0, "epoch": 0, "turn_id": 0, "response_seq": 0}
    assert responder.entries[1].payload == b"\x00\xff"
    assert "payload" not in bodies[1]
    assert bodies[1]["mode"] == "append_audio_chunk"
    assert responder.entries[2].payload is None
    assert (bodies[2]["payload"], bodies[2]["operation_id"], bodies[2]["deadline_ms"]) == ([1, 2], "o1", 500)
    assert bodies[3]["event"] == "session.update"
    assert "session_config" not in bodies[3]


async def test_a_session_as_context_manager_is_closed_at_its_end(
    responder: Responder, connect: Connect, redis_url: str
) -> None:
    async with connect(redis_url) as client, await client.open():
        pass
    assert [entry.body["op"] for entry in responder.entries] == ["open", "close"]


async def test_leaving_a_session_that_has_expired_is_no_error(
    responder: Responder, connect: Connect, redis_url: str
) -> None:
    async with connect(redis_url) as client, await client.open() as session:
        await responder.expire(session.session_id)
    assert responder.of("open")


async def test_pipelined_appends_arrive_in_order_and_resolve_later(
    responder: Responder, connect: Connect, redis_url: str
) -> None:
    async with connect(redis_url) as client:
        session = await client.open()
        replies = [await session.append(bytes([number]), wait=False) for number in range(50)]
        assert [reply.detail["seq"] for reply in [await reply for reply in replies]] == list(range(1, 51))
    assert [entry.payload for entry in responder.of("append")] == [bytes([number]) for number in range(50)]


async def test_a_turn_begins_with_the_append_after_a_final_one(
    responder: Responder, connect: Connect, redis_url: str
) -> None:
    async with connect(redis_url) as client:
        session = await client.open()
        await session.append(b"", final=True)
        await session.heartbeat()
        await session.append(b"")
        session.next_turn()
        await session.append(b"")
    turns = [(entry.body["op"], entry.body["fence"]["turn_id"]) for entry in responder.entries[1:]]
    assert turns == [("append", 0), ("touch", 0), ("append", 1), ("append", 2)]


async def test_s25_input_right_after_an_interrupt_belongs_to_the_new_epoch(
    responder: Responder, connect: Connect, redis_url: str
) -> None:
    responder.withhold("signal", 1)
    async with connect(redis_url, options=QUICK) as client:
        session = await client.open()
        await session.append(b"old")
        interruption = await session.interrupt(wait=False)
        assert (await session.append(b"new")).accepted_fence == Fence(0, 1, 1, 0)
        assert not interruption.done()
        assert (await interruption).ok
    cancel, append = responder.entries[2], responder.entries[3]
    assert cancel.body["event"] == "barge_in"
    assert cancel.body["fence"] == {"incarnation": 0, "epoch": 0, "turn_id": 0, "response_seq": 0}
    assert cancel.body["next_fence"] == {"incarnation": 0, "epoch": 1, "turn_id": 1, "response_seq": 0}
    assert (append.payload, append.body["fence"]) == (b"new", cancel.body["next_fence"])


async def test_after_a_local_interrupt_no_older_output_is_handed_out(
    responder: Responder, connect: Connect, redis_url: str
) -> None:
    async with connect(redis_url) as client:
        session = await client.open()
        for number in range(3):
            await responder.speak(session.session_id, number)
        await session.heartbeat()  # its reply comes after the outputs, so they have been read by now
        assert said(await heard(session, 2)) == ["opened", 0]
        await session.interrupt(wait=False)
        await responder.until_seen("signal")
        await responder.speak(session.session_id, "late", epoch=0)
        await responder.speak(session.session_id, "new")
        assert said(await heard(session, 2)) == ["interrupted", "new"]
        assert session.dropped_locally == 3


async def test_an_interruption_by_somebody_else_drops_older_output_too(
    responder: Responder, connect: Connect, redis_url: str
) -> None:
    async with connect(redis_url) as client:
        session = await client.open()
        await responder.speak(session.session_id, "old")
        life = responder.lives[session.session_id]
        life.fence = {**life.fence, "epoch": 4, "turn_id": 2}
        await responder.tell(session.session_id, "interrupted")
        # Its reply, whichever it is, comes after the events, so they have been read by now.
        with contextlib.suppress(StaleFenceError):
            await session.heartbeat()
        assert said(await heard(session, 2)) == ["opened", "interrupted"]
        assert session.fence == Fence(0, 4, 2, 0)


async def test_a_command_whose_reply_is_lost_is_sent_again_and_counts_once(
    responder: Responder, connect: Connect, redis_url: str
) -> None:
    async with connect(redis_url, options=QUICK) as client:
        session = await client.open()
        responder.withhold("append", 2)
        assert (await session.append(b"once")).detail["seq"] == 1
    sends = responder.of("append")
    assert len(sends) == 3
    assert sends[0] == sends[1] == sends[2]
    assert [effect["op"] for effect in responder.effects] == ["open", "append"]


async def test_a_command_that_nobody_answers_ends_with_its_outcome_unknown(
    responder: Responder, connect: Connect, redis_url: str
) -> None:
    async with connect(redis_url, options=QUICK) as client:
        session = await client.open()
        responder.withhold("append", 9)
        with pytest.raises(NoReplyError) as caught:
            await session.append(b"")
        assert isinstance(caught.value, TimeoutError)
        assert (caught.value.retryable, caught.value.session_id) == (True, session.session_id)
        assert len(responder.of("append")) == 3
        assert (await session.heartbeat()).ok


async def test_s1_an_open_that_nobody_answers_is_closed_again(
    responder: Responder, connect: Connect, redis_url: str
) -> None:
    responder.withhold("open", 9)
    async with connect(redis_url, options=QUICK) as client:
        with pytest.raises(NoReplyError):
            await client.open()
        close = (await responder.until_seen("close"))[0]
    assert close.body["session_id"] == responder.of("open")[0].body["session_id"]


async def test_s1_an_open_that_its_caller_gives_up_is_closed_again(responder: Responder, redis_url: str) -> None:
    responder.withhold("open", 9)
    async with AsyncBargein(redis_url) as client:
        opening = asyncio.create_task(client.open())
        await responder.until_seen("open")
        opening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await opening
        await responder.until_seen("close")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("stale_fence", "StaleFenceError"),
        ("invalid_capability", "InvalidCapabilityError"),
        ("resource_exhausted", "ResourceExhaustedError"),
        ("not_found", "NotFoundError"),
        ("invalid_argument", "InvalidArgumentError"),
        ("timeout", "StageTimeoutError"),
        ("failed_precondition", "FailedPreconditionError"),
        ("cleanup_failed", "CleanupFailedError"),
        ("payload_too_large", "PayloadTooLargeError"),
        ("unsupported_version", "UnsupportedVersionError"),
        ("internal", "InternalError"),
        ("of_a_newer_version", "BargeinError"),
    ],
)
async def test_a_refusal_is_raised_as_the_error_of_its_code(
    responder: Responder, connect: Connect, redis_url: str, code: str, kind: str
) -> None:
    async with connect(redis_url) as client:
        session = await client.open()
        responder.refuse("append", code)
        with pytest.raises(getattr(bargein_client, kind)) as caught:
            await session.append(b"")
    assert type(caught.value).__name__ == kind
    assert (caught.value.code, caught.value.retryable) == (code, False)
    assert caught.value.accepted_fence == Fence(0)
    assert caught.value.lease_generation == 0
    assert f"scripted {code}" in str(caught.value)


async def test_a_retryable_refusal_is_tried_again_if_asked_for(
    responder: Responder, connect: Connect, redis_url: str
) -> None:
    async with connect(redis_url, options=Options(reply_timeout_s=1.0, retries=2, backoff_s=0.01)) as client:
        responder.refuse("open", "resource_exhausted", retryable=True, times=2)
        session = await client.open()
        opens = responder.of("open")
        assert len({entry.body["control_id"] for entry in opens}) == 1
        assert len(opens) == 3
        responder.refuse("append", "resource_exhausted", retryable=True)
        with pytest.raises(ResourceExhaustedError):
            await session.append(b"")
        assert len(responder.of("append")) == 1


async def test_a_failure_that_nobody_waits_for_shows_among_the_events(
    responder: Responder, connect: Connect, redis_url: str
) -> None:
    async with connect(redis_url) as client:
        session = await client.open()
        responder.refuse("append", "resource_exhausted", retryable=True)
        await session.append(b"", wait=False)
        replies = [event for event in await heard(session, 3, replies=True) if isinstance(event, Reply)]
    assert [(reply.op, reply.code) for reply in replies] == [("open", None), ("append", "resource_exhausted")]


async def test_missing_events_are_noticed(responder: Responder, connect: Connect, redis_url: str) -> None:
    async with connect(redis_url) as client:
        session = await client.open()
        await responder.speak(session.session_id, "before")
        responder.lose(session.session_id, 2)
        await responder.speak(session.session_id, "after")
        assert said(await heard(session, 4)) == ["opened", "before", Gap(2), "after"]


async def test_an_unreadable_event_shows_as_a_gap(responder: Responder, connect: Connect, redis_url: str) -> None:
    async with connect(redis_url) as client:
        session = await client.open()
        with redis.Redis.from_url(redis_url) as raw:
            raw.xadd(responder.events_key(session.session_id), {"t": "output", "n": 3, "b": b"\xc1"})
        responder.lose(session.session_id, 1)
        await responder.speak(session.session_id, "after")
        assert said(await heard(session, 3)) == ["opened", Gap(1), "after"]


async def test_the_terminal_event_ends_the_iteration(responder: Responder, connect: Connect, redis_url: str) -> None:
    async with connect(redis_url) as client:
        session = await client.open()
        await responder.expire(session.session_id)
        events = [event async for event in session.events()]
        assert said(events) == ["opened", "expired"]
        assert (events[-1].reason, events[-1].terminal) == ("idle_ttl", True)
        assert [event async for event in session.events()] == []
        with pytest.raises(bargein_client.NotFoundError):
            await session.append(b"")
        assert (await session.close()).ok  # S12


async def test_a_reopened_id_hears_nothing_of_its_former_lives(
    responder: Responder, connect: Connect, redis_url: str
) -> None:
    async with connect(redis_url) as client:
        first = await client.open("call-7")
        await responder.speak("call-7", "first life")
        await first.close()
        second = await client.open("call-7")
        await responder.speak("call-7", "second life")
        assert said(await heard(second, 2)) == ["opened", "second life"]
        assert second.fence.incarnation > first.fence.incarnation > 0
        with pytest.raises(StaleFenceError) as caught:
            await client.open("call-7", incarnation=5)
        assert caught.value.accepted_fence == second.fence


async def test_a_life_that_another_producer_began_ends_the_one_before(
    responder: Responder, connect: Connect, redis_url: str
) -> None:
    async with connect(redis_url) as client:
        first = await client.open("call-8", incarnation=3)
        second = await client.open("call-8", incarnation=4)
        assert said([event async for event in first.events()]) == ["opened", Gap(None)]
        assert said(await heard(second, 1)) == ["opened"]


async def test_a_detached_session_ends_its_iteration_and_goes_on_when_resumed(
    responder: Responder, connect: Connect, redis_url: str
) -> None:
    async with connect(redis_url) as client:
        session = await client.open()
        await session.detach()
        assert responder.of("touch")[0].body["expected_lease_generation"] == 0
        assert said([event async for event in session.events()]) == ["opened"]
        await responder.speak(session.session_id, "meanwhile")
        assert (await session.resume()).lease_generation == 1
        assert said(await heard(session, 1)) == ["meanwhile"]
        assert session.lease_generation == 1


async def test_s82_a_late_detach_can_not_detach_the_call_that_was_resumed_elsewhere(
    responder: Responder, connect: Connect, redis_url: str
) -> None:
    async with connect(redis_url) as there, connect(redis_url) as here:
        late = await there.open()
        resumed = here.attach(late.bookmark())
        await resumed.resume()
        await responder.tell(late.session_id, "closing")  # an event that carries the new generation
        assert said(await heard(late, 2)) == ["opened", "closing"]
        for _ in range(2):
            with pytest.raises(bargein_client.FailedPreconditionError) as caught:
                await late.detach()
            assert caught.value.lease_generation == 1
        assert (await resumed.detach()).ok


async def test_a_bookmark_leaves_what_was_not_heard_to_the_next_listener(
    responder: Responder, connect: Connect, redis_url: str
) -> None:
    async with connect(redis_url) as there, connect(redis_url) as here:
        session = await there.open()
        await session.append(b"", final=True)
        for word in ("heard", "not heard"):
            await responder.speak(session.session_id, word)
        assert said(await heard(session, 2)) == ["opened", "heard"]
        await session.detach()
        resumed = here.attach(session.bookmark())
        await resumed.resume()
        assert said(await heard(resumed, 1)) == ["not heard"]
        await resumed.interrupt()
        assert resumed.fence == Fence(0, 1, 1, 0)


async def test_s52_a_listener_survives_the_loss_of_its_connections(
    responder: Responder, connect: Connect, redis_url: str
) -> None:
    async with connect(redis_url) as client:
        session = await client.open()
        assert said(await heard(session, 1)) == ["opened"]
        for word in range(3):
            await responder.kill_producers()
            await responder.speak(session.session_id, word)
            assert said(await heard(session, 1)) == [word]


async def test_s52_a_command_survives_the_loss_of_its_connections(
    responder: Responder, connect: Connect, redis_url: str
) -> None:
    async with connect(redis_url, options=QUICK) as client:
        session = await client.open()
        responder.withhold("append", 1)
        waiting = await session.append(b"waiting", wait=False)
        await responder.until_seen("append")
        await responder.kill_producers()
        assert (await session.append(b"next")).detail["seq"] == 2
        assert (await waiting).detail["seq"] == 1
    assert [effect["op"] for effect in responder.effects] == ["open", "append", "append"]


async def test_commands_keep_their_order_while_one_of_them_has_to_wait(
    responder: Responder, connect: Connect, redis_url: str
) -> None:
    given: Any = _given_client(connect, redis_url, socket_timeout=5)
    async with connect(given) as client:
        session = await client.open()
        add, failures = given.xadd, [redis.ConnectionError("lost")] * 3

        def fail_first(*args: Any) -> Any:
            if failures:
                raise failures.pop()
            return add(*args)

        given.xadd = fail_first
        frames = [bytes([number]) for number in range(6)]
        await asyncio.gather(*(session.append(frame) for frame in frames))
        await session.close()
    payloads = [entry.payload or b"" for entry in responder.of("append")]
    in_threads = isinstance(given, redis.Redis)  # which have no order among themselves
    assert (sorted(payloads) if in_threads else payloads) == frames
    await _close(given)


async def test_s57_a_quiet_stream_is_not_taken_for_a_dead_connection(
    responder: Responder, connect: Connect, redis_url: str
) -> None:
    given: Any = _given_client(connect, redis_url, socket_timeout=0.4)
    async with connect(given) as client:
        session = await client.open()
        await session.heartbeat()
        before = await responder.connections_made()
        listening = asyncio.create_task(heard(session, 2))
        done, _ = await asyncio.wait([listening], timeout=1.5)  # several times the socket's timeout
        assert not done
        await responder.speak(session.session_id, "at last")
        assert said(await listening) == ["opened", "at last"]
        assert await responder.connections_made() - before <= 1
        await session.close()
    await _close(given)


async def test_a_client_without_a_socket_timeout_is_refused(connect: Connect, redis_url: str) -> None:
    given = _given_client(connect, redis_url)
    with pytest.raises(ValueError, match="socket_timeout"):
        connect(given)
    await _close(given)


async def test_a_client_that_decodes_its_answers_is_refused(connect: Connect, redis_url: str) -> None:
    given = _given_client(connect, redis_url, socket_timeout=5, decode_responses=True)
    with pytest.raises(ValueError, match="decode_responses"):
        connect(given)
    await _close(given)


async def test_the_newer_protocol_of_redis_works_too(responder: Responder, connect: Connect, redis_url: str) -> None:
    async with connect(f"{redis_url}?protocol=3") as client, await client.open("resp3") as session:
        await responder.speak("resp3", "heard")
        assert said(await heard(session, 2)) == ["opened", "heard"]


async def test_a_cluster_may_be_handed_in(connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:  # the usual one may be above 65,535
        bus = ["--cluster-port", str(free.getsockname()[1])]
    with ValkeyServer(args=["--cluster-enabled", "yes", *bus]) as server:
        with server.client() as raw:
            raw.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
            while raw.execute_command("CLUSTER INFO").get("cluster_state") != "ok":
                pass
        asynchronous = isinstance(connect(server.url), AsyncBargein)
        kind: Any = redis.asyncio.RedisCluster if asynchronous else redis.RedisCluster
        cluster = kind.from_url(server.url, socket_timeout=5)
        async with (
            Responder(server.url, partitions=1) as responder,
            connect(cluster) as client,
            await client.open("call-9") as session,
        ):
            await session.append(b"")
            await responder.speak("call-9", "heard")
            assert said(await heard(session, 2)) == ["opened", "heard"]
            assert session.fence.incarnation > 0
        await _close(cluster)


async def test_s53_a_full_server_is_waited_out(responder: Responder, connect: Connect, redis_url: str) -> None:
    async with connect(redis_url) as client:
        session = await client.open()
        with redis.Redis.from_url(redis_url) as raw:
            raw.config_set("maxmemory", 1)
            try:
                appending = asyncio.create_task(session.append(b""))
                done, _ = await asyncio.wait([appending], timeout=0.3)
            finally:
                raw.config_set("maxmemory", 0)
        assert not done
        assert (await appending).ok


async def test_without_a_worker_there_is_a_clear_error(connect: Connect, redis_url: str) -> None:
    with pytest.raises(NotReadyError, match="no worker has started"):
        await connect(redis_url).open()


async def test_a_client_may_wait_for_the_first_worker(connect: Connect, redis_url: str) -> None:
    opening = asyncio.create_task(connect(redis_url, config_wait_s=20.0).open())
    async with Responder(redis_url):
        assert (await opening).session_id


@pytest.mark.parametrize(
    ("config", "message"),
    [({"protocol": 2, "partitions": 4}, "protocol 2"), ({"protocol": 1, "partitions": 0}, "partitions")],
)
async def test_another_protocol_is_refused(
    connect: Connect, redis_url: str, config: dict[str, int], message: str
) -> None:
    with redis.Redis.from_url(redis_url) as raw:
        raw.hset("bargein:config", mapping=dict(config))
    with pytest.raises(UnsupportedVersionError, match=message):
        await connect(redis_url).open()


async def test_a_redis_that_is_away_for_good_is_said(connect: Connect, redis_url: str) -> None:
    options = Options(unreachable_after_s=0.2)
    with pytest.raises(UnreachableError, match="ConnectionError") as caught:
        await connect("redis://127.0.0.1:1", options=options).open()
    assert caught.value.retryable
    assert isinstance(caught.value, ConnectionError)


async def test_a_refusal_of_redis_is_not_waited_out(responder: Responder, connect: Connect, redis_url: str) -> None:
    async with connect(redis_url) as client:
        session = await client.open()
        with redis.Redis.from_url(redis_url) as raw:
            raw.set(responder.events_key(session.session_id), "not a stream")
        await responder.kill_producers()  # a read that has begun does not notice
        with pytest.raises(UnreachableError, match="WRONGTYPE") as caught:
            await session.append(b"")
        assert not caught.value.retryable
        with pytest.raises(UnreachableError):
            await heard(session, 2)


async def test_closing_the_client_ends_everything_that_waits(
    responder: Responder, connect: Connect, redis_url: str
) -> None:
    async with connect(redis_url) as client:
        session = await client.open()
        responder.withhold("append", 9)
        waiting = await session.append(b"", wait=False)
        listening = asyncio.create_task(heard(session, 9))
        await responder.until_seen("append")
        begun_s = time.monotonic()
    assert time.monotonic() - begun_s < 4.0  # a blocked read would take 6 or more to end by itself
    assert said(await listening) in ([], ["opened"])
    with pytest.raises(UnreachableError, match="stopped listening"):
        await waiting
    with pytest.raises(UnreachableError, match="stopped listening"):
        await session.append(b"")


async def test_an_id_that_could_not_be_answered_is_refused_before_it_is_sent(
    responder: Responder, connect: Connect, redis_url: str
) -> None:
    async with connect(redis_url) as client:
        for bad in ("", "a\nb", "ä" * 65):
            with pytest.raises(ValueError, match="session_id"):
                await client.open(bad)
    assert responder.entries == []


async def test_sessions_of_one_client_do_not_hear_each_other(
    responder: Responder, connect: Connect, redis_url: str
) -> None:
    async with connect(redis_url) as client:
        sessions = [await client.open() for _ in range(6)]
        for session in reversed(sessions):
            await responder.speak(session.session_id, session.session_id)
        for session in sessions:
            assert said(await heard(session, 2)) == ["opened", session.session_id]
    assert len({entry.partition for entry in responder.entries}) > 1


async def test_an_abandoned_wait_is_not_sent_again(responder: Responder, redis_url: str) -> None:
    async with AsyncBargein(redis_url, options=Options(reply_timeout_s=0.1, attempts=9)) as client:
        session = await client.open()
        responder.withhold("append", 99)
        waiting = asyncio.create_task(session.append(b""))
        await responder.until_seen("append")
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        sent = len(responder.of("append"))
        for _ in range(4):
            await session.heartbeat()
        done, _ = await asyncio.wait([asyncio.create_task(responder.until_seen("append", sent + 2))], timeout=0.5)
        assert not done


def _given_client(connect: Connect, url: str, **keys: Any) -> Any:
    probe = connect(url)
    kind = redis.asyncio.Redis if isinstance(probe, AsyncBargein) else redis.Redis
    return kind.from_url(url, **keys)


async def _close(client: Any) -> None:
    if isinstance(client, redis.asyncio.Redis | redis.asyncio.RedisCluster):
        await client.aclose()
    else:
        client.close()
