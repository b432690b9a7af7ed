"""A producer of a chaos run: one session id through all its lives, chosen by a seed.

Responsible for what is said when: turns and bursts of input, interruptions in every order with the input around
them (S25, S38, S84), updates, touches, a session that another gateway takes over (S82), reopening, and commands that
are sent again. Leaves the way into Redis and listening to `traffic.py`. It does nothing that a well-behaved producer
would not, save opening what is open and sending late what is over.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgpack

from tests.chaos.history import History, Sent, Turn

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from tests.chaos.traffic import Traffic

RESEND_S = 3.0
AGAIN_S = 0.3
SPOKEN_S = 12.0  # after the faults, whatever was accepted must have been said
LIVES = 4
WAITING_APPENDS = 3

# What a producer does next, and how often.
ACTIONS = {
    "append": 40,
    "burst": 8,
    "cancel": 8,
    "double_cancel": 4,
    "cancel_and_append": 5,
    "append_and_cancel": 4,
    "update": 6,
    "touch": 6,
    "send_again": 5,
    "take_over": 5,
    "open_again": 1,
    "go_away": 1,
    "pause": 4,
}


class Producer:
    """`await live()` is the whole of it; `history` is what it sent and heard."""

    def __init__(self, traffic: Traffic, session_id: str, choose: random.Random) -> None:
        self.history = History(session_id)
        self._traffic = traffic
        self._choose = choose
        self._incarnation = 1
        self._epoch = 0
        self._turn: Turn = (0, 0)
        self._turn_over = False
        self._generation = 0
        self._bodies: dict[str, dict[Any, Any]] = {}

    async def live(self) -> None:
        """From life to life, each from its open to whatever end it has."""
        while True:
            opened = await self._live_once()
            if not opened or self._traffic.stopping.is_set() or self._choose.random() < 0.4:
                return
            if self._incarnation >= LIVES or not self._over():
                return
            if self._choose.random() < 0.2:  # D4: refused, this life is over
                await self._send("open")
            self._begin(self._incarnation + self._choose.choice((1, 1, 3)))

    def _begin(self, incarnation: int) -> None:
        self._incarnation, self._epoch, self._turn, self._turn_over, self._generation = incarnation, 0, (0, 0), False, 0

    async def _live_once(self) -> bool:
        """Whether this life was opened."""
        traffic, choose = self._traffic, self._choose
        opening = await self._send("open")
        if choose.random() < 0.03:  # S1: gave up while it was opening
            await self._send("close")
            await self._until(self._all_answered)
            if (self._reply(opening) or {})["ok"] and not self._over():
                # It was refused at first, closed as such, and tried again with success.
                await self._send("close")
                await self._until(self._all_answered)
            return False
        await self._until(lambda: self._is_final(opening) or self._over())
        reply = self._reply(opening)
        if reply is None or not reply["ok"]:
            return False
        for _ in range(choose.randint(4, 35)):
            if self._over() or traffic.stopping.is_set():
                break
            await self._act()
        if self._over():
            if choose.random() < 0.3:
                await self._send("close")
        else:
            if traffic.stopping.is_set() or choose.random() < 0.3:
                await self._hear_out()
            await self._send("close")
        await self._until(self._all_answered)
        return True

    # --- what it does

    async def _act(self) -> None:
        what = self._choose.choices(list(ACTIONS), list(ACTIONS.values()))[0]
        if self._epoch_lost() and what in ("append", "burst", "cancel_and_append", "append_and_cancel"):
            what = "cancel"
        await getattr(self, f"_{what}")()
        await asyncio.sleep(self._choose.uniform(0.03, 0.5))

    async def _append(self) -> None:
        await self._room_for_an_append()
        if not self._epoch_lost() and not self._over():
            await self._say()

    async def _burst(self) -> None:
        for _ in range(self._choose.randint(2, 4)):
            await self._append()

    async def _cancel(self) -> None:
        cancelled = await self._interrupt()
        if self._choose.random() < 0.4:
            await self._until(lambda: self._is_final(cancelled) or self._over())

    async def _double_cancel(self) -> None:
        """S38: the same interruption twice, or one more right behind it."""
        epoch, turn = self._epoch, self._turn
        await self._interrupt()
        if self._choose.random() < 0.5:
            await self._send("signal", next_epoch=epoch + 1, epoch=epoch, turn=turn, event="response.cancel")
        else:
            await self._interrupt()

    async def _cancel_and_append(self) -> None:
        """S25: the input that interrupted comes right behind its cancel."""
        await self._interrupt()
        await self._say()

    async def _append_and_cancel(self) -> None:
        """S84: the input that interrupts is there before its cancel."""
        await self._room_for_an_append()
        epoch = self._epoch
        self._enter(epoch + 1)
        await self._say()
        await self._send("signal", next_epoch=epoch + 1, epoch=epoch, turn=(0, 0))

    async def _update(self) -> None:
        await self._send("signal", event="session.update")

    async def _touch(self) -> None:
        expected = self._generation if self._choose.random() < 0.4 else None
        await self._send("touch", activity=self._choose.choice(("heartbeat", "playback_ack")), generation=expected)

    async def _send_again(self) -> None:
        """D5: whatever was answered is answered the same, however late and in whichever life."""
        known = [sent for sent in self.history.sent.values() if self._is_final(sent.control_id)][-60:]
        if known:
            await self._deliver_again(self._choose.choice(known))

    async def _take_over(self) -> None:
        """S82: detached or not, another gateway resumes; then the first notices that it is alone."""
        old = self._generation
        if self._choose.random() < 0.7:
            await self._send("touch", activity="detach", generation=old)
        resumes = [await self._send("resume", generation=old)]
        if self._choose.random() < 0.3:  # two gateways at once: one of them gets it
            resumes.append(await self._send("resume", generation=old))
        await self._until(lambda: all(self._is_final(one) for one in resumes) or self._over())
        replies = [reply for one in resumes if (reply := self._reply(one)) is not None]
        for reply in replies:
            if reply["ok"]:
                self._generation = reply["detail"]["lease_generation"]
        if self._generation != old and self._choose.random() < 0.6:
            await self._send("touch", activity="detach", generation=old)

    async def _open_again(self) -> None:
        """S4: what is open isn't opened again."""
        await self._send("open")

    async def _go_away(self) -> None:
        """S6: detached and never resumed."""
        detached = await self._send("touch", activity="detach", generation=self._generation)
        await self._until(lambda: self._is_final(detached) or self._over())
        if (self._reply(detached) or {}).get("ok"):
            await self._until(lambda: self._over() or self._traffic.stopping.is_set())

    async def _pause(self) -> None:
        await asyncio.sleep(self._choose.uniform(0.2, 1.5))

    # --- the words for it

    def _enter(self, epoch: int) -> None:
        self._epoch, self._turn, self._turn_over = epoch, (epoch, 0), False

    async def _interrupt(self) -> str:
        # From a fence that somebody has come with for certain: input of a later turn may have been refused.
        cancelled = await self._send("signal", next_epoch=self._epoch + 1, turn=(0, 0))
        self._enter(self._epoch + 1)
        return cancelled

    async def _say(self) -> str:
        """An append: in this turn, in the next one, or in another response to this one."""
        choose = self._choose
        if self._turn_over or choose.random() < 0.12:
            turn_id, response_seq = self._turn
            further = choose.random() < 0.7
            self._turn, self._turn_over = (turn_id + further, response_seq + (not further)), False
        self._turn_over = choose.random() < 0.2
        tokens = tuple(next(self._traffic.tokens) for _ in range(choose.randint(1, 10)))
        return await self._send("append", tokens=tokens, final=self._turn_over)

    async def _room_for_an_append(self) -> None:
        await self._until(
            lambda: (
                sum(s.op == "append" and self._reply(s.control_id) is None for s in self._sent_here()) < WAITING_APPENDS
                or self._epoch_lost()
                or self._over()
            )
        )

    async def _hear_out(self) -> None:
        """Let everything be said that was accepted; the checker looks whether it was. No input comes after it."""
        await self._until(self._all_answered)
        traffic = self._traffic
        while not (self._is_said() or self._over() or self._epoch_lost()):
            if traffic.stopping.is_set() and traffic.now_s > traffic.stopped_s + SPOKEN_S:
                break
            await traffic.wait_news(self.history.session_id, 0.5)
        if not self._over() and not self._epoch_lost():
            self.history.settled[self._incarnation] = self._epoch

    def _is_said(self) -> bool:
        """Whether the last turn that was accepted has been said to its end."""
        appends = [
            sent
            for sent in self._sent_here()
            if sent.op == "append" and sent.epoch == self._epoch and (self._reply(sent.control_id) or {}).get("ok")
        ]
        turn = max((sent.turn for sent in appends), default=(0, 0))
        mine = [sent for sent in appends if sent.turn == turn]
        said = [
            entry
            for entry in self.history.seen
            if entry.kind == "output"
            and (entry.incarnation, entry.epoch, entry.turn) == (self._incarnation, self._epoch, turn)
        ]
        ended = not any(sent.final for sent in mine) or any(entry.body.get("turn_end") for entry in said)
        return ended and sum(len(e.body["data"]) for e in said) >= sum(len(s.tokens) for s in mine)

    def _epoch_lost(self) -> bool:
        """Whether the current epoch takes no more input."""
        return any(
            entry.is_event("epoch_lost") and (entry.incarnation, entry.epoch) == (self._incarnation, self._epoch)
            for entry in self.history.seen
        )

    def _over(self) -> bool:
        return self.history.has_ended(self._incarnation)

    def _sent_here(self) -> list[Sent]:
        return [sent for sent in self.history.sent.values() if sent.incarnation == self._incarnation]

    def _reply(self, control_id: str) -> dict[str, Any] | None:
        return self._traffic.find_reply(self.history.session_id, control_id)

    def _is_final(self, control_id: str) -> bool:
        """Whether there is nothing to wait for: a reply that isn't to be tried again. An append never is."""
        reply = self._reply(control_id)
        return reply is not None and (not reply["retryable"] or reply["op"] == "append")

    def _all_answered(self) -> bool:
        return all(self._is_final(control_id) for control_id in self.history.sent)

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._traffic.wait_news(self.history.session_id, 0.5)

    # --- the sending of it

    async def _send(self, op: str, **about: Any) -> str:
        """`about`: the fields of `Sent` that are not as the session stands."""
        control_id = f"{self.history.session_id}.{len(self.history.sent) + 1}"
        here: dict[str, Any] = {"incarnation": self._incarnation, "epoch": self._epoch, "turn": self._turn}
        sent = Sent(control_id, op, at_s=self._traffic.now_s, **(here | about))
        fields = self._bodies[control_id] = _encode(self.history.session_id, sent, apart=self._choose.random() < 0.5)
        self.history.sent[control_id] = sent
        await self._traffic.push(self.history.session_id, sent, fields)
        if self._choose.random() < 0.04:  # delivered twice, as a producer that lost patience would
            await self._deliver_again(sent)
        self._traffic.follow(self._see_through(sent))
        return control_id

    async def _deliver_again(self, sent: Sent) -> None:
        sent.deliveries += 1
        await self._traffic.push(self.history.session_id, sent, self._bodies[sent.control_id])

    async def _see_through(self, sent: Sent) -> None:
        """Send it again while no reply comes, and while the reply says so."""
        sent_s, refusal = self._traffic.now_s, None
        while not self._is_final(sent.control_id):
            reply = self._reply(sent.control_id)
            # The same refusal again is no news: the next try was not answered yet.
            wait_s = AGAIN_S if reply is not None and reply is not refusal else RESEND_S
            if self._traffic.now_s - sent_s >= wait_s:
                refusal = reply
                await self._deliver_again(sent)
                sent_s = self._traffic.now_s
            await asyncio.sleep(0.1)


