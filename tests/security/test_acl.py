"""The roles on a real server: together they hold a conversation, and none can do another's part."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import asynccontextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import pytest
from redis.exceptions import AuthenticationError, ResponseError

from bargein_client import AsyncBargein, Lifecycle, Output
from control.store import keys
from control.store.keys import PartitionKeys
from control.store.scripts import SCRIPTS, script
from stages.pipeline import Pipeline
from tests.security.guarded import ROLES, RULES, assert_refused, assert_refused_in_script
from tests.system import RunningSystem
from tests.workers.cli_process import run
from workers.control import ControlWorker
from workers.stage import StageWorker

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from tests.security.guarded import GuardedServer

FRAME = bytes(range(256)) * 2 + bytes(128)
PATIENCE_S = 20.0
KEYS = PartitionKeys(0)
# One of each kind that only its owners may touch, and what every one of them is written with.
RECORDS = [KEYS.owner, KEYS.sessions, KEYS.fences, KEYS.cleanups, KEYS.deadlines, KEYS.answers("call")]
DANGEROUS = [
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("CONFIG", "GET", "*"),
    ("CONFIG", "SET", "maxmemory-policy", "allkeys-lru"),
    ("KEYS", "*"),
    ("SCAN", "0"),
    ("RANDOMKEY",),
    ("ACL", "LIST"),
    ("ACL", "SETUSER", "intruder", "on", "nopass", "~*", "+@all"),
    ("CLIENT", "LIST"),
    ("CLIENT", "KILL", "TYPE", "normal"),
    ("MONITOR",),
    ("SHUTDOWN",),
    ("SAVE",),
    ("REPLICAOF", "127.0.0.1", "1"),
    ("SCRIPT", "FLUSH"),
    ("FUNCTION", "LOAD", "#!lua name=x\nredis.register_function('f', function() end)"),
    ("MIGRATE", "127.0.0.1", "1", "bargein:config", "0", "1"),
    ("SWAPDB", "0", "1"),
    ("PUBLISH", "anything", "x"),
    ("SUBSCRIBE", "anything"),
]


@pytest.fixture
async def system(guarded: GuardedServer) -> AsyncIterator[RunningSystem]:
    async with as_roles(guarded, Pipeline.example()) as system:
        yield system


@asynccontextmanager
async def as_roles(server: GuardedServer, pipeline: Pipeline) -> AsyncGenerator[RunningSystem]:
    """A system of which each process is its own role."""
    system = RunningSystem(server.url_of("control"), pipeline)
    system.controls = [ControlWorker(server.url_of("control"), pipeline)]
    system.stages = [StageWorker(server.url_of("stage"), pipeline, n) for n in range(len(pipeline.stages))]
    async with system:
        yield system


async def until(session: Any, wanted: Any) -> list[Any]:
    """The session's events, up to the first that is wanted."""
    events: list[Any] = []
    async with asyncio.timeout(PATIENCE_S):
        async for event in session.events():
            events.append(event)
            if wanted(event):
                return events
    raise AssertionError(f"the session ended before: {events}")


