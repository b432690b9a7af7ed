"""A connection to the simulated server without redis-py, for those who are not what is tested.

Responsible for one command at a time over the same network, with its latency and the server's absences. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.sim.server import LOST
from tests.sim.values import Failure

if TYPE_CHECKING:
    import asyncio

    from tests.sim.world import World


class Client:
    """A connection without redis-py: one command at a time. ConnectionError where the answer is lost."""

    def __init__(self, world: World, role: str) -> None:
        self._world = world
        self._role = role
        self._session: Any = None
        self._waiting: asyncio.Future[Any] | None = None

    async def call(self, *args: bytes) -> Any:
        """The answer. Raises `Failure` or ConnectionError."""
        loop, network = self._world.loop, self._world.network
        self._waiting = waiting = loop.create_future()
        loop.call_later(network.latency_s(), self._arrive, list(args), context=network.server.context)
        return await waiting

    def _arrive(self, args: list[bytes]) -> None:
        server = self._world.server
        if not server.up:
            self._settle(LOST)
            return
        if self._session is None or not self._session.open:
            self._session = server.open_session(self._role, self._answer)
        self._session.request(args)

    def _answer(self, answer: Any) -> None:
        network = self._world.network
        network.loop.call_later(network.latency_s(), self._settle, answer, context=network.server.context)

    def _settle(self, answer: Any) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is None or waiting.done():
            return
        if answer is LOST:
            waiting.set_exception(ConnectionError("the server has gone"))
        elif isinstance(answer, Failure):
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)
