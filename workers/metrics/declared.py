"""Every metric of a control worker, and those that every process has: name, what it counts, unit, labels.

Responsible for names and for the words that operators read. Leaves the numbers to `control.py`, the metrics of stage
workers to `declared_stage.py`, the table of all to `table.py`. Pure.
"""

from __future__ import annotations

from workers.metrics.metric import ALL, Metric

# ---- every process

BUILD_INFO = Metric("bargein_build_info", "gauge", "1", "Always 1; what runs here.", ("role", "version"), ALL)
READY = Metric("bargein_ready", "gauge", "0 or 1", "Whether /readyz says yes.", (), ALL)
CHECK = Metric("bargein_ready_check", "gauge", "0 or 1", "Each of the checks behind /readyz.", ("check",), ALL)
LOOP_LAG = Metric(
    "bargein_event_loop_lag_seconds",
    "gauge",
    "seconds",
    "How late the event loop is now, or was at its worst within the last ten seconds; whatever it does waits for that.",
    (),
    ALL,
)
REDIS_ERRORS = Metric(
    "bargein_redis_errors_total",
    "counter",
    "answers",
    "Error answers of Redis that made a part try again.",
    ("part",),
    ALL,
)
REDIS_RECONNECTS = Metric(
    "bargein_redis_reconnects_total", "counter", "connections", "Connections lost, and opened again.", ("part",), ALL
)

# ---- control workers: what they decide

COMMANDS = Metric(
    "bargein_commands_total",
    "counter",
    "replies",
    "Replies to commands, counted when their commit is confirmed. A command that is sent again is replied to again.",
    ("op", "outcome"),
)
COMMAND_SECONDS = Metric(
    "bargein_command_seconds",
    "histogram",
    "seconds",
    "From a command's entry in its stream to the commit with its reply, by the server's clock, to the millisecond. "
    "What a stage takes is in it. Not of commands that came before their partition was taken over.",
    ("op",),
)
INPUTS = Metric("bargein_inputs_total", "counter", "entries", "Stream entries handled.", ("stream",))
COMMITS = Metric(
    "bargein_commits_total", "counter", "commits", "Commits: committed, or refused and decided anew.", ("outcome",)
)
MISSING = Metric(
    "bargein_missing_entries_total", "counter", "entries", "Entries that somebody had deleted before their turn."
)
DEAD_LETTERS = Metric(
    "bargein_dead_letters_total", "counter", "entries", "Entries set aside since nobody could answer them."
)
BARGE_IN_FENCED = Metric(
    "bargein_barge_in_fenced_seconds",
    "histogram",
    "seconds",
    "From a barge-in's entry (any cancel of an open session that raises its epoch) to the commit that moves the fence, "
    "by the server's clock, to the millisecond. The same commit puts the aborts into the stages' queues and says "
    "`interrupted`: nothing older is delivered after it.",
)
BARGE_IN_CONFIRMED = Metric(
    "bargein_barge_in_confirmed_seconds",
    "histogram",
    "seconds",
    "From a barge-in's entry to the commit of the last stage's word that nothing of the cancelled requests is left. "
    "Only of those that had something to stop, and whose session didn't end before.",
)
CLEANUPS = Metric("bargein_cleanups_total", "counter", "cleanups", "Cleanups begun.", ("kind",))
CLEANUP_ATTEMPTS = Metric(
    "bargein_cleanup_attempts_total",
    "counter",
    "rounds",
    "How often the stages were asked, retries included.",
    ("kind",),
)
CLEANUP_CONFIRMATIONS = Metric(
    "bargein_cleanup_confirmations_total",
    "counter",
    "cleanups",
    "Cleanups ended since every stage worker has confirmed, or is gone.",
    ("kind",),
)
CLEANUP_JOINS = Metric(
    "bargein_cleanup_joins_total",
    "counter",
    "cleanups",
    "Cleanups that became part of the one that ends their session.",
    ("kind",),
)
CLEANUP_FAILURES = Metric(
    "bargein_cleanup_failures_total",
    "counter",
    "words of a stage worker",
    "Tries that a stage worker reported as failed; each is tried again.",
    ("kind", "reason"),
)

