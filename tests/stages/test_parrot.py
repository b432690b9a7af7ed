"""The parrot: exact words, exact pace."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.engine import EngineConfigError, EngineError, EngineRefusal
from stages.parrot import ParrotEngine
from tests.stages.ear import Ear, input_for, joined, request_name
from tests.stages.virtual_time import VirtualTimeLoop, run

ONE = request_name()
FRAME = 640  # 20 ms at 16 kHz, s16le


def counting(samples: int, first: int = 0) -> bytes:
    return b"".join(((first + n) % 65_536).to_bytes(2, "little") for n in range(samples))


async def started(**options: Any) -> tuple[ParrotEngine, Ear]:
    engine, ear = ParrotEngine(options), Ear()
    await engine.start(ear)
    return engine, ear


async def say(engine: ParrotEngine, pieces: list[Any], *, mode: str = "append_audio_chunk") -> None:
    """One turn in pieces, the last of them final."""
    for index, piece in enumerate(pieces):
        final = index == len(pieces) - 1
        await engine.submit(input_for(ONE, piece, final=final, seq=index + 1, resumed=index > 0, mode=mode))


@given(
    pieces=st.lists(st.binary(max_size=1500), min_size=1, max_size=8),
    reply=st.sampled_from(["turn", "stream"]),
)
def test_every_byte_comes_back_in_order_and_in_whole_frames(pieces: list[bytes], reply: str) -> None:
    async def scene() -> None:
        engine, ear = await started(pace="fast", reply=reply)
        await say(engine, pieces)
        outputs = await ear.turn_ends(ONE)
        assert joined(outputs) == b"".join(pieces)
        assert [output.turn_end for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert all(len(output.data) == FRAME for output in outputs[:-1])
        assert len(outputs[-1].data) <= FRAME
        await engine.stop()

    run(scene())


@given(
    pieces=st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9), min_size=1, max_size=6),
    frame_tokens=st.integers(1, 4),
    wrapped=st.booleans(),
)
def test_every_token_comes_back(pieces: list[list[int]], frame_tokens: int, *, wrapped: bool) -> None:
    async def scene() -> None:
        engine, ear = await started(pace="fast", reply="stream", frame_tokens=frame_tokens)
        await say(engine, [{"tokens": each} if wrapped else each for each in pieces], mode="append_tokens")
        outputs = await ear.turn_ends(ONE)
        assert joined(outputs) == [token for piece in pieces for token in piece]
        assert all(output.kind == "tokens" for output in outputs)
        assert all(len(output.data) == frame_tokens for output in outputs[:-1])
        await engine.stop()

    run(scene())


def test_real_time_speech_keeps_its_deadlines_exactly() -> None:
    async def scene() -> None:
        engine, ear = await started()
        begun = asyncio.get_running_loop().time()
        await say(engine, [counting(320 * 500)])
        await ear.turn_ends(ONE)
        due = [begun + 0.02 * n for n in range(500)]
        assert ear.times_s == pytest.approx(due, abs=1e-6)
        await engine.stop()

    run(scene())


def test_a_stall_of_the_loop_is_made_up_for_and_does_not_shift_what_follows() -> None:
    async def scene() -> None:
        engine, ear = await started()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        begun = loop.time()
        await say(engine, [counting(320 * 50)])
        await ear.until(lambda: len(ear.outputs) == 10)
        loop.advance(0.205)  # something blocks the loop for ten frames
        await ear.turn_ends(ONE)
        late = [time_s - (begun + 0.02 * n) for n, time_s in enumerate(ear.times_s)]
        assert late[:10] == pytest.approx([0.0] * 10, abs=1e-6)
        assert late[10] > 0.18
        assert late[21:] == pytest.approx([0.0] * 29, abs=1e-6)
        assert engine.load().tick_late_ms > 180
        await engine.stop()

    run(scene())


def test_a_stream_is_echoed_with_its_delay_and_at_its_own_pace() -> None:
    async def scene() -> None:
        engine, ear = await started(reply="stream", delay_ms=100)
        begun = asyncio.get_running_loop().time()
        for index in range(10):
            piece = counting(320, 320 * index)
            await engine.submit(input_for(ONE, piece, final=index == 9, resumed=index > 0))
            await asyncio.sleep(0.02)
        outputs = await ear.turn_ends(ONE)
        assert joined(outputs) == counting(3200)
        assert ear.times_s == pytest.approx([begun + 0.1 + 0.02 * n for n in range(10)], abs=1e-6)
        await engine.stop()

    run(scene())


def test_a_whole_turn_at_once_is_still_spoken_at_the_pace_of_speech() -> None:
    async def scene() -> None:
        engine, ear = await started(reply="stream")
        await say(engine, [counting(320 * 5), counting(320 * 5, 1600)])
        await ear.turn_ends(ONE)
        gaps = [later - earlier for earlier, later in zip(ear.times_s, ear.times_s[1:], strict=False)]
        assert gaps == pytest.approx([0.02] * 9, abs=1e-6)
        await engine.stop()

    run(scene())


def test_an_abort_stops_the_speech_before_the_next_frame() -> None:
    async def scene() -> None:
        engine, ear = await started()
        loop = asyncio.get_running_loop()
        await say(engine, [counting(320 * 100)])
        await ear.until(lambda: len(ear.outputs) == 7)
        asked = loop.time()
        await engine.abort(ONE)
        assert loop.time() == asked, "nothing has to be waited for"
        await asyncio.sleep(5)
        assert len(ear.outputs) == 7

    run(scene())


def test_input_with_a_higher_fence_replaces_what_was_still_to_be_said() -> None:
    async def scene() -> None:
        engine, ear = await started()
        await engine.submit(input_for(ONE, counting(320 * 100), turn=0))
        await ear.until(lambda: len(ear.outputs) == 5)
        asked = asyncio.get_running_loop().time()
        await engine.submit(input_for(ONE, counting(320 * 3, 9), turn=1, resumed=True))
        outputs = await ear.turn_ends(ONE)
        assert [output.fence.turn_id for output in outputs] == [0] * 5 + [1] * 3
        assert joined(outputs[5:]) == counting(320 * 3, 9)
        assert ear.times_s[5] <= asked + 0.02 + 1e-6, "the next answer does not wait for the old one's end"
        await engine.stop()

    run(scene())


def test_input_of_an_unfinished_turn_is_not_said_in_the_next() -> None:
    async def scene() -> None:
        engine, ear = await started(pace="fast")
        await engine.submit(input_for(ONE, counting(1000), turn=0, final=False))
        await engine.submit(input_for(ONE, counting(50, 7), turn=1, resumed=True))
        assert joined(await ear.turn_ends(ONE)) == counting(50, 7)
        await engine.stop()

    run(scene())


def test_a_chunk_of_another_kind_within_a_turn_is_refused_and_leaves_the_turn() -> None:
    async def scene() -> None:
        engine, ear = await started(pace="fast")
        await engine.submit(input_for(ONE, b"abcd", final=False))
        with pytest.raises(EngineRefusal, match="began with audio") as refusal:
            await engine.submit(input_for(ONE, [1, 2], resumed=True))
        assert refusal.value.code == "invalid_argument"
        await engine.submit(input_for(ONE, b"ef", resumed=True))
        assert joined(await ear.turn_ends(ONE)) == b"abcdef"
        await engine.submit(input_for(ONE, [1, 2], resumed=True))
        assert joined((await ear.turn_ends(ONE, 2))[1:]) == [1, 2], "the next turn may be of another kind"
        await engine.stop()

    run(scene())


@pytest.mark.parametrize(
    "prompt",
    [
        "text",
        7,
        {"audio": [1]},
        {"tokens": b"1"},
        {"audio": b"", "tokens": []},
        {},
        [1, "2"],
        [True],
        [2**63],
        [1.0],
    ],
)
def test_what_is_neither_audio_nor_tokens_is_refused(prompt: Any) -> None:
    async def scene() -> None:
        engine, _ = await started()
        with pytest.raises(EngineRefusal) as refusal:
            await engine.submit(input_for(ONE, prompt))
        assert refusal.value.code == "invalid_argument"
        assert engine.load().slots_used == 0

    run(scene())


@pytest.mark.parametrize("prompt", [None, b"", [], {"audio": b""}, {"tokens": []}])
def test_a_commit_without_a_payload_answers_the_turn_so_far(prompt: Any) -> None:
    async def scene() -> None:
        engine, ear = await started(pace="fast")
        await engine.submit(input_for(ONE, b"ab", final=False))
        await engine.submit(input_for(ONE, prompt, mode="turn_commit_only", resumed=True))
        assert joined(await ear.turn_ends(ONE)) == b"ab"
        await engine.stop()

    run(scene())


def test_a_backlog_beyond_the_bound_is_refused_and_the_exact_fit_is_not() -> None:
    async def scene() -> None:
        engine, ear = await started(pace="fast", max_backlog_frames=4)
        await engine.submit(input_for(ONE, counting(320 * 3), final=False))
        with pytest.raises(EngineRefusal) as refusal:
            await engine.submit(input_for(ONE, counting(320 * 2), resumed=True))
        assert refusal.value.code == "resource_exhausted"
        await engine.submit(input_for(ONE, counting(320, 960), resumed=True))
        assert joined(await ear.turn_ends(ONE)) == counting(320 * 4)
        await engine.stop()

    run(scene())


def test_more_requests_than_allowed_are_refused_as_retryable() -> None:
    async def scene() -> None:
        engine, _ = await started(max_requests=1)
        await engine.submit(input_for(ONE, b"ab"))
        assert engine.load().utilisation == 1
        with pytest.raises(EngineRefusal) as refusal:
            await engine.submit(input_for(request_name("other"), b"ab"))
        assert (refusal.value.code, refusal.value.retryable) == ("resource_exhausted", True)
        await engine.abort(ONE)
        await engine.submit(input_for(request_name("other"), b"ab"))
        await engine.stop()

    run(scene())


def test_an_abort_under_delay_silences_at_once_and_is_confirmed_later() -> None:
    async def scene() -> None:
        engine, ear = await started(abort_delay_ms=500)
        loop = asyncio.get_running_loop()
        await say(engine, [counting(320 * 100)])
        await ear.until(lambda: len(ear.outputs) == 3)
        asked = loop.time()
        await asyncio.gather(engine.abort(ONE), engine.abort(ONE))
        assert loop.time() == pytest.approx(asked + 0.5)
        assert len(ear.outputs) == 3
        assert engine.load().slots_used == 0

    run(scene())


def test_s30_a_failing_abort_changes_nothing_and_a_later_one_works() -> None:
    async def scene() -> None:
        engine, ear = await started(fail_aborts=2)
        await say(engine, [counting(320 * 10)])
        for _ in range(2):
            with pytest.raises(EngineError):
                await engine.abort(ONE)
        await ear.until(lambda: len(ear.outputs) == 5)
        await engine.abort(ONE)
        assert engine.load().slots_used == 0

    run(scene())


def test_a_submit_that_is_told_to_fail_keeps_nothing() -> None:
    async def scene() -> None:
        engine, ear = await started(fail_submits=1, pace="fast")
        with pytest.raises(EngineRefusal):
            await engine.submit(input_for(ONE, b"ab"))
        assert engine.load().slots_used == 0
        await engine.submit(input_for(ONE, b"cd"))
        assert joined(await ear.turn_ends(ONE)) == b"cd"

    run(scene())


def test_a_long_fast_reply_gives_others_their_turn() -> None:
    async def scene() -> None:
        engine, ear = await started(pace="fast")
        await engine.submit(input_for(ONE, counting(320 * 1000)))
        await engine.submit(input_for(request_name("short"), counting(320)))
        await ear.turn_ends(request_name("short"))
        assert ear.ends(ONE) == 0
        await ear.turn_ends(ONE)
        await engine.stop()

    run(scene())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pase": "fast"}, r"pase: unknown option; allowed are pace, reply, frame_ms"),
        ({"pace": "slow"}, "pace: Invalid enum value 'slow'"),
        ({"frame_ms": 0}, "frame_ms: Expected `int` >= 1"),
        ({"frame_ms": "20"}, "frame_ms: Expected `int"),
        ({"frame_ms": 3, "sample_rate_hz": 1100}, "no whole number of samples"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineConfigError, match=message):
        ParrotEngine(options)