async def until_true(holds: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110  the server tells nobody
            await asyncio.sleep(0.01)


def is_event(name: str) -> Any:
    return lambda event: isinstance(event, Lifecycle) and event.event == name


def blocks() -> dict[str, str]:
    """The shipped rules by role."""
    text = "\n".join(line for line in RULES.read_text().splitlines() if not line.startswith("#"))
    return dict(re.findall(r"^user (\w+)\n((?:[ ]+.*\n?|\n)+)", text, re.MULTILINE))


def commands_of(rules: str) -> set[str]:
    return set(re.findall(r"\+([a-z|]+)", rules))


def patterns_of(rules: str, *, writing: bool) -> list[str]:
    """The key patterns of a role's rules; those that it may write, or those that it may read. Without evalsha's:
    what a script names isn't yet what it may do."""
    selectors = [s for s in re.findall(r"\(([^)]*)\)", rules) if "+evalsha" not in s]
    kind = r"(?:%W|%RW)?~" if writing else r"(?:%R|%RW)?~"
    found = [re.findall(rf"(?:^|\s){kind}(\S+)", s) for s in selectors]
    return [pattern.replace("{p}", "{[0-9]}") for each in found for pattern in each]


# ---- together


async def test_every_role_does_its_part_of_a_conversation_with_a_barge_in(
    guarded: GuardedServer, system: RunningSystem
) -> None:
    async with (
        AsyncBargein(guarded.url_of("producer")) as producer,
        AsyncBargein(guarded.url_of("listener")) as listener,
    ):
        talk = await producer.open("call", input_modes=["append_audio_chunk"])
        heard = asyncio.create_task(until(listener.attach(talk.bookmark()), is_event("closed")))
        for _ in range(3):
            await talk.append(FRAME)
        await talk.append(FRAME, final=True)
        await until(talk, lambda event: isinstance(event, Output))
        assert (await talk.interrupt()).ok
        await talk.append(FRAME, final=True)
        await until(talk, lambda event: isinstance(event, Output) and event.fence.epoch == 1)
        rows = {name: await asyncio.to_thread(ask_as_observer, guarded, name) for name in LOOKS}
        assert (await talk.close()).ok
        events = await heard
    assert any(is_event("interrupted")(event) for event in events)
    assert any(isinstance(event, Output) and event.fence.epoch == 1 for event in events)
    # What the observer may not read would be None.
    assert [row["session_id"] for row in rows["sessions"]] == ["call"]
    assert len(rows["workers"]) == 3
    assert len(rows["partitions"]) == system.pipeline.partitions
    for row in rows["partitions"]:
        assert None not in [
            row[name] for name in ("owner", "commands", "acks", "orders", "dead_letters", "sessions", "cleanups")
        ]
    assert guarded.fetch_denials() == []


LOOKS = ("sessions", "cleanups", "workers", "partitions")


def ask_as_observer(server: GuardedServer, name: str) -> list[dict[str, Any]]:
    done = run(name, "--json", redis_url=server.url_of("observer"))
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_listener_follows_a_session_on_the_command_line(guarded: GuardedServer) -> None:
    async def converse() -> None:
        async with as_roles(guarded, Pipeline.example()), AsyncBargein(guarded.url_of("producer")) as producer:
            talk = await producer.open("call", input_modes=["append_audio_chunk"])
            await talk.close()

    asyncio.run(converse())
    done = run("tail", "call", "--json", redis_url=guarded.url_of("listener"))
    assert done.exit_code == 0, done.output
    told = [json.loads(line)["body"] for line in done.stdout.splitlines()]
    assert [body["event"] for body in told if "event" in body] == ["opened", "closed"]
    assert guarded.fetch_denials() == []


@pytest.mark.parametrize("command", ["sessions", "cleanups", "workers", "partitions"])
def test_who_may_not_look_is_told_so_and_not_that_there_is_nothing(guarded: GuardedServer, command: str) -> None:
    with guarded.client_of("root") as root:
        root.hset(keys.CONFIG, mapping={"protocol": 1, "partitions": 2, "layout": 1})
    done = run(command, redis_url=guarded.url_of("listener"))
    assert done.exit_code == 3, done.output
    assert "permission" in done.output
    assert "no " + command not in done.output


async def test_a_producer_sends_on_the_command_line(guarded: GuardedServer, system: RunningSystem) -> None:
    command = {"op": "open", "session_id": "call", "fence": {"incarnation": 7}}
    url = guarded.url_of("producer")
    done = await asyncio.to_thread(run, "send", "--json", json.dumps(command), redis_url=url)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)[0]["fence"]["incarnation"] == 7


async def test_control_ends_a_crashed_stage_and_mends_what_others_broke(guarded: GuardedServer) -> None:
    """The ways that no conversation takes: a life ended by others, keys of a wrong type, dead letters, strangers."""
    quick = {"heartbeat_s": 1.0, "heartbeat_interval_s": 0.2}
    pipeline = Pipeline.example()
    pipeline = pipeline.model_copy(update={"control": pipeline.control.model_copy(update=quick), "partitions": 1})
    async with as_roles(guarded, pipeline) as system:
        with guarded.client_of("root") as root:
            async with AsyncBargein(guarded.url_of("producer")) as producer:
                talk = await producer.open("call", input_modes=["append_audio_chunk"])
                await talk.append(FRAME, final=True)
                root.xadd(KEYS.commands, {"b": b"\xc1"})
                await until_true(lambda: root.xlen(KEYS.dead) == 1)
                body = {"v": 1, "op": "touch", "control_id": "t", "session_id": "nobody", "activity": "heartbeat"}
                fence = {"incarnation": 0, "epoch": 0, "turn_id": 0, "response_seq": 0}
                with guarded.client_of("producer") as sender:
                    sender.xadd(KEYS.commands, {"b": json.dumps({**body, "fence": fence})})
                    await until_true(lambda: sender.xread({KEYS.events("nobody"): "0-0"}))
                    root.set(KEYS.answers("other"), "in the way")
                    sender.xadd(KEYS.commands, {"b": json.dumps({**body, "session_id": "other", "fence": fence})})
                    await until_true(lambda: not root.exists(KEYS.answers("other")))
                    root.set(KEYS.strangers, "in the way")
                    sender.xadd(KEYS.commands, {"b": json.dumps({**body, "session_id": "third", "fence": fence})})
                    await until_true(lambda: root.type(KEYS.strangers) == b"zset")
                system._tasks[0].cancel()
                gone = root.hkeys(keys.STAGES)
                await until(talk, is_event("closed"))
                await until_true(lambda: root.hkeys(keys.STAGES) != gone)
    assert guarded.fetch_denials() == []


