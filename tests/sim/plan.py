"""What a seed means: how big the world is, what the producers do, and what goes wrong when.

Responsible for drawing all of it up front, as data: every item has an id, so that a run may leave items out and nothing
else changes (`--only`, shrinking). Leaves doing it to `traffic.py`, `faults.py` and `engine.py`. Pure.
Times are seconds from the start of the run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from stages.pipeline import Pipeline, parse_pipeline

CALM_S = 3.3
"""From here on nothing goes wrong any more (what was stuck is free, who was away is back soon after)."""

OF_CONTROLS, OF_STAGES = "control", "stage"
SCRIPTS_OF = {
    "contr": ("commit", "commit", "commit", "commit", "slot", "slot", "acquire", "renew", "join", "handling", ""),
    "stage": ("publish", "publish", "publish", "acknowledge", "acknowledge", "acknowledge", "beat", ""),
}
TROUBLES = frozenset({"stuck", "stubborn", "silent", "refuse", "slow", "broken", "fail", "die", "drawl"})
THEMES = {
    "mixed": "kill kill kill pause pause cut cut cut cut stall isolate leave join server_restart server_restart full "
    "forget_scripts flush stuck stuck stubborn silent refuse slow broken fail die dismiss dismiss drain",
    "ownership": "kill kill pause pause pause pause stall stall isolate leave join cut cut cut dismiss",
    "network": "cut cut cut cut cut cut stall stall isolate full forget_scripts stuck dismiss",
    "stages": "kill kill pause pause isolate stall leave stuck stuck silent die fail broken cut cut dismiss drain",
    "server": "server_restart server_restart server_restart full forget_scripts kill cut stuck dismiss",
    "quiet": "stuck stuck stuck stuck stuck stubborn silent refuse slow slow fail",
    "idle": "drawl drawl drawl drawl stuck slow pause cut kill",
}
"""What goes wrong in a run of each kind. `quiet`: only to the first session, so nobody else may notice."""


@dataclass(slots=True)
class Item:
    """Something that a session's producer does, or something that goes wrong."""

    number: int
    kind: str
    at_s: float
    who: str
    more: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        more = ", ".join(f"{name}={value}" for name, value in self.more.items())
        return f"#{self.number} {self.at_s:.3f} {self.who} {self.kind} {more}"


@dataclass(slots=True)
class Plan:
    """`loses`: writes that were acknowledged may be lost, so most invariants are not promised."""

    seed: int
    theme: str
    controls: int
    stages: tuple[int, int]
    pipeline: Pipeline
    jitter_s: float
    faults: list[Item]
    sessions: dict[str, list[Item]]
    loses: bool

    @property
    def items(self) -> list[Item]:
        return [*self.faults, *(item for items in self.sessions.values() for item in items)]

    def only(self, numbers: set[int]) -> Plan:
        """The same world with these items alone."""
        faults = [item for item in self.faults if item.number in numbers]
        return Plan(
            self.seed,
            self.theme,
            self.controls,
            self.stages,
            self.pipeline,
            self.jitter_s,
            faults,
            {s: kept for s, items in self.sessions.items() if (kept := [i for i in items if i.number in numbers])},
            any(item.more.get("loses") or item.kind == "flush" for item in faults),
        )


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    choose = random.Random(seed)
    theme = choose.choice(
        ("mixed", "mixed", "mixed", "ownership", "ownership", "network", "stages", "server", "quiet", "idle")
    )
    controls = choose.choice((2, 2, 3)) if theme == "ownership" else choose.choice((1, 1, 2, 2, 3))
    stages = (choose.choice((1, 1, 2)), choose.choice((1, 1, 1, 2)))
    count = choose.choice((2, 2, 3, 3, 4, 5))
    if theme == "quiet":
        stages, count = (1, 1), max(4, count)
    pipeline = _pipeline(choose, theme, count)
    numbers = iter(range(1, 1_000_000))
    lives = 4 if theme == "quiet" else None
    sessions = {name: _session(choose, numbers, name, lives) for name in [f"s{i}" for i in range(count)]}
    roles = [f"control-{i}" for i in range(controls)]
    roles += [f"stage{stage}-{i}" for stage in range(2) for i in range(stages[stage])]
    many = choose.choice((3, 4, 6, 8)) if theme == "quiet" else choose.choice((1, 2, 3, 4, 5, 7))
    faults = [_fault(choose, next(numbers), theme, roles, list(sessions)) for _ in range(many)]
    jitter_s = choose.choice((0.002, 0.01, 0.03))
    plan = Plan(seed, theme, controls, stages, pipeline, jitter_s, faults, sessions, loses=False)
    return plan.only({item.number for item in plan.items})


