"""Frames of a turn."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control.core.fence import Fence
from stages.chunks import NOTHING, Chunk, read_chunk
from stages.framing import Framer

FENCE = Fence(incarnation=0, epoch=0, turn_id=0, response_seq=0)


def new_framer() -> Framer:
    return Framer({"audio": 4, "tokens": 2}, "audio", FENCE)


@given(
    turns=st.lists(
        st.one_of(
            st.lists(st.binary(max_size=11), min_size=1, max_size=5),
            st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=5),
        ),
        max_size=4,
    ),
    hold=st.booleans(),
    taken_between=st.integers(0, 3),
)
def test_turns_come_out_as_they_went_in(turns: list[Any], taken_between: int, *, hold: bool) -> None:
    framer, taken = new_framer(), []
    for turn in turns:
        for index, piece in enumerate(turn):
            chunk = read_chunk(piece)
            framer.check(chunk)
            promised = framer.backlog_with(chunk)
            framer.add(chunk, final=index == len(turn) - 1, hold=hold, ready_s=0)
            assert len(framer.frames) <= promised + 1
            count = min(taken_between, len(framer.frames))
            taken.extend(framer.frames.popleft() for _ in range(count))
    taken.extend(framer.frames)
    assert sum(frame.turn_end for frame in taken) == len(turns)
    position = 0
    for turn in turns:
        frames = []
        while not frames or not frames[-1].turn_end:
            frames.append(taken[position])
            position += 1
        whole = [item for piece in turn for item in piece]
        assert [item for frame in frames for item in frame.data] == whole
    assert position == len(taken)


def test_a_flushed_turn_has_no_end_and_no_half_things() -> None:
    framer = new_framer()
    framer.add(Chunk("audio", b"123456789"), final=False, hold=False, ready_s=0)
    framer.flush(ready_s=0, whole=2)
    assert [frame.data for frame in framer.frames] == [b"1234", b"5678"]
    framer.add(Chunk("tokens", [1]), final=True, hold=False, ready_s=0)
    assert [frame.turn_end for frame in framer.frames] == [False, False, True]


def test_a_cleared_turn_leaves_nothing_behind() -> None:
    framer = new_framer()
    framer.add(Chunk("audio", b"12345"), final=False, hold=False, ready_s=0)
    framer.clear()
    assert framer.backlog_with(NOTHING) == 0
    framer.check(Chunk("tokens", [1]))
    framer.add(Chunk("tokens", [1]), final=True, hold=False, ready_s=0)
    assert [frame.data for frame in framer.frames] == [[1]]


def test_a_turn_of_two_kinds_is_refused() -> None:
    framer = new_framer()
    framer.add(Chunk("audio", b"1"), final=False, hold=True, ready_s=0)
    with pytest.raises(ValueError, match="began with audio"):
        framer.check(Chunk("tokens", [1]))
