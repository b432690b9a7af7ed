"""A policy that answers from a stage that isn't the last, through the whole system: nothing stays behind downstream."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from redis.asyncio import Redis

from bargein_client import AsyncBargein, Output
from control.store.keys import worker_slots
from stages.pipeline import Pipeline, parse_pipeline
from stages.policy import DefaultPolicy, OutputAction, OutputDecision
from tests.system import RunningSystem
from tests.workers.control_bed import until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bargein_client import AsyncSession


class Brief(DefaultPolicy):
    """Tokens from 100 on are said by the first stage; the others go on through all of them."""

    def decide_output(self, *, stage_id: int, final_stage_id: int, output: Output) -> Any:  # type: ignore[override]
        if stage_id == 0 and output.data and output.data[0] >= 100:
            return OutputDecision(OutputAction.DIRECT_RESPONSE, {"short": True})
        return None


def make_pipeline() -> Pipeline:
    fast = {"pace": "fast", "reply": "stream"}
    stages = [{"name": name, "engine": "parrot", "options": fast} for name in ("thinker", "talker", "voice")]
    policy = f"{__name__}:{Brief.__name__}"
    return parse_pipeline({"partitions": 2, "policy": policy, "stages": stages}, "test")


async def are_free(slots: Callable[[], Awaitable[list[int]]]) -> bool:
    return await slots() == [0, 0, 0]


async def turn(session: AsyncSession, *pieces: list[int]) -> list[tuple[int, list[int]]]:
    """The stages and tokens that a turn of these is answered with."""
    for place, piece in enumerate(pieces):
        await session.append(piece, mode="append_tokens", final=place == len(pieces) - 1)
    said: list[tuple[int, list[int]]] = []
    async with asyncio.timeout(20):
        async for event in session.events():
            if isinstance(event, Output):
                said.append((event.stage_id, event.data))
                if event.turn_end:
                    return said
    return said


async def test_what_is_answered_early_leaves_nothing_downstream(redis_url: str) -> None:
    async with (
        RunningSystem(redis_url, make_pipeline()) as system,
        AsyncBargein(redis_url) as client,
        Redis.from_url(redis_url) as redis,
    ):

        def held() -> list[int]:
            engines = [stage._engine for stage in system.stages]
            return [engine.load().slots_used if engine is not None else -1 for engine in engines]

        async def slots() -> list[int]:
            return [await redis.hlen(worker_slots(stage.worker_id)) for stage in system.stages]  # type: ignore[misc]

        session = await client.open(input_modes=["append_tokens"])
        said = await turn(session, [100, 101], [102])
        assert {stage for stage, _ in said} == {0}
        assert held() == [1, 0, 0], "the stages behind were never asked"
        said = await turn(session, [1, 5], [6])
        assert {stage for stage, _ in said} == {2}
        assert held() == [1, 1, 1]
        assert await slots() == [1, 1, 1]
        # Half of it has gone on when the turn is answered from here.
        said = await turn(session, [1, 7], [108])
        assert said[-1] == (0, [108])
        assert (await session.interrupt()).ok
        assert held() == [0, 0, 0]
        # What the turn had left behind is not heard in the next one.
        said = await turn(session, [2, 9])
        assert [token for _, tokens in said for token in tokens] == [2, 9]
        assert (await session.close()).ok
        assert held() == [0, 0, 0]
        await until(lambda: are_free(slots))