def _encode(session_id: str, sent: Sent, *, apart: bool) -> dict[Any, Any]:
    """The fields of the command's entry. `apart`: an append's payload beside the body, without an operation id."""
    body: dict[str, Any] = {
        "v": 1,
        "op": sent.op,
        "control_id": sent.control_id,
        "session_id": session_id,
        "fence": _fence(sent.incarnation, sent.epoch, sent.turn),
    }
    fields: dict[Any, Any] = {}
    if sent.generation is not None:
        body["expected_lease_generation"] = sent.generation
    if sent.op == "open":
        body["capabilities"] = {"input_modes": ["append_tokens"]}
    elif sent.op == "append":
        body |= {"mode": "append_tokens", "final": sent.final}
        if apart:
            fields["p"] = msgpack.packb(list(sent.tokens))
        else:
            body |= {"payload": list(sent.tokens), "operation_id": f"op-{sent.control_id}"}
    elif sent.op == "signal":
        body["event"] = sent.event
        if sent.next_epoch is None:
            body |= {"session_config": {"by": sent.control_id}, "runtime_config": {"pitch": len(sent.control_id)}}
        else:
            body["next_fence"] = _fence(sent.incarnation, sent.next_epoch, (sent.next_epoch, 0))
    elif sent.op == "touch":
        body["activity"] = sent.activity
    fields["b"] = msgpack.packb(body)
    return fields


def _fence(incarnation: int, epoch: int, turn: Turn) -> dict[str, int]:
    return {"incarnation": incarnation, "epoch": epoch, "turn_id": turn[0], "response_seq": turn[1]}
