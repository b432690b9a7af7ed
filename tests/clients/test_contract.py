"""The producer's idea of the wire against the workers' own: neither shares code with the other."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from bargein_client import protocol
from bargein_client.conversation import Conversation
from bargein_client.errors import ERROR_BY_CODE
from bargein_client.mailbox import Options
from control.core import commands, replies
from control.core.fence import Fence
from control.core.lease import Activity
from control.core.rejections import Code
from control.core.tokens import digest_token
from control.store import keys
from control.wire.commands import decode_command
from control.wire.events import OutputEvent, encode_event
from control.wire.limits import TOKEN_MIN_BYTES, Limits

FENCE = Fence(incarnation=1, epoch=2, turn_id=3, response_seq=4)
TOKEN = "sixteen bytes or möre"
TALK = Conversation("s0", 1, Options(), input_modes=("append_tokens",))
INPUT: dict[str, Any] = {"mode": None, "final": True, "operation_id": "o", "deadline_ms": 5}


def received(command: protocol.Command) -> Any:
    return decode_command(command.fields["b"], command.fields.get("p"))


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (TALK.open("turn", {"voice": "b"}, None), commands.Open),
        (TALK.append([1], **INPUT), commands.Append),
        (TALK.append(None, **INPUT), commands.Append),
        (TALK.append(b"\x00{", **INPUT), commands.Append),
        (TALK.interrupt("barge_in"), commands.Cancel),
        (TALK.interrupt("input.cancel"), commands.Cancel),
        (TALK.interrupt("response.cancel"), commands.Cancel),
        (TALK.update(None, {"t": 1}), commands.Update),
        (TALK.touch("detach"), commands.Touch),
        (TALK.touch("heartbeat"), commands.Touch),
        (TALK.resume(None), commands.Resume),
        (TALK.close("client_close"), commands.Close),
    ],
)
def test_every_command_is_understood(command: protocol.Command, kind: type[commands.Command]) -> None:
    understood = received(command).command
    assert type(understood) is kind
    assert (understood.control_id, understood.session_id) == (command.control_id, "s0")
    assert understood.fence.incarnation == 1


def test_a_token_arrives_as_the_workers_digest_it() -> None:
    talk = Conversation("s0", 1, Options(), input_modes=("append_tokens",), token=TOKEN)
    for command in (talk.open("duplex", None, None), talk.append([1], **INPUT), talk.close("client_close")):
        assert received(command).command.token == digest_token(TOKEN.encode())
    assert (TOKEN_MIN_BYTES, Limits().token_bytes) == (protocol.TOKEN_MIN_BYTES, protocol.TOKEN_MAX_BYTES)


def test_what_a_command_says_arrives() -> None:
    talk = Conversation("s0", 1, Options(), input_modes=("append_tokens",))
    opened = received(talk.open("turn", {"voice": "b"}, None)).command
    assert (opened.session_mode, opened.capabilities.input_modes) == ("turn", ["append_tokens"])
    assert opened.session_config == {"voice": "b"}
    first = received(talk.append(b"abc", **INPUT)).command
    assert (first.mode, first.final, first.operation_id, first.deadline_ms) == ("append_tokens", True, "o", 5)
    assert first.payload_bytes == 3
    cancel = received(talk.interrupt("barge_in")).command
    assert (cancel.event, cancel.next_fence.epoch, cancel.next_fence.turn_id) == ("barge_in", 1, 1)
    assert received(talk.touch("detach")).command.expected_lease_generation == 0


@pytest.mark.parametrize(
    ("kind", "sent", "expected"),
    [
        (
            "reply",
            replies.Reply(
                control_id="c",
                op="append",
                session_id="s0",
                ok=False,
                code="timeout",
                message="why",
                retryable=True,
                fence=FENCE,
                accepted_fence=FENCE,
                lease_generation=3,
            ),
            protocol.Reply(
                "c",
                "append",
                "s0",
                False,
                "timeout",
                "why",
                True,
                protocol.Fence(1, 2, 3, 4),
                protocol.Fence(1, 2, 3, 4),
                3,
            ),
        ),
        (
            "output",
            OutputEvent(session_id="s0", request_id="r", stage_id=1, fence=FENCE, seq=5, kind="audio", data=b"\xff"),
            protocol.Output("s0", "r", 1, protocol.Fence(1, 2, 3, 4), 5, "audio", b"\xff"),
        ),
        (
            "lifecycle",
            replies.Lifecycle(event="expired", session_id="s0", fence=FENCE, lease_generation=3, reason="x"),
            protocol.Lifecycle("expired", "x", protocol.Fence(1, 2, 3, 4), 3),
        ),
    ],
)
def test_every_event_is_understood(kind: str, sent: Any, expected: Any) -> None:
    assert protocol.decode_entry({b"t": kind.encode(), b"n": b"9", b"b": encode_event(sent)}) == (9, expected)


def test_both_sides_have_the_same_words() -> None:
    assert set(ERROR_BY_CODE) == {code.value for code in Code}
    assert set(get_args(protocol.CancelKind)) == set(commands.CANCEL_EVENTS)
    assert set(get_args(protocol.Activity)) == {activity.value for activity in Activity}
    terminal = {name for name in ("opened", *replies.TERMINAL_EVENTS) if _is_terminal(name)}
    assert terminal == replies.TERMINAL_EVENTS


@pytest.mark.parametrize("session_id", ["s0", "电话", "a b{c}", "x" * 128])
def test_both_sides_have_the_same_partitions(session_id: str) -> None:
    assert protocol.partition_of(session_id, 16) == keys.partition_of(session_id, 16)


def _is_terminal(event: str) -> bool:
    return protocol.Lifecycle(event, None, protocol.Fence(0), 0).terminal