def _pipeline(choose: random.Random, theme: str, sessions: int) -> Pipeline:
    capacity = choose.choice((64, 64, sessions, 2, 1))
    idle_ttl_s = 1.2 if theme == "idle" else choose.choice((None, None, None, None, None, 1.2))
    content: dict[str, Any] = {
        "partitions": choose.choice((1, 1, 2, 2, 4)),
        "max_sessions": choose.choice((None, None, None, sessions, max(1, sessions - 1))),
        "session": {
            "idle_ttl_s": idle_ttl_s,
            "disconnect_grace_s": choose.choice((0.5, 1.5)),
            "append_timeout_s": choose.choice((0.6, 1.0)) if idle_ttl_s else choose.choice((0.6, 1.0, 2.0)),
            "cleanup_timeout_s": choose.choice((0.5, 1.0)),
            "cleanup_backoff_s": 0.1,
            "cleanup_backoff_max_s": 0.8,
            "max_waiting_appends": choose.choice((32, 32, 3)),
            "restart_after_s": 2.0,
        },
        "control": {
            "lease_s": 1.0,
            "heartbeat_s": 1.5,
            "heartbeat_interval_s": 0.5,
            "brake_s": 2.0,
            "audit_s": choose.choice((1.0, 30.0)),
            "batch_max": choose.choice((48, 48, 4)),
        },
        "stages": [
            {"name": "stage0", "engine": "parrot", "capacity": capacity, "sampling": {"heat": 1}},
            {"name": "stage1", "engine": "parrot", "capacity": capacity, "sampling": {"heat": 1}},
        ],
    }
    return parse_pipeline(content, "sim")


def _session(choose: random.Random, numbers: Any, name: str, lives: int | None = None) -> list[Item]:
    """One to three lives of a session."""
    items: list[Item] = []

    def do(kind: str, gap_s: float, **more: Any) -> None:
        if choose.random() < 0.06:
            more["again_s"] = choose.choice((0.0, 0.001, 0.05, 0.6))
        items.append(Item(next(numbers), kind, gap_s, name, more))

    for life in range(choose.choice((1, 1, 1, 2, 2, 3)) if lives is None else lives):
        do("open", choose.random() * 0.8 if life == 0 else choose.choice((0.0, 0.001, 0.2)))
        if choose.random() < 0.05:
            do("close", choose.choice((0.0, 0.003, 0.02)))
        for _ in range(choose.randint(3, 12)):
            x = choose.random()
            gap_s = choose.choice((0.0, 0.0, 0.002, 0.02, 0.1, 0.2, 0.4))
            wait = choose.random() < 0.4
            if x < 0.50:
                do("append", gap_s, wait=wait, **_append(choose))
            elif x < 0.72:
                do(
                    "cancel",
                    gap_s,
                    wait=wait,
                    event=choose.choice(("barge_in", "barge_in", "input.cancel", "response.cancel")),
                )
                if choose.random() < 0.5:
                    do("append", 0.0, wait=False, **_append(choose))
                if choose.random() < 0.2:
                    do("cancel", choose.choice((0.0, 0.001)), wait=False, event="barge_in", late=choose.random() < 0.5)
            elif x < 0.80:
                do("update", gap_s, wait=wait, bad=choose.random() < 0.2, stale=choose.random() < 0.1)
            elif x < 0.88:
                do("touch", gap_s, wait=wait)
            elif x < 0.92:
                do("hear_out", 0.0)
            elif x < 0.96:
                do("detach", gap_s)
                if choose.random() < 0.8:
                    do("resume", choose.choice((0.05, 0.2, 0.6)))
                    if choose.random() < 0.5:
                        do("rival", 0.0, op=choose.choice(("resume", "touch")), ahead=choose.choice((0, 0, 0, 1)))
            else:
                do("jump", gap_s, **_append(choose))
        if choose.random() < 0.15:
            do("cancel", 0.0, wait=False, event="barge_in")
        do("close", choose.choice((0.0, 0.01, 0.3)), wait=True)
    return items