# ---- control workers: what they own

PARTITIONS = Metric(
    "bargein_partitions", "gauge", "partitions", "All there are. The same everywhere: take the maximum."
)
PARTITIONS_OWNED = Metric("bargein_partitions_owned", "gauge", "partitions", "Owned here.")
CONTROL_WORKERS = Metric(
    "bargein_control_workers", "gauge", "processes", "Control workers that count as alive, as seen here."
)
HANDOVERS = Metric("bargein_handovers_total", "counter", "partitions", "Partitions given up in order.")
TAKEOVERS = Metric(
    "bargein_takeovers_total", "counter", "partitions", "Partitions taken over from an owner that was gone."
)
IN_MEMORY = Metric("bargein_sessions_in_memory", "gauge", "sessions", "Sessions that the owner has loaded.")
BACKLOG = Metric(
    "bargein_backlog",
    "gauge",
    "entries",
    "Entries not applied yet, at the last sample. Appends that wait for their stage are among the commands.",
    ("partition", "stream"),
)
OLDEST_COMMAND = Metric(
    "bargein_oldest_command_age_seconds",
    "gauge",
    "seconds",
    "Age of the oldest command that is not applied, at the last sample; 0 if there is none.",
    ("partition",),
)
DEAD_LETTERS_KEPT = Metric(
    "bargein_dead_letters_kept", "gauge", "entries", "Dead letters kept, at the last sample.", ("partition",)
)
SESSIONS = Metric(
    "bargein_sessions",
    "gauge",
    "sessions",
    "Sessions of the partitions owned here, at the last census. Vacant: the id is remembered, or a slot is owed back.",
    ("phase",),
)
REQUESTS = Metric(
    "bargein_requests", "gauge", "requests", "Requests registered at the stages, at the last census.", ("state",)
)
PENDING_CLEANUPS = Metric(
    "bargein_pending_cleanups", "gauge", "cleanups", "Cleanups not confirmed yet, at the last census.", ("kind",)
)
OLDEST_CLEANUP = Metric(
    "bargein_oldest_cleanup_age_seconds",
    "gauge",
    "seconds",
    "Age of the oldest pending cleanup, at the last census; 0 if there is none.",
    ("kind",),
)
SLOTS_MISSING = Metric(
    "bargein_slots_missing",
    "gauge",
    "slots",
    "Slots that live sessions of the partitions owned here should hold and don't, in two samples in a row. Must be 0.",
)
SAMPLE_AGE = Metric(
    "bargein_sample_age_seconds", "gauge", "seconds", "How old the sample is that the figures come from.", ("sample",)
)
SAMPLE_CAPPED = Metric(
    "bargein_sample_capped",
    "gauge",
    "0 or 1",
    "1: there was more than a sample may look at; its figures are too low.",
    ("sample",),
)

# ---- only of the owner of partition 0

GLOBAL = " Only from the owner of partition 0."
STAGE_WORKERS = Metric(
    "bargein_stage_workers", "gauge", "lives", "Stage workers in the index." + GLOBAL, ("stage", "state")
)
SLOTS_USED = Metric(
    "bargein_slots_used", "gauge", "slots", "Slots taken at live and draining workers." + GLOBAL, ("stage",)
)
SLOTS_CAPACITY = Metric(
    "bargein_slots_capacity", "gauge", "slots", "Slots that live workers have." + GLOBAL, ("stage",)
)
SLOTS_UNOWNED = Metric(
    "bargein_slots_unowned",
    "gauge",
    "slots",
    "Slots minus live owners: slots taken that no session holds or owes back, in two samples in a row. Must be 0."
    + GLOBAL,
)
ADMISSION_USED = Metric(
    "bargein_admission_used", "gauge", "sessions", "Sessions counted against `max_sessions`." + GLOBAL
)
ADMISSION_LIMIT = Metric(
    "bargein_admission_limit", "gauge", "sessions", "`max_sessions`; missing where there is no limit." + GLOBAL
)
BRAKE_HELD = Metric(
    "bargein_brake_held",
    "gauge",
    "0 or 1",
    "1: more than a third of the stage fell silent at once, and nobody is given up." + GLOBAL,
    ("stage",),
)