@pytest.mark.parametrize(
    ("role", "names"),
    [
        ("control", [name for name in SCRIPTS if name not in {"publish", "acknowledge", "beat"}]),
        ("stage", ["publish", "acknowledge", "beat", "end_life"]),
    ],
)
def test_a_role_is_allowed_every_command_of_the_scripts_that_it_runs(role: str, names: list[str]) -> None:
    for name in names:
        used = re.findall(r"(?:call\(|redis\.call, |call_with\()'([A-Z]+)'", script(name).text)
        assert used
        assert {command.lower() for command in used} <= commands_of(blocks()[role]), name


# ---- nobody else


def test_nobody_gets_in_without_a_name_and_a_password(guarded: GuardedServer) -> None:
    for credentials in ("", "producer:wrong@", ":anything@", "default:anything@", "intruder:anything@"):
        with guarded.client_of("root") as client:
            client.connection_pool = type(client.connection_pool).from_url(
                f"redis://{credentials}127.0.0.1:{guarded.port}/0"
            )
            with pytest.raises(AuthenticationError):
                client.ping()
            client.connection_pool.disconnect()


@pytest.mark.parametrize("role", ROLES)
def test_no_role_can_empty_configure_or_list_the_server(guarded: GuardedServer, role: str) -> None:
    with guarded.client_of(role) as client:
        assert_refused(client, *DANGEROUS)


@pytest.mark.parametrize("role", ROLES)
def test_no_role_can_touch_another_prefix(guarded: GuardedServer, role: str) -> None:
    with guarded.client_of("root") as root:
        root.hset("other:config", "partitions", "1")
        root.xadd("other:{0}:events:call", {"b": "secret"})
    with guarded.client_of(role) as client:
        assert_refused(
            client,
            ("HGETALL", "other:config"),
            ("GET", "other:key"),
            ("SET", "bargein", "x"),
            ("XREAD", "STREAMS", "other:{0}:events:call", "0"),
            ("XREAD", "STREAMS", KEYS.events("call"), "other:{0}:events:call", "0", "0"),
            ("XADD", "other:{0}:commands", "*", "b", "x"),
            ("EVAL", "return redis.call('HGETALL', KEYS[1])", "1", "other:config"),
        )


@pytest.mark.parametrize("role", [role for role in ROLES if role != "control"])
def test_nobody_but_control_can_write_sessions_or_leases(guarded: GuardedServer, role: str) -> None:
    with guarded.client_of("root") as root:
        root.hset(KEYS.sessions, "call", "state")
        root.hset(KEYS.owner, "token", "1:a")
    with guarded.client_of(role) as client:
        for key in RECORDS:
            assert_refused(
                client,
                ("HSET", key, "call", "forged"),
                ("HDEL", key, "call"),
                ("ZADD", key, "0", "call"),
                ("RPUSH", key, "forged"),
                ("DEL", key),
                ("UNLINK", key),
                ("SET", key, "forged"),
                ("EXPIRE", key, "1"),
                ("RENAME", key, KEYS.events("x")),
                ("RESTORE", key, "0", "x"),
                ("XADD", key, "*", "b", "x"),
            )
    patterns = patterns_of(blocks()[role], writing=True)
    assert not [(key, pattern) for key in RECORDS for pattern in patterns if fnmatchcase(key, pattern)]


def test_the_rules_name_the_roles_and_their_patterns_are_found() -> None:
    assert tuple(blocks()) == ROLES
    writable = patterns_of(blocks()["control"], writing=True)
    assert any(fnmatchcase(KEYS.sessions, pattern) for pattern in writable)
    assert patterns_of(blocks()["producer"], writing=True) == ["bargein:{[0-9]}:commands"]


# ---- the producer


