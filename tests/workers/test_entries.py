"""Stream entries as the control worker reads them: which of them hold a token, and so leave no body behind."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from control.store.commits import COMMANDS_KEY
from control.store.keys import partition_of
from control.wire.limits import Limits
from workers.entries import Entry, decode_entry

TOKEN = "a-token-of-enough-bytes"
FENCE = {"incarnation": 0, "epoch": 0, "turn_id": 0, "response_seq": 0}


def entry_of(body: bytes) -> Entry:
    return decode_entry(partition_of("Ada", 4), (COMMANDS_KEY, [b"5-0", [b"b", body]]), 4, Limits())


def touch(**more: Any) -> dict[str, Any]:
    return {
        "v": 1,
        "op": "touch",
        "control_id": "t",
        "session_id": "Ada",
        "fence": FENCE,
        "activity": "heartbeat",
        **more,
    }


@pytest.mark.parametrize("encode", [msgspec.msgpack.encode, msgspec.json.encode])
def test_a_command_with_a_token_is_secret_and_one_without_is_not(encode: Any) -> None:
    assert entry_of(encode(touch(token=TOKEN))).is_secret
    assert not entry_of(encode(touch())).is_secret


def test_what_cannot_be_read_is_secret_where_it_speaks_of_a_token() -> None:
    cut = entry_of(msgspec.msgpack.encode(touch(token=TOKEN))[:-1])
    assert (cut.unreadable is not None, cut.is_secret) == (True, True)
    other = entry_of(b"\xc1 nonsense")
    assert (other.unreadable is not None, other.is_secret) == (True, False)


def test_a_command_in_the_wrong_partition_keeps_its_token_to_itself() -> None:
    raw = (COMMANDS_KEY, [b"5-0", [b"b", msgspec.msgpack.encode(touch(token=TOKEN))]])
    lost = decode_entry((partition_of("Ada", 4) + 1) % 4, raw, 4, Limits())
    assert lost.unreadable is not None
    assert lost.is_secret
