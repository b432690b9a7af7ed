"""The server's clock as seen from here, on a monotonic clock that the test moves."""

from __future__ import annotations

import time

import pytest

from workers.clock import JUMP_MS, ServerClock


class HeldClock(ServerClock):
    """`here_ms` is this machine's monotonic time."""

    def __init__(self) -> None:
        self.here_ms = 50_000.0
        super().__init__()

    def monotonic_ms(self) -> float:
        return self.here_ms


def test_there_is_no_time_before_the_server_has_told_it() -> None:
    with pytest.raises(RuntimeError, match="not known yet"):
        HeldClock().now_ms()


def test_server_time_goes_on_with_monotonic_time() -> None:
    clock = HeldClock()
    clock.learn(1_700_000_000_000)
    clock.here_ms += 1_234.5
    assert clock.now_ms() == 1_700_000_001_234


def test_every_answer_corrects_it() -> None:
    clock = HeldClock()
    clock.learn(1_000_000)
    clock.here_ms += 100
    clock.learn(1_000_130)
    assert clock.now_ms() == 1_000_130
    clock.learn(1_000_090)
    assert clock.now_ms() == 1_000_090


@pytest.mark.parametrize("jump_ms", [JUMP_MS + 1, -JUMP_MS - 1, 3_600_000, -3_600_000])
def test_s56_a_jump_of_the_servers_clock_unsettles_it_for_a_while(jump_ms: int) -> None:
    clock = HeldClock()
    clock.learn(10_000_000)
    clock.here_ms += 6_000
    clock.learn(10_006_000)
    assert clock.is_settled(5_000)
    clock.learn(10_006_000 + jump_ms)
    assert clock.now_ms() == 10_006_000 + jump_ms
    assert not clock.is_settled(5_000)
    clock.here_ms += 4_999
    assert not clock.is_settled(5_000)
    clock.here_ms += 1
    assert clock.is_settled(5_000)


def test_an_answer_that_took_a_moment_is_no_jump() -> None:
    clock = HeldClock()
    clock.learn(10_000_000)
    clock.here_ms += 6_000
    clock.learn(10_006_000 - JUMP_MS + 1)
    assert clock.is_settled(6_000)


def test_the_first_answer_is_no_jump() -> None:
    clock = HeldClock()
    clock.here_ms += 5_000
    clock.learn(9_999_999_999)
    assert clock.is_settled(5_000)


def test_s71_a_lost_connection_unsettles_it_for_a_while() -> None:
    clock = HeldClock()
    clock.learn(10_000_000)
    clock.here_ms += 6_000
    assert clock.is_settled(5_000)
    clock.unsettle()
    assert not clock.is_settled(1)
    assert clock.is_settled(0)
    clock.here_ms += 5_000
    assert clock.is_settled(5_000)
    assert clock.now_ms() == 10_011_000


def test_s56_this_machines_wall_clock_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ServerClock()
    clock.learn(1_000_000)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    assert 1_000_000 <= clock.now_ms() < 1_060_000
    before = clock.monotonic_ms()
    assert 0 <= clock.elapsed_ms(before) < 60_000
