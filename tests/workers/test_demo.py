"""The demo: its sound, its plan, its audit, and the whole of it as a stranger would run it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
import wave
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec.structs import replace

from bargein_client import Fence, Reply
from stages.pipeline import SHIPPED
from workers.cli.endings import Failure
from workers.demo.audit import Audit
from workers.demo.cli import SPEECH, choose_pipeline, plan_from
from workers.demo.dialogue import MOST_UNDER_WAY, RATE_HZ, Microphone
from workers.demo.findings import Findings, InterruptionFinding, Spread, describe, verdict
from workers.demo.playback import Loudspeaker, Track
from workers.demo.speech import LONGEST_S, find_utterances, plan_turns
from workers.demo.wav import NotSpeech, decode_wav, from_pcm, read_wav, resample, to_pcm, write_wav

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FRAME = RATE_HZ // 50


def tone(seconds: float, rate_hz: int = RATE_HZ, hz: float = 440.0, level: float = 0.5) -> np.ndarray:
    return (level * np.sin(2 * np.pi * hz * np.arange(round(seconds * rate_hz)) / rate_hz)).astype(np.float32)


def silence(seconds: float) -> np.ndarray:
    return np.zeros(round(seconds * RATE_HZ), np.float32)


def riff(kind: int, channels: int, rate_hz: int, bits: int, data: bytes, extension: bytes = b"") -> bytes:
    block = channels * bits // 8
    form = struct.pack("<HHIIHH", kind, channels, rate_hz, rate_hz * block, block, bits) + extension
    chunks = b"LIST" + struct.pack("<I", 3) + b"odd\0" + b"fmt " + struct.pack("<I", len(form)) + form
    chunks += b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


# ---- sound


@pytest.mark.parametrize("from_hz", [8_000, 11_025, 16_000, 22_050, 44_100, 48_000, 96_000])
def test_a_tone_is_the_same_tone_at_another_rate(from_hz: int) -> None:
    there = resample(tone(1, from_hz), from_hz, RATE_HZ)
    assert there.size == RATE_HZ
    assert np.abs(there - tone(1))[200:-200].max() < 1e-3


def test_what_the_lower_rate_cannot_hold_is_filtered_out() -> None:
    assert np.abs(resample(tone(1, 48_000, 12_000), 48_000, RATE_HZ))[200:-200].max() < 1e-3


def test_any_length_can_be_resampled() -> None:
    for length in (0, 1, 2, 159, 160, 161):
        assert resample(np.ones(length, np.float32), 44_100, RATE_HZ).size == -(-length * 160 // 441)


@pytest.mark.parametrize(
    ("kind", "bits", "encode"),
    [
        (1, 8, lambda s: np.rint(s * 127 + 128).astype("u1").tobytes()),
        (1, 16, lambda s: np.rint(s * 32767).astype("<i2").tobytes()),
        (1, 24, lambda s: (np.rint(s * (2**23 - 1)).astype("<i4") << 8).view("u1").reshape(-1, 4)[:, 1:].tobytes()),
        (1, 32, lambda s: np.rint(s.astype(float) * (2**31 - 1)).astype("<i4").tobytes()),
        (3, 32, lambda s: s.astype("<f4").tobytes()),
        (3, 64, lambda s: s.astype("<f8").tobytes()),
    ],
)
@pytest.mark.parametrize("extensible", [False, True])
def test_every_sample_format_reads_the_same(
    kind: int, bits: int, encode: Callable[[np.ndarray], bytes], extensible: bool
) -> None:
    said = tone(0.1)
    both = np.stack((said, said), axis=1).reshape(-1)
    extension = struct.pack("<HHIH14s", 22, bits, 3, kind, bytes(14)) if extensible else b""
    content = riff(0xFFFE if extensible else kind, 2, 44_100, bits, encode(both), extension)
    sound, rate_hz = decode_wav(content)
    assert rate_hz == 44_100
    assert np.abs(sound - said).max() < 2**-6


@pytest.mark.parametrize(
    ("kind", "codes", "values"),
    [
        (7, [0xFF, 0x7F, 0x80, 0x00, 0xEF, 0xD5], [0, 0, 32124, -32124, 132, 716]),
        (6, [0xD5, 0x55, 0xAA, 0x2A, 0xC5], [8, -8, 32256, -32256, 264]),
    ],
)
def test_telephone_codes_are_read_by_the_book(kind: int, codes: list[int], values: list[int]) -> None:
    sound, _ = decode_wav(riff(kind, 1, 8_000, 8, bytes(codes)))
    assert (sound * 32768).tolist() == values


def test_a_file_that_was_cut_off_is_read_as_far_as_it_goes() -> None:
    content = riff(1, 1, 8_000, 16, to_pcm(tone(0.1, 8_000)))
    sound, _ = decode_wav(content[:-101])
    assert sound.size == 800 - 51


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not a WAV file: it is empty"),
        (b"ID3\x04 and so on, and on", "but MP3; convert it"),
        (b"\0\0\0\x20ftypM4A and so on", "but MP4"),
        (b"RIFF\0\0\0\0WAVE", "it has no data"),
        (b"RIFF\0\0\0\0WAVEdata\0\0\0\0", "its data come before their format"),
        (riff(17, 1, 8_000, 4, b"abcd"), "compressed format (number 17); what works is"),
        (riff(1, 1, 8_000, 12, b"abcd"), "12 bits a sample; what works is"),
        (riff(1, 0, 8_000, 16, b"abcd"), "0 channels"),
    ],
)
def test_what_is_no_usable_wav_file_is_refused_by_name(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "speech.wav"
    path.write_bytes(content)
    with pytest.raises(NotSpeech, match=re.escape(str(path))) as refusal:
        read_wav(path, RATE_HZ)
    assert says in str(refusal.value)


def test_a_written_file_is_read_again(tmp_path: Path) -> None:
    left, right = tone(0.2), tone(0.2, hz=300)
    write_wav(tmp_path / "both.wav", (left, right), RATE_HZ)
    with wave.open(str(tmp_path / "both.wav")) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (2, 2, RATE_HZ)
    assert np.abs(read_wav(tmp_path / "both.wav", RATE_HZ) - (left + right) / 2).max() < 1e-3


# ---- the plan


def test_the_shipped_speech_is_small_and_says_what_its_text_says() -> None:
    assert SPEECH.stat().st_size < 200_000
    text = SPEECH.with_suffix(".txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(find_utterances(read_wav(SPEECH, RATE_HZ), RATE_HZ)) == len(lines)
    assert "espeak-ng" in text


def test_utterances_are_what_stands_between_pauses() -> None:
    sound = np.concatenate((silence(0.5), tone(1), silence(0.1), tone(1), silence(0.5), tone(0.8), silence(0.3)))
    assert [round(each.size / RATE_HZ, 1) for each in find_utterances(sound, RATE_HZ)] == [2.1, 0.8]


def test_noise_in_the_pauses_does_not_join_utterances() -> None:
    sound = np.concatenate((tone(1), silence(0.5), tone(1), silence(0.5)))
    noise = np.random.default_rng(1).normal(0, 0.02, sound.size).astype(np.float32)
    assert len(find_utterances(sound + noise, RATE_HZ)) == 2


def test_a_click_is_no_utterance_and_silence_holds_none() -> None:
    assert not find_utterances(silence(2), RATE_HZ)
    assert not find_utterances(np.zeros(0, np.float32), RATE_HZ)
    click = np.concatenate((silence(0.5), tone(0.05), silence(0.5), tone(1), silence(0.5)))
    assert len(find_utterances(click, RATE_HZ)) == 1


def test_a_long_monologue_is_cut_where_it_is_quietest() -> None:
    sound = tone(9)
    sound[3 * RATE_HZ : 3 * RATE_HZ + FRAME] *= 0.1
    utterances = find_utterances(sound, RATE_HZ)
    assert utterances[0].size == 3 * RATE_HZ
    assert all(each.size <= LONGEST_S * RATE_HZ for each in utterances)
    assert sum(each.size for each in utterances) == sound.size


@pytest.mark.parametrize("count", [1, 2, 6, 20])
def test_the_plan_interrupts_four_times_whatever_was_recorded(count: int) -> None:
    turns = plan_turns([tone(2)] * count, RATE_HZ, kill=True)
    assert [turn.listen_s is None for turn in turns] == [False, False, True, False, False, True]
    assert [turn.kill for turn in turns] == [False, False, True, False, False, False]
    assert not any(turn.kill for turn in plan_turns([tone(2)], RATE_HZ, kill=False))


def test_a_short_answer_is_interrupted_before_its_end() -> None:
    turns = plan_turns([tone(0.6)], RATE_HZ, kill=True)
    assert all(turn.listen_s is None or turn.listen_s <= 0.3 for turn in turns)


def test_a_file_without_speech_is_refused_before_anything_starts(tmp_path: Path) -> None:
    write_wav(tmp_path / "silent.wav", (silence(1),), RATE_HZ)
    with pytest.raises(Failure, match="holds no speech"):
        plan_from(tmp_path / "silent.wav", kill=True)


def test_without_pytorch_the_demo_says_that_it_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.demo.cli.find_spec", lambda name: None)
    path, remark = choose_pipeline()
    assert path.name == "demo-parrot.yaml"
    assert "PyTorch isn't installed" in remark
    monkeypatch.setattr("workers.demo.cli.find_spec", lambda name: name)
    path, remark = choose_pipeline()
    assert (path.name, remark) == ("demo.yaml", "")


# ---- what was heard


def test_pieces_of_an_answer_are_heard_without_gaps_although_they_come_irregularly() -> None:
    speaker = Loudspeaker(RATE_HZ, buffer_s=0.04)
    answer = tone(0.2)
    for number in range(10):
        late_s = 0.03 if number % 3 == 1 else 0.0
        speaker.play(
            1 + number * 0.02 + late_s, to_pcm(answer[number * FRAME : (number + 1) * FRAME]), last=number == 9
        )
    assert speaker.ended_s == pytest.approx(1.24)
    heard = speaker.track.lay_out(1.3)
    begin = round(1.04 * RATE_HZ)
    assert np.abs(heard[begin : begin + answer.size] - answer).max() < 1e-4
    assert not heard[:begin].any()
    assert not heard[begin + answer.size :].any()


def test_a_piece_that_comes_too_late_leaves_a_gap() -> None:
    speaker = Loudspeaker(RATE_HZ, buffer_s=0.04)
    for at_s in (0.0, 0.2):
        speaker.play(at_s, to_pcm(tone(0.02)), last=False)
    assert [round(start_s, 3) for start_s, _ in speaker.track.pieces] == [0.04, 0.24]


def test_an_interruption_cuts_at_the_very_sample_and_what_follows_is_heard() -> None:
    speaker = Loudspeaker(RATE_HZ, buffer_s=0.0)
    for number in range(5):
        speaker.play(number * 0.02, to_pcm(np.full(FRAME, 0.5, np.float32)), last=False)
    assert speaker.is_playing(0.05)
    assert speaker.cut(0.05) == pytest.approx(0.05)
    assert not speaker.is_playing(0.05)
    speaker.play(0.08, to_pcm(np.full(FRAME, 0.25, np.float32)), last=True)
    heard = speaker.track.lay_out(0.1)
    assert np.abs(heard[: round(0.05 * RATE_HZ)] - 0.5).max() < 1e-3
    assert not heard[round(0.05 * RATE_HZ) : round(0.08 * RATE_HZ)].any()
    assert np.abs(heard[round(0.08 * RATE_HZ) :] - 0.25).max() < 1e-3


def test_a_cut_in_silence_loses_nothing() -> None:
    track = Track(RATE_HZ)
    assert track.cut(1.0) == 0
    track.add(0.0, tone(0.1))
    assert track.cut(1.0) == 0
    assert track.level_db(0.05) > -20
    assert track.level_db(0.5) == -120


# ---- the microphone


class Listener:
    """Takes inputs as a session does, and answers when it is told to."""

    def __init__(self) -> None:
        self.inputs: list[tuple[bytes, bool]] = []
        self.replies: list[asyncio.Future[Reply]] = []

    async def append(self, payload: bytes, *, final: bool, wait: bool) -> asyncio.Future[Reply]:
        assert not wait
        self.inputs.append((payload, final))
        self.replies.append(asyncio.get_running_loop().create_future())
        return self.replies[-1]

    def answer(self, count: int) -> None:
        fence = Fence(0, 1)
        for future in [each for each in self.replies if not each.done()][:count]:
            future.set_result(Reply("c", "append", "demo", True, None, "", False, fence, fence, 1))


async def test_what_is_said_while_nobody_answers_is_kept_and_sent_in_order() -> None:
    session = Listener()
    microphone = Microphone(session)  # pyright: ignore[reportArgumentType]
    frames = [bytes([number]) for number in range(100)]
    for frame in frames[:-1]:
        await microphone.push(frame, final=False)
    assert len(session.inputs) == MOST_UNDER_WAY
    ending = asyncio.create_task(microphone.push(frames[-1], final=True))
    await asyncio.sleep(0)
    assert not ending.done()
    session.answer(1)
    await ending
    assert b"".join(payload for payload, _ in session.inputs) == b"".join(frames)
    assert [final for _, final in session.inputs] == [False] * MOST_UNDER_WAY + [True]
    session.answer(1_000)
    await microphone.settle()
    assert (microphone.sent, microphone.accepted, microphone.epochs) == (MOST_UNDER_WAY + 1, MOST_UNDER_WAY + 1, {1})


# ---- the audit and the table


def test_an_output_of_an_older_epoch_after_interrupted_is_stale() -> None:
    audit = Audit()
    audit.output(0)
    audit.lifecycle("interrupted", 1)
    audit.output(1)
    audit.output(0)
    audit.lifecycle("interrupted", 2)
    audit.output(1)
    assert (audit.stale, audit.outputs, audit.interruptions) == (2, 4, 2)


def test_the_stream_audit_counts_missing_numbers() -> None:
    audit = Audit()
    audit.entry("lifecycle", 1, {"event": "opened", "fence": {"epoch": 0}})
    audit.entry("output", 4, {"fence": {"epoch": 0}})
    audit.entry("reply", 5, {})
    assert (audit.events, audit.missing, audit.stale) == (3, 2, 0)


FINDINGS = Findings(
    ok=True,
    pipeline="demo.yaml",
    wav="speech.wav",
    conversation_s=18.9,
    total_s=25.0,
    turns=6,
    answers_heard_out=2,
    interruptions=2,
    interruptions_each=(
        InterruptionFinding(at_s=1, epoch=0, abort_ms=3.5, listener_ms=2, confirmed_ms=8, waited=False),
        InterruptionFinding(at_s=9, epoch=1, abort_ms=2100.0, listener_ms=2100, confirmed_ms=2110, waited=True),
    ),
    abort=Spread(3.5, 3.5, 3.5),
    stale_dropped_by_stages=2,
    stale_dropped_by_client=1,
    stale_speech_cut_ms=150,
    stale_delivered=0,
    listener_events=900,
    listener_gaps=0,
    stream_events=903,
    stream_missing=0,
    outputs_delivered=386,
    requests_opened=10,
    requests_released=10,
    requests_held_by_engines=0,
    requests_left=(),
    inputs_sent=517,
    inputs_accepted=517,
    control_worker_killed=None,
    heard_wav="heard.wav",
    conversation_wav="conversation.wav",
    log="workers.log",
)


def test_an_interruption_during_the_takeover_is_told_apart() -> None:
    rows = dict(describe(FINDINGS))
    assert rows["barge-in to the engines' abort"].startswith("3.5 / 3.5 / 3.5 ms")
    assert "2,100 ms for one during the takeover" in rows["barge-in to the engines' abort"]
    assert "control worker killed" not in rows


def test_the_verdict_names_what_went_wrong() -> None:
    assert verdict(FINDINGS).startswith("Nothing stale")
    assert verdict(replace(FINDINGS, ok=False, stale_delivered=3)) == "FAILED: 3 stale outputs were delivered."
    assert verdict(replace(FINDINGS, ok=False, requests_left=("r1",))) == "FAILED: not released: r1."
    many = replace(FINDINGS, ok=False, requests_left=("r1", "r2", "r3", "r4", "r5"))
    assert verdict(many) == "FAILED: not released: r1, r2, r3 and 2 more."
    assert "still hold 2 requests" in verdict(replace(FINDINGS, ok=False, requests_held_by_engines=2))


# ---- the whole


def start_demo(*arguments: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BARGEIN_")}
    environment["PYTHONPATH"] = os.pathsep.join(part for part in sys.path if part)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "workers.cli", "demo", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def pids() -> Iterator[set[int]]:
    """The processes that a demo has told of; whatever a failing test leaves is ended."""
    seen: set[int] = set()
    yield seen
    for pid in seen:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_s25_the_demo_interrupts_kills_a_worker_and_delivers_nothing_stale(tmp_path: Path, pids: set[int]) -> None:
    with start_demo("--out", str(tmp_path), "--json", str(tmp_path / "found.json")) as demo:
        output, _ = demo.communicate(timeout=100)
    pids.update(map(int, re.findall(r"is ready \(process (\d+)\)", output)))
    assert demo.returncode == 0, output
    found = json.loads((tmp_path / "found.json").read_bytes())

    assert found["ok"]
    assert found["interruptions"] >= 3
    assert found["answers_heard_out"] >= 1
    assert found["stale_delivered"] == 0
    assert found["outputs_delivered"] > 100
    assert found["requests_opened"] == 2 * (found["interruptions"] + 1)
    assert found["requests_released"] == found["requests_opened"]
    assert found["requests_held_by_engines"] == 0
    assert found["inputs_accepted"] == found["inputs_sent"]
    assert (found["stream_missing"], found["listener_gaps"]) == (0, 0)
    assert all(each["abort_ms"] is not None for each in found["interruptions_each"])
    outage = found["control_worker_killed"]
    assert {outage["killed"], outage["successor"]} == {"control-1", "control-2"}
    assert outage["gap_ms"] < outage["lease_ms"] + 2_000
    assert outage["outputs_meanwhile"] > 0
    assert found["total_s"] < 60

    # Of the interrupted answers nothing is heard from the interruption on, until the next one begins.
    with wave.open(found["conversation_wav"]) as file:
        both = from_pcm(file.readframes(file.getnframes())).reshape(-1, 2)
    for each in found["interruptions_each"]:
        at = round(each["at_s"] * RATE_HZ)
        assert both[at - FRAME * 10 : at, 1].any()
        assert not both[at + FRAME // 20 : at + FRAME * 20, 1].any()  # at_s is told to the millisecond
        assert both[at : at + FRAME * 20, 0].any()

    # Plain output: no control codes, and something to read at least every few seconds.
    assert all(character.isprintable() or character == "\n" for character in output)
    stamps = [float(each) for each in re.findall(r"^\[ *([\d.]+) s\]", output, re.MULTILINE)]
    assert max(later - earlier for earlier, later in pairwise(stamps)) < 4
    assert "stale outputs delivered" in output
    assert len(pids) == 4
    assert not any(map(is_alive, pids))


@pytest.mark.slow
def test_a_request_that_is_not_released_fails_the_demo(tmp_path: Path, pids: set[int]) -> None:
    pipeline = tmp_path / "stubborn.yaml"
    plain = (SHIPPED / "demo-parrot.yaml").read_text(encoding="utf-8")
    pipeline.write_text(plain.replace("reply: stream ", "fail_aborts: 1000\n      reply: stream "), encoding="utf-8")
    said = tone(0.5, 44_100)
    speech = np.stack((said, 0 * said), axis=1).reshape(-1).astype("<f4").tobytes()
    (tmp_path / "speech.wav").write_bytes(riff(3, 2, 44_100, 32, speech))
    wav, data = tmp_path / "speech.wav", tmp_path / "found.json"
    arguments = ["--out", str(tmp_path), "--json", str(data), "--wav", str(wav), "--pipeline", str(pipeline)]
    with start_demo(*arguments, "--no-kill") as demo:
        output, _ = demo.communicate(timeout=100)
    pids.update(map(int, re.findall(r"is ready \(process (\d+)\)", output)))
    assert demo.returncode == 1, output
    found = json.loads(data.read_bytes())
    assert not found["ok"]
    assert found["interruptions"] == 4
    assert found["requests_released"] < found["requests_opened"]
    assert found["requests_held_by_engines"] > 0
    assert found["control_worker_killed"] is None
    assert "FAILED: not released: duplex-s." in output
    assert not any(map(is_alive, pids))


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_a_demo_that_is_ended_early(tmp_path: Path, pids: set[int], how: signal.Signals) -> None:
    with start_demo("--out", str(tmp_path)) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            pids.update(map(int, re.findall(r"is ready \(process (\d+)\)", line)))
            if "the user speaks" in line:
                break
        demo.send_signal(how)
        rest = demo.stdout.read()
        demo.wait(30)
    assert demo.returncode == (-how if how == signal.SIGKILL else 128 + how), rest
    assert "Traceback" not in rest
    assert len(pids) == 4
    give_up_s = time.monotonic() + 20
    while any(map(is_alive, pids)) and time.monotonic() < give_up_s:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--wav", "nowhere.wav"], "nowhere.wav can't be read: No such file or directory"),
        (["--pipeline", "nowhere.yaml"], "nowhere.yaml: 1 problem"),
        (["--json", "nowhere/found.json"], "--json nowhere/found.json: is no file in an existing folder"),
    ],
)
def test_wrong_arguments_end_it_before_anything_starts(tmp_path: Path, arguments: list[str], says: str) -> None:
    with start_demo("--out", str(tmp_path), *arguments) as demo:
        output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 2, output
    assert says in output
    assert "Traceback" not in output
