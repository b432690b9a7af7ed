"""Import paths."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import pytest

from stages.imports import ImportPathError, load_symbol

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("path", ["collections:OrderedDict", "collections.OrderedDict"])
def test_both_spellings_lead_to_the_object(path: str) -> None:
    assert load_symbol(path) is OrderedDict


def test_behind_the_colon_there_may_be_dots() -> None:
    assert load_symbol("collections:OrderedDict.fromkeys") == OrderedDict.fromkeys


@pytest.mark.parametrize("path", ["", "json", ":x", "json:", "a b:c", "json:1x", "..json:x", "json:loads()"])
def test_what_is_no_import_path_is_told_how_to_write_one(path: str) -> None:
    with pytest.raises(ImportPathError, match=r"package\.module:Name"):
        load_symbol(path)


@pytest.mark.parametrize(
    ("path", "missing"),
    [
        ("no_such_package.mod:X", "no module 'no_such_package'"),
        ("json.no_such_module:X", "no module 'json.no_such_module'"),
        ("json:no_such_name", "has no 'no_such_name'"),
    ],
)
def test_the_part_that_is_missing_is_named(path: str, missing: str) -> None:
    with pytest.raises(ImportPathError, match=missing):
        load_symbol(path)


def test_an_error_inside_the_users_module_is_not_covered_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_module_that_needs_more.py").write_text("import something_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="something_not_installed"):
        load_symbol("users_module_that_needs_more:Engine")
