"""`bargein drain`, `close` and `jobs`: what takes longer than a command should, done by maintenance.

Responsible for giving a job, and for following it. Leaves doing it to `workers/maintenance`. Ctrl-C ends only the
following. Status 1 if the job fails or is cancelled, or is left to itself; 4 if no maintenance process takes it.
"""

from __future__ import annotations

import asyncio
import difflib
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from control.store import inspect, lives
from control.wire.orders import REASON
from workers.cli.endings import Failure, Status, connected, plainly
from workers.cli.leaving import run_until_interrupted
from workers.cli.listening import require_partitions
from workers.cli.options import AsJson, JobsPasswordFile, JobsUrl, PasswordFile, RedisUrl
from workers.cli.output import make_console, note, print_json, print_table, spell_ms
from workers.maintenance.arq_jobs import open_queue, submit
from workers.maintenance.record import Job, JobState, JobStore
from workers.maintenance.steps import CLOSED
from workers.maintenance.where import HELP, Condition, WhereError, is_meant, parse_length_ms, parse_where
from workers.settings import load_settings

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from redis.asyncio import Redis

    from workers.settings import Settings

LOOK_S = 0.3
# A maintenance process looks twice a second, and one that was killed keeps a job from the others for about a minute.
TAKEN_S = 10.0
SAID_S = 5.0
SHOWN = 20

Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Follow the job to its end")]


@dataclass(frozen=True, slots=True)
class _Desk:
    """`redis`: of the sessions."""

    redis: Redis
    store: JobStore
    queue: Any


@plainly
def drain(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="A stage worker, as `bargein workers` names it")],
    grace: Annotated[
        str, typer.Option("--grace", help="How long its sessions may end by themselves: 30s, 10m, 2h; 0s: not at all")
    ] = "10m",
    undo: Annotated[bool, typer.Option("--undo", help="Have it take sessions again instead")] = False,
    wait: Wait = True,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
    redis_password_file: PasswordFile = None,
    jobs_url: JobsUrl = None,
    jobs_password_file: JobsPasswordFile = None,
) -> None:
    """Empty a stage worker: it takes no more sessions; those that it has may end by themselves for the grace time.

    Then they are ended, as worker_drained. The worker stays and takes nothing: stop it, or --undo.
    Counted from the first time that this was asked for; asking again changes the grace time.
    """
    try:
        grace_ms = parse_length_ms(grace)
    except WhereError as error:
        raise Failure(f"--grace: {error}", Status.SETTINGS) from None
    settings = _settings(redis_url, redis_password_file, jobs_url, jobs_password_file)

    async def work() -> Status:
        async with _desk(settings) as desk:
            await _require_worker(desk.redis, worker)
            if undo:
                job = await desk.store.find(f"drain-{worker}")
                if job is not None and not job.is_over:
                    await desk.store.cancel(job.job_id)
                found = await lives.end_drain(desk.redis, worker)
                note(f"{worker} takes sessions again" if found else f"{worker} wasn't to be emptied")
                return Status.OK
            # At once, and not only when a maintenance process comes by.
            await lives.order_drain(desk.redis, worker)
            job = await desk.store.give("drain", {"worker": worker, "grace_ms": grace_ms}, only=worker)
            return await _see_to(desk, job, wait=wait, as_json=as_json)

    _run(work())


