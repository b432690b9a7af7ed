"""The faults of a chaos run: chosen by a seed, one after another, each undone after its time.

Responsible for what is done to whom and when, and for the record of it (`spans`). Leaves the processes to
`processes.py`, the server's disk to `server.py`, the network to `proxy.py`. Starts and stops processes; talks to the
server for CLIENT KILL, CLIENT PAUSE, SCRIPT FLUSH and its memory limit. `missing`: why some can't be had here.
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

from tests.chaos.history import Span, Violation
from tests.chaos.losses import EVERYBODY
from tests.chaos.server import why_no_full_disk

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from tests.chaos.processes import Worker
    from tests.chaos.proxy import Proxy
    from tests.chaos.server import ChaosServer

PAUSE_S = (0.3, 1.4)  # between two faults
USEFUL_S = 2.0  # a worker that was started needs that long to be of any use
LEAVE_S = 16.0  # its grace, an engine's stop, and a little
# Kinds that fall on one worker, and how often they are chosen; then those that everybody feels.
ONE = {
    "kill control": 3,
    "kill stage": 2,
    "stop control": 3,
    "stop stage": 2,
    "stall control": 2,
    "stall stage": 1,
    "leave control": 2,
    "leave stage": 1,
    "reset one": 3,
    "lose answers": 4,
}
MORE = {"reset all": 1, "stall all": 1}
SERVER = {"server crash": 2, "client kill": 2, "client pause": 1, "script flush": 2, "memory full": 2}
DISK = {"disk full": 1, "no writes": 1}


class Faults:
    """`counts` by kind; `spans`: each fault with its time; `violations`: who did not leave in order (S45)."""

    def __init__(
        self,
        server: ChaosServer,
        controls: Sequence[Worker],
        stages: Sequence[Worker],
        proxies: dict[str, Proxy],
        seed: int,
        began_s: float,
        say: Callable[[str], None],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.spans: list[Span] = []
        self.violations: list[Violation] = []
        self.missing = why_no_full_disk()
        self._server = server
        self._controls = controls
        self._stages = stages
        self._proxies = proxies
        self._choose = random.Random(seed)
        self._began_s = began_s
        self._say = say
        self._busy: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._kinds = ONE | MORE | SERVER | ({} if self.missing else DISK)

    @property
    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    async def run(self, seconds: float) -> None:
        """Faults for that long; returns once each is undone."""
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            await asyncio.sleep(self._choose.uniform(*PAUSE_S))
            self._begin(self._choose.choices(list(self._kinds), list(self._kinds.values()))[0])
        await asyncio.gather(*self._tasks)

    def holds(self, name: str) -> bool:
        """Whether a fault has that worker, or the server, in its hands."""
        return name in self._busy

    def _begin(self, kind: str) -> None:
        """Choose whom it falls on; everybody who is free may be, and nobody is hit twice at once."""
        group: Sequence[Worker] = ()
        if kind in ONE:
            group = (*self._controls, *self._stages)
            group = self._controls if kind.endswith("control") else self._stages if kind.endswith("stage") else group
        free = [worker for worker in group if worker.name not in self._busy]
        if group and not free:
            return
        target = self._choose.choice(free) if free else None
        name = target.name if target is not None else EVERYBODY
        if name in self._busy:
            return
        long_s, short_s = self._choose.uniform(1.2, 3.0), self._choose.uniform(0.1, 1.0)
        self.counts[kind] += 1
        self._busy.add(name)
        self._say(f"{kind}: {name}")
        span = Span(kind, name, self._now_s)
        self.spans.append(span)
        work = self._hit_all(kind, long_s, short_s) if target is None else self._hit(kind, target, long_s, short_s)
        self._tasks.add(asyncio.ensure_future(self._suffer(span, work)))

    async def _suffer(self, span: Span, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        finally:
            span.ended_s = self._now_s
            self._busy.discard(span.name)

    async def _hit_all(self, kind: str, long_s: float, short_s: float) -> None:
        server = self._server
        match kind:
            case "server crash":
                await asyncio.to_thread(server.kill)
                await asyncio.sleep(short_s)
                await asyncio.to_thread(server.start)
            case "client kill":
                await self._tell("CLIENT", "KILL", "TYPE", "normal")
            case "client pause":
                await self._tell("CLIENT", "PAUSE", str(int(short_s * 1500)), self._choose.choice(("ALL", "WRITE")))
                await asyncio.sleep(short_s * 1.5)
            case "script flush":
                await self._tell("SCRIPT", "FLUSH")
            case "memory full":
                await self._tell("CONFIG", "SET", "maxmemory", "1mb")
                await asyncio.sleep(long_s)
                await self._tell("CONFIG", "SET", "maxmemory", "0")
            case "disk full":
                # With `appendfsync always` the server ends rather than say what it has not kept.
                server.fill_disk(self._choose.choice((0, 500, 5000)))
                await asyncio.to_thread(server.wait_end, long_s)
                server.empty_disk() if server.running else None
                await asyncio.sleep(short_s)
                await asyncio.to_thread(server.revive)
            case "no writes":
                # With another policy it stays and refuses writes until there is room.
                await self._tell("CONFIG", "SET", "appendfsync", "everysec")
                server.fill_disk()
                await asyncio.sleep(long_s)
                server.empty_disk()
                await self._until_written()
                await self._tell("CONFIG", "SET", "appendfsync", "always")
            case "reset all":
                for proxy in self._proxies.values():
                    proxy.reset()
            case _:
                assert kind == "stall all"
                for proxy in self._proxies.values():
                    proxy.stall(kind)
                await asyncio.sleep(long_s)
                for proxy in self._proxies.values():
                    proxy.flow(kind)

    async def _hit(self, kind: str, target: Worker, long_s: float, short_s: float) -> None:
        proxy = self._proxies[target.name]
        match kind.split(maxsplit=1)[0]:
            case "kill":
                await asyncio.to_thread(target.kill)
                await asyncio.sleep(short_s)
                target.start()
                await asyncio.sleep(USEFUL_S)
            case "leave":
                await self._let_leave(kind, target)
                await asyncio.sleep(short_s)
                target.start()
                await asyncio.sleep(USEFUL_S)
            case "stop":
                target.signal(signal.SIGSTOP)
                await asyncio.sleep(long_s)
                target.signal(signal.SIGCONT)
            case "stall":
                proxy.stall(kind)
                await asyncio.sleep(long_s)
                proxy.flow(kind)
            case "lose":
                proxy.lose_answers()
                await asyncio.sleep(short_s / 2)
                proxy.reset()
                proxy.give_answers()
            case _:
                proxy.reset()

    async def _let_leave(self, kind: str, target: Worker) -> None:
        """SIGTERM; it has to end in order and with status 0, unless the server was away meanwhile (S45)."""
        began_s = self._now_s
        status = await asyncio.to_thread(target.end, LEAVE_S)
        self._say(f"{kind}: {target.name} has left with status {status}")
        disturbed = any(span.name == EVERYBODY and span.ended_s > began_s for span in self.spans)
        if status != 0 and not disturbed:
            what = f"told to leave at {began_s:.1f} s, it ended with status {status}"
            self.violations.append(Violation("S45", target.name, what))

    async def _until_written(self) -> None:
        """What the server could not write meanwhile it writes as soon as it can."""
        for _ in range(100):
            info = await self._tell("INFO", "persistence")
            if info is None or info.get("aof_last_write_status") == "ok":
                return
            await asyncio.sleep(0.05)

    async def _tell(self, *words: str) -> Any:
        """A command to the server; a server that is down has been told enough."""
        with contextlib.suppress(RedisError, OSError):
            client: Any = Redis.from_url(self._server.url, socket_timeout=2)
            try:
                return await client.execute_command(*words)
            finally:
                await client.aclose()
        return None
