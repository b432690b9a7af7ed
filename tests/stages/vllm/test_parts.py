"""The parts of the vLLM engine that need no vLLM: options, sampling, a request's input and room, text."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from control.core.fence import Fence
from stages import vllm_core, vllm_process
from stages.engine import EngineConfigError, load_engine
from stages.pipeline import SHIPPED, load_pipeline
from stages.vllm_core import check_version
from stages.vllm_engine import VllmEngine
from stages.vllm_options import DEFAULT_MAX_TOKENS, read_sampling
from stages.vllm_request import Chunk, Request
from stages.vllm_text import Prompt, TurnText, read_prompt
from tests.stages.ear import Ear


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "model: is missing"),
        ({"model": ""}, "model"),
        ({"model": "m", "max_model_len": 3}, "max_model_len: unknown option; allowed are model, engine"),
        ({"model": "m", "engine": {"model": "n"}}, "the model is the option `model`"),
        ({"model": "m", "engine": {"max_num_seqs": 1}}, "at least 2"),
        ({"model": "m", "engine": {"max_num_seqs": 8}, "max_requests": 8}, "below max_num_seqs"),
        ({"model": "m", "sampling": {"n": 3}}, "n = 1"),
        ({"model": "m", "output": "audio"}, "output"),
        ({"model": "m", "refuse_above_kv": 1.5}, "refuse_above_kv"),
        ({"model": "m", "watch_every_ms": 9000, "hang_after_ms": 9000}, "less than hang_after_ms"),
        ({"model": "m", "environment": {"A": 1}}, "environment"),
    ],
)
def test_options_that_can_not_be_are_refused_without_vllm(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineConfigError, match=message):
        load_engine("vllm", options)


def test_the_later_layer_of_sampling_wins() -> None:
    read = read_sampling({"temperature": 0.5, "top_p": 0.9}, None, {"temperature": 1, "n": 1, "stop": []})
    assert read == {"temperature": 1.0, "top_p": 0.9, "max_tokens": DEFAULT_MAX_TOKENS}


@pytest.mark.parametrize(
    ("found", "works"),
    [("0.30.9", False), ("0.31.0", True), ("0.33.1+cpu", True), ("0.34.0", False), ("1.0.0", False)],
)
def test_another_version_of_vllm_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, found: str, *, works: bool
) -> None:
    monkeypatch.setattr(vllm_core, "version", lambda _: found)
    if works:
        assert check_version() == found
    else:
        with pytest.raises(EngineConfigError, match=r"works with vLLM from 0\.31 up to, not including, 0\.34"):
            check_version()


async def test_without_vllm_the_start_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> str:
        raise vllm_core.PackageNotFoundError(name)

    monkeypatch.setattr(vllm_core, "version", none)
    engine = VllmEngine({"model": "m"})
    with pytest.raises(EngineConfigError, match="extra `gpu`"):
        await engine.start(Ear())
    assert not engine.healthy()
    await engine.stop()


@pytest.mark.parametrize("name", ["vllm-cpu.yaml", "vllm-gpu.yaml"])
def test_the_shipped_pipelines_are_right_and_keep_their_capacity_below_what_vllm_holds(name: str) -> None:
    pipeline = load_pipeline(SHIPPED / name)
    for stage in pipeline.stages:
        if stage.engine == "vllm":
            limit = VllmEngine(stage.options).capacity_limit
            assert limit is not None
            assert stage.capacity <= limit


def test_a_process_that_nobody_started_for_vllm_is_left_alone() -> None:
    vllm_process.die_with_parent()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the signal")
def test_h10_what_would_let_processes_outlive_a_killed_worker_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = EntryPoint("bargein", vllm_process._PLUGIN, vllm_process._GROUP)
    monkeypatch.setattr(vllm_process, "entry_points", lambda group: [plugin] if group == plugin.group else [])
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert vllm_process.find_gap(fork=False) is None
    monkeypatch.setenv("VLLM_PLUGINS", "other,bargein")
    assert vllm_process.find_gap(fork=False) is None
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert vllm_process.find_gap(fork=False) == "VLLM_PLUGINS leaves out bargein"
    assert vllm_process.find_gap(fork=True) is None
    monkeypatch.setattr(vllm_process, "entry_points", lambda group: [])
    assert "install the project anew" in (vllm_process.find_gap(fork=False) or "")


# A request's input.


def fence(turn: int = 0) -> Fence:
    return Fence(incarnation=0, epoch=0, turn_id=turn, response_seq=0)


class Line:
    """A request with a limit of 20 tokens, and what has gone in."""

    def __init__(self, *, keeps_all_said: bool = False) -> None:
        self.request = Request("r", fence(), 20, keeps_all_said=keeps_all_said)
        self.empty: list[Chunk] = []
        self.full: list[str] = []
        self.feed = self.request.feed(lambda chunk, room: (chunk.tokens, room), self.empty.append, self.full.append)

    def add(self, count: int, *, final: bool = True, turn: int = 0, prefill: bool = True) -> None:
        self.request.add(Chunk(list(range(count)), fence(turn), final, {}), prefill=prefill)

    async def next(self) -> Any:
        return await asyncio.wait_for(anext(self.feed), 5)

    def answer(self, count: int) -> None:
        self.request.said = count
        self.request.land()


async def test_h01_the_room_is_known_to_the_token() -> None:
    line = Line()
    async with aclosing(line.feed):
        assert line.request.room() == 19
        line.add(5)
        assert line.request.room() == 14
        assert await line.next() == ([0, 1, 2, 3, 4], 15)
        line.answer(4)
        assert (line.request.context_tokens, line.request.room()) == (8, 11)
        line.add(11)
        assert await line.next() == (list(range(11)), 1)
        line.answer(1)
        assert line.request.room() == 0


async def test_h01_where_a_turns_last_token_may_be_kept_it_is_counted() -> None:
    line = Line(keeps_all_said=True)
    async with aclosing(line.feed):
        line.add(5)
        await line.next()
        line.answer(4)
        assert line.request.context_tokens == 9


async def test_a_turn_in_pieces_goes_in_early_but_for_its_last_token() -> None:
    line = Line()
    async with aclosing(line.feed):
        line.add(3, final=False)
        assert await line.next() == ([0, 1], 18)
        line.add(2, final=False)
        line.add(2, final=False)
        line.answer(1)
        assert (await line.next())[0] == [2, 0, 1, 0]
        line.answer(1)
        line.add(0)
        assert (await line.next())[0] == [1]
        assert not line.empty


async def test_nothing_goes_in_early_where_that_is_switched_off() -> None:
    line = Line()
    async with aclosing(line.feed):
        line.add(3, final=False, prefill=False)
        line.add(1, prefill=False)
        assert (await line.next())[0] == [0, 1, 2, 0]


async def test_h06_only_one_turn_is_at_the_core_at_a_time() -> None:
    line = Line()
    async with aclosing(line.feed):
        line.add(2)
        line.add(3)
        await line.next()
        second = asyncio.ensure_future(line.next())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not second.done()
        line.answer(2)
        assert (await second)[0] == [0, 1, 2]


async def test_a_newer_turn_keeps_the_input_of_older_ones_and_drops_their_answers() -> None:
    line = Line()
    async with aclosing(line.feed):
        line.add(2)
        line.add(3, turn=1)
        await line.next()
        assert line.request.flying == Chunk([0, 1], fence(0), False, {})


async def test_h04_nothing_goes_in_once_a_request_is_leaving() -> None:
    line = Line()
    line.add(2)
    line.request.leave()
    waiting = asyncio.ensure_future(anext(line.feed))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait({waiting})
    await line.request.until_closed()


async def test_a_turn_of_nothing_is_answered_with_nothing() -> None:
    line = Line()
    async with aclosing(line.feed):
        line.add(0)
        line.add(1)
        assert (await line.next())[0] == [0]
        assert [chunk.final for chunk in line.empty] == [True]


# What is in one piece, as sound.


def sound(count: int, *, final: bool = False) -> Chunk:
    return Chunk([9] * count, fence(), final, {}, {"type": "multimodal"})


async def next_flying(line: Line) -> tuple[list[int], bool, bool]:
    """The next chunk's tokens, whether it is in one piece, and whether it is answered."""
    await line.next()
    chunk = line.request.flying
    assert chunk is not None
    line.answer(1)
    return chunk.tokens, chunk.media is not None, chunk.final


