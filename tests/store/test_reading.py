"""How many entries a read asks for: a bound in bytes, kept with a bound in entries. No IO."""

from __future__ import annotations

from typing import Any

import pytest

from control.store.reading import FIRST, ReadSize

BUDGET = 10_000


def stream(entries: int, size_bytes: int) -> list[Any]:
    """As a client gives it: each entry with one field `p` and a value that makes up the rest of the size."""
    return [[b"1-0", [b"p", bytes(size_bytes - 1)]] for _ in range(entries)]


def test_it_begins_small_and_stays_so_while_nothing_waits() -> None:
    size = ReadSize(48, BUDGET)
    assert size.count == FIRST
    for _ in range(5):
        size.note([stream(1, 10), stream(FIRST - 1, 10)])
        assert size.count == FIRST


def test_a_backlog_of_small_entries_is_read_in_ever_larger_portions_up_to_the_most() -> None:
    size = ReadSize(48, BUDGET)
    counts: list[int] = []
    for _ in range(5):
        size.note([stream(size.count, 10)])
        counts.append(size.count)
    assert counts == [8, 16, 32, 48, 48]


def test_it_is_small_again_once_the_backlog_is_gone() -> None:
    size = ReadSize(48, BUDGET)
    for _ in range(4):
        size.note([stream(size.count, 10)])
    for _ in range(6):
        size.note([stream(1, 10)])
    assert size.count == FIRST


@pytest.mark.parametrize("streams", [1, 2, 32])
@pytest.mark.parametrize("size_bytes", [10, 400, 3_000, 20_000])
def test_a_backlog_everywhere_never_brings_much_more_than_the_budget_twice(streams: int, size_bytes: int) -> None:
    size = ReadSize(48, BUDGET)
    brought: list[int] = []
    for _ in range(20):
        brought.append(size.count * streams * size_bytes)
        size.note([stream(size.count, size_bytes) for _ in range(streams)])
    least = streams * size_bytes  # one entry a stream is the least that a read can ask for
    assert all(each <= max(BUDGET, least) for each in brought[2:]), brought


def test_one_entry_at_a_time_is_not_for_ever() -> None:
    size = ReadSize(48, BUDGET)
    for _ in range(3):
        size.note([stream(size.count, 50_000)])
    assert size.count == 1
    for _ in range(5):
        size.note([stream(0, 1)])
    assert size.count == FIRST


def test_an_entry_without_fields_counts_as_nothing() -> None:
    size = ReadSize(2, BUDGET)
    size.note([[[b"1-0", None], [b"2-0", None]]])
    assert size.count == 2
