"""What a partition's new owner finds there, and the partition's own keys if somebody has put something else there.

Responsible for reading what a takeover needs in one round trip, and for looking at the types of the fixed keys then and
after an error, so that the commit needn't (looking costs as much as writing). Removes what isn't ours: nothing of a
session is in it, and as long as it is there the partition stands still. Leaves the sessions' own keys to the commit's
check. Talks to Redis. Keeps I11.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from redis.exceptions import RedisError

from control.store.commits import ACKS_KEY, COMMANDS_KEY
from control.store.keys import FIXED_TYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from control.store.keys import PartitionKeys
    from control.store.link import Link

log = logging.getLogger("bargein.mending")


class Legacy(Struct, frozen=True):
    """What a partition's last owner has left. `deadlines`: when each session is due (ms).

    `backlog`: the last entry of each input stream that has any, by the stream's number.
    """

    deadlines: tuple[tuple[str, int], ...]
    backlog: dict[int, str]


async def load_legacies(link: Link, partitions: Sequence[PartitionKeys]) -> list[Legacy]:
    """Of each of the partitions, their keys mended. One round trip where there is nothing to mend."""
    calls = [call for known in partitions for call in _calls(known)]
    answers = await link.try_all(calls) if calls else []
    width = len(FIXED_TYPES) + 3
    return [
        await _read(link, known, answers[width * index : width * (index + 1)]) for index, known in enumerate(partitions)
    ]


async def load_deadlines(link: Link, known: PartitionKeys) -> tuple[tuple[str, int], ...]:
    """When each of the partition's sessions is due (ms), its keys mended."""
    return (await load_legacies(link, [known]))[0].deadlines


async def mend(link: Link, known: PartitionKeys) -> list[str]:
    """Remove the partition's fixed keys that are of a wrong type; their names. One round trip where there are none."""
    return await _mend(link, known, await link.call_all(_calls(known)[: len(FIXED_TYPES)]))


async def _read(link: Link, known: PartitionKeys, answers: Sequence[Any]) -> Legacy:
    types, rest = answers[: len(FIXED_TYPES)], answers[len(FIXED_TYPES) :]
    wrong = await _mend(link, known, types)
    if wrong:
        rest = await link.call_all(_calls(known)[len(FIXED_TYPES) :])
    for answer in rest:
        if isinstance(answer, RedisError):
            raise answer
    stored, *last = rest
    if known.deadlines in wrong:
        # Every session is due at once: whoever looks at one finds its true time.
        deadlines = tuple((name.decode(), 0) for name in await link.call("HKEYS", known.sessions))
    else:
        deadlines = tuple((stored[i].decode(), int(float(stored[i + 1]))) for i in range(0, len(stored), 2))
    backlog = {
        stream: found[0][0].decode() for stream, found in zip((COMMANDS_KEY, ACKS_KEY), last, strict=True) if found
    }
    return Legacy(deadlines, backlog)


def _calls(known: PartitionKeys) -> list[tuple[Any, ...]]:
    return [
        *(("TYPE", getattr(known, attribute)) for attribute in FIXED_TYPES),
        ("ZRANGE", known.deadlines, 0, -1, "WITHSCORES"),
        *(("XREVRANGE", name, "+", "-", "COUNT", 1) for name in (known.commands, known.acks)),
    ]


async def _mend(link: Link, known: PartitionKeys, types: Sequence[Any]) -> list[str]:
    for answer in types:
        if isinstance(answer, RedisError):
            raise answer
    names = {getattr(known, attribute): kind for attribute, kind in FIXED_TYPES.items()}
    wrong = [
        name for (name, kind), found in zip(names.items(), types, strict=True) if found.decode() not in {"none", kind}
    ]
    if wrong:
        log.error("not of the type that they should be, and removed: %s", ", ".join(wrong))
        await link.call("UNLINK", *wrong)
    return wrong
