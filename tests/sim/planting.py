"""How a bug is planted: a line of a script or of a function is written differently, for as long as a run lasts.

Responsible for changing the product's code in this process and for taking it back. Leaves which bugs there are to
`planted.py`. A line that isn't there (any more) is an error: then the bug has to be planted anew.
"""

from __future__ import annotations
import __future__ as futures

import contextlib
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from control.store import scripts

if TYPE_CHECKING:
    from collections.abc import Generator

Plant = Callable[[], contextlib.AbstractContextManager[None]]

OURS = ("control.", "stages.", "workers.")


def in_script(name: str, *edits: tuple[str, str]) -> Plant:
    """Lines of `lua/<name>.lua`: old, new."""

    @contextlib.contextmanager
    def plant() -> Generator[None]:
        read = scripts._read

        def read_differently(wanted: str) -> str:
            text = read(wanted)
            return _edit(text, edits, f"{name}.lua") if wanted == name else text

        scripts._read = read_differently
        scripts.script.cache_clear()
        try:
            yield
        finally:
            scripts._read = read
            scripts.script.cache_clear()

    return plant


def in_code(path: str, *edits: tuple[str, str]) -> Plant:
    """Lines of `module:function` or `module:Class.method`."""

    @contextlib.contextmanager
    def plant() -> Generator[None]:
        module_name, _, place = path.partition(":")
        module = importlib.import_module(module_name)
        owner, name = _find(module, place)
        original = inspect.getattr_static(owner, name)
        text = _edit(textwrap.dedent(inspect.getsource(original)), edits, path)
        scope: dict[str, Any] = {}
        code = compile(text, f"<planted {path}>", "exec", futures.annotations.compiler_flag, dont_inherit=True)
        exec(code, module.__dict__, scope)
        with replaced(owner, name, scope[name]):
            yield

    return plant


def in_place_of(path: str, make: Callable[[Any], Any]) -> Plant:
    """`make(original)` in the place of `module:function` or `module:Class.method`."""

    @contextlib.contextmanager
    def plant() -> Generator[None]:
        module_name, _, place = path.partition(":")
        owner, name = _find(importlib.import_module(module_name), place)
        with replaced(owner, name, make(getattr(owner, name))):
            yield

    return plant


def together(*plants: Plant) -> Plant:
    """Several as one."""

    @contextlib.contextmanager
    def plant() -> Generator[None]:
        with contextlib.ExitStack() as stack:
            for each in plants:
                stack.enter_context(each())
            yield

    return plant


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Generator[None]:
    """Set an attribute, and the same function wherever the product has imported it by name or keeps it in its table."""
    original = inspect.getattr_static(owner, name)
    places: list[tuple[Any, str]] = [(owner, name)]
    if inspect.ismodule(owner):
        modules = [module for key, module in list(sys.modules.items()) if key.startswith(OURS)]
        places += [(m, k) for m in modules for k, v in list(vars(m).items()) if v is original and m is not owner]
    for place, key in places:
        setattr(place, key, value)
    rows = _replace_rules(original, value)
    try:
        yield
    finally:
        for place, key in places:
            setattr(place, key, original)
        _put_back(rows)


def _replace_rules(original: Any, value: Any) -> dict[Any, Any]:
    """The transition table holds the rules themselves."""
    from control.core import transitions  # noqa: PLC0415

    before = {key: row for key, row in transitions.ROWS.items() if row.rule is original}
    for key, row in before.items():
        transitions.ROWS[key] = type(row)(row.id, row.phase, row.event, value, row.leads_to)
    return before


def _put_back(rows: dict[Any, Any]) -> None:
    from control.core import transitions  # noqa: PLC0415

    transitions.ROWS.update(rows)


def _find(module: Any, place: str) -> tuple[Any, str]:
    *path, name = place.split(".")
    owner = module
    for part in path:
        owner = getattr(owner, part)
    return owner, name


def _edit(text: str, edits: tuple[tuple[str, str], ...], where: str) -> str:
    for old, new in edits:
        if text.count(old) != 1:
            raise LookupError(f"{where} has {old!r} {text.count(old)} times; plant this bug anew")
        text = text.replace(old, new)
    return text