def test_a_producer_cannot_forge_a_confirmation(guarded: GuardedServer) -> None:
    with guarded.client_of("producer") as producer:
        producer.xadd(KEYS.commands, {"b": "{}"})
        assert_refused(
            producer,
            ("XADD", KEYS.orders, "*", "b", "dismiss"),
            ("SET", keys.worker_drain("thinker-1"), "1"),
            ("XADD", KEYS.acks, "*", "b", "cleaned"),
            ("XADD", KEYS.events("call"), "*", "t", "reply", "n", "1", "b", "ok"),
            ("XADD", KEYS.submissions("thinker-1"), "*", "b", "x", "p", ""),
            ("XADD", KEYS.aborts("thinker-1"), "*", "b", "x"),
            ("SADD", KEYS.fenced, "thinker-1"),
            ("HSET", keys.worker_state("thinker-1"), "state", "dead"),
        )


def test_a_producer_cannot_read_session_states_or_what_others_send(guarded: GuardedServer) -> None:
    with guarded.client_of("producer") as producer:
        assert_refused(
            producer,
            ("HGETALL", KEYS.sessions),
            ("HGET", KEYS.fences, "call"),
            ("HGETALL", KEYS.owner),
            ("LRANGE", KEYS.answers("call"), "0", "-1"),
            ("XREAD", "STREAMS", KEYS.commands, "0"),
            ("XRANGE", KEYS.commands, "-", "+"),
            ("XREVRANGE", KEYS.commands, "+", "-"),
            ("XREAD", "STREAMS", KEYS.submissions("thinker-1"), "0"),
            ("HGETALL", keys.STAGES),
            ("HGETALL", keys.worker_slots("thinker-1")),
        )


def test_a_producer_cannot_take_back_or_trim_what_others_have_sent(guarded: GuardedServer) -> None:
    with guarded.client_of("producer") as producer:
        entry: Any = producer.xadd(KEYS.commands, {"b": "{}"})
        assert_refused(
            producer,
            ("XDEL", KEYS.commands, entry),
            ("XTRIM", KEYS.commands, "MAXLEN", "0"),
            ("DEL", KEYS.commands),
            ("XGROUP", "CREATE", KEYS.commands, "g", "0"),
        )


def test_a_producer_cannot_run_scripts(guarded: GuardedServer) -> None:
    with guarded.client_of("producer") as producer:
        assert_refused(
            producer,
            ("EVAL", "return 1", "0"),
            ("EVAL_RO", "return 1", "0"),
            ("EVALSHA", script("commit").sha, "1", KEYS.owner),
            ("SCRIPT", "LOAD", "return 1"),
            ("FCALL", "f", "0"),
        )


def test_no_session_id_makes_a_key_look_like_another(guarded: GuardedServer) -> None:
    for role in ("producer", "listener"):
        with guarded.client_of(role) as client:
            assert_refused(
                client,
                ("XADD", KEYS.events("}:commands"), "*", "t", "reply"),
                ("XREAD", "STREAMS", KEYS.answers("}:events:call"), "0"),
                ("XREAD", "STREAMS", KEYS.submissions("}:events:call"), "0"),
                ("XADD", "bargein:{0}:answers:{1}:commands", "*", "b", "x"),
            )


# ---- the listener


def test_a_listener_hears_and_cannot_write_anything(guarded: GuardedServer) -> None:
    with guarded.client_of("root") as root:
        root.xadd(KEYS.events("call"), {"t": "reply", "n": 1, "b": "x"})
        writes = _commands_in_category(root, "write")
    with guarded.client_of("listener") as listener:
        assert listener.xread({KEYS.events("call"): "0"})
        assert_refused(
            listener,
            ("XADD", KEYS.commands, "*", "b", "{}"),
            ("XADD", KEYS.events("call"), "*", "t", "reply"),
            ("XTRIM", KEYS.events("call"), "MAXLEN", "0"),
            ("DEL", KEYS.events("call")),
            ("EVAL", "return 1", "0"),
        )
    assert not commands_of(blocks()["listener"]) & writes


# ---- the stage