async def test_what_is_in_one_piece_stays_so_between_tokens() -> None:
    line = Line()
    async with aclosing(line.feed):
        line.add(2, final=False, prefill=False)
        line.request.add(sound(3), prefill=False)
        line.request.add(sound(2), prefill=False)
        assert line.request.room() == 20 - 1 - 7
        line.add(1, prefill=False)
        assert await next_flying(line) == ([0, 1], False, False)
        assert await next_flying(line) == ([9, 9, 9], True, False)
        assert await next_flying(line) == ([9, 9], True, False)
        assert await next_flying(line) == ([0], False, True)
        assert line.request.context_tokens == 8


async def test_a_piece_that_may_be_the_turns_last_is_kept_for_its_end() -> None:
    line = Line()
    async with aclosing(line.feed):
        line.add(2, final=False)
        assert await next_flying(line) == ([0], False, False)
        line.request.add(sound(3), prefill=True)
        assert await next_flying(line) == ([1], False, False), "what was the last token isn't any more"
        line.request.add(sound(2), prefill=True)
        assert await next_flying(line) == ([9, 9, 9], True, False)
        line.add(0)
        assert await next_flying(line) == ([9, 9], True, True)
        line.request.add(sound(4, final=True), prefill=True)
        assert await next_flying(line) == ([9] * 4, True, True)
        assert not line.empty


