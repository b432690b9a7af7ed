"""The fence: which life, epoch, turn and response of a session a message belongs to.

Responsible for comparing fences. Leaves to `session.py` which fence is the accepted one, and to the scripts
in `control/store/lua` the same comparison beside the stored record. Pure.

The comparison is by component, not by tuple: within an epoch a message is stale as soon as its turn *or* its
response lies behind. Only an epoch that is higher makes lower turns and responses acceptable again.
"""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

# Lua and JSON hold integers exactly up to here; scripts compare fences as numbers.
MAX_COMPONENT = 2**53 - 1

Component = Annotated[int, Meta(ge=0, le=MAX_COMPONENT)]


class Fence(Struct, frozen=True, gc=False):
    """A position in a session's life. Encoded as a map, so that it reads the same on the wire and at rest."""

    incarnation: Component
    epoch: Component
    turn_id: Component
    response_seq: Component

    @property
    def key(self) -> tuple[int, int, int]:
        """`(epoch, turn_id, response_seq)`: the order of cancels, which compare as tuples."""
        return (self.epoch, self.turn_id, self.response_seq)


class Relation(StrEnum):
    """How a fence stands to the accepted one."""

    CURRENT = "current"
    AHEAD = "ahead"
    STALE = "stale"
    FOREIGN = "foreign"


def relate(accepted: Fence, fence: Fence) -> Relation:
    """How `fence` stands to `accepted`, for two fences of one session id."""
    if fence.incarnation != accepted.incarnation:
        return Relation.FOREIGN
    if fence.epoch != accepted.epoch:
        return Relation.AHEAD if fence.epoch > accepted.epoch else Relation.STALE
    if fence.turn_id < accepted.turn_id or fence.response_seq < accepted.response_seq:
        return Relation.STALE
    if fence.turn_id == accepted.turn_id and fence.response_seq == accepted.response_seq:
        return Relation.CURRENT
    return Relation.AHEAD


def is_acceptable(accepted: Fence, fence: Fence) -> bool:
    """Whether a command with `fence` may act: current or ahead, never stale or foreign."""
    if fence.incarnation != accepted.incarnation:
        return False
    if fence.epoch != accepted.epoch:
        return fence.epoch > accepted.epoch
    return fence.turn_id >= accepted.turn_id and fence.response_seq >= accepted.response_seq
