"""The judge of the chaos run: a good history passes, and each planted fault is found."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.checker import LOSS_S, check, check_history, tell
from tests.chaos.history import History, Leftovers, Seen, Sent, Violation

SESSION = "s1"


def fence(epoch: int) -> dict[str, int]:
    return {"incarnation": 1, "epoch": epoch, "turn_id": epoch, "response_seq": 0}


class Told(History):
    """A history that is written by hand, a step at a time; `n` and the time follow."""

    def __init__(self) -> None:
        super().__init__(SESSION)
        self._n = 0
        self._said: dict[int, int] = {}

    def send(self, op: str, epoch: int = 0, **fields: Any) -> str:
        control_id = f"{op}{len(self.sent)}"
        self.sent[control_id] = Sent(control_id, op, epoch, self.now_s, **fields)
        return control_id

    @property
    def now_s(self) -> float:
        return float(len(self.seen))

    def see(self, kind: str, body: dict[str, Any], n: int | None = None) -> Seen:
        self._n = self._n + 1 if n is None else n
        entry = Seen(kind, self._n, self.now_s, body)
        self.seen.append(entry)
        return entry

    def event(self, event: str, epoch: int = 0, reason: str | None = None) -> None:
        self.see("lifecycle", {"event": event, "fence": fence(epoch), "reason": reason})

    def reply(self, control_id: str, code: str | None = None, *, retryable: bool = False, **detail: Any) -> None:
        body = {"control_id": control_id, "ok": code is None, "code": code, "message": "", "retryable": retryable}
        self.see("reply", {**body, "fence": fence(0), "detail": None if code else detail})

    def say(self, *tokens: int, epoch: int = 0) -> None:
        for token in tokens:
            seq = self._said.get(epoch, 0)
            self._said[epoch] = seq + 1
            self.see("output", {"fence": fence(epoch), "data": [token], "seq": seq})


def opened() -> Told:
    told = Told()
    opening = told.send("open")
    told.event("opened")
    told.reply(opening)
    return told


def append(told: Told, *tokens: int, seq: int, epoch: int = 0, deliveries: int = 1) -> str:
    control_id = told.send("append", epoch, tokens=tokens, deliveries=deliveries)
    told.reply(control_id, seq=seq)
    return control_id


def interrupt(told: Told, to: int) -> None:
    cancel = told.send("signal", to - 1, next_epoch=to)
    told.event("interrupted", to)
    told.reply(cancel)


def close(told: Told) -> Told:
    closing = told.send("close")
    told.event("closing")
    told.event("closed", reason="client_close")
    told.reply(closing)
    return told


def conversation() -> Told:
    """Open, speak, interrupt in the middle of the answer, go on."""
    told = opened()
    append(told, 1, 2, 3, seq=1)
    told.say(1, 2)
    append(told, 4, seq=2)
    interrupt(told, 1)
    append(told, 5, 6, seq=1, epoch=1)
    told.say(5, 6, epoch=1)
    told.settled_epoch = 1
    return told


def rules(told: History, *stage_faults_s: float) -> set[str]:
    return {violation.rule for violation in check_history(told, stage_faults_s)}


def test_a_good_history_passes() -> None:
    assert check([close(conversation())], Leftovers()) == []


def test_a_stale_output_after_the_interruption_is_found() -> None:
    told = conversation()
    told.say(3)
    assert "I1" in rules(close(told))


def test_a_second_terminal_is_found() -> None:
    told = close(conversation())
    told.event("closed", reason="client_close")
    assert rules(told) == {"I10"}


def test_a_session_without_a_terminal_is_found() -> None:
    assert rules(conversation()) == {"I10"}


def test_an_output_after_the_terminal_is_found() -> None:
    told = opened()
    append(told, 1, seq=1)
    close(told).say(1)
    assert rules(told) == {"I10"}


def test_a_loss_without_a_fault_at_a_stage_is_found() -> None:
    told = opened()
    told.event("closed", reason="stage_lost")
    at_s = told.seen[-1].at_s
    assert rules(told, at_s - 1) == set()
    assert rules(told) == rules(told, at_s + 1) == rules(told, at_s - LOSS_S - 1) == {"I10"}


def test_a_missing_reply_is_found() -> None:
    told = conversation()
    told.send("touch", 1)
    assert rules(close(told)) == {"liveness"}


def test_two_replies_to_one_delivery_are_found() -> None:
    told = opened()
    told.reply(append(told, 1, seq=1), seq=1)
    assert rules(close(told)) == {"I4"}


def test_a_second_reply_to_a_second_delivery_may_only_repeat_the_first() -> None:
    told = opened()
    told.reply(append(told, 1, seq=1, deliveries=2), seq=1)
    assert rules(close(told)) == set()
    told = opened()
    told.reply(append(told, 1, seq=1, deliveries=2), "not_found")
    assert rules(close(told)) == {"I4"}


def test_a_retryable_reply_may_be_followed_by_another() -> None:
    told = Told()
    opening = told.send("open", deliveries=2)
    told.see(
        "reply",
        Seen("reply", 0, 0, {}).body
        | {
            "control_id": opening,
            "ok": False,
            "code": "resource_exhausted",
            "message": "",
            "retryable": True,
            "fence": fence(0),
            "detail": None,
        },
        n=0,
    )
    told.event("opened")
    told.reply(opening)
    assert rules(close(told)) == set()


def test_a_doubled_seq_is_found() -> None:
    told = opened()
    append(told, 1, seq=1)
    append(told, 2, seq=1)
    assert rules(close(told)) == {"I5"}


def test_a_gap_in_seq_is_found() -> None:
    told = opened()
    append(told, 1, seq=1)
    append(told, 2, seq=3)
    assert rules(close(told)) == {"I5"}


def test_appends_out_of_order_are_found() -> None:
    told = opened()
    first, second = told.send("append", tokens=(1,)), told.send("append", tokens=(2,))
    told.reply(second, seq=1)
    told.reply(first, seq=2)
    assert rules(close(told)) == {"I5"}


@pytest.mark.parametrize("said", [(1, 1, 2), (2,), (1, 3), (1, 2, 9)], ids=["repeated", "lost", "skipped", "foreign"])
def test_a_wrong_word_is_found(said: tuple[int, ...]) -> None:
    told = opened()
    append(told, 1, 2, 3, seq=1)
    told.say(*said)
    assert rules(close(told)) == {"I5"}


def test_a_repeated_output_number_is_found() -> None:
    told = opened()
    append(told, 1, 2, seq=1)
    told.say(1, 2)
    told.seen[-1].body["seq"] = 0
    assert rules(close(told)) == {"I5"}


def test_words_of_a_refused_append_may_come_last_but_not_before_others() -> None:
    told = opened()
    append(told, 1, seq=1)
    unsure = told.send("append", tokens=(2, 3))
    told.say(1, 2)
    told.reply(unsure, "stale_fence")
    assert rules(close(told)) == set()
    told = opened()
    unsure = told.send("append", tokens=(2, 3))
    told.say(2)
    told.reply(unsure, "failed_precondition")
    append(told, 1, seq=1)
    told.say(1)
    assert rules(close(told)) == {"I5"}


def test_words_that_never_come_are_found() -> None:
    told = opened()
    append(told, 1, 2, seq=1)
    told.say(1)
    told.settled_epoch = 0
    assert rules(close(told)) == {"liveness"}


@pytest.mark.parametrize("n", [9, 3, 0], ids=["gap", "repeat", "restart"])
def test_a_wrong_n_is_found(n: int) -> None:
    told = conversation()
    told.seen[3].n = n
    assert "n" in rules(close(told))


@pytest.mark.parametrize(
    ("left", "rule"),
    [
        (Leftovers(sessions=["s1 (closing)"]), "I3"),
        (Leftovers(debts=["s1"]), "I3"),
        (Leftovers(cleanups=1), "I3"),
        (Leftovers(slots={"voice": ["s1"]}), "I3"),
        (Leftovers(queues={"acks": 2}), "I3"),
        (Leftovers(dead_letters=1), "I4"),
        (Leftovers(overfull=["voice"]), "I9"),
    ],
    ids=["session", "debt", "cleanup", "slot", "queue", "dead letter", "overfull"],
)
def test_a_leak_is_found(left: Leftovers, rule: str) -> None:
    assert [violation.rule for violation in check([], left)] == [rule]


def test_the_history_is_told_a_line_an_entry_with_outputs_joined() -> None:
    lines = tell(close(conversation()))
    assert any("output epoch 1 seq 0: 5..6" in line for line in lines)
    assert any("interrupted epoch 1" in line for line in lines)
    assert str(Violation("I1", SESSION, "stale")) == "I1 s1: stale"
