"""The scripts' texts: their shared parts, their numbers beside Python's, and a server that has forgotten them."""

from __future__ import annotations

import re
from enum import IntEnum
from hashlib import sha1
from importlib.resources import files

import pytest
from redis.exceptions import NoScriptError

from control.core import commands as c
from control.store.commits import CommitStatus, fixed_keys, read_outcome
from control.store.keys import FIXED_TYPES, PartitionKeys
from control.store.publishing import Published
from control.store.scripts import SCRIPTS, script
from control.store.slots import Slot
from tests.store.desk import KEYS, SID, Store, command

LUA = files("control.store").joinpath("lua")


def stored_numbers(name: str) -> dict[str, int]:
    """The names and numbers of the first `local A, B = 0, 1` in a script."""
    text = LUA.joinpath(f"{name}.lua").read_text()
    for names, values in re.findall(r"^local ([A-Z_, ]+) = ([0-9, ]+)$", text, re.MULTILINE):
        numbers = [int(value) for value in values.split(",")]
        if numbers == list(range(len(numbers))):
            return dict(zip([part.strip() for part in names.split(",")], numbers, strict=True))
    raise AssertionError(f"{name}.lua has no line of numbers")


@pytest.mark.parametrize(("name", "enum"), [("commit", CommitStatus), ("publish", Published), ("slot", Slot)])
def test_the_numbers_in_a_script_are_those_in_python(name: str, enum: type[IntEnum]) -> None:
    assert stored_numbers(name) == {member.name: member.value for member in enum}


@pytest.mark.parametrize(("name", "enum"), [("commit", CommitStatus), ("publish", Published), ("slot", Slot)])
def test_a_script_answers_each_of_its_numbers(name: str, enum: type[IntEnum]) -> None:
    text = LUA.joinpath(f"{name}.lua").read_text()
    for member in enum:
        assert len(re.findall(rf"\b{member.name}\b", text)) >= 2, f"{member.name} is declared and never answered"


def test_the_commit_counts_its_fixed_keys_as_python_does() -> None:
    known = PartitionKeys(0)
    fixed = fixed_keys(known)
    text = LUA.joinpath("commit.lua").read_text()
    assert f"local FIXED, CHUNK = {len(fixed)}," in text
    assert set(fixed) == {getattr(known, attribute) for attribute in FIXED_TYPES}
    described = re.search(r"^-- KEYS +(.*?), then", text, re.MULTILINE | re.DOTALL)
    assert described is not None
    names = re.findall(r"\d+ (\w+)", described[1].replace("\n--", ""))
    assert names == [key.rpartition(":")[2] for key in fixed]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_named_by_its_text_and_says_what_it_takes(name: str) -> None:
    known = script(name)
    assert known.text.startswith("#!lua")
    assert known.sha == sha1(known.text.encode(), usedforsecurity=False).hexdigest()
    assert "#!lua" not in script(name, plain=True).text
    assert known is script(name)
    text = LUA.joinpath(f"{name}.lua").read_text()
    for word in ("-- KEYS ", "-- ARGV ", "-- returns "):
        assert word in text, f"{name}.lua's header lacks {word}"


def test_every_lua_file_is_a_script_or_a_part_of_one() -> None:
    names = {entry.name.removesuffix(".lua") for entry in LUA.iterdir()}
    assert names == {*SCRIPTS, "events"}
    part = LUA.joinpath("events.lua").read_text()
    assert [name for name in SCRIPTS if part in script(name).text] == ["commit", "publish"]


def test_only_what_drains_a_full_server_may_run_on_one() -> None:
    leads = {name: script(name).text.partition("\n")[0] for name in SCRIPTS}
    assert leads.pop("publish") == "#!lua"
    assert set(leads.values()) == {"#!lua flags=allow-oom"}


async def test_a_server_that_was_told_to_forget_its_scripts_gets_them_again(real_store: Store) -> None:
    desk = await real_store.acquire()
    desk.open()
    await desk.must_commit()
    await real_store.redis.script_flush()
    desk.decide(command(c.Touch, activity="heartbeat"))
    names, argv = desk.batch.arguments(desk.token, desk.revision, 1000)
    call = ("EVALSHA", script("commit").sha, len(names), *names, *argv)
    (answer,) = await real_store.link.try_all([call])
    assert isinstance(answer, NoScriptError)
    (answer,) = await real_store.link.run_all([(script("commit"), names, argv)])
    assert read_outcome(answer).status is CommitStatus.COMMITTED
    assert await real_store.redis.xlen(KEYS.events(SID)) == 3


async def test_every_script_is_one_that_the_servers_can_load(real_store: Store) -> None:
    for name in SCRIPTS:
        sha = await real_store.redis.script_load(script(name).text)
        assert sha in {script(name).sha, script(name).sha.encode()}


async def test_an_error_inside_a_script_says_so_and_one_before_it_does_not(one_server: Store) -> None:
    """The owner tells by it whether a batch is at fault, or the server runs no script at all."""
    # Only one server can be made a replica by hand.
    await one_server.redis.set(KEYS.owner, "not ours")
    (inside,) = await one_server.link.try_run_all([(script("acquire"), [KEYS.owner], ["control-a", 1000, "x"])])
    assert "script:" in str(inside)
    await one_server.redis.config_set("maxmemory", 1)
    try:
        (before,) = await one_server.link.try_run_all([(script("publish"), ["a", "b", "c", "d", "e"], ["ear-1", 1000])])
    finally:
        await one_server.redis.config_set("maxmemory", 0)
    assert "script:" not in str(before)
    await one_server.redis.execute_command("REPLICAOF", "127.0.0.1", "1")
    try:
        (before,) = await one_server.link.try_run_all([(script("acquire"), [KEYS.owner], ["control-a", 1000, "x"])])
    finally:
        await one_server.redis.execute_command("REPLICAOF", "NO", "ONE")
    assert "script:" not in str(before)
