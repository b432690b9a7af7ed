"""Every key that Bargein has in Redis, in one place: name, type, lifetime, who writes it.

Responsible for names only. A partition's keys share the hash tag `{<p>}`, so that one script can change them together
on Redis Cluster as well; a stage worker's own keys share `{w:<id>}`. The jobs, and arq's own `arq:*`, may be on a
server of their own. Only `config`, `commands` and `events` are for producers; the rest is the project's own and may
change with the stored layout's version.

| key | type | what | written by | lives |
|---|---|---|---|---|
| `bargein:config` | hash | `protocol`, `partitions`, `layout` | the first process | for ever |
| `bargein:controls` | zset | control worker id -> alive until (ms) | control workers | while any runs |
| `bargein:ownership` | stream | hints that ownership may move now | control workers | 16 entries |
| `bargein:stages` | hash | stage worker id -> stage, capacity, engine | stage workers | until nobody is placed on it |
| `bargein:{w:<id>}:drain` | string | since when it is to take no more (ms) | an operator | an hour past a beat |
| `bargein:brake:<stage>` | string | there: silent workers of the stage may be given up | an operator | 10 minutes |
| `bargein:{w:<id>}` | hash | `state`, `beat`, `capacity`, load | stage worker; `dead`: owner | an hour past a beat |
| `bargein:{w:<id>}:slots` | hash | session id -> `<incarnation> <token number>` | owners | while held |
| `bargein:{w:<id>}:owners` | hash | partition -> `<highest token number> <last call>` for a slot | owners | a day |
| `bargein:{admission}:slots` | hash | the same as a worker's, for the limit of sessions | owners | while held |
| `bargein:{admission}:owners` | hash | likewise | owners | a day |
| `bargein:jobs` | zset | an operator's job -> when it was given (ms) | operators, maintenance | 1,000 jobs |
| `bargein:job:<job>` | hash | `arguments`; `record`: how it goes; `cancel` | operators, maintenance | a week |
| `bargein:job:<job>:targets` | hash | session id -> incarnation | maintenance | a week |
| `bargein:{p}:owner` | hash | `token`, `holder`, `revision`; after a crash `handling` | owners | for ever |
| `bargein:{p}:commands` | stream | what producers want | producers; deleted by the commit | until applied |
| `bargein:{p}:acks` | stream | what stages say | stage workers; deleted by the commit | until applied |
| `bargein:{p}:orders` | stream | what operators and upkeep want | they; deleted by the commit | until applied |
| `bargein:{p}:dead` | stream | entries that nobody could answer | owner | 10,000 entries |
| `bargein:{p}:sessions` | hash | session id -> state | owner | an hour past the session's end |
| `bargein:{p}:fences` | hash | session id -> what scripts check | owner | while open or closing |
| `bargein:{p}:cleanups` | hash | session id -> pending cleanups | owner | until confirmed |
| `bargein:{p}:deadlines` | zset | session id -> due (ms), never later than the true time | owner | with the session |
| `bargein:{p}:marks` | hash | session id -> events, bytes, where to trim | owner, publish | while open or closing |
| `bargein:{p}:heard` | hash | session id -> last delivered output (ms) | publish | while open or closing |
| `bargein:{p}:outputs` | hash | request id -> last output number | publish | until released |
| `bargein:{p}:fenced` | set | stage workers whose life is over | owner | a day past the end |
| `bargein:{p}:strangers` | zset | session ids without a session -> their events' end (ms) | owner | a minute |
| `bargein:{p}:events:<session>` | stream | what its listener reads | owner, publish | 5 minutes past the end |
| `bargein:{p}:answers:<session>` | list | what was answered, oldest first | owner | 5 minutes past the end |
| `bargein:{p}:submissions:<worker>` | stream | input for that life of a stage worker | owner, publish | with `stages` |
| `bargein:{p}:aborts:<worker>` | stream | what that life has to stop | owner | with `stages` |
"""

from __future__ import annotations

from zlib import crc32

