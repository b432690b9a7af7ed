"""What deciding alone costs: the whole mix through `step`, on values."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from control.core import commands as c
from control.core import effects as e
from control.core.answers import Answers
from control.core.fence import Fence
from control.core.scene import Scene, Settings
from control.core.session import Session
from control.core.transitions import step
from control.wire.stage import pack_config, unpack_config

ROUTE = ("w0", "w1")
APPENDS = 8


def core_cost_us(sessions: int = 2_000) -> float:
    """CPU µs a command, what stages and placement say included."""
    for number in range(sessions // 10):
        _live(f"warm-{number}")
    started = time.process_time()
    for number in range(sessions):
        _live(f"s{number}")
    spent_s = time.process_time() - started
    return spent_s / (sessions * (APPENDS + 3)) * 1e6


def _configure(runtime_config: Mapping[str, Any]) -> tuple[Any, ...]:
    return (runtime_config, {})


_SETTINGS = Settings(stage_count=2, configure=_configure, pack_config=pack_config, unpack_config=unpack_config)


def _live(sid: str) -> None:
    answers = Answers()
    session: Session | None = None
    before, after = Fence(0, 0, 0, 0), Fence(0, 1, 1, 0)

    def feed(event: c.Event) -> None:
        nonlocal session
        scene = Scene(settings=_SETTINGS, session_id=sid, now_ms=1, answers=answers, choose_route=lambda: ROUTE)
        decision = step(scene, session, event)
        session = decision.session
        for effect in decision.effects:
            if isinstance(effect, e.Answer) and effect.remember is not None:
                answers.remember(effect.remember)

    capabilities = c.Capabilities(input_modes=["append_tokens"])
    feed(c.Open(control_id="o", session_id=sid, fence=before, capabilities=capabilities))
    feed(c.Placed(0, 1))
    for number in range(APPENDS):
        feed(c.Append(control_id=f"a{number}", session_id=sid, fence=before, mode="append_tokens"))
        assert session is not None
        assert session.append is not None
        feed(c.Accepted(0, session.append.number))
    feed(c.Cancel(control_id="b", session_id=sid, fence=before, event="barge_in", next_fence=after))
    assert session is not None
    for worker_id in ROUTE:
        feed(c.Cleaned(0, session.cleanups[0].number, worker_id))
    feed(c.Close(control_id="c", session_id=sid, fence=after))
