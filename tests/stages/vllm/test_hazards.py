"""The hazards of docs/vllm.md, each by its number, against the real engine. The deadly ones are in test_deaths.py."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest

from stages.engine import EngineConfigError, EngineRefusal
from stages.vllm_core import Counts, _counting_logger
from stages.vllm_engine import VllmEngine
from tests.stages.ear import request_name
from tests.stages.vllm.bed import CONTEXT, KV_TOKENS, SEATS, small_options

if TYPE_CHECKING:
    from pathlib import Path

    from tests.stages.vllm.bed import Bed

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]


def tokens(count: int, first: int = 1) -> list[int]:
    return [(first + n) % 250 for n in range(count)]


async def test_h01_s23_the_exact_fit_is_taken_and_one_token_more_is_refused(bed: Bed) -> None:
    assert len(await bed.ask("a", tokens(100))) == 8
    # Of the answer seven tokens are kept: the core drops the last one of each turn.
    with pytest.raises(EngineRefusal) as refusal:
        await bed.say("a", tokens(CONTEXT - 1 - 107 + 1))
    assert refusal.value.code == "resource_exhausted"
    assert not refusal.value.retryable
    assert "148 of the model's 256 are left" in refusal.value.message
    assert len(await bed.ask("a", tokens(CONTEXT - 1 - 107))) == 1, "one place is left for the answer"
    with pytest.raises(EngineRefusal, match="0 of the model's 256 are left"):
        await bed.say("a", [1])
    assert len(await bed.ask("b", tokens(20))) == 8, "nobody else notices"
    assert not bed.ear.failed


async def test_h01_s23_a_first_input_as_long_as_the_context_is_taken(bed: Bed) -> None:
    with pytest.raises(EngineRefusal, match="256 tokens don't fit"):
        await bed.say("a", tokens(CONTEXT))
    assert bed.engine.load().slots_used == 0
    assert len(await bed.ask("a", tokens(CONTEXT - 1))) == 1


async def test_h01_an_answer_is_cut_where_the_context_ends(bed: Bed) -> None:
    long = {"max_tokens": 200}
    assert len(await bed.ask("a", tokens(100), sampling=long)) == CONTEXT - 100
    end = bed.ear.heard(request_name("a"))[-1]
    assert end.metadata["finish_reason"] == "length"
    with pytest.raises(EngineRefusal, match="0 of the model's 256"):
        await bed.say("a", [1])
    assert len(await bed.ask("b", tokens(20))) == 8


async def test_h01_s23_input_that_outgrows_the_context_while_the_model_speaks_ends_that_request_only(bed: Bed) -> None:
    one = await bed.say("a", tokens(100), sampling={"max_tokens": 60})
    other = await bed.say("b", tokens(20), sampling={"max_tokens": 60})
    await bed.ear.until(lambda: bed.ear.heard(one))
    await bed.say("a", tokens(CONTEXT - 1 - 100 - 30))  # would fit if no more were said
    await bed.ear.until(lambda: one in bed.ear.failed)
    assert "255 and an answer" in bed.ear.failed[one]
    await bed.ear.turn_ends(other)
    assert list(bed.ear.failed) == [one]
    assert bed.engine.load().slots_used == 1


async def test_h01_many_random_turns_up_to_the_brim_leave_the_engine_alive(bed: Bed) -> None:
    async def talk(session: str) -> None:
        dice = random.Random(session)
        for turn in range(40):
            count, final = dice.randint(1, 40), dice.random() < 0.7
            try:
                if final:
                    await bed.ask(session, tokens(count), turn=turn, sampling={"max_tokens": dice.randint(1, 20)})
                else:
                    await bed.say(session, tokens(count), turn=turn, final=False)
            except EngineRefusal as refusal:
                assert "don't fit" in refusal.message  # noqa: PT017  some fit, some don't
                return

    await asyncio.gather(*(talk(f"s{number}") for number in range(3)))
    assert not bed.ear.failed
    assert not bed.ear.deaths


async def test_h02_idle_requests_never_take_all_of_the_places(bed: Bed) -> None:
    for number in range(SEATS - 1):
        await bed.ask(f"s{number}", [number + 1] * 4)
    with pytest.raises(EngineRefusal) as refusal:
        await bed.say("one-too-many", [1, 2, 3])
    assert (refusal.value.code, refusal.value.retryable) == ("resource_exhausted", True)
    assert "all 7 requests" in refusal.value.message
    await bed.engine.abort(request_name("s0"))
    assert len(await bed.ask("the-next", [1, 2, 3])) == 8
    assert bed.engine.capacity_limit == SEATS - 1


async def test_h02_more_requests_than_vllm_has_places_for_are_no_configuration(tiny_model: Path) -> None:
    with pytest.raises(EngineConfigError, match=r"max_requests: is 8; it must be below max_num_seqs \(8\)"):
        VllmEngine(small_options(tiny_model, max_requests=SEATS))


async def test_h03_a_full_cache_refuses_new_requests_and_the_load_shows_it(bed: Bed) -> None:
    for number in range(3):
        await bed.ask(f"s{number}", tokens(240))
    assert bed.engine.load().utilisation > 0.7
    await bed.ask("s3", tokens(200))
    with pytest.raises(EngineRefusal) as refusal:
        await bed.say("s4", tokens(10))
    assert (refusal.value.code, refusal.value.retryable) == ("resource_exhausted", True)
    assert "KV cache" in refusal.value.message
    assert not bed.engine.load().accepts, "nobody is placed here"
    await bed.engine.abort(request_name("s0"))
    assert bed.engine.load().accepts
    assert bed.engine.load().utilisation < 0.8
    assert len(await bed.ask("s4", tokens(10))) == 8


async def test_h03_input_that_would_stall_is_refused_at_once(bed: Bed) -> None:
    for number in range(4):
        await bed.ask(f"s{number}", tokens(CONTEXT // 2))
    await asyncio.gather(*(bed.ask(f"s{number}", tokens(100)) for number in range(3)))
    taken = round(bed.engine.load().utilisation * KV_TOKENS)
    assert taken > KV_TOKENS - 120
    with pytest.raises(EngineRefusal, match="would stall") as refusal:
        await bed.say("s3", tokens(110))
    assert refusal.value.retryable
    await bed.engine.abort(request_name("s0"))
    assert len(await bed.ask("s3", tokens(100))) == 8


async def test_h04_aborts_that_race_with_input_leave_nothing_in_the_core(bed: Bed) -> None:
    async def race(number: int) -> None:
        dice = random.Random(number)
        name = await bed.say(f"s{number}", tokens(20), final=dice.random() < 0.5, sampling={"max_tokens": 100})
        pushes: list[asyncio.Task[Any]] = []
        for _ in range(dice.randint(0, 3)):
            for _ in range(dice.randint(0, 8)):
                await asyncio.sleep(0)
            pushes.append(asyncio.ensure_future(bed.say(f"s{number}", tokens(9), resumed=True)))
        for _ in range(dice.randint(0, 8)):
            await asyncio.sleep(0)
        await bed.engine.abort(name)
        heard = len(bed.ear.heard(name))
        await asyncio.wait(pushes or [asyncio.ensure_future(asyncio.sleep(0))])
        for push in pushes:
            push.exception()
        await asyncio.sleep(0.01)
        assert len(bed.ear.heard(name)) == heard

    for batch in range(15):
        await asyncio.gather(*(race(4 * batch + number) for number in range(4)))
    assert bed.engine.load().slots_used == 0
    assert await bed.core_holds() == 0


async def test_h04_an_abort_waits_for_input_that_is_just_on_its_way_to_the_core(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = bed.engine._core
    assert core is not None
    client, going = core._llm.engine_core, asyncio.Event()
    send = client.add_request_async

    async def later(request: Any) -> None:
        await asyncio.sleep(0.05)
        await send(request)

    async def slowly(request: Any) -> None:
        going.set()
        # What a socket has taken can't be cancelled any more.
        await asyncio.shield(asyncio.ensure_future(later(request)))

    monkeypatch.setattr(client, "add_request_async", slowly)
    for sentence in range(2):
        name = await bed.say(f"s{sentence}", tokens(20), sampling={"max_tokens": 30})
        if sentence:
            await bed.ear.turn_ends(name)
            going.clear()
            await bed.say(f"s{sentence}", tokens(20))
        await going.wait()
        await bed.engine.abort(name)
        going.clear()
    await asyncio.sleep(0.1)
    monkeypatch.undo()
    assert await bed.core_holds() == 0


async def test_h05_an_abort_before_vllm_has_heard_of_the_request_is_an_abort(bed: Bed) -> None:
    for yields in range(12):
        name = await bed.say(f"s{yields}", tokens(20), sampling={"max_tokens": 100})
        for _ in range(yields):
            await asyncio.sleep(0)
        await bed.engine.abort(name)
        assert await bed.core_holds() == 0
    assert not bed.ear.failed


async def test_h06_no_turns_end_is_lost_when_input_waits_behind_a_turn(bed: Bed) -> None:
    name = request_name("a")
    for _ in range(4):
        await bed.say("a", tokens(12))
    # The loop stands still for several of the core's steps.
    for _ in range(5):
        await asyncio.sleep(0.005)
        until_s = asyncio.get_running_loop().time() + 0.05
        while asyncio.get_running_loop().time() < until_s:
            pass
    heard = await bed.ear.turn_ends(name, 4)
    ends = [output for output in heard if output.turn_end]
    assert [end.metadata["output_tokens"] for end in ends] == [8] * 4
    assert sum(len(output.data) for output in heard) == 32


async def test_h07_a_request_id_that_runs_is_refused(bed: Bed) -> None:
    await bed.say("a", tokens(10), sampling={"max_tokens": 50})
    with pytest.raises(EngineRefusal, match="already runs") as refusal:
        await bed.say("a", tokens(10), resumed=False)
    assert refusal.value.code == "failed_precondition"
    await bed.ear.turn_ends(request_name("a"))
    assert len(bed.engine._requests) == 1


async def test_h11_figures_of_newer_versions_are_taken(bed: Bed) -> None:
    counts = Counts()
    record = _counting_logger(counts)(None).record
    stats = type("Stats", (), {"num_running_reqs": 2, "num_waiting_reqs": 1, "kv_cache_usage": 0.5, "something": 1})
    record(scheduler_stats=stats, iteration_stats=None, engine_idx=0, something_new=1)
    record(scheduler_stats=None, iteration_stats=None, mm_cache_stats=None, engine_idx=0)
    assert (counts.held, counts.kv, counts.records) == (3, 0.5, 1)


async def test_h11_s42_an_error_of_a_kind_that_came_later_ends_its_request_only(bed: Bed) -> None:
    core = bed.engine._core
    assert core is not None
    one = await bed.say("a", tokens(10), sampling={"max_tokens": 100})
    states = core._llm.output_processor.request_states
    await bed.ear.until(lambda: bed.ear.heard(one))
    other = await bed.say("b", tokens(10), sampling={"max_tokens": 40})
    queue = next(state.queue for state in states.values() if state.external_req_id == one)
    queue.put(type("RetryableRequestError", (Exception,), {})("a kind that came later"))
    await bed.ear.until(lambda: one in bed.ear.failed)
    assert "RetryableRequestError: a kind that came later" in bed.ear.failed[one]
    await bed.ear.turn_ends(other)
    assert await bed.core_holds() == 1
