"""The recorded traces on the whole system over a real server, a few at a time."""

from __future__ import annotations

import pytest

from tests.conformance.run import run_on_system
from tests.conformance.traces import DEFAULT_TRACES, load_traces

TRACES = load_traces(DEFAULT_TRACES)
PORTION = 25


@pytest.mark.parametrize("first", range(0, len(TRACES), PORTION))
async def test_the_system_behaves_as_the_reference_class(redis_url: str, first: int) -> None:
    steps, differences = await run_on_system(redis_url, TRACES[first : first + PORTION])
    assert differences == []
    assert steps >= PORTION
