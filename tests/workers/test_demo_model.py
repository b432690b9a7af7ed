"""The demo with a language model: the codec, the crowd's ear, the conclusions; with vLLM, the whole of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from control.core.fence import Fence
from stages.engine import Output
from stages.modules.spoken import FRAME_BYTES, SpokenPolicy, decode_speech, encode_speech, voice_of
from stages.pipeline import load_pipeline
from tests.workers.cli_process import ROOT, clean_environment, run
from workers.demo.crowd import ANSWER_TOKENS, BUFFER_S, BargeIn, Crowd, _Answer, search
from workers.demo.journal import Note, encode_note
from workers.demo.llm import PIPELINE
from workers.demo.llm_findings import Spread, conclude_model
from workers.demo.llm_words import describe_model, find_wrong

if TYPE_CHECKING:
    from pathlib import Path

NOW = Fence(0, 0, 0, 0)

# ---- speech as tokens


def test_what_can_be_heard_is_the_same_token_again() -> None:
    heard = list(range(16, 256))
    assert encode_speech(decode_speech(heard)) == heard
    assert encode_speech(decode_speech(range(16))) == [0] * 16, "silence has no pitch"


def test_louder_and_higher_sound_is_another_token() -> None:
    def token(hz: float, level: float) -> int:
        tone = level * np.sin(2 * np.pi * hz * np.arange(320) / 16_000)
        (code,) = encode_speech(np.rint(32767 * tone).astype("<i2").tobytes())
        return code

    assert token(400, 0.5) // 16 > token(400, 0.05) // 16 > token(400, 0.005) // 16 > 0
    assert token(300, 0.5) % 16 < token(500, 0.5) % 16 < token(1_200, 0.5) % 16


def test_a_frame_that_was_begun_is_a_token_and_a_strange_token_is_silence() -> None:
    assert len(encode_speech(bytes(FRAME_BYTES + 2))) == 2
    assert encode_speech(b"") == encode_speech(b"\0") == []
    assert decode_speech([256, -1]) == bytes(2 * FRAME_BYTES)


def plan(mode: str, payload: Any, *, final: bool = False) -> Any:
    common: dict[str, Any] = {"session_config": {}, "runtime_config": {}, "seq": 1, "turn_seq": 1, "sampling": None}
    return (
        SpokenPolicy()
        .plan_append(request_id="r", session_id="s", fence=NOW, mode=mode, payload=payload, final=final, **common)
        .prompt
    )


def test_the_policy_makes_tokens_of_audio_and_passes_tokens_on() -> None:
    sound = decode_speech([200, 100])
    assert plan("append_audio_chunk", sound) == plan("append_audio_chunk", {"audio": sound}) == [200, 100]
    assert plan("append_tokens", [1, 2]) == plan("append_tokens", {"tokens": [1, 2]}) == [1, 2]
    assert plan("append_audio_chunk", b"", final=True) == []
    with pytest.raises(ValueError, match="needs audio"):
        plan("append_audio_chunk", [1, 2])


def test_the_adapter_says_tokens_and_nothing_else() -> None:
    def say(kind: Any, data: Any) -> Any:
        output = Output(request_id="r", fence=NOW, kind=kind, data=data)
        common: dict[str, Any] = {"session_config": {}, "runtime_config": {}}
        return voice_of(request_id="r", session_id="s", stage_id=1, fence=NOW, seq=0, output=output, **common).prompt

    assert say("tokens", [200]) == decode_speech([200])
    assert say("tokens", []) == b""
    with pytest.raises(TypeError, match="not of text"):
        say("text", "hello")


# ---- the crowd


def test_an_answer_runs_dry_only_where_its_next_piece_is_late() -> None:
    answer = _Answer([(10.0, 0.5), (10.5, 0.5), (10.6, 0.1)])
    assert answer.dry_s(11.0) == 0.0
    assert answer.end_s == pytest.approx(11.1 + BUFFER_S)
    answer = _Answer([(10.0, 0.5), (10.0 + BUFFER_S + 0.5 + 0.3, 0.5), (12.0, 0.5)])
    assert answer.dry_s(12.0) == pytest.approx(0.3 + (12.0 - (10.8 + BUFFER_S + 0.5)))
    assert _Answer().dry_s(12.0) == 0.0


def test_an_answer_that_stops_before_its_end_is_dry_until_it_is_interrupted() -> None:
    begun = [(10.0, 0.5)]
    assert _Answer(begun).dry_s(10.0 + BUFFER_S + 0.5) == pytest.approx(0.0)
    assert _Answer(begun).dry_s(10.0 + BUFFER_S + 0.7) == pytest.approx(0.2)
    assert _Answer(begun, ended=True).dry_s(20.0) == 0.0


@pytest.mark.parametrize(
    ("bears", "tried"),
    [
        (99, [2, 4, 8, 16, 20]),
        (20, [2, 4, 8, 16, 20]),
        (10, [2, 4, 8, 16, 12, 10]),
        (15, [2, 4, 8, 16, 12, 14]),
        (2, [2, 4, 3]),
        (1, [2, 1]),
        (0, [2, 1]),
    ],
)
async def test_the_search_doubles_until_a_turn_is_missed_and_then_halves(
    monkeypatch: pytest.MonkeyPatch, bears: int, tried: list[int]
) -> None:
    async def gather(_: Any, sessions: int, __: bytes) -> Crowd:
        return Crowd(sessions, missed=["late"] if sessions > bears else [])

    monkeypatch.setattr("workers.demo.crowd.gather_crowd", gather)
    crowds: list[Crowd] = []
    begun: list[int] = []
    await search(None, 20, b"", crowds.append, begun.append)  # type: ignore[arg-type]
    assert [crowd.sessions for crowd in crowds] == begun == tried


# ---- conclusions

NOTES = [
    Note(1.0, "taken", "a"),
    Note(1.0, "turn", "a"),
    Note(1.1, "said", "a", 1),
    Note(1.9, "said", "a", 1),
    # the barge-in, at 2.0
    Note(2.002, "said", "a", 2),
    Note(2.003, "asked", "a"),
    Note(2.004, "said", "a", 1),
    Note(2.01, "freed", "a"),
    Note(3.0, "taken", "b"),
    Note(3.0, "turn", "b"),
    Note(3.1, "said", "b", 5),
    Note(3.1, "ended", "b"),
    # another, at 4.0
    Note(4.005, "asked", "b"),
    Note(4.02, "freed", "b"),
]
BARGE_INS = [BargeIn("a", 2.0), BargeIn("b", 4.0)]


def write(tmp_path: Path, notes: list[Note], rest: bytes = b"") -> Path:
    journal = tmp_path / "journal"
    journal.write_bytes(b"".join(map(encode_note, notes)) + rest)
    return journal


def test_what_an_interruption_costs_is_counted_from_the_producers_side(tmp_path: Path) -> None:
    found = conclude_model(write(tmp_path, [*NOTES, Note(9, "held", "", 0)]), BARGE_INS, [])
    assert found.ok
    assert (found.requests, found.tokens, found.held) == (2, 10, 0)
    costs = found.barge_ins
    assert costs.asked_ms == Spread(4.0, 5.0, 5.0)
    assert costs.freed_ms == Spread(15.0, 20.0, 20.0)
    assert (costs.count, costs.in_mid_answer) == (2, 1), "the second answer was whole already"
    assert costs.wasted == Spread(3.0, 3.0, 3.0)
    assert not find_wrong(found)


@pytest.mark.parametrize(
    ("notes", "crowds", "wrong"),
    [
        (NOTES, [], "did not say"),
        ([], [], "did not say"),
        ([*NOTES, Note(9, "held", "", 1)], [], "held 1 requests"),
        ([*NOTES[:-1], Note(9, "held")], [], "not seen to free 1 requests, b first"),
        ([*NOTES, Note(9, "held")], [Crowd(2, turns=6, stale=1)], "1 stale outputs"),
    ],
)
def test_what_must_not_be_is_found(tmp_path: Path, notes: list[Note], crowds: list[Crowd], wrong: str) -> None:
    found = conclude_model(write(tmp_path, notes), BARGE_INS, crowds)
    assert not found.ok
    assert any(wrong in each for each in find_wrong(found)), find_wrong(found)


def test_a_journal_that_is_missing_or_cut_short_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    assert conclude_model(tmp_path / "nowhere", [], []).requests == 0
    found = conclude_model(write(tmp_path, NOTES, rest=b'[9.0,"hel'), BARGE_INS, [])
    assert found.requests == 2
    assert found.held is None


def test_the_table_says_how_many_sessions_went_well_and_why_others_did_not(tmp_path: Path) -> None:
    crowds = [
        Crowd(2, turns=6, first_s=[0.1] * 6, barge_ins=BARGE_INS),
        Crowd(4, turns=12, missed=["late", "late", "timeout"], first_s=[0.1]),
        Crowd(3, turns=9),
    ]
    found = conclude_model(write(tmp_path, [*NOTES, Note(9, "held")]), [], crowds)
    assert (found.most_at_once, found.searched) == (3, 4)
    rows = describe_model(found)
    assert "6 turns, none missed" in rows["2 sessions at once"]
    assert "3 missed (2 x late, 1 x timeout)" in rows["4 sessions at once"]
    assert rows["without a missed turn"].startswith("3 sessions")
    assert "not tried" not in rows["without a missed turn"]
    assert "not measured" in rows["tokens wasted"]


def test_the_model_goes_with_a_pipeline_of_its_own() -> None:
    described = load_pipeline(PIPELINE)
    assert [stage.engine for stage in described.stages] == ["vllm", "torch"]
    done = run("demo", "--vllm", "--pipeline", str(PIPELINE))
    assert done.exit_code == 2
    assert "one of them" in done.output
    if find_spec("vllm") is None:
        done = run("demo", "--vllm")
        assert done.exit_code == 2
        assert "make demo-vllm" in done.output


# ---- the whole


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM isn't installed (make test-vllm)")
def test_a_conversation_with_vllm_and_then_with_two_at_once(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    words = ["--vllm", "--most", "2", "--out", str(tmp_path / "out"), "--json", str(table)]
    done = subprocess.run(
        [sys.executable, "-m", "workers.cli", "demo", *words],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Nothing stale was delivered, and every request was released." in done.stdout
    found = json.loads(table.read_text())
    model = found["model"]
    assert found["interruptions"] >= 4
    assert model["barge_ins"]["count"] == found["interruptions"]
    assert model["held"] == 0
    assert model["requests_left"] == []
    # Where the machine is busy a turn may be missed even so, and fewer are tried then.
    crowd = model["crowds"][0]
    assert (crowd["sessions"], crowd["turns"]) == (2, 6)
    assert 1 <= crowd["barge_ins"]["count"] <= 4
    assert model["requests"] > found["requests_opened"] // 2, "the crowd's come on top of the conversation's"
    asked, freed = crowd["barge_ins"]["asked_ms"], crowd["barge_ins"]["freed_ms"]
    assert 0 < asked["median"] < freed["most"]
    assert model["tokens"] > ANSWER_TOKENS
    assert re.search(r"2 sessions at once +6 turns", done.stdout)
