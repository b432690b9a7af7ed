"""`bargein retry`, `brake` and `dead-letters`: what an operator does by hand."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from control.store import keys
from control.store.keys import PartitionKeys
from control.store.lives import Entry, is_brake_released, register_life
from tests.security.guarded import GuardedServer
from tests.workers.cli_process import run
from tests.workers.control_bed import Bed, fence, local, make_pipeline, until
from workers.embedded import require_valkey_binary


@pytest.fixture
async def bed(redis_url: str) -> Any:
    async with Bed(redis_url, local()) as bed:
        await bed.control("c1")
        yield bed


async def act(bed: Bed, *arguments: str) -> Any:
    return await asyncio.to_thread(run, *arguments, redis_url=bed.url)


async def test_a_stuck_cleanup_is_tried_again_at_once(redis_url: str) -> None:
    patient = make_pipeline(session={"cleanup_backoff_s": 600.0, "cleanup_backoff_max_s": 600.0})
    async with Bed(redis_url, patient) as bed:
        await bed.control("c1")
        stage = await bed.stage()
        caller = bed.caller("call")
        await caller.open()
        nothing = await act(bed, "retry", "call")
        assert nothing.exit_code == 1
        assert "session 'call' has no pending cleanup" in nothing.output
        await caller.reply(await caller.append())
        stage.confirms = False
        cancel = await caller.cancel(fence(), fence(1))
        await until(lambda: stage.seen_aborts)
        for entry_id, _ in await bed.redis.xrange(caller.keys.aborts("ear-1")):
            await bed.redis.xdel(caller.keys.aborts("ear-1"), entry_id)  # lost by the stage
        stage.confirms = True
        assert (await act(bed, "retry", "call")).exit_code == 0
        assert (await caller.reply(cancel))["ok"]


async def test_a_brake_is_shown_released_and_held_again(bed: Bed) -> None:
    for name in ("ear-1", "ear-2"):
        await register_life(bed.redis, name, Entry(stage_id=0, stage="ear", capacity=4, engine="hand"))
    shown = await act(bed, "brake", "--json")
    ((row),) = json.loads(shown.stdout)
    assert (row["stage"], row["workers"], row["silent"], row["released_ms"]) == ("ear", 2, 0, None)
    assert (await act(bed, "brake", "release", "ear", "--for", "2m")).exit_code == 0
    assert await is_brake_released(bed.redis, "ear")
    assert 0 < await bed.redis.ttl(keys.brake("ear")) <= 120
    assert 0 < json.loads((await act(bed, "brake", "--json")).stdout)[0]["released_ms"] <= 120_000
    assert "holds again" in (await act(bed, "brake", "hold", "ear")).output
    assert "wasn't released" in (await act(bed, "brake", "hold", "ear")).output
    assert not await is_brake_released(bed.redis, "ear")


async def test_silent_workers_show_and_what_can_be_done_is_said(bed: Bed) -> None:
    await register_life(bed.redis, "ear-1", Entry(stage_id=0, stage="ear", capacity=4, engine="hand"))
    await bed.redis.pexpire(keys.worker_state("ear-1"), 3_600_000 - 60_000)  # its last heartbeat: a minute ago
    shown = await act(bed, "brake")
    assert "bargein brake release STAGE" in shown.output
    assert json.loads((await act(bed, "brake", "--json")).stdout)[0]["silent"] == 1


async def test_dead_letters_are_shown_newest_first_and_dropped(bed: Bed) -> None:
    assert "no dead letters" in (await act(bed, "dead-letters")).output
    for partition, body in ((0, b"\xc1"), (2, b"no command \x1b[31m")):
        await bed.redis.xadd(PartitionKeys(partition).commands, {"b": body})
        await until(lambda partition=partition: bed.redis.xlen(PartitionKeys(partition).dead))
        await asyncio.sleep(0.002)  # another millisecond
    letters = json.loads((await act(bed, "dead-letters", "--json")).stdout)
    assert [(row["partition"], row["stream"]) for row in letters] == [(2, "commands"), (0, "commands")]
    text = await act(bed, "dead-letters")
    assert "no command \\x1b[31m" in text.output
    assert "\x1b" not in text.output
    assert "there are more" in (await act(bed, "dead-letters", "--limit", "1")).output
    dropped = await act(bed, "dead-letters", "drop", "2", letters[0]["letter_id"])
    assert "1 dead letter removed" in dropped.output
    again = await act(bed, "dead-letters", "drop", "2", letters[0]["letter_id"])
    assert again.exit_code == 1
    assert "1 dead letter removed" in (await act(bed, "dead-letters", "drop", "0", "all")).output
    assert json.loads((await act(bed, "dead-letters", "--json")).stdout) == []


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["retry", "nobody"], 1, "session 'nobody' has no pending cleanup"),
        (["brake", "release", "nose"], 1, "no stage 'nose' has workers; these have: none"),
        (["brake", "release", "ear", "--for", "soon"], 2, "--for: 'soon' is no length of time"),
        (["brake", "release", "ear", "--for", "2h"], 2, "--for: is 2h; it must be from 1s to 1h"),
        (["dead-letters", "drop", "99", "1-1"], 2, "there is no partition 99; they go up to 3"),
        (["dead-letters", "drop", "0", "first"], 2, "'first' is no letter's id"),
    ],
)
async def test_what_can_not_be_done_is_said_in_a_line(bed: Bed, arguments: list[str], status: int, says: str) -> None:
    result = await act(bed, *arguments)
    assert result.exit_code == status
    assert says in " ".join(result.output.split())


def test_the_maintenance_role_may_do_all_of_it_and_an_observer_may_look() -> None:
    with GuardedServer(require_valkey_binary()) as server:
        with server.client_of("root") as root:
            _prepare(root)
        url = server.url_of("maintenance")
        for arguments in (
            ["retry", "call"],
            ["brake", "release", "ear"],
            ["brake"],
            ["brake", "hold", "ear"],
            ["dead-letters"],
            ["dead-letters", "drop", "0", "1-1"],
        ):
            result = run(*arguments, redis_url=url)
            assert result.exit_code == 0, result.output
        assert run("brake", redis_url=server.url_of("observer")).exit_code == 0
        assert server.fetch_denials() == []
        for arguments in (["brake", "release", "ear"], ["dead-letters"], ["dead-letters", "drop", "0", "all"]):
            assert run(*arguments, redis_url=server.url_of("observer")).exit_code == 3


def _prepare(root: Any) -> None:
    root.hset(keys.CONFIG, mapping={"protocol": 1, "partitions": 1, "layout": 1})
    root.hset(PartitionKeys(0).cleanups, "call", b"\x90")
    root.xadd(PartitionKeys(0).dead, {"reason": "x"}, id="1-1")
    entry = b"\x84\xa8stage_id\x00\xa5stage\xa3ear\xa8capacity\x04\xa6engine\xa1x"
    root.hset(keys.STAGES, "ear-1", entry)
    root.hset(keys.worker_state("ear-1"), mapping={"state": "live", "beat": 1})
    root.pexpire(keys.worker_state("ear-1"), 3_600_000)
