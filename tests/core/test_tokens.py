"""A session that was opened with a token hears only commands that show it; to all others it is a wall."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from control.core import commands as c
from control.core import effects as e
from control.core.answers import Answered, Answers, digest, key_of
from control.core.rejections import Code
from control.core.session import LAYOUT, Phase, Session
from control.core.tokens import TokenDigest, digest_token, is_right
from tests.core.call import Call, Word, at

TOKEN = digest_token(b"sixteen bytes or more")
OTHER = digest_token(b"sixteen bytes or more!")
SECRET = TOKEN.sha256

# Every command that a live session may be sent.
COMMANDS: dict[str, Callable[..., c.Command]] = {
    "open": lambda call, **more: call.make(c.Open, **more),
    "append": lambda call, **more: call.make(c.Append, mode="append_tokens", **more),
    "cancel": lambda call, **more: call.make(c.Cancel, event="barge_in", next_fence=at(1), **more),
    "update": lambda call, **more: call.make(c.Update, session_config={"voice": "b"}, **more),
    "unknown signal": lambda call, **more: call.make(c.UnknownSignal, event="sneeze", **more),
    "close": lambda call, **more: call.make(c.Close, **more),
    "touch": lambda call, **more: call.make(c.Touch, activity="heartbeat", **more),
    "detach": lambda call, **more: call.make(c.Touch, activity="detach", **more),
    "resume": lambda call, **more: call.make(c.Resume, expected_lease_generation=0, **more),
}
SHOWN = pytest.mark.parametrize("shown", [None, OTHER], ids=["no token", "another token"])
PHASES = [Phase.OPENING, Phase.OPEN, Phase.CLOSING]


def guarded(phase: Phase = Phase.OPEN) -> Call:
    """A call that was opened with the token, with a request running if it is that far."""
    call = Call()
    call.open(token=TOKEN)
    if phase is not Phase.OPENING:
        call.place()
        call.append(token=TOKEN)
        call.accept()
    if phase is Phase.CLOSING:
        call.close(token=TOKEN)
    assert call.phase is phase
    return call


def assert_refused(call: Call, word: Word, command: c.Command) -> None:
    assert word.changed_nothing
    (effect,) = word.all(e.Answer)
    assert len(word.decision.effects) == 1
    reply = word.reply
    assert (reply.control_id, reply.op, reply.code) == (command.control_id, c.op_of(command), Code.FAILED_PRECONDITION)
    assert not reply.retryable
    assert "token" in reply.message
    assert (reply.accepted_fence, reply.lease_generation, reply.detail) == (None, None, None)
    assert effect.remember is None
    assert not word.waits


@SHOWN
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", COMMANDS)
def test_i8_without_its_token_every_command_is_refused_and_changes_nothing(
    name: str, phase: Phase, shown: TokenDigest | None
) -> None:
    call = guarded(phase)
    call.pass_ms(1_000)
    command = COMMANDS[name](call, token=shown)
    assert_refused(call, call.feed(command), command)


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"open", "unknown signal"}))
def test_with_its_token_every_command_is_heard(name: str) -> None:
    call = guarded()
    word = call.feed(COMMANDS[name](call, token=TOKEN))
    assert not word.changed_nothing
    assert not [reply for reply in word.replies if not reply.ok]


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"open", "unknown signal"}))
def test_a_session_without_a_token_ignores_one(name: str) -> None:
    call = Call()
    call.open()
    call.place()
    word = call.feed(COMMANDS[name](call, token=TOKEN))
    assert not word.changed_nothing
    assert not [reply for reply in word.replies if not reply.ok]


@SHOWN
def test_the_token_comes_before_what_is_too_old_stale_or_wrong(shown: TokenDigest | None) -> None:
    call = guarded()
    for changes in ({"deadline_ms": 0}, {"fence": at(0, incarnation=9)}, {"expected_lease_generation": 7}):
        command = replace(COMMANDS["append"](call, token=shown), **changes)
        assert_refused(call, call.feed(command, entered_ms=0), command)
    command = call.make(c.Append, mode="telepathy", token=shown)
    assert_refused(call, call.feed(command), command)


@SHOWN
@pytest.mark.parametrize("phase", PHASES)
def test_nobody_without_the_token_gets_the_reply_that_the_open_has_had(phase: Phase, shown: TokenDigest | None) -> None:
    call = guarded(phase)
    first = call.make(c.Open, at(0), control_id="c1", token=shown)
    assert_refused(call, call.feed(first), first)


@SHOWN
@pytest.mark.parametrize("name", ["append", "cancel", "update", "touch", "resume", "close"])
def test_nobody_without_the_token_gets_the_reply_of_another(name: str, shown: TokenDigest | None) -> None:
    call = guarded()
    command = COMMANDS[name](call, token=TOKEN)
    call.feed(command)
    if name == "append":
        call.accept()
    stolen = replace(command, token=shown)
    assert_refused(call, call.feed(stolen), stolen)
    again = call.feed(command)
    assert again.row == "T00"
    # A cancel and a close wait for their cleanup, and their own reply is still to come.
    assert [reply.code for reply in again.replies] == ([] if name in {"cancel", "close"} else [None])


@SHOWN
def test_a_refusal_without_the_token_is_not_the_answer_to_the_rightful_command(shown: TokenDigest | None) -> None:
    call = guarded()
    rightful = COMMANDS["touch"](call, token=TOKEN)
    assert call.feed(replace(rightful, token=shown)).code == Code.FAILED_PRECONDITION
    malformed = call.make(
        c.Malformed, control_id=rightful.control_id, op="touch", code="invalid_argument", message="$.v: no", token=shown
    )
    word = call.feed(malformed)
    assert (word.code, word.reply.message, word.reply.accepted_fence) == (Code.INVALID_ARGUMENT, "$.v: no", None)
    assert word.changed_nothing
    assert call.feed(rightful).reply.ok


@SHOWN
def test_a_body_that_is_no_command_gets_no_remembered_reply_without_the_token(shown: TokenDigest | None) -> None:
    call = guarded()
    answered = COMMANDS["touch"](call, token=TOKEN)
    call.feed(answered)
    fields: dict[str, Any] = {"op": "touch", "code": "invalid_argument", "message": "no"}
    word = call.feed(call.make(c.Malformed, control_id=answered.control_id, token=shown, **fields))
    assert word.code == Code.INVALID_ARGUMENT
    word = call.feed(call.make(c.Malformed, control_id=answered.control_id, token=TOKEN, **fields))
    assert word.reply.ok


def test_a_command_without_the_token_is_no_activity() -> None:
    call = guarded()
    ttl_ms = call.settings.idle_ttl_ms
    assert ttl_ms is not None
    call.pass_ms(ttl_ms - 1)
    call.touch()
    call.wait_ms(1)
    assert call.phase is Phase.CLOSING


@SHOWN
def test_after_the_end_only_the_token_finds_what_was_answered(shown: TokenDigest | None) -> None:
    call = guarded()
    touch, close = COMMANDS["touch"](call, token=TOKEN), COMMANDS["close"](call, token=TOKEN)
    call.feed(touch)
    call.feed(close)
    call.clean()
    assert call.phase is Phase.VACANT
    assert call.feed(touch).reply.ok
    assert call.feed(close).reply.detail is not None
    assert call.feed(replace(touch, token=shown)).code == Code.NOT_FOUND
    nobody = call.feed(replace(close, token=shown))
    assert nobody.reply.ok
    assert nobody.reply.detail is None  # S12: the close of nobody, not the one that ended something


def test_the_next_life_has_a_token_of_its_own_or_none() -> None:
    call = guarded(Phase.CLOSING)
    call.clean()
    call.pay_debts()
    call.open(at(0, incarnation=2), token=OTHER)
    call.place()
    assert call.touch(token=TOKEN).code == Code.FAILED_PRECONDITION
    assert call.touch(token=OTHER).reply.ok
    call.close(token=OTHER)
    call.pay_debts()
    call.open(at(0, incarnation=3))
    call.place()
    assert call.touch().reply.ok


def test_a_former_lifes_answers_are_not_found_by_whoever_opens_the_next() -> None:
    call = guarded()
    mine = COMMANDS["update"](call, token=TOKEN)
    call.feed(mine)
    call.close(token=TOKEN)
    call.clean()
    call.pay_debts()
    call.open(at(0, incarnation=2), token=OTHER)
    call.place()
    word = call.feed(replace(mine, token=OTHER))
    assert word.code == Code.STALE_FENCE


def test_a_forgotten_record_holds_no_token() -> None:
    call = guarded(Phase.CLOSING)
    call.clean()
    assert call.open_session.token is None
    assert SECRET not in msgspec.msgpack.encode(call.session)


def test_the_digest_shows_itself_nowhere_but_in_the_stored_state() -> None:
    call = guarded()
    command = COMMANDS["append"](call, token=TOKEN)
    call.feed(command)
    call.feed(COMMANDS["touch"](call, token=OTHER))
    assert SECRET in msgspec.msgpack.encode(call.session)
    for reply in call.replies:
        assert SECRET not in msgspec.msgpack.encode(reply)
    for event in call.lifecycle:
        assert SECRET not in msgspec.msgpack.encode(event)
    told = f"{call.session!r} {command!r} {TOKEN} {TOKEN!r} {call.answers!r}"
    assert repr(SECRET)[2:-1] not in told
    assert SECRET.hex() not in told
    assert "TokenDigest(...)" in told
    assert TOKEN.__rich_repr__() == []


def test_only_the_same_token_is_right() -> None:
    assert is_right(TOKEN, digest_token(b"sixteen bytes or more"))
    assert not is_right(TOKEN, OTHER)
    assert not is_right(TOKEN, None)
    assert not is_right(TOKEN, TokenDigest(b""))


def test_a_session_stored_before_there_were_tokens_is_read() -> None:
    call = Call()
    call.open()
    whole: list[Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(call.session))
    former = msgspec.msgpack.encode(whole[:-1])
    assert msgspec.msgpack.decode(former, type=Session) == call.session
    assert whole[0] == LAYOUT


def test_an_answer_is_remembered_under_its_token() -> None:
    assert key_of("c1", None) == digest("c1")
    assert len({key_of("c1", token) for token in (None, TOKEN, OTHER)}) == 3
    kept = Answered(key_of("c1", TOKEN), "touch", None, 0, at(0), 0, (0,))
    answers = Answers([kept])
    assert answers.find("c1", TOKEN) == kept
    assert answers.find("c1", OTHER) is None
    assert answers.find("c1") is None
    assert answers.find("c2", TOKEN) is None
    open_to_all = Answered(key_of("c3", None), "touch", None, 0, at(0), 0, (0,))
    answers.remember(open_to_all)
    assert answers.find("c3", TOKEN) == answers.find("c3") == open_to_all
