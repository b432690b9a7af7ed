"""The bugs that are planted to see that the simulation finds them, each with the promises that it breaks.

`python -m tests.sim.planted` plants one after another and prints what was found, as JSON, a line a bug. A checker that
has never fired is not trusted. Leaves planting to `planting.py`. `first`: the seed to begin with, so that it is quick.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import msgspec

from control.core.effects import Announce
from tests.sim.planting import Plant, in_code, in_place_of, in_script, together

MOST_SEEDS = 300


@dataclass(frozen=True, slots=True)
class Bug:
    """`rules`: any of these must be named within `MOST_SEEDS` from `first`, by a violation that also `says` this.

    Only seeds of its `themes` are run, if it has any: those where what makes it show is frequent.
    """

    name: str
    rules: tuple[str, ...]
    plant: Plant
    says: str = ""
    first: int = 0
    themes: tuple[str, ...] = ()


def _confirm_without_engine(abort: Any) -> Any:
    async def forget(self: Any, name: str) -> None:
        self._lanes.remove(name)

    return forget


def _end_without_a_word(original: Any) -> Any:
    def finish(scene: Any, session: Any, owed: Any, effects: Any, *more: Any) -> Any:
        decision = original(scene, session, owed, effects, *more)
        told = [each for each in decision.effects if effects or type(each) is not Announce]
        return msgspec.structs.replace(decision, effects=tuple(told))

    return finish


async def _watch_through(self: Any) -> None:
    """`Observer.run` without a thought for its own silence."""
    import asyncio  # noqa: PLC0415

    from redis.exceptions import RedisError  # noqa: PLC0415

    while True:
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            await self.look()
        await asyncio.sleep(0.15)


def _one_at_a_time(original: Any) -> Any:
    import asyncio  # noqa: PLC0415
    import weakref  # noqa: PLC0415

    locks: weakref.WeakKeyDictionary[Any, asyncio.Lock] = weakref.WeakKeyDictionary()

    async def ask(self: Any, *args: Any) -> None:
        async with locks.setdefault(self, asyncio.Lock()):
            await original(self, *args)

    return ask


BUGS = (
    Bug(
        "the commit does not look at the owner's token (nor at the revision, which would do instead)",
        ("I6",),
        in_script(
            "commit",
            ("if held[1] ~= ARGV[1] then", "if false then"),
            ("if revision ~= tonumber(ARGV[2]) then", "if false then"),
        ),
        says="token",
    ),
    Bug(
        "the commit does not look at the revision",
        ("I6",),
        in_script("commit", ("if revision ~= tonumber(ARGV[2]) then", "if false then")),
        first=98,
        themes=("network", "ownership"),
    ),
    Bug(
        "publish does not look at the fence",
        ("I1",),
        in_script(
            "publish",
            ("if not f or f[1] ~= incarnation or epoch < f[2] then", "if not f then"),
            ("elseif not (epoch == f[3] and", "elseif false and not (epoch == f[3] and"),
            ("elseif epoch == f[3] and (turn < f[4]", "elseif false and (turn < f[4]"),
        ),
    ),
    Bug(
        "publish delivers what it has delivered before",
        ("I5",),
        in_script("publish", ("elseif number <= last[request] then", "elseif false then")),
        first=135,
        themes=("network", "stages"),
    ),
    Bug(
        "a slot can be taken at a worker that has none left",
        ("I9",),
        in_script("slot", ("redis.call('HLEN', KEYS[2]) >= limit", "false")),
    ),
    Bug(
        "a slot is not given back",
        ("I3",),
        in_script("slot", ("redis.call('HDEL', KEYS[2], ARGV[2])", "")),
    ),
    Bug(
        "the payload stays behind",
        ("I5", "I7"),
        in_script("commit", ("payloads[ARGV[i + 1]] or ARGV[i + 3]", "ARGV[i + 3]")),
    ),
    Bug(
        "an acknowledged entry stays in its queue",
        ("I3",),
        in_script("acknowledge", ("redis.call('XDEL', KEYS[3], unpack(ARGV, 3 + count))", "local _ = 0")),
    ),
    Bug(
        "requests are released at the first confirmation",
        ("I2",),
        in_code("control.core.cleanup:confirm", ("if w != worker_id", "if False")),
    ),
    Bug(
        "a stage confirms without asking its engine",
        ("I2",),
        in_place_of("workers.stage_cleanup:Cleanups._abort", _confirm_without_engine),
    ),
    Bug(
        "an abort that overtakes its submission is forgotten",
        ("I2", "I3"),
        in_place_of("workers.stage_lanes:Lanes.is_stopped", lambda _: lambda *_: False),
    ),
    Bug(
        "what was answered before is forgotten",
        ("I4", "I5"),
        in_place_of("control.core.rules.answering:find_repeat", lambda _: lambda *_: None),
    ),
    Bug(
        "only the cancelled epoch is cleaned up",
        ("I3",),
        in_code("control.core.requests:epochs_in", ("r.epoch < below)", "r.epoch == below - 1)")),
    ),
    Bug(
        "an append that timed out leaves the floor where it was",
        ("I2", "I3"),
        in_code(
            "control.core.rules.append:give_up_append", ("floor=max(session.floor, epoch + 1)", "floor=session.floor")
        ),
        first=16,
    ),
    Bug(
        "a session expires while its model is heard",
        ("I10",),
        together(
            in_code("workers.partition:Partition.look", ("c.Due(output_ms,", "c.Due(0,")),
            in_script("commit", ("if heard and tonumber(heard) > tonumber(ARGV[i + 1]) then", "if false then")),
        ),
        first=9,
        themes=("idle", "server"),
    ),
    Bug(
        "an observer does not mind that it was away itself",
        ("I10",),
        together(
            in_code("workers.observer:Observer.look", ("self.heartbeat_ms / 2:", "1e9:")),
            in_place_of("workers.observer:Observer.run", lambda _: _watch_through),
            in_place_of("workers.observer:Observer.start_over", lambda _: lambda _: None),
        ),
        first=31,
        themes=("server", "mixed"),
    ),
    Bug(
        "a resume takes over whatever generation there is",
        ("lease",),
        in_code("control.core.rules.attach:resume", ("if bad is None and expected != generation:", "if False:")),
        first=13,
    ),
    Bug(
        "an update that is refused leaves a trace",
        ("I8",),
        in_code(
            "control.core.rules.turn:update",
            (
                "return refused(scene, session, command, *bad)",
                "moved = replace(session, config_generation=99); return refused(scene, moved, command, *bad)",
            ),
        ),
        first=10,
    ),
    Bug(
        "an end is told of only where something had to be cleaned up",
        ("I10",),
        in_place_of("control.core.rules.release:finish", _end_without_a_word),
    ),
    Bug(
        "appends overtake each other",
        ("I5",),
        in_code(
            "workers.partition:Partition._park", ("known.waiting.append(waiting)", "known.waiting.appendleft(waiting)")
        ),
        first=9,
    ),
    Bug(
        "aborts wait for each other",
        ("I11",),
        in_place_of("workers.stage_cleanup:Cleanups._ask_engine", _one_at_a_time),
        first=196,
        themes=("quiet",),
    ),
    Bug(
        "a debt is asked for only once",
        ("I3",),
        in_code("control.core.rules.release:ask_debts", ("if not due:", "if True:")),
        first=73,
        themes=("ownership", "mixed"),
    ),
    Bug(
        "an order for a former life ends the present one",
        ("I10",),
        in_code("control.core.rules.close:dismiss", ("event.incarnation != session.fence.incarnation", "False")),
        says="operator_close",
    ),
    Bug(
        "an order stays where it is",
        ("liveness",),
        in_script("commit", ("call_with('XDEL', KEYS[14], from, to)", "local _ = 0")),
        says=":orders",
    ),
)


def hunt(bug: Bug, most: int = MOST_SEEDS) -> dict[str, Any]:
    """Plant it and run seeds until one of its rules is broken."""
    from tests.sim.plan import draw  # noqa: PLC0415
    from tests.sim.world import World  # noqa: PLC0415

    others: set[str] = set()
    with bug.plant():
        plans = (draw(seed) for seed in itertools.count(bug.first))
        wanted = (plan for plan in plans if not bug.themes or plan.theme in bug.themes)
        for tried, plan in enumerate(itertools.islice(wanted, most), 1):
            violations = World(plan).run().violations
            seed = plan.seed
            for violation in violations:
                what = str(violation)
                if violation.rule in bug.rules and bug.says in what:
                    return {"bug": bug.name, "rule": violation.rule, "seed": seed, "tried": tried, "what": what}
            others.update(violation.rule for violation in violations)
    return {"bug": bug.name, "rule": None, "seed": None, "tried": most, "what": f"only {sorted(others)}"}


def _hunt_and_look(index: int, most: int) -> dict[str, Any]:
    """With `clean`: whether the seed that showed the bug shows nothing without it."""
    from tests.sim.plan import draw  # noqa: PLC0415
    from tests.sim.world import World  # noqa: PLC0415

    found: dict[str, Any]
    try:
        found = hunt(BUGS[index], most)
    except LookupError as error:
        found = {"bug": BUGS[index].name, "rule": None, "seed": None, "tried": 0, "what": str(error)}
    found["clean"] = found["seed"] is not None and not World(draw(found["seed"])).run().violations
    return found


def main() -> int:
    """1 if one was not found."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        where = [sys.executable, "-m", "tests.sim.planted", *sys.argv[1:]]
        os.execve(sys.executable, where, {**os.environ, "PYTHONHASHSEED": "0"})
    # Under its own name, for the other processes; here it is __main__.
    planted = importlib.import_module("tests.sim.planted")
    parser = argparse.ArgumentParser(prog="python -m tests.sim.planted", description=__doc__)
    parser.add_argument("--seeds", type=int, default=MOST_SEEDS, help="how many to try at most, each")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once (1)")
    parser.add_argument("--bugs", help="parts of names, with ; between")
    options = parser.parse_args()
    names = None if options.bugs is None else options.bugs.split(";")
    picked = [i for i, bug in enumerate(BUGS) if names is None or any(name in bug.name for name in names)]
    missed = 0
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(planted._hunt_and_look, index, options.seeds) for index in picked]):
            found = done.result()
            missed += found["rule"] is None
            print(json.dumps(found), flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
