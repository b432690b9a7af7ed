"""What is said to the model and what it says, over several turns, against the real engine."""

from __future__ import annotations

import asyncio
import copy
from typing import TYPE_CHECKING, Any

import pytest

from stages.engine import EngineRefusal
from tests.stages.ear import request_name
from tests.stages.vllm.bed import Bed, small_options

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

HELLO = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100]


async def test_a_later_turn_sees_what_was_said_before_but_for_the_last_token(bed: Bed) -> None:
    first = await bed.ask("a", HELLO, turn=0)
    second = await bed.ask("a", [10, 11, 12], turn=1)
    assert await bed.ask("b", [*HELLO, *first[:-1], 10, 11, 12]) == second
    assert await bed.ask("c", [10, 11, 12]) != second
    assert len(set(second)) > 2, "a model that repeats itself would prove nothing"


async def test_a_turn_in_pieces_is_answered_like_one_at_once(bed: Bed) -> None:
    at_once = await bed.ask("a", HELLO)
    for number, piece in enumerate(([HELLO[:4]], [HELLO[:1], HELLO[1:2], HELLO[2:]], [HELLO, []])):
        session = f"pieces{number}"
        for part in piece if number else [*piece]:
            if part is piece[-1] and number:
                assert await bed.ask(session, part) == at_once
            else:
                await bed.say(session, part, final=False)
                await asyncio.sleep(0.02)  # it may be read, or still be waiting: the answer is the same
        if not number:
            assert await bed.ask(session, HELLO[4:]) == at_once
    assert bed.ear.ends(request_name("pieces1")) == 1


async def test_input_is_read_before_its_turn_ends(bed: Bed) -> None:
    core = bed.engine._core
    assert core is not None
    await bed.say("a", HELLO, final=False)
    request = bed.engine._requests[request_name("a")]
    async with asyncio.timeout(20):
        while request.context_tokens < len(HELLO) - 1 or request.flying is not None:  # noqa: ASYNC110  another process's doing
            await asyncio.sleep(0.005)
    assert not bed.ear.heard(request_name("a"))
    assert bed.engine.load().running == 0
    assert len(await bed.ask("a", [])) == 8


async def test_what_a_newer_turn_makes_needless_is_not_said_but_stays_in_mind(bed: Bed) -> None:
    one = await bed.say("a", HELLO, turn=0, sampling={"max_tokens": 30})
    await bed.ear.until(lambda: bed.ear.heard(one))
    await bed.say("a", [50, 51], turn=1)
    await bed.say("a", [60, 61], turn=2)
    await bed.ear.until(lambda: any(output.turn_end for output in bed.ear.heard(one)))
    heard = bed.ear.heard(one)
    assert [output.fence.turn_id for output in heard if output.turn_end] == [2]
    last = [token for output in heard if output.fence.turn_id == 2 for token in output.data]
    whole = await bed.ask("b", HELLO, sampling={"max_tokens": 30})
    assert await bed.ask("c", [*HELLO, *whole[:-1], 50, 51, 60, 61]) == last


async def test_a_turns_end_says_why_and_how_much(bed: Bed) -> None:
    await bed.ask("a", HELLO)
    await bed.ask("a", [10, 11])
    end = bed.ear.heard(request_name("a"))[-1]
    assert end.metadata == {
        "finish_reason": "length",
        "input_tokens": 2,
        "output_tokens": 8,
        "context_tokens": len(HELLO) + 7 + 2 + 8,
    }


async def test_a_stop_token_ends_a_turn_and_not_the_request(bed: Bed) -> None:
    answer = await bed.ask("a", HELLO)
    cut = answer.index(answer[3]) + 1
    assert await bed.ask("b", HELLO, sampling={"stop_token_ids": [answer[3]]}) == answer[:cut]
    assert bed.ear.heard(request_name("b"))[-1].metadata["finish_reason"] == "stop"
    assert len(await bed.ask("b", [10])) == 8