PREFIX = "bargein"

# What the commit writes without looking at the type first, by the name of its attribute in `PartitionKeys`.
FIXED_TYPES = {
    "owner": "hash",
    "commands": "stream",
    "acks": "stream",
    "orders": "stream",
    "dead": "stream",
    "sessions": "hash",
    "fences": "hash",
    "cleanups": "hash",
    "deadlines": "zset",
    "marks": "hash",
    "heard": "hash",
    "outputs": "hash",
    "strangers": "zset",
    "fenced": "set",
}

CONFIG = f"{PREFIX}:config"
CONTROLS = f"{PREFIX}:controls"
OWNERSHIP = f"{PREFIX}:ownership"
STAGES = f"{PREFIX}:stages"
JOBS = f"{PREFIX}:jobs"
ADMISSION_SLOTS = f"{PREFIX}:{{admission}}:slots"
ADMISSION_OWNERS = f"{PREFIX}:{{admission}}:owners"
# The limit of sessions has no life of its own to check; the script finds an empty hash there.
ADMISSION_STATE = f"{PREFIX}:{{admission}}"


def partition_of(session_id: str, partitions: int) -> int:
    """The partition that a session belongs to for good."""
    return crc32(session_id.encode()) % partitions


def worker_state(worker_id: str) -> str:
    """A stage worker's own record."""
    return f"{PREFIX}:{{w:{worker_id}}}"


def worker_slots(worker_id: str) -> str:
    """Who holds a slot at a stage worker."""
    return f"{PREFIX}:{{w:{worker_id}}}:slots"


def worker_owners(worker_id: str) -> str:
    """Which owners have asked a stage worker for slots."""
    return f"{PREFIX}:{{w:{worker_id}}}:owners"


def worker_drain(worker_id: str) -> str:
    """Exists: the worker is to be emptied."""
    return f"{PREFIX}:{{w:{worker_id}}}:drain"


def brake(stage: str) -> str:
    """Exists: the stage's brake is released."""
    return f"{PREFIX}:brake:{stage}"


def job(job_id: str) -> str:
    """An operator's job."""
    return f"{PREFIX}:job:{job_id}"


def job_targets(job_id: str) -> str:
    """The sessions that an operator's job still has to see to."""
    return f"{PREFIX}:job:{job_id}:targets"


class PartitionKeys:
    """The keys of one partition."""

    __slots__ = (
        "_events",
        "_stem",
        "acks",
        "cleanups",
        "commands",
        "dead",
        "deadlines",
        "fenced",
        "fences",
        "heard",
        "marks",
        "orders",
        "outputs",
        "owner",
        "partition",
        "sessions",
        "strangers",
    )

    def __init__(self, partition: int) -> None:
        """`partition`: 0 to the number of partitions less one."""
        self.partition = partition
        self._stem = stem = f"{PREFIX}:{{{partition}}}:"
        self._events = stem + "events:"
        self.owner = stem + "owner"
        self.commands = stem + "commands"
        self.acks = stem + "acks"
        self.orders = stem + "orders"
        self.dead = stem + "dead"
        self.sessions = stem + "sessions"
        self.fences = stem + "fences"
        self.cleanups = stem + "cleanups"
        self.deadlines = stem + "deadlines"
        self.marks = stem + "marks"
        self.heard = stem + "heard"
        self.outputs = stem + "outputs"
        self.fenced = stem + "fenced"
        self.strangers = stem + "strangers"

    def events(self, session_id: str) -> str:
        """The session's one stream for its listener."""
        return self._events + session_id

    def answers(self, session_id: str) -> str:
        """The session's memory of answers."""
        return f"{self._stem}answers:{session_id}"

    def submissions(self, worker_id: str) -> str:
        """The worker's input queue for this partition's sessions."""
        return f"{self._stem}submissions:{worker_id}"

    def aborts(self, worker_id: str) -> str:
        """The worker's abort queue for this partition's sessions; read first."""
        return f"{self._stem}aborts:{worker_id}"
