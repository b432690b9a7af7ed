"""The network between the simulated processes and the server: latency, order within a connection, and what goes wrong.

Responsible for moving bytes. A request that is on its way when its connection is reset is lost, arrives all the same,
or arrives late, after its sender has connected anew (a real TCP connection does all three). Leaves what the bytes say
to `server.py`, and when something goes wrong to `faults.py`. Pure.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from tests.sim.loop import Process, SimLoop
    from tests.sim.server import SimServer

CONNECT_S = 0.0005


class Cut:
    """A connection is lost at the `nth` write that carries `mark` (any write if empty), by a process of `role`.

    `mode`: `request`: it never arrives; `answer`: it is carried out, and the answer never arrives; `late`: the sender
    hears of a reset, and the request arrives after `delay_s`; `last`: the sender dies, and it arrives after `delay_s`;
    `half`: a part of it arrives, then nothing.
    """

    def __init__(self, role: str, mark: bytes, nth: int, mode: str, delay_s: float) -> None:
        self.role = role
        self.mark = mark
        self.left = nth
        self.mode = mode
        self.delay_s = delay_s


class Network:
    """`choose`: the seed's chance. `cuts`: what is still to go wrong."""

    def __init__(self, loop: SimLoop, choose: random.Random, server: SimServer, *, jitter_s: float) -> None:
        self.loop = loop
        self.server = server
        self.cuts: list[Cut] = []
        self.stalled_until_s: dict[str, float] = {}
        self.isolated_until_s: dict[str, float] = {}
        self.tell: Callable[[str], None] = lambda _: None
        self._random = choose.random
        self._jitter_s = jitter_s
        loop.connect = self._connect

    def latency_s(self) -> float:
        """Mostly a fraction of a millisecond, now and then many times that."""
        x = self._random()
        if x > 0.97:
            return self._jitter_s * self._random()
        return 0.0001 + 0.0004 * x

    def find_cut(self, role: str, data: bytes) -> Cut | None:
        """The fault that this write meets, if any."""
        for cut in self.cuts:
            if cut.role in ("", role) and (not cut.mark or cut.mark in data):
                cut.left -= 1
                if cut.left <= 0:
                    self.cuts.remove(cut)
                    return cut
        return None

    def stall_s(self, role: str) -> float:
        """How long what this process sends or is sent is held up."""
        until_s = max(self.stalled_until_s.get(role, 0.0), self.stalled_until_s.get("", 0.0))
        return max(0.0, until_s - self.loop.now_s)

    def is_isolated(self, role: str) -> bool:
        return self.isolated_until_s.get(role, 0.0) > self.loop.now_s

    def isolate(self, process: Process, until_s: float) -> None:
        """The process reaches nobody until then; its connections are reset."""
        self.isolated_until_s[role_of(process)] = until_s
        for wire in list(process.wires):
            wire.reset()

    async def _connect(self, process: Process, protocol: asyncio.BaseProtocol, host: str, port: int) -> Wire:
        await asyncio.sleep(CONNECT_S + self.latency_s() + self.stall_s(role_of(process)))
        if not self.server.up or self.is_isolated(role_of(process)):
            raise ConnectionRefusedError(111, f"connect to {host}:{port} refused")
        wire = Wire(self, process, protocol)
        process.wires.append(wire)
        self.server.accept(wire)
        protocol.connection_made(wire)
        return wire


def role_of(process: Process) -> str:
    """`control-0` of `control-0/2`, its third life."""
    return process.name.partition("/")[0]


class Wire(asyncio.Transport):
    """One connection: the client's transport and the server's end of it."""

    def __init__(self, network: Network, process: Process, protocol: Any) -> None:
        super().__init__()
        self.process = process
        self.role = role_of(process)
        self.session: Any = None
        self._network = network
        self._loop = network.loop
        self._protocol = protocol
        self._up_s = 0.0
        self._down_s = 0.0
        self._client_open = True
        self._server_open = True

    # The client's side.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._client_open:
            return
        network = self._network
        payload = bytes(data)
        cut = network.find_cut(self.role, payload) if network.cuts else None
        if cut is None:
            self._send_up(payload, 0.0)
            return
        network.tell(f"{self.role}: connection cut ({cut.mode}, {cut.delay_s:.3f} s)")
        if cut.mode == "late":
            self._send_up(payload, cut.delay_s)
            self.reset()
        elif cut.mode == "last":
            self._send_up(payload, cut.delay_s)
            self.process.kill()
        elif cut.mode == "half":
            self._send_up(payload[: len(payload) // 2], 0.0)
            self.reset()
        elif cut.mode == "answer":
            self._send_up(payload, 0.0)
            # The server's answer meets a connection that is gone.
            self._loop.call_at(self._up_s, self.reset)
        else:
            self.reset()

    def _send_up(self, payload: bytes, extra_s: float) -> None:
        network = self._network
        arrival_s = self._loop.now_s + network.latency_s() + extra_s + network.stall_s(self.role)
        self._up_s = max(self._up_s + 1e-7, arrival_s)
        self._loop.call_at(self._up_s, self._arrive, payload, context=network.server.context)

    def _arrive(self, payload: bytes) -> None:
        if self._server_open and self._network.server.up and self.session is not None:
            self.session.receive(payload)

    def is_closing(self) -> bool:
        return not self._client_open

    def close(self) -> None:
        """The client closes; what it has sent arrives, and then the end."""
        if self._client_open:
            self._forget()
            self._loop.call_soon(self._protocol.connection_lost, None, context=self.process.context)
            self._end_up()

    def abort(self) -> None:
        self.close()

    def abandon(self) -> None:
        """The client's process has died; its kernel closes."""
        if self._client_open:
            self._forget()
            self._end_up()

    def reset(self) -> None:
        """The client hears of a reset now; what is on its way to it is lost."""
        if self._client_open:
            self._forget()
            error = ConnectionResetError(104, "Connection reset by peer")
            self._loop.call_soon(self._protocol.connection_lost, error, context=self.process.context)
            self._end_up()

    def _forget(self) -> None:
        self._client_open = False
        if self in self.process.wires:
            self.process.wires.remove(self)

    def _end_up(self) -> None:
        when_s = max(self._up_s, self._loop.now_s + self._network.latency_s())
        self._loop.call_at(when_s + 1e-6, self._end_server_side, context=self._network.server.context)

    def _end_server_side(self) -> None:
        if self._server_open:
            self._server_open = False
            if self.session is not None:
                self.session.end()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    # The server's side.

    def answer(self, data: bytes) -> None:
        """Bytes for the client."""
        if not self._client_open:
            return
        network = self._network
        arrival_s = self._loop.now_s + network.latency_s() + network.stall_s(self.role)
        self._down_s = max(self._down_s + 1e-7, arrival_s)
        self._loop.call_with_input_at(self._down_s, self._deliver, data, self.process.context)

    def _deliver(self, data: bytes) -> None:
        if self._client_open:
            self._protocol.data_received(data)

    def drop(self) -> None:
        """The server's machine is gone: what was on its way in either direction is lost."""
        self._server_open = False
        self.session = None
        self.reset()
