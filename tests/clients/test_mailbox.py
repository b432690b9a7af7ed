"""When a command is sent again, and what of the event stream is shown: gaps, lives, interruptions, overflow."""

from __future__ import annotations

from typing import Any

import pytest

from bargein_client.mailbox import TOLD_AFTER_SKIPPING, Inbox, Options, Outbox
from bargein_client.protocol import Command, Fence, Gap, Lifecycle, Output, Reply

OPTIONS = Options(reply_timeout_s=4.0, attempts=3, growth=2.0, jitter=0.5, retries=2, backoff_s=0.1)


def outbox(chance: float = 0.0) -> Outbox:
    return Outbox(OPTIONS, lambda: chance)


def command(control_id: str, op: str = "touch") -> Command:
    return Command(control_id, op, "s0", {})


def reply(control_id: str, op: str = "touch", *, retryable: bool = False, accepted: Fence | None = None) -> Reply:
    ok = not retryable
    return Reply(control_id, op, "s0", ok, None if ok else "timeout", "", retryable, None, accepted, None)


def output(epoch: int = 0, life: int = 1, data: Any = None) -> Output:
    return Output("s0", "r", 0, Fence(life, epoch), 0, "data", data)


def lifecycle(event: str, epoch: int = 0, life: int = 1) -> Lifecycle:
    return Lifecycle(event, None, Fence(life, epoch), 0)


def inbox(*entries: tuple[int, Any], limit_bytes: int = 100_000) -> Inbox:
    box = Inbox(1, limit_bytes)
    for place, (n, event) in enumerate(entries, 1):
        box.put(f"{place}-0", n, event, 100)
    return box


def shown(box: Inbox) -> list[Any]:
    events: list[Any] = []
    while (event := box.take(replies=True)) is not None:
        events.append(event)
    return events


# --- the outbox ---------------------------------------------------------------------------------------------------


def test_a_command_is_sent_again_ever_later_and_is_lost_in_the_end() -> None:
    box, a = outbox(), command("a")
    box.expect(a)
    assert box.due(1e9) == ([], [])  # not sent yet
    box.sent("a", 0.0)
    assert box.due(3.9) == ([], [])
    assert box.due(4.0) == ([a], [])
    box.sent("a", 4.0)
    assert box.due(11.9) == ([], [])
    assert box.due(12.0) == ([a], [])
    box.sent("a", 12.0)
    assert box.due(27.9) == ([], [])
    assert box.due(28.0) == ([], [a])
    assert not box
    assert not box.answered(reply("a"), 29.0)


def test_chance_spreads_the_sends() -> None:
    box, a = outbox(chance=1.0), command("a")
    box.expect(a)
    box.sent("a", 0.0)
    assert box.due(5.9) == ([], [])
    assert box.due(6.0) == ([a], [])


def test_a_reply_that_is_faster_than_its_send_counts() -> None:
    box = outbox()
    box.expect(command("a"))
    assert box.answered(reply("a"), 0.0)
    box.sent("a", 0.0)
    assert not box


def test_a_retryable_reply_is_tried_again_with_pauses_and_then_settles() -> None:
    box, a = outbox(chance=1.0), command("a")
    box.expect(a)
    box.sent("a", 0.0)
    assert not box.answered(reply("a", retryable=True), 1.0)
    assert box.due(1.05) == ([], [])
    assert box.due(1.1) == ([a], [])
    box.sent("a", 1.1)
    assert not box.answered(reply("a", retryable=True), 2.0)
    assert box.due(2.2) == ([a], [])
    box.sent("a", 2.2)
    assert box.answered(reply("a", retryable=True), 3.0)


def test_an_append_is_never_tried_again_by_itself() -> None:
    box = outbox()
    box.expect(command("a", "append"))
    box.sent("a", 0.0)
    assert box.answered(reply("a", "append", retryable=True), 0.0)


def test_what_nobody_waits_for_is_forgotten() -> None:
    box = outbox()
    box.expect(command("a"))
    box.sent("a", 0.0)
    box.forget("a")
    assert box.due(1e9) == ([], [])


def test_a_read_ends_when_something_is_due() -> None:
    box = outbox()
    assert box.wait_s(0.0) == 2.0
    box.expect(command("a"))
    assert box.wait_s(0.0) == 2.0
    box.sent("a", 0.0)
    assert box.wait_s(3.0) == 1.0
    assert box.wait_s(9.0) == 0.0


def test_options_that_would_outlast_the_memory_of_the_workers_are_refused() -> None:
    with pytest.raises(ValueError, match="remember"):
        Options(reply_timeout_s=20.0, attempts=4)
    Options(reply_timeout_s=40.0, attempts=2)


@pytest.mark.parametrize("wrong", [{"reply_timeout_s": 0}, {"attempts": 0}, {"retries": -1}, {"buffer_bytes": 0}])
def test_options_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        Options(**wrong)


def test_pauses_double_up_to_a_bound() -> None:
    options = Options(backoff_s=1.0, backoff_max_s=5.0)
    assert [options.pause_s(failures, 1.0) for failures in (1, 2, 3, 4, 5000)] == [1, 2, 4, 5, 5]
    assert options.pause_s(1, 0.0) == 0.5


