"""Every metric that only maintenance has: name, what it counts, unit, labels. Pure."""

from __future__ import annotations

from workers.metrics.metric import MAINTENANCE, Metric

UPKEEP_RUNS = Metric(
    "bargein_upkeep_runs_total",
    "counter",
    "runs",
    "Times that upkeep ran, or that an operator's job took a step.",
    ("duty", "outcome"),
    MAINTENANCE,
)
UPKEEP_FOUND = Metric(
    "bargein_upkeep_found_total",
    "counter",
    "things",
    "What upkeep found to put right: slots, lives with queues, sessions, dead letters. Slots and sessions should be 0.",
    ("duty",),
    MAINTENANCE,
)
UPKEEP_SECONDS = Metric(
    "bargein_upkeep_seconds", "histogram", "seconds", "How long a run took.", ("duty",), MAINTENANCE
)
UPKEEP_AGE = Metric(
    "bargein_upkeep_age_seconds",
    "gauge",
    "seconds",
    "Since this process last did it without an error, or began. With several processes another may have done it: "
    "look at the smallest.",
    ("duty",),
    MAINTENANCE,
)
POLL_AGE = Metric(
    "bargein_maintenance_poll_age_seconds",
    "gauge",
    "seconds",
    "Since the queue of jobs was last looked at, or since the process began.",
    (),
    MAINTENANCE,
)
