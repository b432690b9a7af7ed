"""The Lua scripts: loading them, putting shared parts in, and naming them to the server.

Responsible for the text and its SHA. Leaves the arguments to the module that calls each script. A part is shared by
writing its text in front of the script that needs it, after the `#!lua` line, since Redis has no include.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from importlib.resources import files

_SHARED = {"commit": ("events",), "publish": ("events",)}
SCRIPTS = ("commit", "publish", "acknowledge", "acquire", "renew", "handling", "join", "slot", "beat", "end_life")


@dataclass(frozen=True, slots=True)
class Script:
    """`text` as the server gets it, `sha` as EVALSHA wants it."""

    name: str
    text: str
    sha: str


@cache
def script(name: str, *, plain: bool = False) -> Script:
    """The script of a name in `SCRIPTS`. `plain`: without the `#!lua` line, for a server that doesn't know it."""
    text = _read(name)
    lead, _, rest = text.partition("\n")
    shared = "".join(_read(part) for part in _SHARED.get(name, ()))
    text = f"{shared}{rest}" if plain else f"{lead}\n{shared}{rest}"
    if not lead.startswith("#!lua"):
        raise ValueError(f"{name}.lua does not begin with its #!lua line")
    return Script(name, text, sha1(text.encode(), usedforsecurity=False).hexdigest())


def _read(name: str) -> str:
    return files("control.store").joinpath(f"lua/{name}.lua").read_text()
