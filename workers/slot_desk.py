"""Taking and freeing slots, after the commit that asks for it, and telling the session what came of it.

Responsible for doing many in one write and for a holder whose keys can't be used (I11). Leaves the slots to
`control/store/slots.py`, and asking again to the sessions' deadlines. Talks to Redis. Keeps I9.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from control.core import commands as c
from control.core import effects as e
from control.store.link import LOST, Link
from control.store.slots import Slot, slot_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from workers.ownership import Claim
    from workers.placement import Directory

log = logging.getLogger("bargein.slots")

RETRY_S = 0.2


@dataclass(frozen=True, slots=True)
class Chore:
    """Slots to take or free for a session, as the owner that `claim` names."""

    claim: Claim
    session_id: str
    incarnation: int
    effect: e.Place | e.Pay


@dataclass(slots=True)
class SlotDesk:
    """`is_ours` says whether a claim is still this worker's, `tell` brings events to a session of a partition."""

    link: Link
    directory: Directory
    max_sessions: int | None
    most: int
    is_ours: Callable[[Claim], bool]
    tell: Callable[[int, str, Iterable[c.Event]], None]
    note_trouble: Callable[[bool], None] = lambda _: None  # told whether the connection was lost
    _calls: itertools.count[int] = field(default_factory=lambda: itertools.count(1), init=False)
    _chores: asyncio.Queue[Chore] = field(default_factory=asyncio.Queue[Chore], init=False)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits here."""
        return self._chores.empty()

    def ask(self, claim: Claim, session_id: str, incarnation: int, effect: e.Place | e.Pay) -> None:
        """What a confirmed commit wants done."""
        self._chores.put_nowait(Chore(claim, session_id, incarnation, effect))

    async def run(self) -> None:
        """Work until cancelled."""
        chores: list[Chore] = []
        while True:
            if not chores:
                chores.append(await self._chores.get())
            while not self._chores.empty() and len(chores) < self.most:
                chores.append(self._chores.get_nowait())
            try:
                await self._do_some(chores)
            except (*LOST, RedisError) as error:
                # Taking and freeing may be repeated. Whatever is lost here, too, its session's next deadline asks for.
                log.warning("placement: %s; trying again", error)
                self.note_trouble(isinstance(error, LOST))
                # In their place: what takes a slot must not be said again behind what frees it.
                await asyncio.sleep(RETRY_S)
            else:
                chores = []

    async def _do_some(self, chores: list[Chore]) -> None:
        calls: list[Any] = []
        asked: list[Chore] = []
        for chore in chores:
            if not self.is_ours(chore.claim):
                # Its new owner does it, as far as it is still to be done.
                continue
            asked.append(chore)
            effect = chore.effect
            if isinstance(effect, e.Place):
                wanted = [("take", holder, chore.incarnation) for holder in effect.holders]
            else:
                wanted = [("free", debt.holder, debt.incarnation) for debt in effect.debts]
            calls += [
                slot_call(
                    what,
                    holder,
                    chore.session_id,
                    incarnation,
                    partition=chore.claim.partition,
                    token_number=chore.claim.token_number,
                    call_number=next(self._calls),
                    max_sessions=self.max_sessions,
                )
                for what, holder, incarnation in wanted
            ]
        if not calls:
            return
        codes = iter([_slot(answer) for answer in await self.link.try_run_all(calls)])
        for chore in asked:
            effect = chore.effect
            events: list[c.Event] = []
            if isinstance(effect, e.Place):
                events += _placement_events(effect, chore.incarnation, [next(codes) for _ in effect.holders])
                for event in events:
                    if isinstance(event, c.PlacementRefused):
                        self.directory.note_full(event.holder)
            else:
                paid = [debt for debt in effect.debts if next(codes) not in {None, Slot.DEPOSED}]
                events += [c.DebtPaid(debt.incarnation, debt.holder) for debt in paid]
                for debt in paid:
                    self.directory.note_freed(debt.holder)
            self.tell(chore.claim.partition, chore.session_id, events)


def _slot(answer: Any) -> Slot | None:
    """A slot script's answer; None where one holder's keys can't be used, which is no matter of the others (I11)."""
    if isinstance(answer, RedisError):
        log.error("a slot could not be asked for: %s", answer)
        return None
    return Slot(answer)


def _placement_events(effect: e.Place, incarnation: int, codes: list[Slot | None]) -> list[c.Event]:
    for holder, code in zip(effect.holders, codes, strict=True):
        if code is Slot.DEPOSED:
            return []
        if code is not Slot.DONE:
            return [c.PlacementRefused(incarnation, effect.attempt, holder)]
    return [c.Placed(incarnation, effect.attempt)]
