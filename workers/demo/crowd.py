"""The crowd: many users at once, each of whom speaks, listens and interrupts, to find how many the machine bears.

Responsible for what a turn is, for when one counts as missed, and for the search. Uses the Python producer as any
application would. Leaves the system to `system.py`, the engine's side to `llm.py`. Times are monotonic seconds.

A user speaks in real time and hears the answer in real time. A turn is missed if the answer's sound isn't there
`FIRST_S` after the user's last word, if it runs dry for more than `DRY_S` in all, or if anything is refused or late.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from bargein_client import BargeinError, Lifecycle, Output
from control.core.requests import request_id
from workers.demo.audit import Audit
from workers.tasks import end_tasks

if TYPE_CHECKING:
    from collections.abc import Callable

    from bargein_client import AsyncBargein, AsyncSession

FIRST_S = 1.0
DRY_S = 0.1
BUFFER_S = 0.1
GIVE_UP_S = 10.0

PIECE_S = 0.08
PIECES = 12  # a second of speech
ANSWER_TOKENS = 120  # at 50 a second
HEARD_S = 0.5  # of an answer that is interrupted
# Whether the answer is cut short, turn by turn.
PLAN = (True, False, True)
BYTES_A_SECOND = 2 * 16_000
START_S = 1.0  # nobody begins at the same moment
OPEN_AGAIN_S = 0.1


@dataclass(frozen=True, slots=True)
class BargeIn:
    """One interruption: which request of the first stage it ends, and when the producer was about to send it."""

    request_id: str
    at_s: float


@dataclass(slots=True)
class Crowd:
    """What came of so many sessions at once. `missed`: why, one for each missed turn; `first_s`: by turn."""

    sessions: int
    turns: int = 0
    missed: list[str] = field(default_factory=list[str])
    first_s: list[float] = field(default_factory=list[float])
    barge_ins: list[BargeIn] = field(default_factory=list[BargeIn])
    stale: int = 0


@dataclass(slots=True)
class _Answer:
    """One answer as it comes in: `pieces` are (arrival, seconds of sound)."""

    pieces: list[tuple[float, float]] = field(default_factory=list["tuple[float, float]"])
    ended: bool = False

    def dry_s(self, until_s: float) -> float:
        """How long nothing was heard between its beginning and its end, or `until_s` where more is to come."""
        dry_s, end_s = self._play()
        return dry_s if self.ended or not self.pieces else dry_s + max(0.0, until_s - end_s)

    @property
    def end_s(self) -> float:
        """When what has come will have been heard."""
        return self._play()[1]

    def _play(self) -> tuple[float, float]:
        dry_s, end_s = 0.0, self.pieces[0][0] + BUFFER_S if self.pieces else 0.0
        for at_s, length_s in self.pieces:
            dry_s += max(0.0, at_s - end_s)
            end_s = max(at_s, end_s) + length_s
        return dry_s, end_s


class User:
    """One of the crowd."""

    def __init__(self, session: AsyncSession, speech: bytes, crowd: Crowd) -> None:
        self._session = session
        self._crowd = crowd
        size = round(PIECE_S * BYTES_A_SECOND)
        self._pieces = [speech[start : start + size] for start in range(0, PIECES * size, size)]
        self._audit = Audit()
        self._answer = _Answer()
        self._epoch = 0
        self._news = asyncio.Event()
        self._troubles: list[str] = []
        self._replies: set[asyncio.Future[Any]] = set()

    async def run(self) -> None:
        """The whole of what one user says and hears."""
        listening = asyncio.create_task(self._listen())
        try:
            for interrupts in PLAN:
                await self._take_turn(interrupts=interrupts)
            if self._replies:
                await asyncio.wait(self._replies)
            await self._session.close()
            await asyncio.wait({listening}, timeout=GIVE_UP_S)
        except BargeinError as error:
            self._troubles.append(_brief(error))
        finally:
            await end_tasks(listening)
            self._crowd.stale += self._audit.stale
            # What went wrong beside the turns: a close, an interruption's reply.
            self._crowd.missed += self._troubles

    async def _take_turn(self, *, interrupts: bool) -> None:
        self._crowd.turns += 1
        self._answer, self._epoch = _Answer(), self._session.fence.epoch
        spoken_s = await self._speak()
        if not await self._until(lambda: bool(self._answer.pieces), spoken_s + GIVE_UP_S):
            self._miss(f"no answer within {GIVE_UP_S:g} s")
            return
        answer = self._answer
        first_s = answer.pieces[0][0] - spoken_s
        self._crowd.first_s.append(first_s)
        if interrupts:
            await asyncio.sleep(max(0.0, answer.pieces[0][0] + HEARD_S - time.monotonic()))
            dry_s = answer.dry_s(time.monotonic())
            await self._interrupt()
        elif await self._until(lambda: answer.ended, spoken_s + GIVE_UP_S + ANSWER_TOKENS / 50):
            await asyncio.sleep(max(0.0, answer.end_s - time.monotonic()))
            dry_s = answer.dry_s(time.monotonic())
        else:
            self._miss("the answer had no end")
            return
        if self._troubles:
            self._miss(self._troubles.pop())
            self._troubles.clear()
        elif first_s > FIRST_S:
            self._miss(f"the answer came after more than {FIRST_S:g} s")
        elif dry_s > DRY_S:
            self._miss(f"the answer ran dry for more than {DRY_S:g} s")

    async def _speak(self) -> float:
        begun_s = time.monotonic()
        for place, piece in enumerate(self._pieces):
            await asyncio.sleep(max(0.0, begun_s + (place + 1) * PIECE_S - time.monotonic()))
            self._keep(await self._session.append(piece, final=place == len(self._pieces) - 1, wait=False))
        return begun_s + PIECES * PIECE_S

    async def _interrupt(self) -> None:
        fence = self._session.fence
        name = request_id(self._session.session_id, fence.incarnation, fence.epoch, 0)
        self._crowd.barge_ins.append(BargeIn(name, time.monotonic()))
        self._keep(await self._session.interrupt(wait=False))

    def _keep(self, reply: asyncio.Future[Any]) -> None:
        self._replies.add(reply)
        reply.add_done_callback(self._note_reply)

    def _note_reply(self, reply: asyncio.Future[Any]) -> None:
        self._replies.discard(reply)
        if not reply.cancelled() and (error := reply.exception()) is not None:
            self._troubles.append(_brief(error))

    async def _listen(self) -> None:
        async for event in self._session.events():
            if isinstance(event, Output):
                self._audit.output(event.fence.epoch)
                if event.fence.epoch == self._epoch:
                    if event.data:
                        self._answer.pieces.append((time.monotonic(), len(event.data) / BYTES_A_SECOND))
                    self._answer.ended = self._answer.ended or event.turn_end
            elif isinstance(event, Lifecycle):
                self._audit.lifecycle(event.event, event.fence.epoch)
                if event.terminal and event.event != "closed":
                    self._troubles.append(f"the session ended: {event.reason}")
            self._news.set()

    async def _until(self, is_so: Callable[[], bool], until_s: float) -> bool:
        while not is_so():
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            self._news.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._news.wait()
            except TimeoutError:
                continue
        return True

    def _miss(self, why: str) -> None:
        self._crowd.missed.append(why)


async def gather_crowd(client: AsyncBargein, sessions: int, speech: bytes) -> Crowd:
    """So many users at once, all turns of each. Raises `BargeinError` if a session can't be opened."""
    crowd, random = Crowd(sessions), Random(sessions)

    async def one(number: int) -> None:
        await asyncio.sleep(random.uniform(0, START_S))
        session = await _open(client, f"crowd-{sessions}-{number}")
        await User(session, speech, crowd).run()

    users = [asyncio.create_task(one(number)) for number in range(sessions)]
    try:
        await asyncio.gather(*users)
    finally:
        await end_tasks(*users)
    return crowd


