"""A partition's own keys, if somebody has put something else under their names.

Responsible for looking at their types at a takeover and after an error, so that the commit needn't (looking costs as
much as writing), and for removing what isn't ours: nothing of a session is in it, and as long as it is there the
partition stands still. Leaves the sessions' own keys to the commit's check. Talks to Redis. Keeps I11.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from control.store.keys import FIXED_TYPES

if TYPE_CHECKING:
    from control.store.keys import PartitionKeys
    from control.store.link import Link

log = logging.getLogger("bargein.mending")


async def load_deadlines(link: Link, known: PartitionKeys) -> tuple[tuple[str, int], ...]:
    """When each of the partition's sessions is due (ms), its keys mended.

    Where that was lost, every session is due at once: whoever looks at one finds its true time.
    """
    if known.deadlines in await mend(link, known):
        return tuple((name.decode(), 0) for name in await link.call("HKEYS", known.sessions))
    stored = await link.call("ZRANGE", known.deadlines, 0, -1, "WITHSCORES")
    return tuple((stored[i].decode(), int(float(stored[i + 1]))) for i in range(0, len(stored), 2))


async def mend(link: Link, known: PartitionKeys) -> list[str]:
    """Remove the partition's fixed keys that are of a wrong type; their names. One round trip where there are none."""
    names: dict[str, str] = {getattr(known, attribute): kind for attribute, kind in FIXED_TYPES.items()}
    found = await link.call_all([("TYPE", name) for name in names])
    wrong = [
        name for (name, kind), answer in zip(names.items(), found, strict=True) if answer.decode() not in {"none", kind}
    ]
    if wrong:
        log.error("not of the type that they should be, and removed: %s", ", ".join(wrong))
        await link.call("UNLINK", *wrong)
    return wrong
