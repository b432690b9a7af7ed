"""The scene of one step: the settings and facts that a rule may look at beside the session and the event.

Responsible for naming every outside fact, so that a rule needs no other argument and a replay of the same scenes
decides the same. Pure. Durations in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from control.core.answers import Answers
    from control.core.fence import Fence

# `configure(runtime_config) -> sampling parameters, one a stage`; TypeError and ValueError are refusals.
Configure = Callable[[Mapping[str, Any]], tuple[Any, ...]]

# Packs `(session_config, runtime_config, sampling)` for the stages, and reads it back.
PackConfig = Callable[[Mapping[str, Any], Mapping[str, Any], tuple[Any, ...]], bytes]
UnpackConfig = Callable[[bytes], tuple[dict[str, Any], dict[str, Any], Any]]

ADMISSION = "admission"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an operator sets for all sessions. `configure` is None where no model policy is configured."""

    stage_count: int
    configure: Configure | None
    pack_config: PackConfig
    unpack_config: UnpackConfig
    limit_sessions: bool = False
    idle_ttl_ms: int | None = 300_000
    disconnect_grace_ms: int = 30_000
    append_timeout_ms: int = 10_000
    cleanup_timeout_ms: int = 5_000
    cleanup_backoff_ms: int = 500
    cleanup_backoff_max_ms: int = 30_000
    restart_after_ms: int = 60_000
    placement_retry_ms: int = 2_000
    placement_attempts: int = 3


@dataclass(slots=True, kw_only=True)
class Scene:
    """`entered_ms`: when the input entered its stream; None for what has no deadline of its own.

    `offered`: the highest fence among the session's appends that wait behind another one. A cancel overtakes them, so
    it may name a fence that only they carry. `choose_route` names one worker a stage, or None if some stage has no
    free slot.
    """

    settings: Settings
    session_id: str
    now_ms: int
    answers: Answers
    entered_ms: int | None = None
    offered: Fence | None = None
    choose_route: Callable[[], tuple[str, ...] | None]
