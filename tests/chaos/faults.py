"""The faults of a chaos run: chosen by a seed, one after another, each undone after its time.

Responsible for what is done to whom and when. Leaves the processes to `processes.py`, the network to `proxy.py`. Starts
and stops processes; talks to the server for CLIENT KILL, SCRIPT FLUSH and its memory limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tests.chaos.processes import Worker
    from tests.chaos.proxy import Proxy
    from workers.embedded import ServerProcess

PAUSE_S = (0.4, 1.8)  # between two faults
# Kinds that fall on one worker, and how often they are chosen; then those that everybody feels.
ONE = {"kill control": 3, "kill stage": 2, "stop control": 3, "stop stage": 2, "stall control": 2, "stall stage": 1}
MORE = {"reset one": 3, "reset all": 1, "lose answers": 4, "stall all": 1}
SERVER = {"server crash": 2, "client kill": 2, "script flush": 2, "memory full": 1}


class Faults:
    """`counts` by kind; `stage_faults_s`: when a stage worker was touched, at the beginning and at the end of it."""

    def __init__(
        self,
        server: ServerProcess,
        controls: Sequence[Worker],
        stages: Sequence[Worker],
        proxies: dict[str, Proxy],
        seed: int,
        began_s: float,
        say: Callable[[str], None],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.stage_faults_s: list[float] = []
        self._server = server
        self._controls = controls
        self._stages = stages
        self._proxies = proxies
        self._choose = random.Random(seed)
        self._began_s = began_s
        self._say = say
        self._busy: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, seconds: float) -> None:
        """Faults for that long; returns once each is undone."""
        weights = ONE | MORE | SERVER
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            await asyncio.sleep(self._choose.uniform(*PAUSE_S))
            kind = self._choose.choices(list(weights), list(weights.values()))[0]
            self._begin(kind)
        await asyncio.gather(*self._tasks)

    def holds(self, worker: Worker) -> bool:
        """Whether a fault has that worker in its hands."""
        return worker.name in self._busy

    def _begin(self, kind: str) -> None:
        """Choose whom it falls on; everybody who is free may be, and nobody is hit twice at once."""
        group = self._controls if "control" in kind else self._stages if "stage" in kind else ()
        if kind in ("reset one", "lose answers"):
            group = (*self._controls, *self._stages)
        target: Worker | None = None
        if group:
            free = [worker for worker in group if worker.name not in self._busy]
            if not free:
                return
            target = self._choose.choice(free)
        name = target.name if target is not None else "server"
        if name in self._busy:
            return
        long_s, short_s = self._choose.uniform(1.2, 3.0), self._choose.uniform(0.1, 1.0)
        self.counts[kind] += 1
        self._busy.add(name)
        self._say(f"{kind}: {name}")
        task = asyncio.ensure_future(self._suffer(kind, name, self._work(kind, target, long_s, short_s)))
        self._tasks.add(task)

    async def _suffer(self, kind: str, name: str, work: Awaitable[None]) -> None:
        hits_stage = name in {worker.name for worker in self._stages} or kind in ("stall all", "server crash")
        if hits_stage:
            self.stage_faults_s.append(time.monotonic() - self._began_s)
        try:
            await work
        finally:
            if hits_stage:
                self.stage_faults_s.append(time.monotonic() - self._began_s)
            self._busy.discard(name)

    async def _work(self, kind: str, target: Worker | None, long_s: float, short_s: float) -> None:
        if target is not None:
            await self._hit(kind, target, long_s, short_s)
        elif kind == "server crash":
            await asyncio.to_thread(self._server.kill)
            await asyncio.sleep(short_s)
            await asyncio.to_thread(self._server.start)
        elif kind == "client kill":
            await self._tell("CLIENT", "KILL", "TYPE", "normal")
        elif kind == "script flush":
            await self._tell("SCRIPT", "FLUSH")
        elif kind == "memory full":
            await self._tell("CONFIG", "SET", "maxmemory", "1mb")
            await asyncio.sleep(short_s)
            await self._tell("CONFIG", "SET", "maxmemory", "0")
        elif kind == "reset all":
            for proxy in self._proxies.values():
                proxy.reset()
        else:
            assert kind == "stall all"
            for proxy in self._proxies.values():
                proxy.stall()
            await asyncio.sleep(long_s)
            for name, proxy in self._proxies.items():
                if name not in self._busy:
                    proxy.flow()

    async def _hit(self, kind: str, target: Worker, long_s: float, short_s: float) -> None:
        proxy = self._proxies[target.name]
        if kind.startswith("kill"):
            await asyncio.to_thread(target.kill)
            await asyncio.sleep(short_s)
            target.start()
            await asyncio.sleep(2)  # it needs that long to be of any use
        elif kind.startswith("stop"):
            target.signal(signal.SIGSTOP)
            await asyncio.sleep(long_s)
            target.signal(signal.SIGCONT)
        elif kind.startswith("stall"):
            proxy.stall()
            await asyncio.sleep(long_s)
            proxy.flow()
        elif kind == "lose answers":
            proxy.lose_answers()
            await asyncio.sleep(short_s / 2)
            proxy.reset()
            proxy.flow()
        else:
            proxy.reset()

    async def _tell(self, *words: str) -> None:
        """A command to the server; a server that is down has been told enough."""
        with contextlib.suppress(RedisError, OSError):
            client: Any = Redis.from_url(self._server.url, socket_timeout=2)
            try:
                await client.execute_command(*words)
            finally:
                await client.aclose()
