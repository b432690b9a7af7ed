"""One session's producer: it does what the plan says, and sees every command through.

Responsible for sending in order and for everything that a patient client does: an XADD without an answer is tried again
before anything later, a command without a reply is sent again under its control id, one that may be tried again is.
Leaves listening to `traffic.py`, the record to `accounts.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from tests.sim.accounts import Sent
from tests.sim.client import Client
from tests.sim.values import Failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.accounts import Account
    from tests.sim.plan import Item
    from tests.sim.traffic import Traffic

RESEND_S = 2.0
AGAIN_S = 0.25
TRIES = 4
CLOSES = 3
HEARD_S = 8.0
FENCE = ("incarnation", "epoch", "turn_id", "response_seq")


class Producer:
    """One session id, life after life. `open_ends`: commands that are still being seen through."""

    def __init__(self, traffic: Traffic, session_id: str, items: list[Item]) -> None:
        self.done = False
        self.open_ends = 0
        self.account: Account = traffic.accounts[session_id]
        self._traffic = traffic
        self._world = traffic.world
        self._session_id = session_id
        self._items = items
        self._client = Client(traffic.world, f"producer-{session_id}")
        self._resender = Client(traffic.world, f"producer-{session_id}")
        self._sending = asyncio.Lock()
        self._resending = asyncio.Lock()
        self._incarnation = 0
        self._place = (0, 0, 0)
        self._generation = 0
        self._before = (0, 0, 0)
        self._opened = False

    async def live(self) -> None:
        """Everything in the plan, and at last a close."""
        for item in self._items:
            if item.kind == "open" or not self._is_over or item.kind == "close":
                await asyncio.sleep(item.at_s)
                await self._do(item)
        number = 0
        while True:
            if self._opened and not self._is_over:
                number += 1
                await self._see(await self._send("close", -1_000_000 - number))
            await self._until(lambda: self.open_ends == 0)
            # An open that was refused at first may have come through behind its close.
            if self._incarnation not in self.account.opened or self._is_over or number >= CLOSES:
                break
        self.done = True

    @property
    def _is_over(self) -> bool:
        return not self._opened or self._incarnation in self.account.ended

    async def _do(self, item: Item) -> None:
        more = item.more
        match item.kind:
            case "open":
                if not await self._open(item):
                    return
            case "append" | "jump":
                await self._append(item)
            case "cancel":
                await self._cancel(item)
            case "update":
                await self._update(item)
            case "touch" | "detach":
                sent = await self._send(
                    "touch", item.number, activity="detach" if item.kind == "detach" else "heartbeat"
                )
                if more.get("wait"):
                    await self._see(sent)
            case "resume":
                sent = await self._send("resume", item.number, expected_lease_generation=self._generation)
                reply = await self._see(sent)
                if reply is not None and reply["ok"]:
                    self._generation = reply["lease_generation"]
            case "rival":
                # A gateway that was left behind: what it says must be refused (D11, S82).
                behind = self._generation - 1 + 2 * more["ahead"]
                await self._send(more["op"], item.number, activity="detach", expected_lease_generation=behind, bad=True)
            case "hear_out":
                await self._hear_out()
            case "close":
                sent = await self._send("close", item.number)
                if more.get("wait"):
                    await self._see(sent)
            case _:
                raise AssertionError(item)
        if "again_s" in more and item.kind != "hear_out":
            self._follow(self._repeat(f"{self._session_id}.{item.number}", more["again_s"]))

    async def _open(self, item: Item) -> bool:
        """The next life. False: it did not come to be."""
        if self._opened and not self._is_over:
            await self._see(await self._send("close", -item.number))
        self._incarnation += 1
        self._place, self._before, self._generation = (0, 0, 0), (0, 0, 0), 0
        self._opened = True
        sent = await self._send("open", item.number, capabilities={"input_modes": ["append_tokens"]})
        following = self._items.index(item) + 1
        if following < len(self._items) and self._items[following].kind == "close":
            return True  # it gives up before it knows
        await self._until(lambda: sent.given_up or self._is_final(sent) or self._is_over)
        reply = self.account.find_reply(sent.control_id)
        return reply is not None and reply["ok"]

    async def _append(self, item: Item) -> None:
        more, account = item.more, self.account
        epoch, turn, response = self._place
        if item.kind == "jump":
            self._before, self._place = self._place, (epoch + 1, 0, 0)
        elif (self._incarnation, epoch) in account.lost:
            await self._cancel(item, extra=True)
        elif more.get("turn"):
            self._place = (epoch, turn + 1, response + 1)
        tokens = [next(self._traffic.tokens) for _ in range(more["tokens"])]
        body: dict[str, Any] = {"mode": "append_tokens", "final": more["final"]}
        payload = None
        if more["bad"]:
            body["payload"] = ["no", "tokens"]
        elif more["apart"]:
            payload = msgspec.msgpack.encode(tokens)
        else:
            body["payload"] = tokens
        if more["operation"]:
            body["operation_id"] = f"op-{item.number}"
        sent = await self._send("append", item.number, payload, tuple(tokens), bad=more["bad"], **body)
        if more.get("wait"):
            await self._see(sent)

    async def _cancel(self, item: Item, *, extra: bool = False) -> None:
        at = self._place
        if item.more.get("late"):
            at, to = self._before, self._place
        else:
            to = (at[0] + 1, 0, 0)
            self._before, self._place = at, to
        number = -item.number if extra else item.number
        event = item.more.get("event", "barge_in")
        sent = await self._send("signal", number, at=at, event=event, next_fence=self._fence(to), next_epoch=to[0])
        if item.more.get("wait"):
            await self._see(sent)

    async def _update(self, item: Item) -> None:
        more: dict[str, Any] = {"event": "session.update", "session_config": {"n": item.number}}
        if item.more.get("bad"):
            more["runtime_config"] = {"sampling": {"nothing": 1}}
        at = self._before if item.more.get("stale") else self._place
        sent = await self._send("signal", item.number, at=at, bad=bool(item.more.get("bad")), **more)
        if item.more.get("wait"):
            await self._see(sent)

    async def _hear_out(self) -> None:
        """Let everything be said that was accepted at the highest fence; what is not said in time is noted."""
        await self._until(lambda: self.open_ends == 0 or self._is_over)
        account, life = self.account, self._incarnation
        accepted = [
            sent
            for sent in account.sent.values()
            if sent.op == "append" and sent.fence[0] == life and (account.find_reply(sent.control_id) or {}).get("ok")
        ]
        if not accepted or self._is_over:
            return
        top = max(sent.fence for sent in accepted)
        if self._highest_fence(life) > top:
            return  # an update has gone on to another turn: nobody hears the rest of this one
        wanted = {token for sent in accepted if sent.fence == top for token in sent.tokens}
        epoch = top[1]

        def is_said() -> bool:
            said = {t for e in account.seen if e.kind == "output" and e.incarnation == life for t in e.body["data"]}
            return wanted <= said

        deadline_s = max(self._world.loop.now_s, self._world.calm_s) + HEARD_S
        while not is_said() and not self._is_over and (life, epoch) not in account.lost and epoch == self._place[0]:
            if self._world.loop.now_s > deadline_s:
                account.unheard.append(f"life {life}, epoch {epoch}: not all of {sorted(wanted)} were ever said")
                return
            await self._news(0.5)

    def _highest_fence(self, life: int) -> tuple[int, int, int, int]:
        """Of those that a life was told to have."""
        told = [reply.body["accepted_fence"] for replies in self.account.replies.values() for reply in replies]
        fences = [tuple(fence[name] for name in FENCE) for fence in told if fence and fence["incarnation"] == life]
        return max(fences, default=(life, 0, 0, 0))

    # Sending and waiting.

    def _fence(self, place: tuple[int, int, int]) -> dict[str, int]:
        return {"incarnation": self._incarnation, "epoch": place[0], "turn_id": place[1], "response_seq": place[2]}

    async def _send(
        self,
        op: str,
        number: int,
        raw: bytes | None = None,
        tokens: tuple[int, ...] = (),
        *,
        at: tuple[int, int, int] | None = None,
        next_epoch: int | None = None,
        bad: bool = False,
        **body: Any,
    ) -> Sent:
        place = self._place if at is None else at
        control_id = f"{self._session_id}.{number if number > 0 else f'x{-number}.{self._incarnation}'}"
        sent = Sent(
            control_id,
            op,
            (self._incarnation, place[0], place[1], place[2]),
            self._world.loop.now_s,
            tokens,
            next_epoch,
            expected=body.get("expected_lease_generation"),
            bad=bad,
        )
        whole = {
            "v": 1,
            "op": op,
            "control_id": control_id,
            "session_id": self._session_id,
            "fence": self._fence(place),
        }
        fields = [b"b", msgspec.msgpack.encode({**whole, **body})]
        if raw is not None:
            fields += [b"p", raw]
        self.account.sent[control_id] = sent
        self._bodies[control_id] = fields
        await self._push(self._client, self._sending, sent, fields)
        self._follow(self._see_through(sent, fields))
        return sent

    @property
    def _bodies(self) -> dict[str, list[bytes]]:
        return self._world.bodies

    async def _push(self, client: Client, lock: asyncio.Lock, sent: Sent, fields: list[bytes]) -> None:
        """XADD until it is answered."""
        name = self._traffic.commands(self._session_id)
        async with lock:
            while True:
                sent.deliveries += 1
                try:
                    await client.call(b"XADD", name, b"*", *fields)
                except (ConnectionError, Failure):
                    await asyncio.sleep(0.05)
                    continue
                return

    async def _repeat(self, control_id: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        sent = self.account.sent.get(control_id)
        if sent is not None:
            await self._push(self._resender, self._resending, sent, self._bodies[control_id])

    def _follow(self, work: Any) -> None:
        self.open_ends += 1

        async def to_the_end() -> None:
            await work
            self.open_ends -= 1
            self.account.wake()

        self._world.start(to_the_end())

    async def _see_through(self, sent: Sent, fields: list[bytes]) -> None:
        """Send it again while no reply comes, and while the reply says so."""
        heard, tries = 0, 0
        while True:
            replies = self.account.replies.get(sent.control_id, ())
            if len(replies) > heard:
                heard = len(replies)
                if not replies[-1].body["retryable"] or (sent.op == "append" and replies[-1].body["code"] == "timeout"):
                    return
                tries += 1
                if not self._gives_up(sent, tries):
                    await asyncio.sleep(AGAIN_S)
                # Asked again after the pause: nobody opens anew what they have closed meanwhile.
                if self._gives_up(sent, tries):
                    sent.given_up = True
                    self.account.wake()
                    return
                if len(self.account.replies[sent.control_id]) == heard:
                    await self._push(self._resender, self._resending, sent, fields)
            sent_s = self._world.loop.now_s
            while len(self.account.replies.get(sent.control_id, ())) == heard:
                if self._world.loop.now_s - sent_s > RESEND_S:
                    await self._push(self._resender, self._resending, sent, fields)
                    break
                await self._news(RESEND_S)

    def _gives_up(self, sent: Sent, tries: int) -> bool:
        return sent.op in ("open", "append") and (tries >= TRIES or self._is_left(sent))

    def _is_left(self, sent: Sent) -> bool:
        """Whether its life has been closed since, or a later one begun."""
        later = [each for each in self.account.sent.values() if each.at_s >= sent.at_s]
        return any(each.op == "close" or each.fence[0] > sent.fence[0] for each in later)

    async def _see(self, sent: Sent) -> dict[str, Any] | None:
        """Wait for a reply that will not be tried again."""
        await self._until(lambda: self._is_final(sent) or sent.given_up)
        return self.account.find_reply(sent.control_id)

    def _is_final(self, sent: Sent) -> bool:
        reply = self.account.find_reply(sent.control_id)
        return reply is not None and (not reply["retryable"] or (sent.op == "append" and reply["code"] == "timeout"))

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._news(5.0)

    async def _news(self, within_s: float) -> None:
        """Until the listener has read something, or the time is over."""
        waiter: asyncio.Future[None] = self._world.loop.create_future()
        self.account.waiters.append(waiter)
        await asyncio.wait({waiter}, timeout=within_s)
