"""What a session's listener reads: replies, outputs and lifecycle events, each a MessagePack map.

Responsible for their bytes and for the shape of an output. Leaves the shape of replies and lifecycle events to
`control/core/replies.py`. Pure.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from control.core.fence import Fence

REPLY, OUTPUT, LIFECYCLE = "reply", "output", "lifecycle"


class OutputEvent(Struct, frozen=True, gc=False, kw_only=True):
    """What a model said. `seq` counts from 0 by request and stage; `data` for `audio` is mono s16le PCM bytes."""

    session_id: str
    request_id: str
    stage_id: int
    fence: Fence
    seq: int
    kind: str
    data: Any
    turn_end: bool = False
    metadata: dict[str, Any] = {}


encode_event = msgspec.msgpack.Encoder().encode
decode_event = msgspec.msgpack.Decoder().decode