# --- the inbox ----------------------------------------------------------------------------------------------------


def test_missing_numbers_are_a_gap() -> None:
    opened = lifecycle("opened")
    assert shown(inbox((1, opened), (2, output()), (5, output()))) == [opened, output(), Gap(2), output()]


def test_events_missing_at_the_beginning_are_a_gap_too() -> None:
    assert shown(inbox((3, output()))) == [Gap(2), output()]


def test_replies_count_but_are_not_shown_unless_they_are_ours() -> None:
    box = inbox((1, lifecycle("opened")), (2, reply("x", accepted=Fence(1))), (3, output()))
    assert shown(box) == [lifecycle("opened"), output()]
    box.settled(reply("mine"), 100)
    assert box.take(replies=False) is None
    box.settled(reply("mine"), 100)
    assert box.take(replies=True) == reply("mine")


def test_former_lives_are_skipped() -> None:
    old = (9, output(life=0)), (10, lifecycle("closed", life=0)), (11, reply("x", accepted=Fence(0)))
    box = inbox(*old, (1, lifecycle("opened")), (2, output()))
    assert shown(box) == [lifecycle("opened"), output()]
    assert not box.ended


def test_a_later_life_ends_this_one() -> None:
    box = inbox((1, lifecycle("opened")), (1, lifecycle("opened", life=2)), (2, output(life=2)))
    assert shown(box) == [lifecycle("opened"), Gap(None)]
    assert box.ended


def test_an_unsigned_entry_counts_if_its_number_fits() -> None:
    assert shown(inbox((1, reply("x")), (2, None), (3, output()))) == [output()]
    assert shown(inbox((8, reply("x")), (1, output()))) == [output()]


def test_numbers_that_begin_again_are_no_gap() -> None:
    assert shown(inbox((1, reply("refused", accepted=None)), (1, lifecycle("opened")), (2, output()))) == [
        lifecycle("opened"),
        output(),
    ]


def test_the_terminal_event_is_the_last() -> None:
    box = inbox((1, output()), (2, lifecycle("closed")), (3, output()), (9, lifecycle("opened", life=2)))
    assert shown(box) == [output(), lifecycle("closed")]
    assert box.ended
    assert box.event_id == "4-0"


def test_i1_an_interruption_that_was_read_drops_older_outputs_that_were_not_fetched() -> None:
    box = inbox((1, output(0)), (2, output(0)), (3, lifecycle("interrupted", 1)), (4, output(0)), (5, output(1)))
    assert shown(box) == [lifecycle("interrupted", 1), output(1)]
    assert box.dropped_locally == 3


def test_i1_a_local_interrupt_drops_what_is_still_on_its_way() -> None:
    box = inbox((1, output(0, data=1)), (2, output(0, data=2)))
    assert box.take(replies=False) == output(0, data=1)
    box.cancel_below(1)
    box.cancel_below(0)
    box.put("3-0", 3, output(0), 100)
    box.put("4-0", 4, output(1), 100)
    assert shown(box) == [output(1)]
    assert box.dropped_locally == 2


def test_an_epoch_that_is_lost_is_not_an_interruption() -> None:
    assert shown(inbox((1, output()), (2, lifecycle("epoch_lost")))) == [output(), lifecycle("epoch_lost")]


def test_s47_what_nobody_fetches_is_bounded_and_said() -> None:
    box = inbox((1, lifecycle("opened")), *((n, output()) for n in range(2, 10_002)), limit_bytes=10_000)
    events = shown(box)
    gap, *rest = events
    assert isinstance(gap, Gap)
    assert gap.local
    assert rest[0] == lifecycle("opened")
    assert gap.missing is not None
    assert gap.missing + len(rest) == 10_001
    assert len(events) < 30


def test_s47_the_end_of_a_session_is_never_what_is_dropped() -> None:
    turns = [(n, lifecycle("interrupted", n)) for n in range(1, 5_000)]
    box = inbox(*turns, (5_000, lifecycle("closed", 5_000)), limit_bytes=50_000)
    events = shown(box)
    assert events[-1] == lifecycle("closed", 5_000)
    assert TOLD_AFTER_SKIPPING <= len(events) < 200


def test_a_position_is_that_of_what_was_handed_out() -> None:
    box = inbox((1, lifecycle("opened")), (2, output()), (4, output()))
    assert box.taken_to == ("0-0", 0)
    box.take(replies=False)
    assert box.taken_to == ("1-0", 1)
    box.take(replies=False)
    assert box.taken_to == ("2-0", 2)
    assert box.take(replies=False) == Gap(1)
    assert box.taken_to == ("2-0", 2)
    box.take(replies=False)
    assert box.taken_to == ("3-0", 4)


def test_s51_a_server_that_lost_its_tail_is_read_from_its_end() -> None:
    box = Inbox(1, 1000, "10-2")
    assert box.rewind("10-3") == "10-2"
    assert box.rewind("10-1") == "10-1"
    assert box.rewind("9-7") == "9-7"
    assert box.rewind("0-0") == "0-0"
