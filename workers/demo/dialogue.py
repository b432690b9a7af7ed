"""The conversation: a user who speaks in real time, listens, talks over the answer, and speaks on.

Responsible for pace, for interrupting, for what is heard, and for the moment at which a control worker is killed. Uses
the Python producer as any application would. Leaves the plan to `speech.py`, sound to `playback.py`, looking at the
system to `watch.py`. Talks to Redis through the producer alone. Says no with `Failure`.

Times are seconds since the conversation began, unless a name says otherwise; `sent_ms` is the server's clock.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgpack
from redis.asyncio import Redis

from bargein_client import BargeinError, CleanupFailedError, Gap, Lifecycle, Output, Reply, StageTimeoutError
from workers.cli.endings import Failure
from workers.demo.audit import Audit
from workers.demo.playback import Loudspeaker, Track
from workers.demo.speech import FRAME_MS, measure_db
from workers.demo.wav import to_pcm
from workers.tasks import end_tasks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from bargein_client import AsyncSession
    from workers.demo.board import Board
    from workers.demo.speech import Turn

RATE_HZ = 16_000
FRAME_S = FRAME_MS / 1000
LOOK_S = 0.01
PAUSE_S = 0.4
KILL_AFTER_S = 0.3
ANSWER_WAIT_S = 10.0

# While nobody answers (a control worker was killed), that many inputs are under way; what is said meanwhile waits here
# and goes as one input. Well below the number that a session may have queued.
MOST_UNDER_WAY = 24


class NotingRedis(Redis):
    """A Redis client that remembers when the server took each interruption."""

    signals_ms: list[int]

    async def xadd(self, name: Any, fields: Any, *args: Any, **kwargs: Any) -> Any:
        """As the base class. The entry's id begins with the server's time in milliseconds."""
        entry_id = await super().xadd(name, fields, *args, **kwargs)
        if msgpack.unpackb(fields["b"])["op"] == "signal":
            self.signals_ms.append(int(entry_id.partition(b"-")[0]))
        return entry_id


@dataclass(slots=True)
class Interruption:
    """One barge-in. `heard_s`: when the listener read `interrupted`; `confirmed_s`: when the reply came.

    `cut_s`: how much of what had come the user never heard. `waited`: nobody owned the partition at that moment.
    """

    at_s: float
    epoch: int
    sent_ms: int
    cut_s: float
    waited: bool = False
    heard_s: float | None = None
    confirmed_s: float | None = None


@dataclass(slots=True)
class Takeover:
    """What became of the session when its control worker was killed."""

    victim: str
    pid: int
    killed_s: float
    replied_s: float | None = None
    successor: str = ""


@dataclass(slots=True)
class Microphone:
    """Sends what the user says, and keeps it while too much is under way already."""

    session: AsyncSession
    sent: int = 0
    accepted: int = 0
    refusals: list[str] = field(default_factory=list[str])
    epochs: set[int] = field(default_factory=set[int])
    _kept: bytearray = field(default_factory=bytearray)
    _under_way: set[asyncio.Future[Reply]] = field(default_factory=set["asyncio.Future[Reply]"])

    async def push(self, pcm: bytes, *, final: bool) -> None:
        """A frame. The last one of an utterance returns when everything is sent."""
        self._kept += pcm
        while len(self._under_way) >= MOST_UNDER_WAY:
            if not final:
                return
            await asyncio.wait(self._under_way, return_when=asyncio.FIRST_COMPLETED)
        pcm = bytes(self._kept)
        self._kept.clear()
        future = await self.session.append(pcm, final=final, wait=False)
        self.sent += 1
        self._under_way.add(future)
        future.add_done_callback(self._note)

    async def settle(self) -> None:
        """Wait until every input is answered."""
        if self._under_way:
            await asyncio.wait(self._under_way)

    def _note(self, future: asyncio.Future[Reply]) -> None:
        self._under_way.discard(future)
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            self.refusals.append(str(error))
            return
        self.accepted += 1
        accepted_fence = future.result().accepted_fence
        if accepted_fence is not None:
            self.epochs.add(accepted_fence.epoch)


class Dialogue:
    """`kill` kills the session's control worker and says which one that was, and its process id.

    `find_owner` says which one it is now; `lease_s` is how long it may take until another one is.
    """

    def __init__(
        self,
        session: AsyncSession,
        noted: NotingRedis,
        turns: Sequence[Turn],
        board: Board,
        say: Callable[[str], None],
        kill: Callable[[], Awaitable[tuple[str, int]]],
        find_owner: Callable[[], Awaitable[str]],
        *,
        lease_s: float,
    ) -> None:
        self.user = Track(RATE_HZ)
        self.model = Loudspeaker(RATE_HZ)
        self.microphone = Microphone(session)
        self.audit = Audit()
        self.interruptions: list[Interruption] = []
        self.takeover: Takeover | None = None
        self.arrivals_s: list[float] = []
        self.heard_out = 0
        self.gaps = 0
        self.length_s = 0.0
        self._session = session
        self._noted = noted
        self._turns = turns
        self._board = board
        self._say = say
        self._kill = kill
        self._find_owner = find_owner
        # A turn may begin just as its control worker is killed.
        self._answer_wait_s = lease_s + ANSWER_WAIT_S
        self._began_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """The whole conversation, until the session is closed. Raises `Failure`."""
        self._began_s = asyncio.get_running_loop().time()
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._show_levels())]
        try:
            for number, turn in enumerate(self._turns, 1):
                await self._speak(number, turn)
                await self._hear(number, turn)
            await self.microphone.settle()
            await asyncio.gather(*self._tasks[2:])
            self.length_s = max(self.now_s, self.model.track.end_s)
            self._board.doing = "closing the session"
            self._say("the user hangs up")
            await self._close()
        except BargeinError as error:
            raise Failure(f"the conversation can't go on: {error}") from None
        except TimeoutError:
            raise Failure("the session's last event has not come") from None
        finally:
            await end_tasks(*self._tasks)

    @property
    def turns(self) -> int:
        """How many turns the user takes."""
        return len(self._turns)

    @property
    def began_s(self) -> float:
        """When the conversation began, by the monotonic clock."""
        return self._began_s

    @property
    def now_s(self) -> float:
        """Since the conversation began."""
        return asyncio.get_running_loop().time() - self._began_s

    async def _close(self) -> None:
        try:
            await self._session.close()
        except (CleanupFailedError, StageTimeoutError) as error:
            # The close holds, and its cleanup goes on; that it is not over is what the findings will say.
            self._say(f"the session closes, but a stage has not let go yet: {error}")
            return
        # The listener ends by itself, with the session's last event.
        await asyncio.wait_for(self._tasks[0], self._answer_wait_s)

    async def _speak(self, number: int, turn: Turn) -> None:
        size = RATE_HZ * FRAME_MS // 1000
        frames = [turn.sound[start : start + size] for start in range(0, turn.sound.size, size)]
        begin_s = self.now_s
        self._board.doing = "the user speaks"
        for place, frame in enumerate(frames):
            said_s = begin_s + place * FRAME_S
            # A microphone has a frame when it is over.
            await self._sleep_until(said_s + FRAME_S)
            self.user.add(said_s, frame)
            if place == 0:
                await self._begin_turn(number)
            self._board.user_db = float(measure_db(frame))
            await self.microphone.push(to_pcm(frame), final=place == len(frames) - 1)
        self._board.talking = False
        self._board.doing = "the user waits for the answer"

    async def _begin_turn(self, number: int) -> None:
        seconds = f"{self._turns[number - 1].sound.size / RATE_HZ:.1f} s"
        if self._is_answering:
            await self._interrupt(number, seconds)
        else:
            self._say(f"turn {number}: the user speaks for {seconds}")
        self.model.expect()
        self._board.talking = True
        self._board.turn = number

    async def _interrupt(self, number: int, seconds: str) -> None:
        at_s, epoch = self.now_s, self._session.fence.epoch
        cut_s = self.model.cut(at_s)
        reply = await self._session.interrupt(wait=False)
        sent_ms = self._noted.signals_ms[-1]
        self._board.interruptions += 1
        self._board.signals_ms[epoch] = sent_ms
        self._board.epoch = epoch + 1
        takeover = self.takeover
        each = Interruption(
            at_s,
            epoch,
            sent_ms,
            cut_s,
            waited=takeover is not None and takeover.replied_s is None,
        )
        self.interruptions.append(each)
        self._tasks.append(asyncio.create_task(self._await_confirmation(each, reply)))
        self._say(f"turn {number}: the user talks over the answer, for {seconds}; epoch {epoch} is over")

    async def _await_confirmation(self, each: Interruption, reply: asyncio.Future[Reply]) -> None:
        try:
            await reply
        except BargeinError as error:
            # The interruption holds; only its cleanup took too long, or failed at first.
            self._say(f"the cleanup of epoch {each.epoch} is not confirmed yet: {error}")
            return
        each.confirmed_s = self.now_s
        self._say(
            f"every stage has let go of epoch {each.epoch}'s requests, {(each.confirmed_s - each.at_s) * 1000:.0f} ms"
            " after the interruption"
        )

    async def _hear(self, number: int, turn: Turn) -> None:
        if not await self._until(lambda: self.model.first_s is not None, self._answer_wait_s):
            why = f"; refused: {self.microphone.refusals[-1]}" if self.microphone.refusals else ""
            raise Failure(f"no answer to turn {number} within {self._answer_wait_s:g} s{why}")
        self._board.doing = "the model answers"
        first_s = self.model.first_s or 0.0
        if turn.kill:
            self._tasks.append(asyncio.create_task(self._kill_owner(first_s + KILL_AFTER_S)))
        if turn.listen_s is not None:
            await self._sleep_until(first_s + turn.listen_s)
            return
        wait_s = turn.sound.size / RATE_HZ + self._answer_wait_s
        if not await self._until(lambda: self.model.ended_s is not None and self.now_s >= self.model.ended_s, wait_s):
            raise Failure(f"the answer to turn {number} has no end")
        self.heard_out += 1
        self._say(f"turn {number}: the answer was heard to its end")
        self._board.doing = "silence"
        await asyncio.sleep(PAUSE_S)

    async def _kill_owner(self, at_s: float) -> None:
        """Kill the session's control worker, then ask for something that only its successor can answer."""
        await self._sleep_until(at_s)
        killed_s = self.now_s
        victim, pid = await self._kill()
        takeover = self.takeover = Takeover(victim, pid, killed_s)
        self._say(f"SIGKILL to {victim}, which owned the session; the model speaks on, nobody takes commands")
        await self._session.heartbeat()
        takeover.replied_s = self.now_s
        takeover.successor = await self._find_owner()
        gap_ms = (takeover.replied_s - takeover.killed_s) * 1000
        self._say(f"{takeover.successor} has taken over and answers, {gap_ms:,.0f} ms after the kill")

    async def _listen(self) -> None:
        async for event in self._session.events(replies=True):
            match event:
                case Output():
                    self.audit.output(event.fence.epoch)
                    self._board.outputs_heard += 1
                    self._take_output(event)
                case Lifecycle():
                    self.audit.lifecycle(event.event, event.fence.epoch)
                    self._take_lifecycle(event)
                case Reply():
                    self.audit.reply()
                case Gap():
                    self.gaps += 1
            self._board.stale_delivered = max(self._board.stale_delivered, self.audit.stale)

    def _take_output(self, output: Output) -> None:
        self.arrivals_s.append(self.now_s)
        if output.kind != "audio":
            return
        rate_hz = int(output.metadata.get("sample_rate_hz", RATE_HZ))
        if rate_hz != self.model.track.rate_hz:
            if self.model.track.pieces:
                raise Failure(f"the model changes its sample rate to {rate_hz} Hz within the conversation")
            self.model = Loudspeaker(rate_hz)
        self.model.play(self.now_s, output.data, last=output.turn_end)

    def _take_lifecycle(self, event: Lifecycle) -> None:
        if event.event == "interrupted":
            for each in self.interruptions:
                if each.heard_s is None and each.epoch < event.fence.epoch:
                    each.heard_s = self.now_s
        elif event.terminal:
            self._say(f"the session has ended: {event.event}, {event.reason}")
        elif event.event == "epoch_lost":
            self._say("the model has lost this epoch's context")

    async def _show_levels(self) -> None:
        while True:
            self._board.model_db = self.model.track.level_db(self.now_s)
            if not self._board.talking:
                self._board.user_db = -120.0
            await asyncio.sleep(2 * FRAME_S)

    @property
    def _is_answering(self) -> bool:
        """Whether an answer has begun and is not over yet."""
        ended_s = self.model.ended_s
        return self.model.first_s is not None and (ended_s is None or self.now_s < ended_s)

    async def _sleep_until(self, at_s: float) -> None:
        await self._until(lambda: False, at_s - self.now_s)

    async def _until(self, is_so: Callable[[], bool], wait_s: float) -> bool:
        """Whether it became so in time. Raises what has ended one of the tasks meanwhile."""
        deadline_s = self.now_s + wait_s
        while not is_so():
            for task in self._tasks:
                if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                    raise error
            if self._tasks[0].done():
                raise Failure("the session has ended before the conversation has")
            left_s = deadline_s - self.now_s
            if left_s <= 0:
                return False
            await asyncio.sleep(min(LOOK_S, left_s))
        return True
