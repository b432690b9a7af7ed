"""The server as a process: connections, scripts, blocked readers, transactions, restarts and a full memory.

Responsible for everything around a command that is not data, with no time of its own: what arrives is carried out at
once, one command after another. Leaves data to `store.py`, Lua to `scripting.py`, delivery to `network.py`. Pure.
`before` and `after` are the checkers' eyes: they see each command with the process that sent it.
"""

from __future__ import annotations

import asyncio
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any

import hiredis

from control.store.scripts import SCRIPTS, script
from tests.sim.commands import GROWING, Args
from tests.sim.loop import PROCESS
from tests.sim.scripting import Compiled, compile_script, run_script
from tests.sim.store import Store, UnknownCommand
from tests.sim.values import OK, OOM, EntryId, Failure, Status, Stream, read_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.loop import SimLoop
    from tests.sim.network import Wire

BEGAN_US = 1_700_000_000_000_000
INFO = b"redis_version:7.4.0\r\nloading:0\r\nmaxmemory_policy:noeviction\r\ncluster_enabled:0\r\nrole:master\r\n"


class Blocked:
    """A reader that waits: `names` with the positions behind which it wants entries."""

    def __init__(self, names: list[bytes], positions: list[EntryId], count: int) -> None:
        self.names = names
        self.positions = positions
        self.count = count
        self.timer: asyncio.TimerHandle | None = None


class Session:
    """The server's end of a connection. `send` gets each answer as a value."""

    def __init__(self, server: SimServer, number: int, role: str, send: Callable[[Any], None]) -> None:
        self.server = server
        self.number = number
        self.role = role
        self.send = send
        self.blocked: Blocked | None = None
        self.open = True
        self._reader = hiredis.Reader()
        self._queue: list[Args] = []
        self._transaction: list[Args] | None = None

    def receive(self, data: bytes) -> None:
        """Bytes of a client."""
        self._reader.feed(data)
        while (args := self._reader.gets()) is not False:
            self._queue.append(args)  # type: ignore[arg-type]
        self.work()

    def request(self, args: Args) -> None:
        """A command of a client without bytes."""
        self._queue.append(args)
        self.work()

    def work(self) -> None:
        while self._queue and self.blocked is None and self.open:
            args = self._queue.pop(0)
            answer = self._answer(args)
            if answer is not NOTHING:
                self.send(answer)
            self.server.serve_blocked()

    def _answer(self, args: Args) -> Any:
        name = args[0].upper()
        if name == b"MULTI":
            self._transaction = []
            return OK
        if name == b"EXEC":
            commands, self._transaction = self._transaction or [], None
            return [self.server.execute(self, each) for each in commands]
        if self._transaction is not None:
            self._transaction.append(args)
            return Status(b"QUEUED")
        return self.server.execute(self, args)

    def end(self) -> None:
        """The client has gone."""
        self.open = False
        self.unblock(NOTHING)
        self.server.forget(self)

    def unblock(self, answer: Any) -> None:
        blocked, self.blocked = self.blocked, None
        if blocked is not None:
            if blocked.timer is not None:
                blocked.timer.cancel()
            self.server.waiting.pop(self.number, None)
            if answer is not NOTHING:
                self.send(answer)
                self.work()


NOTHING = object()


