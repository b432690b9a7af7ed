"""The product's Lua scripts, run by a real Lua 5.1 against the store model.

Responsible for what Redis does around a script: arguments, conversions both ways, errors, the flags of its first line.
Leaves the commands to `store.py`. Keeps one Lua state a process: the scripts have no state of their own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lupa.lua51 import LuaRuntime, lua_type

from tests.sim.values import OOM, Failure, Status

if TYPE_CHECKING:
    from tests.sim.store import Store

_make_lua: Any = LuaRuntime
_lua: Any = _make_lua(encoding=None)

_WRAP = b"""
local call, to_text = ...
redis = {}
function redis.call(...)
  local answer = call(...)
  if type(answer) == 'table' and answer.err then error(answer, 0) end
  return answer
end
function redis.pcall(...) return call(...) end
function run_script(script, KEYS, ARGV)
  local ok, answer = pcall(script, KEYS, ARGV)
  if ok then return answer end
  if type(answer) == 'table' then return answer end
  return {err = 'ERR ' .. tostring(answer)}
end
return run_script
"""


@dataclass(frozen=True, slots=True)
class Compiled:
    """`allow_oom`: whether it may run when memory is full."""

    run: Any
    allow_oom: bool
    sha: str


class _Current:
    """The store that `redis.call` talks to."""

    store: Store


_current = _Current()
_compiled: dict[str, Compiled] = {}


def _call(*args: Any) -> Any:
    try:
        return _to_lua(_current.store.run([_text(each) for each in args]))
    except Failure as no:
        return _lua.table_from({b"err": no.text.encode()})


def _text(value: Any) -> bytes:
    if type(value) is bytes:
        return value
    if type(value) is int:
        return b"%d" % value
    if type(value) is float:
        return b"%d" % int(value) if value.is_integer() else b"%.17g" % value
    raise Failure("ERR Lua redis lib command arguments must be strings or integers")


def _to_lua(value: Any) -> Any:
    if value is None:
        return False
    if type(value) is list:
        return _lua.table_from([_to_lua(each) for each in value])
    if type(value) is Status:
        return _lua.table_from({b"ok": bytes(value)})
    return value


def _from_lua(value: Any) -> Any:
    if value is None or value is False:
        return None
    if value is True:
        return 1
    if type(value) is float:
        return int(value)
    if lua_type(value) == "table":
        error = value[b"err"]
        if error is not None:
            raise Failure(error.decode())
        status = value[b"ok"]
        if status is not None:
            return Status(status)
        found: list[Any] = []
        for position in range(1, len(value) + 1):
            each = value[position]
            if each is None:
                break
            found.append(_from_lua(each))
        return found
    return value


_run = _lua.execute(_WRAP, _call, None)


def compile_script(text: str, sha: str) -> Compiled:
    """A script as SCRIPT LOAD and EVAL get it."""
    known = _compiled.get(text)
    if known is None:
        lead, _, rest = text.partition("\n")
        is_declared = lead.startswith("#!")
        body = "\n" + rest if is_declared else text
        function = _lua.execute(b"return function(KEYS, ARGV) " + body.encode() + b"\nend")
        flags = re.findall(r"[a-z-]+", lead.partition("flags=")[2]) if is_declared else []
        known = _compiled[text] = Compiled(function, "allow-oom" in flags, sha)
    return known


def run_script(store: Store, script: Compiled, keys: list[bytes], argv: list[bytes], *, full: bool) -> Any:
    """EVALSHA's answer. Raises `Failure`."""
    if full and not script.allow_oom:
        raise Failure(OOM)
    _current.store = store
    try:
        return _from_lua(_run(script.run, _lua.table_from(keys), _lua.table_from(argv)))
    except Failure as no:
        raise Failure(f"{no.text} script: {script.sha}, on @user_script:1.") from None
