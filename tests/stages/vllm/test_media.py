"""Sound as multi-modal data, through the real vLLM and a tiny model of the kind of Qwen2-Audio."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import pytest_asyncio

from control.core.fence import Fence
from stages.engine import EngineRefusal
from stages.policy import DefaultPolicy
from stages.tiny_model import AFTER_AUDIO, AUDIO, BEFORE_AUDIO, make_tiny_listener
from tests.stages.ear import request_name
from tests.stages.vllm.bed import CONTEXT, Bed, small_options

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

ROOT = Path(__file__).parent.parent.parent.parent
HELLO = [72, 101]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_bed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bed]:
    options = small_options(make_tiny_listener(tmp_path_factory.mktemp("listener")))
    async with Bed(options) as bed:
        yield bed


def tone(hz: float, seconds: float = 0.5) -> Any:
    time_s = np.arange(round(16_000 * seconds)) / 16_000
    return (0.5 * np.sin(2 * np.pi * hz * time_s)).astype(np.float32)


def heard(*sounds: Any, before: list[int] | None = None, after: list[int] | None = None) -> dict[str, Any]:
    places = [BEFORE_AUDIO, AUDIO, AFTER_AUDIO] * len(sounds)
    data = {"audio": [(sound, 16_000) for sound in sounds]}
    return {"tokens": [*(before or []), *places, *(after or [])], "multi_modal_data": data}


async def test_what_is_heard_makes_the_answer(bed: Bed) -> None:
    low, high = heard(tone(220)), heard(tone(1_760, 1.0))
    first = await bed.ask("a", low)
    assert len(first) == 8
    assert await bed.ask("b", low) == first
    assert await bed.ask("c", high) != first


async def test_a_turn_in_pieces_is_answered_like_one_at_once(bed: Bed) -> None:
    """Tokens, sound, tokens; the sound goes in while the turn still goes on, in one piece."""
    at_once = await bed.ask("a", heard(tone(440), before=HELLO, after=HELLO))
    await bed.say("b", HELLO, final=False)
    await bed.say("b", heard(tone(440)), final=False)
    assert await bed.ask("b", HELLO) == at_once


async def test_sound_may_be_the_last_that_is_said_in_a_turn(bed: Bed) -> None:
    at_once = await bed.ask("a", heard(tone(440), before=HELLO))
    await bed.say("b", HELLO, final=False)
    await bed.say("b", heard(tone(440)), final=False)
    assert await bed.ask("b", []) == at_once, "the turn's end says nothing more"


async def test_later_turns_are_heard_as_well_and_the_former_ones_are_remembered(bed: Bed) -> None:
    async def talk(session: str, first: Any, second: Any) -> list[int]:
        await bed.ask(session, first)
        return await bed.ask(session, second)

    low, high = heard(tone(220)), heard(tone(1_760, 1.0))
    answer = await talk("a", low, low)
    assert await talk("b", low, low) == answer
    assert await talk("c", low, high) != answer
    assert await talk("d", high, low) != answer


async def test_h01_the_context_counts_what_a_placeholder_stands_for(bed: Bed) -> None:
    name = await bed.say("a", heard(tone(440, 1.0)), final=False)
    request = bed.engine._requests[name]
    assert request.room() < CONTEXT - 1 - 3 - 10
    with pytest.raises(EngineRefusal) as refused:
        await bed.say("a", heard(*[tone(hz, 20.0) for hz in (200, 300)]))
    assert refused.value.code == "resource_exhausted"
    assert len(await bed.ask("a", HELLO)) == 8


@pytest.mark.parametrize(
    "prompt",
    [
        {"tokens": HELLO, "multi_modal_data": {"audio": [(tone(440), 16_000)]}},
        {"tokens": [AUDIO], "multi_modal_data": {"smell": [1]}},
        {"tokens": [AUDIO], "multi_modal_data": {"audio": ["no sound"]}},
        {"tokens": [AUDIO], "multi_modal_data": {"image": [tone(440)]}},
    ],
    ids=["no place for it", "unknown", "not audio", "not taken"],
)
async def test_what_the_model_does_not_take_is_refused_and_the_request_goes_on(bed: Bed, prompt: Any) -> None:
    with pytest.raises(EngineRefusal, match="multi_modal_data") as refused:
        await bed.say("a", prompt)
    assert refused.value.code == "invalid_argument"
    assert not bed.engine._requests, "nothing of it is kept"
    at_once = await bed.ask("b", HELLO)
    await bed.say("a", HELLO[:1], final=False)
    with pytest.raises(EngineRefusal):
        await bed.say("a", prompt)
    assert await bed.ask("a", HELLO[1:]) == at_once


async def test_h04_an_abort_while_sound_is_being_heard_frees_all_of_it(bed: Bed) -> None:
    for wait in range(4):
        name = await bed.say(f"a{wait}", heard(tone(440), before=HELLO), sampling={"max_tokens": 100})
        if wait:
            await bed.ear.until(lambda name=name, wait=wait: len(bed.ear.heard(name)) >= wait)
        await bed.engine.abort(name)
        assert await bed.core_holds() == 0


async def test_the_policy_in_the_docs_lets_the_model_hear(bed: Bed) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/vllm.md").read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(compile(code, "docs/vllm.md", "exec"), names)
    policy = names["Listening"]()
    assert isinstance(policy, DefaultPolicy)

    def plan(payload: Any, mode: str = "append_audio_chunk") -> Any:
        common: dict[str, Any] = {"session_config": {}, "runtime_config": {}, "seq": 1, "turn_seq": 1, "sampling": None}
        common |= {"request_id": request_name("a"), "session_id": "a", "fence": Fence(0, 0, 0, 0)}
        return policy.plan_append(payload=payload, mode=mode, final=True, **common).prompt

    pcm = np.rint(32_767 * tone(440)).astype("<i2").tobytes()
    quiet = (np.frombuffer(pcm, "<i2").astype(np.float32)) / 32_768
    assert await bed.ask("a", plan(pcm)) == await bed.ask("b", heard(quiet))
    assert plan([1, 2], "append_tokens") == [1, 2]
