"""Fixtures for the producers: a scripted responder on an empty server, and both shells behind one face.

`connect` makes a client of the kind that the test runs for, `aio` or `sync`. The synchronous one works in threads
behind the face of the asynchronous one, so each test runs on both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from bargein_client import AsyncBargein, Bargein, Options, Session
from tests.clients.responder import Responder

# Too patient to send anything again by accident on a busy machine.
PATIENT = Options(reply_timeout_s=20.0, attempts=2, backoff_s=0.01, unreachable_after_s=20.0)
# For the tests of just that.
QUICK = Options(reply_timeout_s=0.5, attempts=3, backoff_s=0.01)


class Threaded:
    """An object whose methods block, behind the face of one whose methods are awaited."""

    def __init__(self, inner: Any, pool: ThreadPoolExecutor) -> None:
        self._inner = inner
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found) or name in {"next_turn", "bookmark"}:
            return found
        if name == "events":
            return lambda **keys: self._iterate(found(**keys))
        if name == "attach":
            return lambda *args: Threaded(found(*args), self._pool)

        async def call(*args: Any, **keys: Any) -> Any:
            answer = await self._in_thread(lambda: found(*args, **keys))
            if isinstance(answer, Future):
                return asyncio.wrap_future(answer)
            return Threaded(answer, self._pool) if isinstance(answer, Session) else answer

        return call

    async def __aenter__(self) -> Any:
        await self._in_thread(self._inner.__enter__)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._in_thread(lambda: self._inner.__exit__(*error))

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    async def _iterate(self, events: Any) -> AsyncIterator[Any]:
        done = object()
        while (event := await self._in_thread(lambda: next(events, done))) is not done:
            yield event


@pytest.fixture
async def responder(redis_url: str) -> AsyncIterator[Responder]:
    async with Responder(redis_url) as responder:
        yield responder


@pytest.fixture(params=["aio", "sync"])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Callable[..., Any]]:
    """Makes a client of either kind, as an async context manager; it is closed at the end all the same."""
    clients: list[Any] = []
    with ThreadPoolExecutor(8) as pool:

        def make(url: Any, **keys: Any) -> Any:
            keys.setdefault("options", PATIENT)
            kind = AsyncBargein if request.param == "aio" else Bargein
            client: Any = kind(url, **keys)
            clients.append(client if request.param == "aio" else Threaded(client, pool))
            return clients[-1]

        yield make
        for client in clients:
            await (client.aclose() if isinstance(client, AsyncBargein) else client.close())
