"""A model of the server's data: Redis' types and just the commands that the product uses, on the simulation's clock.

Responsible for keys and expiry. Leaves what a command does to `commands.py`, connections, scripts, blocking and
everything about the server as a process to `server.py`. Pure. Says no with `Failure`, as Redis does; a command that the
model does not know is an `UnknownCommand`, which ends the run: then the model has to learn it.

`log` collects the writes of the command under way, for the checkers. `test_store.py` compares it with a real server.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

from tests.sim.commands import COMMANDS, Args
from tests.sim.values import WRONG_TYPE, Failure

T = TypeVar("T")


class UnknownCommand(Exception):
    """The model lacks a command that the product uses."""


class Store:
    """`now_us`: the server's clock. `added`: the streams that got entries since somebody looked."""

    def __init__(self, now_us: Callable[[], int]) -> None:
        self.now_us = now_us
        self.db: dict[bytes, Any] = {}
        self.expiry: dict[bytes, int] = {}
        self.log: list[tuple[Args, Any]] = []
        self.added: set[bytes] = set()

    def run(self, args: Args) -> Any:
        """One command. Raises `Failure`."""
        command = COMMANDS.get(args[0]) or COMMANDS.get(args[0].upper())
        if command is None:
            raise UnknownCommand(b" ".join(args[:3]).decode(errors="replace"))
        work, writes = command
        try:
            answer = work(self, args)
        except IndexError:
            raise Failure(f"ERR wrong number of arguments for '{args[0].decode().lower()}' command") from None
        if writes:
            self.log.append((args, answer))
        return answer

    @property
    def now_ms(self) -> int:
        return self.now_us() // 1000

    def find(self, key: bytes, kind: type[T]) -> T | None:
        value = self.peek(key)
        if value is not None and type(value) is not kind:
            raise Failure(WRONG_TYPE)
        return value

    def peek(self, key: bytes) -> Any:
        """Whatever the key holds; None if nothing, or nothing any more."""
        value = self.db.get(key)
        if value is not None and self.expiry:
            due_ms = self.expiry.get(key)
            if due_ms is not None and due_ms <= self.now_ms:
                self.drop(key)
                return None
        return value

    def make(self, key: bytes, kind: type[T]) -> T:
        value = self.find(key, kind)
        if value is None:
            value = self.db[key] = kind()
        return value

    def drop(self, key: bytes) -> bool:
        self.expiry.pop(key, None)
        return self.db.pop(key, None) is not None

    def snapshot(self) -> tuple[dict[bytes, Any], dict[bytes, int]]:
        return copy.deepcopy(self.db), dict(self.expiry)

    def restore(self, state: tuple[dict[bytes, Any], dict[bytes, int]]) -> None:
        self.db, self.expiry = copy.deepcopy(state[0]), dict(state[1])