@plainly
def close(
    where: Annotated[
        list[str] | None, typer.Option("--where", help=f"A condition; all must hold. {HELP}", show_default=False)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All sessions, instead of --where")] = False,
    reason: Annotated[str, typer.Option("--reason", help="What their listeners hear, a word")] = CLOSED,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show which it would be")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask")] = False,
    wait: Wait = True,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
    redis_password_file: PasswordFile = None,
    jobs_url: JobsUrl = None,
    jobs_password_file: JobsPasswordFile = None,
) -> None:
    """End the sessions that fulfil all conditions when the job looks, whether their clients want it or not.

    bargein close --where 'worker=thinker-*' --where 'idle>10m'
    """
    if bool(where) == everything:
        raise Failure("close: say which sessions, with --where, or --all", Status.SETTINGS)
    if not re.fullmatch(REASON, reason):
        message = f"--reason: is {reason!r}; it must be a word of small letters, digits and _, at most 64"
        raise Failure(message, Status.SETTINGS)
    try:
        conditions = parse_where(where or ())
    except WhereError as error:
        raise Failure(f"--where: {error}", Status.SETTINGS) from None
    settings = _settings(redis_url, redis_password_file, jobs_url, jobs_password_file)

    async def work() -> Status:
        async with _desk(settings) as desk:
            if dry_run or not yes:
                rows = await _find_meant(desk.redis, settings, conditions)
                if dry_run and as_json:
                    print_json(rows)
                    return Status.OK
                _show_meant(rows)
                if dry_run or not rows:
                    return Status.OK
                if not make_console(stderr=True).is_terminal:
                    raise Failure("close: nobody can be asked here; say --yes", Status.SETTINGS)
                if not typer.confirm(f"End {len(rows)} sessions?", err=True):
                    return Status.REFUSED
            job = await desk.store.give("close", {"where": where or [], "reason": reason})
            return await _see_to(desk, job, wait=wait, as_json=as_json)

    _run(work())


app = typer.Typer(add_completion=False, rich_markup_mode="rich", no_args_is_help=False, invoke_without_command=True)


@app.callback(invoke_without_command=True)
@plainly
def ls(
    context: typer.Context,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1_000, help="How many to show at most")] = 50,
    as_json: AsJson = False,
    jobs_url: JobsUrl = None,
    jobs_password_file: JobsPasswordFile = None,
) -> None:
    """The jobs, newest first; each is kept for a week."""
    if context.invoked_subcommand is not None:
        return

    async def work(store: JobStore) -> Status:
        jobs = await store.list(limit)
        if as_json:
            print_json(jobs)
            return Status.OK
        now_ms = time.time_ns() // 1_000_000
        print_table(
            "jobs",
            ["JOB", "STATE", "GIVEN", "CHANGED", "DONE>", "OF>", "HOW IT GOES"],
            [
                [j.job_id, j.state, _ago(now_ms, j.given_ms), _ago(now_ms, j.changed_ms), j.done, j.total, j.message]
                for j in jobs
            ],
            empty="no jobs",
        )
        return Status.OK

    _run_beside_jobs(work, jobs_url, jobs_password_file)


@app.command()
@plainly
def follow(
    job_id: Annotated[str, typer.Argument(metavar="JOB", help="As `bargein jobs` names it")],
    as_json: AsJson = False,
    jobs_url: JobsUrl = None,
    jobs_password_file: JobsPasswordFile = None,
) -> None:
    """Follow a job to its end."""

    async def work(store: JobStore) -> Status:
        return await _follow(store, await _require_job(store, job_id), as_json=as_json)

    _run_beside_jobs(work, jobs_url, jobs_password_file)


@app.command()
@plainly
def cancel(
    job_id: Annotated[str, typer.Argument(metavar="JOB", help="As `bargein jobs` names it")],
    jobs_url: JobsUrl = None,
    jobs_password_file: JobsPasswordFile = None,
) -> None:
    """End a job before its next step. What it has done stays done; a worker that was to be emptied still is."""

    async def work(store: JobStore) -> Status:
        job = await _require_job(store, job_id)
        if job.is_over:
            raise Failure(f"job {job_id} is over: {job.state}: {job.message}")
        await store.cancel(job_id)
        note(f"job {job_id} ends before its next step")
        return Status.OK

    _run_beside_jobs(work, jobs_url, jobs_password_file)


def _settings(
    redis_url: str | None, redis_password_file: Path | None, jobs_url: str | None, jobs_password_file: Path | None
) -> Settings:
    return load_settings(
        redis_url=redis_url,
        redis_password_file=redis_password_file,
        jobs_url=jobs_url,
        jobs_password_file=jobs_password_file,
    )


def _run_beside_jobs(
    work: Callable[[JobStore], Awaitable[Status]], jobs_url: str | None, jobs_password_file: Path | None
) -> None:
    """What needs only the server of the jobs."""
    settings = _settings(None, None, jobs_url, jobs_password_file)

    async def run() -> Status:
        async with connected(settings, jobs=True) as redis:
            return await work(JobStore(redis))

    _run(run())