async def test_each_turn_has_its_own_sampling(bed: Bed) -> None:
    for count in (3, 9, 1, 5):
        assert len(await bed.ask("a", [10, 11], sampling={"max_tokens": count})) == count


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"n": 2}, "n = 1"),
        ({"stop": ["."]}, "use stop_token_ids"),
        ({"output_kind": "final_only"}, "output_kind"),
        ({"temperature": -1}, "sampling.temperature"),
        ({"temperature": "hot"}, "sampling.temperature"),
        ({"max_tokens": 0}, "sampling.max_tokens"),
        ({"max_token": 3}, "max_token: unknown; allowed are max_tokens"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"logit_bias": {"700": 1.0}}, "logit_bias"),
        (["greedy"], "must be a mapping"),
    ],
)
async def test_sampling_that_can_not_be_is_refused_before_anything_begins(
    bed: Bed, sampling: Any, message: str
) -> None:
    with pytest.raises(EngineRefusal, match=message) as refusal:
        await bed.say("a", HELLO, sampling=sampling)
    assert refusal.value.code == "invalid_argument"
    assert bed.engine.load().slots_used == 0


async def test_s42_what_only_vllm_itself_refuses_ends_that_request_alone(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = bed.engine._core
    assert core is not None
    monkeypatch.setattr(core, "_can_verify", False)
    one = await bed.say("a", HELLO, sampling={"allowed_token_ids": []})
    await bed.ear.until(lambda: one in bed.ear.failed)
    assert "allowed_token_ids" in bed.ear.failed[one]
    two = await bed.say("b", HELLO)
    await bed.ear.turn_ends(two)
    await bed.say("b", HELLO, resumed=True, sampling={"allowed_token_ids": []})
    await bed.ear.until(lambda: two in bed.ear.failed)
    assert bed.engine.load().slots_used == 0
    assert await bed.core_holds() == 0


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, 260], r"tokens\[1\] is 260; the model's vocabulary has 260"),
        ([-1], r"tokens\[0\]"),
        (b"\0\0", "from audio"),
        ({"tokens": [1], "multi_modal_data": {"audio": [1]}}, "no multi-modal data"),
        ({"text": 3}, "'text' is a int"),
        (3.5, "float"),
    ],
)
async def test_prompts_that_are_none_are_refused(bed: Bed, prompt: Any, message: str) -> None:
    with pytest.raises(EngineRefusal, match=message) as refusal:
        await bed.say("a", prompt)
    assert refusal.value.code == "invalid_argument"
    assert bed.engine.load().slots_used == 0


async def test_text_is_encoded_by_the_models_tokenizer(bed: Bed) -> None:
    core = bed.engine._core
    assert core is not None
    spoken = list(core.tokenizer.encode("Grüß dich"))
    assert await bed.ask("a", "Grüß dich") == await bed.ask("b", spoken) == await bed.ask("c", {"text": "Grüß dich"})


async def test_s34_an_abort_while_text_is_encoded_wins(bed: Bed) -> None:
    for yields in range(4):
        saying = asyncio.ensure_future(bed.say(f"s{yields}", "x" * 200, resumed=False))
        for _ in range(yields):
            await asyncio.sleep(0)
        await bed.engine.abort(request_name(f"s{yields}"))
        await asyncio.wait({saying})
        # The worker asks again once the submit has ended.
        await bed.engine.abort(request_name(f"s{yields}"))
        assert bed.engine.load().slots_used == 0
    assert not bed.ear.outputs


async def test_text_comes_out_whole_and_turn_by_turn(tiny_model: Path) -> None:
    options = copy.deepcopy(small_options(tiny_model, output="text"))
    options["sampling"]["max_tokens"] = 40
    async with Bed(options) as bed:
        name = request_name("a")
        core = bed.engine._core
        assert core is not None
        for turn, prompt in enumerate(("Hello", " and", "more")):
            await bed.say("a", prompt, turn=turn)
            heard = await bed.ear.turn_ends(name, turn + 1)
            said = [output for output in heard if output.fence.turn_id == turn]
            assert {output.kind for output in said} == {"text"}
            assert len(said) > 3
            assert "".join(output.data for output in said)
            assert said[-1].turn_end
        await bed.engine.abort(name)
        assert await bed.core_holds() == 0
