"""The traces on the pure core: `step` and a stage that answers at once, no store, no clock but the trace's own."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from control.core import commands as c
from control.core import effects as e
from control.core.answers import Answers
from control.core.invariants import find_broken
from control.core.requests import RequestPhase, request_id
from control.core.scene import ADMISSION, Scene, Settings
from control.core.session import Phase, Session
from control.core.transitions import step
from control.wire.commands import decode_command
from tests.conformance.script import (
    Advance,
    Early,
    Expire,
    FailNext,
    FailRequests,
    Operation,
    Pending,
    Retry,
    Send,
    TakeFailure,
    Tell,
    operations,
)
from tests.conformance.traces import REASONS, Seen, plain_fence

START_MS = 1_000_000
NO_RETRY_MS = 10**12


def configure(runtime_config: Mapping[str, Any]) -> tuple[Any, ...]:
    """The recorded policy: it passes the runtime configuration on, whatever it holds."""
    return (dict(runtime_config),)


def pack_config(
    session_config: Mapping[str, Any], runtime_config: Mapping[str, Any], sampling: tuple[Any, ...]
) -> bytes:
    """Any reversible packing will do."""
    return msgspec.msgpack.encode((session_config, runtime_config, sampling))


def unpack_config(packed: bytes) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """The inverse of `pack_config`."""
    return msgspec.msgpack.decode(packed, type=tuple[dict[str, Any], dict[str, Any], Any])


class CoreRun:
    """One trace's state: sessions, a scripted stage, and slots."""

    def __init__(self, config: dict[str, Any]) -> None:
        """`config` as recorded; durations in seconds there."""
        ttl = config["idle_ttl_s"]
        self.settings = Settings(
            stage_count=config["stage_count"],
            configure=configure if config["extension"] else None,
            pack_config=pack_config,
            unpack_config=unpack_config,
            limit_sessions=config["max_sessions"] is not None,
            idle_ttl_ms=None if ttl is None else round(ttl * 1000),
            disconnect_grace_ms=round(config["disconnect_grace_s"] * 1000),
            cleanup_backoff_ms=NO_RETRY_MS,
            cleanup_backoff_max_ms=NO_RETRY_MS,
        )
        self.max_sessions = config["max_sessions"]
        self.operation_limit = config["completed_append_limit"]
        self.route = tuple(f"w{n}" for n in range(config["stage_count"]))
        self.now_ms = START_MS
        self.sessions: dict[str, Session] = {}
        self.answers: dict[str, Answers] = {}
        self.admitted: set[tuple[str, int]] = set()
        self.fail_cleanups = 0
        self.fail_submits = 0
        self.payloads: dict[str, Any] = {}
        self.cleaned: set[str] = set()
        self.early = Early()
        self.rows: set[str] = set()

    def run(self, recorded: dict[str, Any]) -> Seen:
        """Do one step and everything that follows from it."""
        self.seen = Seen()
        self.closing = recorded.get("message", {}).get("op") == "close"
        steps = operations(recorded, self.early)
        answer: Any = None
        while True:
            try:
                answer = self._do(steps.send(answer))
            except StopIteration:
                break
        self.seen.cleaned = set(self.cleaned)
        self.seen.sessions = {
            sid: registered(sid, s) for sid, s in self.sessions.items() if s.phase is not Phase.VACANT
        }
        return self.seen

    def _do(self, operation: Operation) -> Any:
        match operation:
            case Send(message):
                self.payload = message.get("payload")
                body = msgspec.msgpack.encode({"v": 1, **message})
                self._feed(message["session_id"], cast("c.Event", decode_command(body).command))
            case Advance(ms):
                self.now_ms += ms
            case FailNext(what, count):
                setattr(self, what, count)
            case TakeFailure():
                failing = self.fail_cleanups > 0
                self.fail_cleanups -= failing
                return failing
            case Pending():
                return [sid for sid, session in self.sessions.items() if session.cleanups]
            case Retry(session_ids):
                for sid in session_ids or list(self.sessions):
                    self._feed(sid, c.RetryNow())
            case FailRequests(names):
                for name in names:
                    died = c.RequestFailed(name.incarnation, name.epoch, self.route[name.stage_id], "died")
                    self._feed(name.session_id, died)
            case Expire():
                for sid in list(self.sessions):
                    self._feed(sid, c.Due())
            case Tell(event):
                self.seen.lifecycle.append(event)
        return None

    def _feed(self, sid: str, first: c.Event) -> None:
        events: deque[c.Event] = deque([first])
        while events:
            event = events.popleft()
            known = self.sessions.get(sid)
            answers = self.answers.setdefault(sid, Answers(operation_limit=self.operation_limit))
            scene = Scene(
                settings=self.settings,
                session_id=sid,
                now_ms=self.now_ms,
                answers=answers,
                choose_route=lambda: self.route,
            )
            decision = step(scene, known, event)
            self.rows.add(decision.row)
            assert not decision.wait, (sid, event)
            if decision.session is None:
                self.sessions.pop(sid, None)
            else:
                assert find_broken(decision.session) == [], (event, decision.session)
                self.sessions[sid] = decision.session
            for effect in decision.effects:
                events.extend(self._carry_out(sid, effect))

    def _carry_out(self, sid: str, effect: e.Effect) -> list[c.Event]:
        session = self.sessions.get(sid)
        incarnation = 0 if session is None else session.fence.incarnation
        match effect:
            case e.Answer(reply, remember):
                self.seen.results.append(msgspec.to_builtins(reply))
                if remember is not None:
                    self.answers[sid].remember(remember)
            case e.Announce(lifecycle):
                if lifecycle.event == "expired":
                    told = self.early.events if self.closing else self.seen.lifecycle
                    told.append(msgspec.to_builtins(lifecycle))
            case e.Place(attempt, holders):
                if ADMISSION in holders and len(self.admitted) >= (self.max_sessions or 0):
                    return [c.PlacementRefused(incarnation, attempt, ADMISSION)]
                self.admitted.add((sid, incarnation))
                return [c.Placed(incarnation, attempt)]
            case e.Pay(debts):
                for debt in debts:
                    self.admitted.discard((sid, debt.incarnation))
                return [c.DebtPaid(debt.incarnation, debt.holder) for debt in debts]
            case e.Submit():
                return [self._submit(sid, incarnation, effect)]
            case e.Abort():
                return [self._abort(incarnation, effect)]
            case e.Release(epochs):
                self.cleaned.update(request_id(sid, self._life(sid, session), epoch, 0) for epoch in epochs)
            case e.ExpireUnlessHeard():
                pass
        return []

    def _life(self, sid: str, session: Session | None) -> int:
        assert session is not None, sid
        if session.phase is Phase.VACANT:
            assert session.ended is not None
            return session.ended.incarnation
        return session.fence.incarnation

    def _submit(self, sid: str, incarnation: int, effect: e.Submit) -> c.Event:
        if self.fail_submits:
            self.fail_submits -= 1
            return c.Rejected(incarnation, effect.number, "failed_precondition", "the stage refuses")
        fence = msgspec.to_builtins(effect.fence)
        self.seen.submitted.append(
            {
                "request_id": request_id(sid, incarnation, effect.fence.epoch, 0),
                "fence": plain_fence(fence),
                "already_submitted": effect.resumed,
                "config_generation": effect.generation,
                "prompt": {
                    "payload": self.payload,
                    "seq": effect.seq,
                    "turn_seq": effect.turn_seq,
                    "final": effect.final,
                },
            }
        )
        return c.Accepted(incarnation, effect.number)

    def _abort(self, incarnation: int, effect: e.Abort) -> c.Event:
        if effect.stage_id == 0 and self.fail_cleanups:
            self.fail_cleanups -= 1
            return c.CleanupFailed(incarnation, effect.number, effect.attempt, effect.worker_id, True, "no answer")
        return c.Cleaned(incarnation, effect.number, effect.worker_id)


def registered(sid: str, session: Session) -> dict[str, Any]:
    """The session in the form of a trace's registry."""
    reason = session.lease.terminal_reason
    return {
        "fence": plain_fence(msgspec.to_builtins(session.fence)),
        "lease_generation": session.lease.generation,
        "terminal_reason": None if reason is None else REASONS.get(reason, reason),
        "detached": session.lease.detached_at_ms is not None,
        "input_seq": session.input_seq,
        "input_turn_seq": session.input_turn_seq,
        "config_generation": session.config_generation,
        "resources": sorted(
            (request_id(sid, session.fence.incarnation, r.epoch, 0), r.phase is not RequestPhase.RESERVED)
            for r in session.requests
        ),
    }