def _append(choose: random.Random) -> dict[str, Any]:
    return {
        "tokens": choose.choice((1, 2, 3, 5, 8)),
        "final": choose.random() < 0.5,
        "turn": choose.random() < 0.25,
        "apart": choose.random() < 0.5,
        "operation": choose.random() < 0.3,
        "bad": choose.random() < 0.04,
    }


def _fault(choose: random.Random, number: int, theme: str, roles: list[str], sessions: list[str]) -> Item:
    at_s = 0.1 + choose.random() * 2.2
    kind = choose.choice(THEMES[theme].split())
    if kind in TROUBLES:
        stage = choose.choice([role for role in roles if role.startswith("stage")])
        until_s = at_s + choose.choice((0.05, 0.3, 1.0, 3.0))
        if theme == "quiet":
            at_s, until_s = at_s / 2, until_s + 0.5
        only = sessions[0] if theme == "quiet" else choose.choice(("", *sessions))
        if kind == "drawl":
            at_s, until_s = 0.2, CALM_S
        return Item(number, kind, at_s, stage, {"until_s": min(until_s, CALM_S), "only": only})
    if kind == "dismiss":
        again_s = choose.choice((None, None, 0.0, 0.05, 0.6))
        return Item(
            number, kind, at_s, choose.choice(sessions), {"again_s": again_s, "back": choose.choice((0, 0, 0, 1))}
        )
    if kind == "drain":
        stage = choose.choice([role for role in roles if role.startswith("stage")])
        return Item(number, kind, at_s, stage, {"for_s": choose.choice((0.3, 1.0, 2.0))})
    whose = OF_CONTROLS if theme == "ownership" else OF_STAGES if theme == "stages" else ""
    who = choose.choice([role for role in roles if role.startswith(whose)])
    more: dict[str, Any] = {}
    match kind:
        case "kill":
            more = {"steps": choose.choice((1, 3, 10, 30, 100, 300)) + choose.randint(0, 20), "back_s": _back(choose)}
        case "pause":
            more = {"for_s": choose.choice((0.02, 0.2, 0.9, 1.1, 1.3, 2.2))}
        case "cut":
            more = {
                "script": choose.choice(SCRIPTS_OF[who[:5]]),
                "nth": choose.choice((1, 1, 2, 3, 5)),
                "mode": choose.choice(("request", "answer", "answer", "late", "late", "half", "last", "last")),
                "delay_s": choose.choice((0.001, 0.02, 0.25, 0.7, 1.4, 2.0, 3.0)),
                "back_s": _back(choose),
            }
            if more["script"] and choose.random() < 0.8:
                who = ""
        case "stall":
            who = choose.choice((who, who, who, ""))
            more = {"for_s": choose.choice((0.05, 0.4, 1.2, 2.0))}
        case "isolate":
            more = {"for_s": choose.choice((0.1, 0.7, 1.8))}
        case "leave":
            more = {"grace_s": choose.choice((0.0, 0.3)), "back_s": _back(choose)}
        case "server_restart":
            more = {"for_s": choose.choice((0.01, 0.3, 1.0, 1.8)), "loses": choose.random() < 0.25}
        case "full":
            more = {"for_s": choose.choice((0.1, 0.5, 1.5))}
        case _:
            pass
    return Item(number, kind, at_s, who, more)


def _back(choose: random.Random) -> float:
    return choose.choice((0.01, 0.2, 0.8))