async def search(
    client: AsyncBargein, most: int, speech: bytes, note: Callable[[Crowd], None], begin: Callable[[int], None]
) -> None:
    """Ever more at once until a turn is missed, or `most`; then twice between the last two, if there is a between."""

    async def is_well(sessions: int) -> bool:
        begin(sessions)
        crowd = await gather_crowd(client, sessions, speech)
        note(crowd)
        return not crowd.missed

    sizes = [*(size for power in range(12) if (size := 2 << power) < most), most]
    good = 0
    for size in sizes:
        if not await is_well(size):
            bad = size
            break
        good = size
    else:
        return
    for _ in range(2):
        middle = (good + bad) // 2
        if middle in {good, bad} or middle == 0:
            break
        if await is_well(middle):
            good = middle
        else:
            bad = middle


async def _open(client: AsyncBargein, session_id: str) -> AsyncSession:
    """A session. A slot that was just given back is known a moment later, hence more than one try."""
    until_s = time.monotonic() + GIVE_UP_S
    config = {"sampling": {"max_tokens": ANSWER_TOKENS}}
    while True:
        try:
            return await client.open(session_id, runtime_config=config)
        except BargeinError as error:
            if not error.retryable or time.monotonic() > until_s:
                raise
        await asyncio.sleep(OPEN_AGAIN_S)


def _brief(error: BaseException) -> str:
    """Without what differs from session to session, so that equal reasons can be counted."""
    return getattr(error, "code", None) or type(error).__name__
