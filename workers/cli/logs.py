"""Logging of the long-lived processes: one line a record on stderr, for people or as JSON.

Responsible for the format. Leaves the level and the choice to the settings. A record of several lines stays one line
as JSON; as text its traceback follows it.
"""

from __future__ import annotations

import logging
import os
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from workers.settings import find_misspelt

if TYPE_CHECKING:
    from workers.settings import Settings

log = logging.getLogger("bargein.settings")


class JsonLines(logging.Formatter):
    """`{"at": ..., "level": ..., "logger": ..., "message": ..., "exception": ...}`."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def set_up_logging(settings: Settings) -> None:
    """Log to stderr as `settings` say, and warn of variables that look misspelt."""
    handler = logging.StreamHandler(sys.stderr)
    if settings.log_json:
        handler.setFormatter(JsonLines())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    for warning in find_misspelt(os.environ):
        log.warning("%s", warning)
