"""`bargein maintenance`: the long-lived process for upkeep and the operators' jobs.

Responsible for its settings, its logging and its end, as `run.py` is for the other processes, which need none of what
this one imports. Leaves the work to `workers/maintenance`.
"""

from __future__ import annotations

import asyncio
import logging
import os

from workers.cli.endings import plainly
from workers.cli.leaving import run_until_told
from workers.cli.logs import set_up_logging
from workers.cli.options import (
    Grace,
    JobsPasswordFile,
    JobsUrl,
    LogJson,
    LogLevel,
    MetricsHost,
    MetricsPort,
    PasswordFile,
    RedisUrl,
)
from workers.cli.run import watched
from workers.maintenance.process import Maintenance
from workers.metrics.maintenance import MaintenanceMetrics
from workers.settings import Settings, load_settings

log = logging.getLogger("bargein.process")


@plainly
def maintenance(
    redis_url: RedisUrl = None,
    redis_password_file: PasswordFile = None,
    jobs_url: JobsUrl = None,
    jobs_password_file: JobsPasswordFile = None,
    log_level: LogLevel = None,
    log_json: LogJson = None,
    grace_s: Grace = None,
    metrics_host: MetricsHost = None,
    metrics_port: MetricsPort = None,
) -> None:
    """Run maintenance: upkeep now and then, and the operators' jobs (drain, close).

    Nothing urgent depends on it. Start one, or several: each job is done by one of them at a time.
    """
    settings = load_settings(
        redis_url=redis_url,
        redis_password_file=redis_password_file,
        jobs_url=jobs_url,
        jobs_password_file=jobs_password_file,
        log_level=log_level,
        log_json=log_json,
        grace_s=grace_s,
        metrics_host=metrics_host,
        metrics_port=metrics_port,
    )
    worker = Maintenance(settings.redis, settings.jobs)
    set_up_logging(settings)
    logging.getLogger("arq").setLevel(logging.WARNING)  # each try of a job is a line of its own there
    asyncio.run(_maintenance(settings, worker))


async def _maintenance(settings: Settings, worker: Maintenance) -> None:
    log.info("maintenance (pid %d): Redis at %s, jobs at %s", os.getpid(), settings.address, settings.jobs_address)
    async with watched(MaintenanceMetrics(worker), settings):
        await run_until_told(worker.run(), worker.stop, settings.grace_s)
    log.info("maintenance has left")
