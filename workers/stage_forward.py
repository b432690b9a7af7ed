"""From an engine's output to what is published: an event for the listener, or input for the route's next stage.

Responsible for the policy's `decide_output`, for numbering outputs and for the form in which one stage hands its
output to the next. Leaves sending to `stage_outbox.py`. Pure. Says no with whatever the policy or the encoding raises;
then nothing was numbered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec import Struct

from control.core.requests import request_id
from control.store.publishing import Outgoing
from control.wire.commands import Unreadable
from control.wire.events import OutputEvent, encode_event
from control.wire.stage import SubmissionOrder, encode
from stages.engine import Output, OutputKind
from stages.policy import OutputAction, OutputDecision
from stages.tensors import pack_extension, unpack_extension

if TYPE_CHECKING:
    from workers.stage_lanes import Input, Lane
    from workers.stage_setup import StageSetup


class Forwarded(Struct, frozen=True, array_like=True):
    """An output on its way to the next stage: the payload of its submission. `final` in the order is its turn's end."""

    kind: str
    data: Any
    metadata: dict[str, Any] = {}


class Parcel(Struct, frozen=True):
    """An output ready to be sent. `generation`: of the configuration that goes with it, -1 if none does."""

    outgoing: Outgoing
    generation: int = -1


_forwarded = msgspec.msgpack.Decoder(Forwarded, ext_hook=unpack_extension)
_pack = msgspec.msgpack.Encoder(enc_hook=pack_extension).encode


def wrap_output(setup: StageSetup, lane: Lane, output: Output) -> Parcel:
    """Number an output of `lane` and make it ready to be sent."""
    stage_id, final_stage_id = setup.stage_id, setup.final_stage_id
    decision = cast(
        "object",
        setup.policy.decide_output(stage_id=stage_id, final_stage_id=final_stage_id, output=output),
    )
    metadata = output.metadata
    if decision is not None:
        if not isinstance(decision, OutputDecision) or decision.action != OutputAction.DIRECT_RESPONSE:
            raise TypeError(f"the policy's decide_output must return None or an OutputDecision, not {decision!r:.80}")
        metadata = {**metadata, **decision.metadata}
    if decision is not None or stage_id == final_stage_id:
        parcel = _event(stage_id, lane, output, metadata)
    else:
        parcel = _forward(stage_id, lane, output)
    lane.next_number += 1
    return parcel


def unwrap_output(item: Input) -> Output:
    """The output of the stage before that an input carries. Raises `Unreadable`."""
    order = item.order
    fence = order.fence
    try:
        forwarded = _forwarded.decode(item.payload)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise Unreadable(f"no output of another stage: {error}") from error
    return Output(
        request_id=request_id(order.session_id, fence.incarnation, fence.epoch, order.stage_id - 1),
        fence=fence,
        kind=cast("OutputKind", forwarded.kind),
        data=forwarded.data,
        turn_end=order.final,
        metadata=forwarded.metadata,
    )


def _event(stage_id: int, lane: Lane, output: Output, metadata: dict[str, Any]) -> Parcel:
    event = OutputEvent(
        session_id=lane.session_id,
        request_id=lane.request_id,
        stage_id=stage_id,
        fence=output.fence,
        seq=lane.next_number,
        kind=output.kind,
        data=output.data,
        turn_end=output.turn_end,
        metadata=metadata,
    )
    outgoing = Outgoing(lane.session_id, lane.request_id, output.fence, lane.next_number, encode_event(event))
    return Parcel(outgoing)


def _forward(stage_id: int, lane: Lane, output: Output) -> Parcel:
    turn = lane.turn_of(output.fence.key)
    config = b"" if lane.sent_generation == lane.generation else lane.config
    order = SubmissionOrder(
        session_id=lane.session_id,
        stage_id=stage_id + 1,
        fence=output.fence,
        number=0,
        seq=lane.forwarded,
        turn_seq=turn.forwarded,
        mode=turn.mode,
        final=output.turn_end,
        resumed=lane.forwarded > 0,
        generation=lane.generation,
        config=config,
        route=lane.route,
        packed=True,
        traceparent=lane.traceparent,
    )
    outgoing = Outgoing(
        session_id=lane.session_id,
        request_id=lane.request_id,
        fence=output.fence,
        number=lane.next_number,
        body=encode(order),
        next_worker=lane.route[stage_id + 1],
        payload=_pack(Forwarded(output.kind, output.data, output.metadata)),
    )
    lane.forwarded += 1
    turn.forwarded += 1
    return Parcel(outgoing, lane.generation if config else -1)
