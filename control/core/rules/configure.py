"""A session's configuration: two maps of the client's, and the sampling parameters that the policy makes of one.

Responsible for D3 and S11: everything is checked before anything changes, and one command is one generation. Leaves
the meaning of the maps to the model policy. Pure. Says no with TypeError or ValueError, which the rules turn into
`invalid_argument`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

if TYPE_CHECKING:
    from control.core.scene import Scene
    from control.core.session import Session


def pack(scene: Scene, session_config: dict[str, Any] | None, runtime_config: dict[str, Any] | None) -> bytes:
    """The packed configuration of a new session."""
    settings = scene.settings
    runtime_config = runtime_config or {}
    sampling = () if settings.configure is None else settings.configure(runtime_config)
    return settings.pack_config(session_config or {}, runtime_config, sampling)


def configure(
    scene: Scene,
    session: Session,
    session_config: dict[str, Any] | None,
    runtime_config: dict[str, Any] | None,
) -> Session:
    """The session with what is given in the place of what it has, one generation further; as it is if nothing is."""
    if session_config is None and runtime_config is None:
        return session
    settings = scene.settings
    old_session_config, old_runtime_config, sampling = settings.unpack_config(session.config)
    if runtime_config is not None:
        sampling = () if settings.configure is None else settings.configure(runtime_config)
    packed = settings.pack_config(
        old_session_config if session_config is None else session_config,
        old_runtime_config if runtime_config is None else runtime_config,
        sampling,
    )
    return replace(session, config=packed, config_generation=session.config_generation + 1)
