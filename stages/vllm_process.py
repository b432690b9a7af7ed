"""vLLM's processes: they die with the process that started them, and can be ended for good (hazard 10).

Responsible for the parent-death signal in each of vLLM's processes and for killing them. Leaves their life to vLLM. A
SIGKILL of the worker runs no code in it, so the kernel has to do it: each process asks for that at its beginning,
spawned ones as a vLLM plugin (entry point `vllm.general_plugins`), forked ones right after the fork. Linux only.

The signal comes when the *thread* that started the process ends. So vLLM is started in a thread that stays.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Sequence
from importlib.metadata import entry_points
from multiprocessing.process import BaseProcess

_GROUP, _PLUGIN = "vllm.general_plugins", "stages.vllm_process:die_with_parent"
_PR_SET_PDEATHSIG = 1
_JOIN_S = 2.0

starting = threading.Lock()
"""Held while vLLM's processes are started: one engine at a time, so that each knows which are its own."""

_hooked: list[bool] = []


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies. Nothing in a process that nobody started for vLLM."""
    parent = multiprocessing.parent_process()
    if parent is None or sys.platform != "linux":
        return
    _depend_on_parent()
    if parent.pid is not None and os.getppid() != parent.pid:
        os._exit(1)  # it has died meanwhile: the signal will not come


def find_gap(*, fork: bool) -> str | None:
    """Why processes that are started now would outlive a killed worker; None if they won't."""
    if sys.platform != "linux":
        return "this system has no parent-death signal"
    if fork:
        return None
    mine = {entry.name for entry in entry_points(group=_GROUP) if entry.value == _PLUGIN}
    if not mine:
        return f"this installation has no entry point {_GROUP} = {_PLUGIN}; install the project anew"
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None and not mine & set(chosen.split(",")):
        return f"VLLM_PLUGINS leaves out {', '.join(mine)}"
    return None


def hook_forks() -> None:
    """Let the processes that are forked while `starting` is held die with this one."""
    if not _hooked:
        _hooked.append(True)
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    if not starting.locked():
        return
    # It would tell the parent's event loop of its own signals, through the socket that both have: the SIGTERM with
    # which vLLM ends it would be the parent's second one, which doesn't ask (S45).
    signal.set_wakeup_fd(-1)
    # Not `die_with_parent`: multiprocessing sets who the parent is a little later.
    if sys.platform == "linux":
        _depend_on_parent()


def _depend_on_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Ctrl-C in a terminal goes to a whole group; it is the worker's to say when vLLM ends.
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)


def kill(processes: Sequence[BaseProcess]) -> None:
    """End processes at once, also stopped ones. Theirs follow: each of them dies with its parent."""
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join(_JOIN_S)
