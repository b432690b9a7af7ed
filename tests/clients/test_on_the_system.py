"""Both producers on the real system: control worker, stage workers, engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from bargein_client import FailedPreconditionError, Lifecycle, Output, StaleFenceError
from tests.system import RunningSystem

FRAME = bytes(range(256)) * 2 + bytes(128)


@pytest.fixture
async def system(redis_url: str) -> AsyncIterator[RunningSystem]:
    async with RunningSystem(redis_url) as system:
        yield system


async def until(session: Any, wanted: Callable[[Any], bool]) -> list[Any]:
    """The session's events, up to the first that is wanted."""
    events: list[Any] = []
    async for event in session.events():
        events.append(event)
        if wanted(event):
            return events
    raise AssertionError(f"the session ended before: {events}")


def is_event(name: str) -> Callable[[Any], bool]:
    return lambda event: isinstance(event, Lifecycle) and event.event == name


async def test_the_model_is_heard_and_interrupted(system: RunningSystem, connect: Any) -> None:
    async with connect(system.url) as client:
        session = await client.open(input_modes=["append_audio_chunk"])
        replies = [await session.append(FRAME, wait=False) for _ in range(4)]
        await session.append(FRAME, final=True)
        assert [(await reply).detail["seq"] for reply in replies] == [1, 2, 3, 4]
        heard = await until(session, lambda event: isinstance(event, Output))
        assert isinstance(heard[-1].data, bytes)
        assert (await session.interrupt()).ok
        await session.append(FRAME, final=True)
        events = await until(session, lambda event: isinstance(event, Output) and event.fence.epoch == 1)
        after = events[[is_event("interrupted")(event) for event in events].index(True) :]
        assert all(event.fence.epoch == 1 for event in after)
        assert (await session.close()).ok
        assert (await until(session, lambda event: event.terminal if isinstance(event, Lifecycle) else False))[
            -1
        ].reason == "client_close"
        assert (await session.close()).ok  # S12


async def test_an_id_lives_again_under_a_higher_incarnation(system: RunningSystem, connect: Any) -> None:
    async with connect(system.url) as client:
        async with await client.open("call") as first:
            await first.append(FRAME)
        async with await client.open("call") as second:
            assert is_event("opened")((await until(second, is_event("opened")))[0])
        with pytest.raises(StaleFenceError):
            await client.open("call", incarnation=1)


async def test_s82_a_call_that_was_resumed_elsewhere_is_not_detached(system: RunningSystem, connect: Any) -> None:
    async with connect(system.url) as there, connect(system.url) as here:
        late = await there.open()
        await late.update(session_config={"voice": "b"})
        await late.heartbeat()
        resumed = here.attach(late.bookmark())
        assert (await resumed.resume()).lease_generation == 1
        with pytest.raises(FailedPreconditionError) as caught:
            await late.detach()
        assert caught.value.lease_generation == 1
        await resumed.detach()
        await resumed.resume()
        await resumed.close()