class SimServer:
    """`up`, `full`: its state. `sha_names`: which script a SHA is."""

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        self.context: Context = copy_context()
        self.context.run(PROCESS.set, None)
        self.store = Store(self.now_us)
        self.up = True
        self.full = False
        self.jumped_us = 0
        self.before: Callable[[str, str, Args], None] = lambda *_: None
        self.after: Callable[[str, str, Args, Any], None] = lambda *_: None
        self.waiting: dict[int, Session] = {}
        self.sha_names = {script(name).sha.encode(): name for name in SCRIPTS}
        self._scripts: dict[bytes, Compiled] = {}
        self._sessions: dict[int, Session] = {}
        self._wires: dict[int, Wire] = {}
        self._numbers = 0

    def now_us(self) -> int:
        return BEGAN_US + self.jumped_us + round(self.loop.now_s * 1_000_000)

    # Connections.

    def accept(self, wire: Wire) -> None:
        session = self.open_session(wire.role, lambda answer: wire.answer(encode(answer)))
        wire.session = session
        self._wires[session.number] = wire

    def open_session(self, role: str, send: Callable[[Any], None]) -> Session:
        self._numbers += 1
        session = self._sessions[self._numbers] = Session(self, self._numbers, role, send)
        return session

    def forget(self, session: Session) -> None:
        self._sessions.pop(session.number, None)
        self._wires.pop(session.number, None)

    # Faults.

    def go_down(self) -> None:
        """The process ends: connections are reset, scripts and blocked readers are gone."""
        self.up = False
        self.drop_connections()
        self._scripts.clear()

    def come_up(self, state: Any = None) -> None:
        """It is back, with what it had, or with `state`."""
        if state is not None:
            self.store.restore(state)
        self.up = True

    def drop_connections(self) -> None:
        for session in list(self._sessions.values()):
            session.open = False
            session.unblock(NOTHING)
            wire = self._wires.pop(session.number, None)
            if wire is not None:
                wire.drop()
            else:
                session.send(LOST)
        self._sessions.clear()

    def forget_scripts(self) -> None:
        self._scripts.clear()

    # Commands.

    def execute(self, session: Session, args: Args) -> Any:
        """One command; a `Failure` is an answer. `NOTHING`: the session waits."""
        name = args[0].upper()
        label = self._label(name, args)
        self.before(session.role, label, args)
        try:
            answer = self._execute(session, name, args)
        except Failure as no:
            answer = no
        if answer is not NOTHING:
            self.after(session.role, label, args, answer)
        return answer

    def _label(self, name: bytes, args: Args) -> str:
        if name == b"EVALSHA":
            return self.sha_names.get(args[1], "script")
        if name == b"EVAL":
            return self.sha_names.get(_sha(args[1]), "script")
        return name.decode()

    def _execute(self, session: Session, name: bytes, args: Args) -> Any:
        match name:
            case b"EVALSHA":
                known = self._scripts.get(args[1])
                if known is None:
                    raise Failure("NOSCRIPT No matching script.")
                return self._run_script(known, args)
            case b"EVAL":
                return self._run_script(compile_script(args[1].decode(), _sha(args[1]).decode()), args)
            case b"XREAD":
                return self._read(session, args)
            case b"SCRIPT":
                return self._script(args)
            case b"CLIENT":
                return self._client(session, args)
            case b"INFO":
                return INFO
            case b"PING":
                return Status(b"PONG")
            case b"SELECT":
                return OK
            case _:
                if self.full and name in GROWING:
                    raise Failure(OOM)
                return self.store.run(args)

    def _run_script(self, known: Compiled, args: Args) -> Any:
        count = int(args[2])
        return run_script(self.store, known, args[3 : 3 + count], args[3 + count :], full=self.full)

    def _script(self, args: Args) -> Any:
        match args[1].upper():
            case b"LOAD":
                sha = _sha(args[2])
                self._scripts[sha] = compile_script(args[2].decode(), sha.decode())
                return sha
            case b"FLUSH":
                self._scripts.clear()
                return OK
            case _:
                raise UnknownCommand(f"SCRIPT {args[1]!r}")

    def _client(self, session: Session, args: Args) -> Any:
        match args[1].upper():
            case b"SETNAME" | b"SETINFO":
                return OK
            case b"ID":
                return session.number
            case b"UNBLOCK":
                other = self.waiting.get(int(args[2]))
                if other is None:
                    return 0
                other.unblock(None)
                return 1
            case _:
                raise UnknownCommand(f"CLIENT {args[1]!r}")

    # Blocking reads.

    def _read(self, session: Session, args: Args) -> Any:
        count, block_ms, at = -1, None, 1
        while (word := args[at].upper()) != b"STREAMS":
            if word == b"COUNT":
                count = int(args[at + 1])
            elif word == b"BLOCK":
                block_ms = int(args[at + 1])
            else:
                raise UnknownCommand(f"XREAD {word!r}")
            at += 2
        names = args[at + 1 :]
        half = len(names) // 2
        wanted = Blocked(
            names[:half], [self._position(n, p) for n, p in zip(names[:half], names[half:], strict=True)], count
        )
        found = self._collect(wanted)
        if found or block_ms is None:
            return found or None
        session.blocked = wanted
        self.waiting[session.number] = session
        if block_ms > 0:
            wanted.timer = self.loop.call_later(block_ms / 1000, session.unblock, None, context=self.context)
        return NOTHING

    def _position(self, name: bytes, text: bytes) -> EntryId:
        if text == b"$":
            stream = self.store.find(name, Stream)
            return (0, 0) if stream is None else stream.last
        return read_id(text)

    def _collect(self, wanted: Blocked) -> list[Any]:
        found: list[Any] = []
        for name, position in zip(wanted.names, wanted.positions, strict=True):
            stream = self.store.find(name, Stream)
            if stream is not None:
                entries = stream.after(position, wanted.count)
                if entries:
                    found.append([name, entries])
        return found

    def serve_blocked(self) -> None:
        """Whoever waits for a stream that has got entries is answered, the longest waiting first."""
        while self.store.added:
            added, self.store.added = self.store.added, set()
            for number in list(self.waiting):
                session = self.waiting.get(number)
                if session is None or session.blocked is None or added.isdisjoint(session.blocked.names):
                    continue
                try:
                    answer: Any = self._collect(session.blocked)
                except Failure as no:
                    answer = no
                if answer:
                    self.after(session.role, "read", [], answer)
                    session.unblock(answer)


LOST = object()
"""What a session without a connection is sent when the server goes."""


def _sha(text: bytes) -> bytes:
    from hashlib import sha1  # noqa: PLC0415

    return sha1(text, usedforsecurity=False).hexdigest().encode()


def encode(value: Any) -> bytes:
    """An answer as RESP 2."""
    parts: list[bytes] = []
    _encode(value, parts)
    return b"".join(parts)


def _encode(value: Any, parts: list[bytes]) -> None:
    if value is None:
        parts.append(b"$-1\r\n")
    elif type(value) is bytes:
        parts.append(b"$%d\r\n%s\r\n" % (len(value), value))
    elif type(value) is int:
        parts.append(b":%d\r\n" % value)
    elif type(value) is list:
        parts.append(b"*%d\r\n" % len(value))
        for each in value:
            _encode(each, parts)
    elif type(value) is Status:
        parts.append(b"+%s\r\n" % bytes(value))
    elif isinstance(value, Failure):
        parts.append(b"-%s\r\n" % value.text.encode())
    else:
        raise TypeError(value)
