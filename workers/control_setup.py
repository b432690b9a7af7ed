"""What the control worker needs of a pipeline file: the core's settings and the wire's limits.

Responsible for the translation. Leaves the file to `stages/pipeline.py`. Loads the model policy; else pure, but for
`ease_garbage_collection`, which a process calls once.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from control.core.scene import Settings
from control.wire.limits import Limits
from control.wire.stage import pack_config, unpack_config
from stages.policy import configured_sampling, load_policy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stages.pipeline import Pipeline


def core_settings(pipeline: Pipeline) -> Settings:
    """What the core needs of a pipeline. Raises ValueError or TypeError for a policy that can't be used."""
    configure = None
    if pipeline.policy is not None:
        defaults = pipeline.sampling_defaults
        policy = load_policy(pipeline.policy, defaults)

        def configure_with_policy(runtime_config: Mapping[str, Any]) -> tuple[Any, ...]:
            return configured_sampling(policy, runtime_config=runtime_config, defaults=defaults)

        configure = configure_with_policy
    session = pipeline.session
    return Settings(
        stage_count=len(pipeline.stages),
        configure=configure,
        pack_config=pack_config,
        unpack_config=unpack_config,
        limit_sessions=pipeline.max_sessions is not None,
        idle_ttl_ms=session.idle_ttl_ms,
        disconnect_grace_ms=session.disconnect_grace_ms,
        append_timeout_ms=session.append_timeout_ms,
        cleanup_timeout_ms=session.cleanup_timeout_ms,
        cleanup_backoff_ms=session.cleanup_backoff_ms,
        cleanup_backoff_max_ms=session.cleanup_backoff_max_ms,
        restart_after_ms=session.restart_after_ms,
    )


def wire_limits(pipeline: Pipeline) -> Limits:
    """What the wire needs of a pipeline."""
    limits, session = pipeline.limits, pipeline.session
    return Limits(
        session_id_bytes=limits.session_id_bytes,
        control_id_bytes=limits.control_id_bytes,
        body_bytes=limits.body_bytes,
        payload_bytes=limits.payload_bytes,
        waiting_appends=session.max_waiting_appends,
        waiting_bytes=session.max_waiting_bytes,
        events_bytes=limits.events_bytes,
    )


def ease_garbage_collection() -> None:
    """Look for cycles less often, and never again in what is loaded by now.

    A turn makes thousands of short-lived objects without a cycle among them; the default threshold of 700 looked
    through them about twenty times a commit, a tenth of the process' time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
