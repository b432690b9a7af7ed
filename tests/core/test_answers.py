"""What was answered before is answered again, and has no second effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from control.core import commands as c
from control.core import effects as e
from control.core.answers import KEEP_ANSWERS, KEEP_MS, Answered, Answers, Operation, digest
from control.core.rejections import RETRYABLE, Code
from control.core.replies import Reply
from control.core.requests import RequestPhase
from control.core.session import Phase
from tests.core.call import BAD_CONFIG, Call, at, opened, talking


def entry(control_id: str, at_ms: int = 0, *, operation: Operation | None = None, **fields: Any) -> Answered:
    return Answered(digest(control_id), "append", None, at_ms, at(0), 0, operation=operation, **fields)


def operation(name: str, epoch: int = 0, *, incarnation: int = 1) -> Operation:
    return Operation(digest(name), at(epoch, incarnation=incarnation), "append_tokens", False, b"x")


def plain(reply: Reply) -> Reply:
    """A replay may say it in other words."""
    return replace(reply, message="")


# --- the memory ------------------------------------------------------------------------------------------------


def test_a_digest_is_short_and_tells_ids_apart() -> None:
    assert len(digest("c1")) == len(digest("ö" * 64)) == 8
    assert len({digest(f"c{n}") for n in range(10_000)}) == 10_000


def test_an_answer_is_found_by_its_control_id() -> None:
    answers = Answers([entry("c1"), entry("c2")])
    assert answers.find("c2") == entry("c2")
    assert answers.find("c3") is None
    assert len(answers) == 2


def test_the_oldest_are_dropped_beyond_256_once_they_are_a_minute_old() -> None:
    answers = Answers()
    for n in range(KEEP_ANSWERS + 10):
        assert answers.remember(entry(f"c{n}", at_ms=0)) == 0  # all within one minute: all are kept
    assert answers.remember(entry("late", at_ms=KEEP_MS)) == 0
    assert answers.remember(entry("later", at_ms=KEEP_MS + 1)) == 12
    assert len(answers) == KEEP_ANSWERS
    assert answers.find("c11") is None
    assert answers.find("c12") is not None


def test_few_answers_are_kept_however_old_they_are() -> None:
    answers = Answers([entry("c1", at_ms=0)])
    answers.remember(entry("c2", at_ms=100 * KEEP_MS))
    assert answers.find("c1") is not None


def test_the_memory_reads_the_same_after_being_stored() -> None:
    call = talking()
    call.append(operation_id="say1", payload_digest=b"x")
    call.accept()
    answers = [effect for word in call.words for effect in word.all(e.Answer)]
    kept = [answer.remember for answer in answers if answer.remember is not None]
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(kept), type=list[Answered])
    assert read == kept
    again = Answers(read)
    assert again.find_operation("say1", call.fence) == call.answers.find_operation("say1", call.fence)


def test_an_operation_is_found_in_its_own_life_and_epoch_only() -> None:
    answers = Answers([entry("c1", operation=operation("say1", 2))])
    assert answers.find_operation("say1", at(2, 5, 5)) is not None
    assert answers.find_operation("say1", at(3)) is None
    assert answers.find_operation("say1", at(2, incarnation=2)) is None
    assert answers.find_operation("say2", at(2)) is None


def test_operations_of_an_older_epoch_are_forgotten_once_one_of_a_newer_is_done() -> None:
    answers = Answers([entry("c1", operation=operation("say1", 1)), entry("c2", operation=operation("say2", 2))])
    assert answers.find_operation("say1", at(1)) is None
    assert answers.find_operation("say2", at(2)) is not None


def test_only_so_many_operations_are_kept_and_the_oldest_go() -> None:
    answers = Answers(operation_limit=2)
    for name in ("say1", "say2", "say1", "say3"):
        answers.remember(entry(f"c-{name}", operation=operation(name)))
    assert answers.find_operation("say2", at(0)) is None
    assert answers.find_operation("say1", at(0)) is not None
    assert answers.find_operation("say3", at(0)) is not None


# --- commands sent again ---------------------------------------------------------------------------------------

COMMANDS: dict[str, Callable[[Call], c.Command]] = {
    "append": lambda call: call.make(c.Append, mode="append_tokens"),
    "barge_in": lambda call: call.make(c.Cancel, event="barge_in", next_fence=at(1)),
    "update": lambda call: call.make(c.Update, session_config={"voice": "b"}),
    "touch": lambda call: call.make(c.Touch, activity="detach"),
    "resume": lambda call: call.make(c.Resume, expected_lease_generation=0),
    "close": lambda call: call.make(c.Close, reason="open_rollback"),
    "refused": lambda call: call.make(c.Update, runtime_config=BAD_CONFIG),
    "unknown": lambda call: call.make(c.UnknownSignal, event="sneeze"),
    "malformed": lambda call: call.make(c.Malformed, op="open", code=Code.UNSUPPORTED_VERSION, message="no"),
}


def play_out(call: Call, command: c.Command) -> Reply:
    call.feed(command)
    if call.session is not None and call.session.append is not None:
        call.accept()
    while call.cleanups:
        call.clean(call.cleanups[0].waiting[0])
    (reply,) = call.answers_to(command.control_id)
    return reply


@pytest.mark.parametrize("make", COMMANDS.values(), ids=COMMANDS)
def test_d05_a_command_sent_again_gets_the_same_reply_and_has_no_second_effect(
    make: Callable[[Call], c.Command],
) -> None:
    call = talking()
    command = make(call)
    first = play_out(call, command)
    call.pass_ms(1_000)
    if call.phase is Phase.OPEN:
        call.update(at(5, 5, 5))  # the world goes on; the reply is still the one of then
    for _ in range(3):
        again = call.feed(command)
        assert (again.row, again.changed_nothing) == ("T00", True)
        assert plain(again.reply) == plain(first)
        assert len(again.decision.effects) == 1


def test_d05_an_open_sent_again_is_answered_again_even_after_the_close() -> None:
    call = Call()
    command = call.make(c.Open, capabilities=c.Capabilities(implementation_level="mine"))
    call.feed(command)
    first = call.place().reply
    assert call.feed(command).reply == first
    call.close()
    assert call.phase is Phase.VACANT
    assert call.feed(command).reply == first


def test_d05_a_command_that_comes_twice_while_it_is_under_way_is_answered_once() -> None:
    call = Call()
    opening = call.make(c.Open)
    call.feed(opening)
    assert call.feed(opening).decision.effects == ()
    call.place()
    call = talking()
    append = call.make(c.Append, mode="append_tokens")
    cancel = call.make(c.Cancel, event="barge_in", next_fence=at(1))
    for command in (append, append):
        call.feed(command)
    call.accept()
    for command in (cancel, cancel):
        call.feed(command)
    call.clean()
    assert len(call.answers_to(append.control_id)) == len(call.answers_to(cancel.control_id)) == 1
    assert len(call.submits) == 2
    assert call.released == [0]


def test_d05_an_id_that_was_used_for_another_op_is_refused() -> None:
    call = talking()
    call.touch(control_id="mine")
    word = call.close(control_id="mine")
    assert word.code == "invalid_argument"
    assert "'touch'" in word.reply.message
    assert call.phase is Phase.OPEN


def test_d05_an_id_whose_command_is_still_under_way_is_refused_to_another_op() -> None:
    call = talking()
    call.append(control_id="mine")
    word = call.close(control_id="mine")
    assert (word.code, call.phase) == ("invalid_argument", Phase.OPEN)
    assert call.accept().reply.ok
    (ok, bad) = sorted(call.answers_to("mine"), key=lambda reply: reply.op)
    assert (ok.op, ok.ok, bad.op, bad.ok) == ("append", True, "close", False)
    assert call.feed(call.make(c.Append, mode="append_tokens", control_id="mine")).reply == ok


@pytest.mark.parametrize("code", sorted(RETRYABLE))
def test_d05_after_a_retryable_reply_a_command_is_tried_again(code: Code) -> None:
    call = talking()
    append = call.make(c.Append, mode="append_tokens")
    call.feed(append)
    assert call.reject(code, "not now").reply.retryable
    call.feed(append)
    assert call.accept().reply.ok
    assert len(call.answers_to(append.control_id)) == 2
    assert call.open_session.input_seq == 2


def test_d05_a_full_open_is_tried_again() -> None:
    call = Call(route=None)
    command = call.make(c.Open)
    assert call.feed(command).code == "resource_exhausted"
    call.route = ("ear", "mouth")
    call.feed(command)
    assert call.place().reply.ok


def test_d05_a_cancel_that_timed_out_joins_its_cleanup_when_it_is_sent_again() -> None:
    call = talking()
    cancel = call.make(c.Cancel, event="barge_in", next_fence=at(1))
    call.feed(cancel)
    call.wait_ms(5_000)
    assert call.replies[-1].code == "timeout"
    again = call.feed(cancel)
    assert (again.replies, again.aborts) == ([], [("ear", (0,)), ("mouth", (0,))])
    assert len(call.cleanups) == 1
    call.clean()
    assert [reply.ok for reply in call.answers_to(cancel.control_id)] == [False, True]


def test_d05_a_close_that_timed_out_joins_its_cleanup_when_it_is_sent_again() -> None:
    call = talking()
    close = call.make(c.Close)
    call.feed(close)
    call.wait_ms(5_000)
    assert call.replies[-1].code == "timeout"
    call.feed(close)
    assert len(call.cleanups) == 1
    call.clean()
    assert [reply.ok for reply in call.answers_to(close.control_id)] == [False, True]
    assert call.events.count("closed") == 1


def test_d05_an_operation_is_replayed_under_another_control_id() -> None:
    call = talking()
    call.append(operation_id="say1", payload_digest=b"x")
    first = call.accept().reply
    word = call.append(operation_id="say1", payload_digest=b"x")
    assert replace(word.reply, control_id=first.control_id) == first
    assert word.all(e.Submit) == []
    assert call.open_session.input_seq == 2


def test_d05_an_operation_that_was_refused_is_none() -> None:
    call = talking()
    call.append(operation_id="say1", payload_digest=b"x")
    call.reject()
    call.append(operation_id="say1", payload_digest=b"y")
    assert call.accept().reply.ok


def test_d05_an_operation_of_an_interrupted_epoch_is_stale_not_replayed() -> None:
    call = talking()
    call.append(operation_id="say1", payload_digest=b"x")
    call.accept()
    call.cancel(at(1))
    assert call.append(at(0), operation_id="say1", payload_digest=b"x").code == "stale_fence"
    call.append(at(1), operation_id="say1", payload_digest=b"y")
    assert call.accept().reply.detail.seq == 1


@pytest.mark.parametrize(
    "other",
    [
        {"payload_digest": b"y"},
        {"final": True},
        {"mode": "turn_commit_only"},
        {"fence": at(0, 1, 0)},
    ],
)
def test_s22_an_operation_id_with_other_content_is_refused(other: dict[str, Any]) -> None:
    call = talking()
    call.append(operation_id="say1", payload_digest=b"x")
    call.accept()
    fields: dict[str, Any] = {"operation_id": "say1", "payload_digest": b"x", **other}
    word = call.append(**fields)
    assert word.code == "invalid_argument"
    assert word.reply.message.startswith("$.operation_id: 'say1'")
    assert word.changed_nothing


def test_s22_an_operation_that_waits_behind_its_own_first_delivery_is_replayed() -> None:
    call = talking()
    call.append(operation_id="say1", payload_digest=b"x")
    assert call.append(operation_id="say1", payload_digest=b"x").waits
    call.accept()
    first, second = call.replies[-2:]
    assert replace(second, control_id=first.control_id) == first
    assert len(call.submits) == 2  # the one before, and this one once


# --- what must not be remembered --------------------------------------------------------------------------------


def test_s14_nothing_is_remembered_for_ids_that_never_lived() -> None:
    for make in COMMANDS.values():
        call = Call()
        call.feed(make(call))
        assert (len(call.answers), call.session) == (0, None)


def test_a_body_without_a_control_id_is_no_repeat_of_another_one() -> None:
    call = opened()
    for message in ("$.v: no", "$.op: no"):
        for op in ("open", "append"):
            body = c.Malformed(control_id="", session_id="call-1", op=op, code=Code.INVALID_ARGUMENT, message=message)
            assert call.feed(body).reply.message == message
    assert len(call.answers) == 1  # the open's


def test_s12_a_close_of_a_life_that_is_over_is_answered_the_same_again() -> None:
    call = opened()
    call.close()
    command = call.make(c.Close)
    first = call.feed(command).reply
    assert (first.ok, first.detail, first.accepted_fence) == (True, None, None)
    assert call.feed(command).reply == first


def test_d05_a_close_of_the_former_life_sent_again_does_not_end_the_next_one() -> None:
    call = opened()
    command = call.make(c.Close)
    call.feed(command)
    call.pay_debts()
    call.open(at(0, incarnation=2))
    call.place()
    assert call.feed(command).reply.ok
    assert call.phase is Phase.OPEN


def test_a_message_never_quotes_more_than_is_readable() -> None:
    call = opened()
    assert len(call.touch("wave" * 100_000).reply.message) == 500
    assert len(call.append(mode="x" * 100_000).reply.message) == 500
    call.append()
    assert len(call.reject("invalid_argument", "x" * 100_000).reply.message) == 500


def test_a_refused_append_can_come_again_after_the_stage_has_changed_its_mind() -> None:
    call = opened()
    call.append(control_id="c-one")
    call.reject("resource_exhausted", "no room")
    assert call.requests == {0: RequestPhase.RESERVED}
    call.append(control_id="c-one")
    assert call.accept().reply.detail.seq == 1


@pytest.mark.parametrize("level", [None, "mine"])
def test_an_append_sent_again_after_its_session_has_ended_has_the_same_reply(level: str | None) -> None:
    call = Call()
    call.feed(call.make(c.Open, capabilities=c.Capabilities(implementation_level=level, input_modes=["append_tokens"])))
    call.place()
    append = call.make(c.Append, mode="append_tokens")
    first = play_out(call, append)
    call.close()
    call.clean()
    assert call.phase is Phase.VACANT
    assert plain(call.feed(append).reply) == plain(first)
