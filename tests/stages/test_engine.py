"""Finding and building engines."""

from __future__ import annotations

from typing import Any

import pytest

from stages.engine import BUILT_IN, Engine, EngineConfigError, load_engine
from stages.parrot import ParrotEngine


class Incomplete:
    """An engine that can't abort and has no name."""

    def __init__(self, options: dict[str, Any]) -> None: ...
    async def start(self, port: Any) -> None: ...
    async def submit(self, submission: Any) -> None: ...
    def load(self) -> Any: ...
    def healthy(self) -> bool:
        return True

    async def stop(self) -> None: ...


NOT_A_CLASS = 7


def test_a_built_in_name_and_its_import_path_give_the_same_engine() -> None:
    for name in ("parrot", "stages.parrot:ParrotEngine", "stages.parrot.ParrotEngine"):
        engine = load_engine(name, {})
        assert isinstance(engine, ParrotEngine)
        assert isinstance(engine, Engine)


def test_every_built_in_engine_carries_its_name() -> None:
    options: dict[str, dict[str, Any]] = {"torch": {"module": "a:B"}, "vllm": {"model": "m"}}
    for name in BUILT_IN:
        assert load_engine(name, options.get(name, {})).name == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vlm", "built in are parrot, torch"),
        ("no_such_package.engines:Mine", "no module 'no_such_package'"),
        ("json:Mine", "has no 'Mine'"),
        (f"{__name__}:Incomplete", "lacks abort, name"),
        (f"{__name__}:NOT_A_CLASS", "not a class"),
    ],
)
def test_an_engine_that_cannot_be_had_is_explained(name: str, message: str) -> None:
    with pytest.raises(EngineConfigError, match=message):
        load_engine(name, {})
