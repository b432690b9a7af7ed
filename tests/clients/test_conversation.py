"""The fence discipline, what a reply changes, and what is kept for another process."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import pytest

from bargein_client.conversation import Bookmark, Conversation, Position
from bargein_client.mailbox import Options
from bargein_client.protocol import Command, Fence, Reply


def body_of(command: Command) -> dict[str, Any]:
    return msgpack.unpackb(command.fields["b"])


def fence_of(command: Command) -> Fence:
    return Fence(**body_of(command)["fence"])


def append(talk: Conversation, payload: Any = b"", *, mode: Any = None, final: bool = False) -> Command:
    return talk.append(payload, mode=mode, final=final, operation_id=None, deadline_ms=None)


def receive(talk: Conversation, n: int, kind: str, body: dict[str, Any]) -> list[Reply]:
    fields: dict[bytes, Any] = {b"t": kind.encode(), b"n": b"%d" % n, b"b": msgpack.packb(body)}
    return talk.receive([(b"%d-0" % n, fields)], 0.0)


def reply_to(command: Command, accepted: Fence, *, ok: bool = True, generation: int = 0) -> dict[str, Any]:
    return {
        "control_id": command.control_id,
        "op": command.op,
        "session_id": command.session_id,
        "ok": ok,
        "code": None if ok else "failed_precondition",
        "accepted_fence": accepted._asdict(),
        "lease_generation": generation,
    }


def answer(talk: Conversation, n: int, command: Command, **keys: Any) -> list[Reply]:
    talk.outbox.expect(command)
    return receive(talk, n, "reply", reply_to(command, talk.position.fence, **keys))


@pytest.fixture
def talk() -> Conversation:
    return Conversation("s0", 7, Options(), input_modes=("append_tokens", "append_audio_chunk"))


def test_an_interrupt_cancels_the_present_fence_and_moves_on_at_once(talk: Conversation) -> None:
    append(talk, final=True)
    cancel = talk.interrupt("barge_in")
    assert fence_of(cancel) == Fence(7, 0, 0, 0)
    assert body_of(cancel)["next_fence"] == Fence(7, 1, 1, 0)._asdict()
    assert fence_of(append(talk)) == Fence(7, 1, 1, 0)


def test_i1_an_interrupt_drops_what_has_come_before_any_word_of_it(talk: Conversation) -> None:
    output = {
        "session_id": "s0",
        "request_id": "r",
        "stage_id": 0,
        "fence": talk.position.fence._asdict(),
        "seq": 0,
        "kind": "audio",
    }
    for n in (1, 2):
        receive(talk, n, "output", output)
    assert talk.inbox.take(replies=False) is not None
    talk.interrupt("barge_in")
    receive(talk, 3, "output", output)
    assert talk.inbox.take(replies=False) is None
    assert talk.inbox.dropped_locally == 2


def test_s38_a_second_interrupt_cancels_what_the_first_began(talk: Conversation) -> None:
    talk.interrupt("barge_in")
    second = talk.interrupt("response.cancel")
    assert (fence_of(second), body_of(second)["event"]) == (Fence(7, 1, 1, 0), "response.cancel")
    assert talk.position.fence == Fence(7, 2, 2, 0)


def test_only_an_input_begins_a_turn(talk: Conversation) -> None:
    append(talk, final=True)
    assert fence_of(talk.touch("heartbeat")) == Fence(7, 0, 0, 0)
    assert fence_of(talk.update({}, None)) == Fence(7, 0, 0, 0)
    assert fence_of(append(talk)) == Fence(7, 0, 1, 0)
    assert fence_of(append(talk)) == Fence(7, 0, 1, 0)
    talk.next_turn()
    assert fence_of(append(talk, final=True)) == Fence(7, 0, 2, 0)


@pytest.mark.parametrize(
    ("mine", "accepted", "expected"),
    [
        (Fence(7, 1, 4, 0), None, Fence(7, 1, 4, 0)),
        (Fence(7, 1, 4, 0), Fence(8, 9, 9, 9), Fence(7, 1, 4, 0)),
        (Fence(7, 1, 4, 0), Fence(7, 0, 9, 9), Fence(7, 1, 4, 0)),
        (Fence(7, 1, 4, 0), Fence(7, 2, 1, 0), Fence(7, 2, 1, 0)),
        (Fence(7, 1, 4, 0), Fence(7, 1, 3, 2), Fence(7, 1, 4, 2)),
        (Fence(7, 1, 4, 0), Fence(7, 1, 5, 0), Fence(7, 1, 5, 0)),
    ],
)
def test_a_fence_never_goes_back(mine: Fence, accepted: Fence | None, expected: Fence) -> None:
    position = Position(mine)
    position.catch_up(accepted)
    assert position.fence == expected


def test_a_turn_that_somebody_else_began_is_not_begun_twice() -> None:
    position = Position(Fence(0), turn_over=True)
    position.catch_up(Fence(0, 0, 1, 0))
    assert position.for_input() == Fence(0, 0, 1, 0)


def test_a_payload_that_can_not_be_written_moves_nothing(talk: Conversation) -> None:
    append(talk, final=True)
    with pytest.raises(ValueError, match="MessagePack"):
        append(talk, {"a": object()})
    with pytest.raises(ValueError, match="MessagePack"):
        append(talk, 2**64)
    assert talk.position.fence == Fence(7, 0, 0, 0)
    assert fence_of(append(talk)) == Fence(7, 0, 1, 0)


@pytest.mark.parametrize("payload", [b"\x00{", bytearray(b"\x00{"), memoryview(b"\x00{")])
def test_bytes_travel_raw(talk: Conversation, payload: Any) -> None:
    command = append(talk, payload)
    assert command.fields["p"] == b"\x00{"
    assert "payload" not in body_of(command)


@pytest.mark.parametrize("payload", [[1, 2], {"text": "hi"}, "hi", None])
def test_anything_else_travels_in_the_body(talk: Conversation, payload: Any) -> None:
    command = append(talk, payload)
    assert "p" not in command.fields
    assert body_of(command)["payload"] == payload


def test_the_mode_of_an_input_is_the_first_of_the_session_unless_said(talk: Conversation) -> None:
    assert body_of(append(talk))["mode"] == "append_tokens"
    assert body_of(append(talk, mode="append_audio_chunk"))["mode"] == "append_audio_chunk"
    assert body_of(append(Conversation("s0", 0, Options())))["mode"] == "turn_commit_only"


def test_the_lease_generation_moves_with_own_open_and_resume_only(talk: Conversation) -> None:
    answer(talk, 1, talk.open("duplex", None, None), generation=2)
    assert talk.lease_generation == 2
    answer(talk, 2, talk.touch("heartbeat"), generation=5)
    receive(
        talk,
        3,
        "lifecycle",
        {"event": "interrupted", "fence": talk.position.fence._asdict(), "lease_generation": 5},
    )
    answer(talk, 4, talk.resume(None), ok=False, generation=5)
    assert talk.lease_generation == 2
    assert body_of(talk.touch("detach"))["expected_lease_generation"] == 2
    assert "expected_lease_generation" not in body_of(talk.touch("heartbeat"))
    assert body_of(talk.resume(None))["expected_lease_generation"] == 2
    assert body_of(talk.resume(5))["expected_lease_generation"] == 5
    answer(talk, 5, talk.resume(5), generation=6)
    assert talk.lease_generation == 6


def test_a_refused_detach_leaves_it_attached(talk: Conversation) -> None:
    answer(talk, 1, talk.touch("detach"), ok=False)
    assert not talk.finished
    answer(talk, 2, talk.touch("detach"))
    assert talk.finished
    answer(talk, 3, talk.resume(None), ok=False)
    assert talk.finished
    answer(talk, 4, talk.resume(None))
    assert not talk.finished


def test_it_listens_while_there_is_something_to_hear(talk: Conversation) -> None:
    assert talk.listening
    answer(talk, 1, talk.touch("detach"))
    assert not talk.listening
    talk.outbox.expect(talk.resume(None))
    assert talk.listening


def test_a_close_that_was_answered_ends_the_session_when_nothing_more_comes(talk: Conversation) -> None:
    assert talk.receive([], 0.0) == []
    assert not talk.finished
    answer(talk, 1, talk.close("client_close"))
    assert not talk.finished
    assert talk.read_wait_s(0.0) < Options().reply_timeout_s / 2
    talk.receive([], 0.0)
    assert talk.finished


def test_a_reply_to_somebody_else_is_nobodys(talk: Conversation) -> None:
    command = talk.touch("heartbeat")
    assert receive(talk, 1, "reply", reply_to(command, Fence(7, 3, 0, 0))) == []
    assert talk.position.fence == Fence(7, 3, 0, 0)


def test_a_bookmark_is_plain_values_and_enough_to_go_on(talk: Conversation) -> None:
    answer(talk, 1, talk.open("duplex", None, None), generation=3)
    talk.interrupt("barge_in")
    assert talk.inbox.take(replies=False) is None
    bookmark = talk.bookmark()
    carried = Bookmark(**msgpack.unpackb(msgpack.packb(dataclasses.asdict(bookmark))))  # lists, not tuples
    there = Conversation.at(carried, Options())
    assert there.bookmark() == bookmark
    assert (there.position.fence, there.lease_generation) == (Fence(7, 1, 1, 0), 3)
    assert (there.inbox.event_id, there.inbox.last_n, there.inbox.floor_epoch) == ("1-0", 1, 1)
    assert body_of(append(there))["mode"] == "append_tokens"
