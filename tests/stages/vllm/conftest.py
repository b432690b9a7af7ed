"""A tiny model and a vLLM that runs it, one for each file of tests: starting one takes seconds.

A test that kills its engine starts its own with `start_engine`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from stages.tiny_model import make_tiny_model
from tests.stages.ear import Ear
from tests.stages.vllm.bed import Bed, small_options

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = find_spec("vllm") is None
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # vLLM's own and its dependencies'
            if missing:
                item.add_marker(pytest.mark.skip(reason="vLLM isn't installed (make test-vllm)"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="module")
def options(tiny_model: Path) -> dict[str, Any]:
    return small_options(tiny_model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_bed(options: dict[str, Any]) -> AsyncIterator[Bed]:
    async with Bed(options) as bed:
        yield bed


@pytest_asyncio.fixture(loop_scope="module")
async def bed(shared_bed: Bed) -> AsyncIterator[Bed]:
    """The file's engine, empty before and after the test."""
    shared_bed.ear = Ear()
    yield shared_bed
    await shared_bed.empty()
    assert shared_bed.engine.load().slots_used == 0
    assert not shared_bed.ear.deaths
    assert await shared_bed.core_holds() == 0
