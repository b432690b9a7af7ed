"""Every metric that only stage workers have: name, what it counts, unit, labels.

Responsible for names and for the words that operators read. Leaves the numbers to `stage.py`, the rest to
`declared.py`. Pure.
"""

from __future__ import annotations

from workers.metrics.metric import STAGE, Metric

STAGE_INPUTS = Metric(
    "bargein_stage_inputs_total",
    "counter",
    "submissions",
    "Inputs: accepted or rejected by the engine; discarded, since their request was aborted; repeated by a failover; "
    "unreadable.",
    ("stage", "outcome"),
    STAGE,
)
REQUESTS_FAILED = Metric(
    "bargein_stage_requests_failed_total", "counter", "requests", "Requests that the stage lost.", ("stage",), STAGE
)
OUTPUTS = Metric(
    "bargein_outputs_total",
    "counter",
    "outputs",
    "Outputs: delivered to a session's events; forwarded to the next stage; duplicate, known already. Stale ones, "
    "which nobody hears: dropped, of an older turn; stopped, since their request or session is over; late, said by the "
    "engine after the abort.",
    ("stage", "outcome"),
    STAGE,
)
ABORTS = Metric(
    "bargein_aborts_total",
    "counter",
    "orders",
    "Abort orders: received, confirmed by the engine, failed.",
    ("stage", "outcome"),
    STAGE,
)
ABORT_SENT = Metric(
    "bargein_abort_sent_seconds",
    "histogram",
    "seconds",
    "From an abort order's entry, which is the commit that moved the fence, to the engine being asked. By the server's "
    "clock as seen here, so give or take half a round trip.",
    ("stage",),
    STAGE,
)
ABORT_CONFIRMED = Metric(
    "bargein_abort_confirmed_seconds",
    "histogram",
    "seconds",
    "From an abort order's entry to the engine holding none of its requests any more. Only of confirmed orders.",
    ("stage",),
    STAGE,
)
LIVES = Metric(
    "bargein_stage_lives_ended_total",
    "counter",
    "lives",
    "Lives of this worker that are over: left in order, fenced by others, engine_lost, broken.",
    ("stage", "ending"),
    STAGE,
)
STAGE_CAPACITY = Metric(
    "bargein_stage_capacity", "gauge", "sessions", "Sessions that this worker takes.", ("stage",), STAGE
)
STAGE_REQUESTS = Metric(
    "bargein_stage_requests",
    "gauge",
    "requests",
    "Requests that this worker knows of, idle ones too.",
    ("stage",),
    STAGE,
)
QUEUE_DEPTH = Metric(
    "bargein_stage_queue_depth",
    "gauge",
    "entries",
    "Entries read from the worker's queues and not acknowledged yet.",
    ("stage", "queue"),
    STAGE,
)
BUFFERED = Metric(
    "bargein_stage_buffered_bytes", "gauge", "bytes", "Outputs that the server has not taken yet.", ("stage",), STAGE
)
HEARTBEAT_AGE = Metric(
    "bargein_stage_heartbeat_age_seconds",
    "gauge",
    "seconds",
    "Since the server last took a heartbeat of this worker.",
    ("stage",),
    STAGE,
)
ENGINE_RUNNING = Metric(
    "bargein_engine_running",
    "gauge",
    "requests",
    "Requests that the engine works on, at the last heartbeat.",
    ("stage",),
    STAGE,
)
ENGINE_WAITING = Metric(
    "bargein_engine_waiting",
    "gauge",
    "requests",
    "Requests with input that the engine has not begun.",
    ("stage",),
    STAGE,
)
ENGINE_HELD = Metric(
    "bargein_engine_requests", "gauge", "requests", "Requests that the engine holds, idle ones too.", ("stage",), STAGE
)
ENGINE_UTILISATION = Metric(
    "bargein_engine_utilisation_ratio",
    "gauge",
    "ratio",
    "0 to 1, of whatever runs out first: KV cache, seats, real time.",
    ("stage",),
    STAGE,
)
ENGINE_ACCEPTS = Metric(
    "bargein_engine_accepts", "gauge", "0 or 1", "Whether the engine has room for one more session.", ("stage",), STAGE
)
ENGINE_LATE = Metric(
    "bargein_engine_tick_late_seconds",
    "gauge",
    "seconds",
    "How late the engine's clockwork was at its worst lately.",
    ("stage",),
    STAGE,
)
ENGINE_MISSED = Metric(
    "bargein_engine_missed_ticks_total",
    "counter",
    "forwards",
    "Forwards that took longer than they may.",
    ("stage",),
    STAGE,
)
ENGINE_MEMORY = Metric(
    "bargein_engine_memory_bytes", "gauge", "bytes", "What the requests' states hold on the device.", ("stage",), STAGE
)
