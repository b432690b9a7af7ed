"""The options that several commands have, each with the name of its setting in `workers/settings.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RedisUrl = Annotated[
    str | None,
    typer.Option(
        "--redis-url",
        help="Where Redis is, without a password. Else BARGEIN_REDIS_URL, else redis://127.0.0.1:6379/0",
        show_default=False,
    ),
]
PasswordFile = Annotated[
    Path | None,
    typer.Option(
        "--redis-password-file",
        help="A file with Redis' password. Else BARGEIN_REDIS_PASSWORD_FILE",
        show_default=False,
    ),
]
JobsUrl = Annotated[
    str | None,
    typer.Option(
        "--jobs-url",
        help="Where the jobs are, without a password; not a cluster. Else BARGEIN_JOBS_URL, else with the sessions",
        show_default=False,
    ),
]
JobsPasswordFile = Annotated[
    Path | None,
    typer.Option(
        "--jobs-password-file",
        help="A file with the password of that Redis. Else BARGEIN_JOBS_PASSWORD_FILE",
        show_default=False,
    ),
]
PipelineFile = Annotated[
    Path | None,
    typer.Option(
        "--pipeline", help="The pipeline file. Else BARGEIN_PIPELINE, else the one that is shipped", show_default=False
    ),
]
LogLevel = Annotated[
    str | None,
    typer.Option(
        "--log-level", help="debug, info, warning or error. Else BARGEIN_LOG_LEVEL, else info", show_default=False
    ),
]
LogJson = Annotated[
    bool | None,
    typer.Option("--log-json/--log-text", help="Log as JSON lines. Else BARGEIN_LOG_JSON", show_default=False),
]
Grace = Annotated[
    float | None,
    typer.Option(
        "--grace-s",
        help="How long leaving may take after a SIGTERM (s). Else BARGEIN_GRACE_S, else 30",
        show_default=False,
    ),
]
MetricsHost = Annotated[
    str | None,
    typer.Option(
        "--metrics-host",
        help="The address for /metrics, /healthz and /readyz. Else BARGEIN_METRICS_HOST, else 127.0.0.1",
        show_default=False,
    ),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        "--metrics-port",
        help="Their port, 0 for a free one, which is logged. Else BARGEIN_METRICS_PORT, else there are none",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]