# Prompts and text.


class Bytes:
    """A tokenizer with a token for each byte."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        del skip_special_tokens
        return bytes(token_ids).decode(errors="replace")


def test_text_never_ends_in_half_a_letter() -> None:
    text, whole = TurnText(Bytes()), "Grüße, 你好 🐦!"
    pieces = [text.add([byte]) for byte in whole.encode()] + [text.add([], end=True)]
    assert "".join(pieces) == whole
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_what_never_becomes_a_letter_is_given_out_in_the_end() -> None:
    text = TurnText(Bytes())
    assert text.add([72, 0xC3]) == ""
    assert text.add([], end=True) == "H\N{REPLACEMENT CHARACTER}"


def test_prompts_are_tokens_or_text() -> None:
    assert read_prompt([1, 2], 10) == read_prompt({"tokens": [1, 2]}, 10) == Prompt([1, 2])
    assert read_prompt("hi", 10) == read_prompt({"text": "hi"}, 10) == Prompt("hi")
    assert read_prompt(None, 10) == read_prompt(b"", 10) == read_prompt([], 10) == Prompt([])


def test_multi_modal_data_goes_with_tokens_or_text() -> None:
    sound = {"audio": [(b"", 16_000)]}
    assert read_prompt({"tokens": [1], "multi_modal_data": sound}, 10) == Prompt([1], sound)
    assert read_prompt({"text": "hi", "multi_modal_data": sound}, 10) == Prompt("hi", sound)


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ([10], "vocabulary has 10"),
        ({"text": 3}, "is a int"),
        (b"sound", "plan_append"),
        ({"multi_modal_data": {"audio": []}}, "goes with"),
        ({"tokens": [1], "text": "hi", "multi_modal_data": {"audio": []}}, "goes with"),
        ({"tokens": [1], "multi_modal_data": {}}, "by modality"),
        ({"tokens": [1], "multi_modal_data": [1]}, "by modality"),
        ({"tokens": [10], "multi_modal_data": {"audio": []}}, "vocabulary has 10"),
    ],
)
def test_what_is_no_prompt_is_told_why(prompt: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_prompt(prompt, 10)