def _run(work: Any) -> None:
    status = Status.REFUSED

    async def run() -> None:
        nonlocal status
        status = await work

    asyncio.run(run_until_interrupted(run()))
    if status:
        raise typer.Exit(int(status))


@asynccontextmanager
async def _desk(settings: Settings) -> AsyncGenerator[_Desk]:
    async with connected(settings) as redis, connected(settings, jobs=True) as jobs:
        yield _Desk(redis, JobStore(jobs), open_queue(cast("Any", jobs.connection_pool)))


async def _require_worker(redis: Redis, worker: str) -> None:
    names = sorted(life.worker_id for life in await lives.fetch_lives(redis) if life.state is not lives.LifeState.DEAD)
    if worker not in names:
        close_by = difflib.get_close_matches(worker, names, 3, 0.4) or names[:10]
        known = f"did you mean {', '.join(close_by)}?" if close_by else "there is none at all"
        raise Failure(f"there is no stage worker {worker!r}: {known}")


async def _require_job(store: JobStore, job_id: str) -> Job:
    job = await store.find(job_id)
    if job is None:
        raise Failure(f"there is no job {job_id!r}; `bargein jobs` lists them")
    return job


async def _find_meant(redis: Redis, settings: Settings, conditions: tuple[Condition, ...]) -> list[inspect.SessionRow]:
    found: dict[str, inspect.SessionRow] = {}
    for partition in range(await require_partitions(redis, settings)):
        async for rows in inspect.walk_sessions(redis, partition):
            found.update({r.session_id: r for r in rows if r.phase in {"open", "closing"} and is_meant(r, conditions)})
    return [found[name] for name in sorted(found)]


def _show_meant(rows: list[inspect.SessionRow]) -> None:
    print_table(
        "sessions to be ended",
        ["SESSION", "P>", "PHASE", "IDLE>", "DETACHED>", "ROUTE"],
        [
            [r.session_id, r.partition, r.phase, spell_ms(r.idle_ms), spell_ms(r.detached_ms), " ".join(r.route)]
            for r in rows[:SHOWN]
        ],
        empty="no session fulfils that",
    )
    if len(rows) > SHOWN:
        note(f"and {len(rows) - SHOWN} more")


async def _see_to(desk: _Desk, job: Job, *, wait: bool, as_json: bool) -> Status:
    await submit(desk.queue, job.job_id)
    if not wait:
        if as_json:
            print_json(job)
        else:
            print(job.job_id)
        return Status.OK
    return await _follow(desk.store, job, as_json=as_json)


async def _follow(store: JobStore, job: Job, *, as_json: bool) -> Status:
    try:
        job = await _until_over(store, job)
    except asyncio.CancelledError:
        note(f"job {job.job_id} goes on without you: bargein jobs follow {job.job_id}")
        raise
    if as_json:
        print_json(job)
    else:
        print(f"{job.state}: {job.message}")
    return Status.OK if job.state is JobState.DONE else Status.REFUSED


async def _until_over(store: JobStore, job: Job) -> Job:
    console = make_console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    shown: AbstractContextManager[Any] = bar if console.is_terminal else nullcontext()
    began_s = said_s = time.monotonic()
    said = ""
    with shown:
        task = bar.add_task(job.message or job.job_id, total=None)
        while not job.is_over:
            await asyncio.sleep(LOOK_S)
            job = await _require_job(store, job.job_id)
            now_s = time.monotonic()
            if job.state is JobState.QUEUED and now_s - began_s > TAKEN_S:
                raise Failure(
                    f"no maintenance process has taken job {job.job_id} in {TAKEN_S:g} s; is one running "
                    "(bargein maintenance)? The job stays on the queue",
                    Status.NO_REPLY,
                )
            bar.update(task, description=job.message or job.state, total=job.total or None, completed=job.done)
            if not console.is_terminal and job.message != said and now_s - said_s > SAID_S:
                note(f"{job.job_id}: {job.message}")
                said, said_s = job.message, now_s
    return job


def _ago(now_ms: int, then_ms: int) -> str:
    return f"{spell_ms(max(0, now_ms - then_ms))} ago"