def test_a_stage_cannot_write_commands_sessions_or_the_owner(guarded: GuardedServer) -> None:
    with guarded.client_of("stage") as stage:
        assert_refused(
            stage,
            ("XADD", KEYS.orders, "*", "b", "dismiss"),
            ("SET", keys.worker_drain("thinker-1"), "1"),
            ("XADD", KEYS.commands, "*", "b", "{}"),
            ("XDEL", KEYS.commands, "1-0"),
            ("HSET", KEYS.owner, "token", "9:x"),
            ("HSET", keys.worker_slots("thinker-1"), "call", "0 1"),
            ("HDEL", keys.worker_slots("thinker-1"), "call"),
            ("XADD", KEYS.aborts("thinker-1"), "*", "b", "x"),
            ("XDEL", KEYS.acks, "1-0"),
            ("ZADD", keys.CONTROLS, "1", "control-x"),
            ("XREAD", "STREAMS", KEYS.commands, "0"),
            ("XREAD", "STREAMS", KEYS.events("call"), "0"),
            ("HGETALL", KEYS.sessions),
        )


def test_a_stage_can_name_a_fence_in_a_script_and_not_change_it(guarded: GuardedServer) -> None:
    with guarded.client_of("root") as root:
        root.hset(KEYS.fences, "call", "0 0 0 0 0")
    with guarded.client_of("stage") as stage:
        assert stage.eval("return redis.call('HMGET', KEYS[1], 'call')", 1, KEYS.fences) == [b"0 0 0 0 0"]
        assert_refused_in_script(
            stage, KEYS.fences, "'HSET', key, 'call', '9'", "'HDEL', key, 'call'", "'DEL', key", "'HGETALL', key"
        )
        assert_refused_in_script(stage, KEYS.fenced, "'SREM', key, 'thinker-1'", "'SADD', key, 'thinker-2'")
        assert_refused_in_script(stage, KEYS.events("call"), "'XRANGE', key, '-', '+'", "'SET', key, ''")
        for key in (KEYS.sessions, KEYS.owner):
            with pytest.raises(ResponseError):
                stage.eval("return redis.call('HSET', KEYS[1], 'a', 'b')", 1, key)
        commit = script("commit")
        with pytest.raises(ResponseError):
            stage.eval(commit.text, 14, *[KEYS.owner] * 14)


# ---- those who look


def test_an_observer_cannot_write_anything(guarded: GuardedServer) -> None:
    with guarded.client_of("root") as root:
        writes = _commands_in_category(root, "write")
        scripts = _commands_in_category(root, "scripting")
    with guarded.client_of("observer") as observer:
        assert_refused(
            observer,
            ("XADD", KEYS.commands, "*", "b", "{}"),
            ("HSET", keys.CONFIG, "partitions", "1"),
            ("HDEL", keys.STAGES, "thinker-1"),
            ("XDEL", KEYS.dead, "1-0"),
            ("EVAL", "return 1", "0"),
            ("SCRIPT", "LOAD", "return 1"),
        )
    assert not commands_of(blocks()["observer"]) & (writes | scripts)
    assert patterns_of(blocks()["observer"], writing=True) == []


def test_an_observer_cannot_read_what_sessions_say(guarded: GuardedServer) -> None:
    with guarded.client_of("observer") as observer:
        assert_refused(
            observer,
            ("XREAD", "STREAMS", KEYS.events("call"), "0"),
            ("XRANGE", KEYS.events("call"), "-", "+"),
            ("XRANGE", KEYS.submissions("thinker-1"), "-", "+"),
            ("LRANGE", KEYS.answers("call"), "0", "-1"),
        )


def test_maintenance_clears_away_and_cannot_decide(guarded: GuardedServer) -> None:
    with guarded.client_of("root") as root:
        root.xadd(KEYS.dead, {"reason": "x"})
        root.xadd(KEYS.submissions("thinker-1"), {"b": "x"})
    with guarded.client_of("maintenance") as maintenance:
        assert maintenance.xtrim(KEYS.dead, maxlen=0) == 1
        assert maintenance.unlink(KEYS.submissions("thinker-1")) == 1
        maintenance.xadd(KEYS.commands, {"b": "{}"})
        maintenance.xadd(KEYS.orders, {"b": "x"})
        maintenance.set(keys.worker_drain("thinker-1"), "1")
        assert_refused(
            maintenance,
            ("XADD", KEYS.acks, "*", "b", "x"),
            ("XDEL", KEYS.orders, "1-0"),
            ("HSET", keys.worker_state("thinker-1"), "state", "dead"),
            ("XADD", KEYS.events("call"), "*", "t", "reply"),
            ("UNLINK", KEYS.commands),
            ("HDEL", keys.worker_slots("thinker-1"), "call"),
            ("EVAL", "return 1", "0"),
            ("ACL", "SETUSER", "maintenance", "+@all"),
        )


def _commands_in_category(root: Any, category: str) -> set[str]:
    return {name.decode() for name in root.execute_command("ACL", "CAT", category)}
