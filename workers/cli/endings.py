"""How a command ends: the exit statuses, and a line instead of a traceback for everything that a user can put right.

Responsible for `Failure`, and for turning the errors of the other layers into it where the command line meets them.
Leaves bugs alone: they keep their traceback.

    0 well   1 refused, or not finished   2 settings or arguments   3 Redis   4 no reply in time
"""

from __future__ import annotations

import functools
from contextlib import asynccontextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import typer
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    RedisError,
)

from control.store.access import open_access
from control.store.link import LOST
from control.store.server import Unusable
from stages.engine import EngineConfigError
from stages.imports import ImportPathError
from stages.pipeline import PipelineError
from workers.embedded import ServerError
from workers.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from redis.asyncio import Redis

    from workers.settings import Settings

P = ParamSpec("P")
R = TypeVar("R")

WRONG_SETTINGS = (SettingsError, PipelineError, EngineConfigError, ImportPathError)
WRONG_SERVER = (Unusable, ServerError)
EXPECTED = (*WRONG_SETTINGS, *WRONG_SERVER)

# Above every BLOCK that the command line uses.
SOCKET_TIMEOUT_S = 5.0


class Status(IntEnum):
    """See the header."""

    OK = 0
    REFUSED = 1
    SETTINGS = 2
    UNUSABLE = 3
    NO_REPLY = 4


class Failure(Exception):
    """The command can't go on. The message is for its user."""

    def __init__(self, message: str, status: Status = Status.REFUSED) -> None:
        super().__init__(message)
        self.status = status


def plainly(command: Callable[P, R]) -> Callable[P, R]:
    """A command whose expected errors end it with a line on stderr and the right exit status."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except Failure as failure:
            message, status = str(failure), failure.status
        except WRONG_SETTINGS as error:
            message, status = str(error), Status.SETTINGS
        except WRONG_SERVER as error:
            message, status = str(error), Status.UNUSABLE
        typer.echo(f"bargein: {message}", err=True)
        raise typer.Exit(int(status))

    return run


@asynccontextmanager
async def connected(settings: Settings, *, jobs: bool = False) -> AsyncGenerator[Redis]:
    """A client for a few questions. `jobs`: of the jobs' server. What goes wrong with Redis inside ends as one line."""
    url, address = (settings.jobs, settings.jobs_address) if jobs else (settings.redis, settings.address)
    variable = "BARGEIN_JOBS_URL" if jobs and settings.jobs_url is not None else "BARGEIN_REDIS_URL"
    access = open_access(url, timeout_s=SOCKET_TIMEOUT_S, name="bargein-cli")
    try:
        yield access.redis
    except BrokenPipeError:
        raise  # whoever read our output has gone, not Redis: that would be redis-py's own error
    except (AuthenticationError, AuthorizationError, NoPermissionError) as error:
        message = f"Redis at {address} refuses the credentials: {error}. Check the user and password"
        raise Unusable(message) from None
    except LOST as error:
        raise Unusable(
            f"Redis at {address} can't be reached: {str(error).rstrip('.') or type(error).__name__}. "
            f"Start it, or set {variable}; `bargein up` brings one along"
        ) from None
    except RedisError as error:
        raise Unusable(f"Redis at {address} answers: {error}") from None
    finally:
        await access.close()
