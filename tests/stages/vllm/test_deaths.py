"""vLLM's processes killed, stopped and left behind: hazards 8, 9 and 10 of docs/vllm.md, with real signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stages.engine import EngineConfigError, EngineRefusal
from stages.vllm_engine import VllmEngine
from tests.stages.ear import Ear, request_name
from tests.stages.vllm.bed import Bed, small_options

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(sys.platform != "linux", reason="signals as Linux has them")]

ROOT = Path(__file__).resolve().parents[3]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


async def until(condition: Any, seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  another process's doing
            await asyncio.sleep(0.01)


async def test_h08_s41_a_killed_core_is_told_within_a_second_and_a_fresh_engine_works(tiny_model: Path) -> None:
    options = small_options(tiny_model)
    for speaking in (True, False):
        async with Bed(options) as bed:
            name = await bed.say("a", [1, 2, 3], sampling={"max_tokens": 200 if speaking else 2})
            await bed.ear.until(lambda bed=bed, name=name: bed.ear.heard(name))
            if not speaking:
                await bed.ear.turn_ends(name)
            killed_s = time.monotonic()
            os.kill(bed.processes()[0].pid, signal.SIGKILL)
            await bed.ear.until(lambda bed=bed: bed.ear.deaths)
            assert time.monotonic() - killed_s < 1.0
            assert not bed.engine.healthy()
            assert len(bed.ear.deaths) == 1
            with pytest.raises(EngineRefusal, match="not running"):
                await bed.say("b", [1])
            await bed.engine.abort(name)
        assert len(bed.ear.deaths) == 1
    async with Bed(options) as bed:
        assert len(await bed.ask("a", [1, 2, 3])) == 8


async def test_h09_a_core_that_hangs_is_found_and_its_abort_is_not_confirmed(tiny_model: Path) -> None:
    options = small_options(tiny_model, watch_every_ms=200, hang_after_ms=2000, abort_timeout_ms=500)
    async with Bed(options) as bed:
        name = await bed.say("a", [1, 2, 3], sampling={"max_tokens": 200})
        await bed.ear.until(lambda: bed.ear.heard(name))
        process = bed.processes()[0]
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError, match="has not confirmed"):
            await bed.engine.abort(name)
        assert bed.engine.load().slots_used == 1
        await bed.ear.until(lambda: bed.ear.deaths)
        assert "has not answered for 2" in bed.ear.deaths[0]
        assert not bed.engine.healthy()
        stopping_s = time.monotonic()
    assert time.monotonic() - stopping_s < 10
    assert not is_alive(process.pid)


async def test_h09_an_abort_that_was_not_confirmed_in_time_may_be_asked_for_again(tiny_model: Path) -> None:
    async with Bed(small_options(tiny_model, abort_timeout_ms=200)) as bed:
        name = await bed.say("a", [1, 2, 3], sampling={"max_tokens": 200})
        await bed.ear.until(lambda: bed.ear.heard(name))
        process = bed.processes()[0]
        os.kill(process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(TimeoutError):
                await bed.engine.abort(name)
        finally:
            os.kill(process.pid, signal.SIGCONT)
        await bed.engine.abort(name)
        assert bed.engine.load().slots_used == 0
        assert await bed.core_holds() == 0
        assert not bed.ear.deaths


@pytest.mark.parametrize(
    ("fork", "own_worker"), [(True, False), (True, True), (False, True)], ids=["fork", "fork-mp", "spawn-mp"]
)
async def test_h10_a_killed_worker_leaves_no_process_behind(tiny_model: Path, *, fork: bool, own_worker: bool) -> None:
    options = small_options(tiny_model, fork=fork)
    options["environment"] = {**options["environment"], "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if own_worker else "0"}
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.stages.vllm.worker", json.dumps(options)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'clients/python'}"},
    )
    children: list[int] = []
    try:
        assert worker.stdout is not None
        async with asyncio.timeout(100):
            while b"speaking" not in await worker.stdout.readline():
                assert worker.returncode is None
        # multiprocessing's resource tracker is no process of vLLM's; it leaves when its pipe is closed.
        children = descendants(worker.pid)
        group = os.getpgid(worker.pid)
        apart = [pid for pid in children if os.getpgid(pid) != group]
        assert len(apart) >= (2 if own_worker else 1), "Ctrl-C is for the worker alone"
        worker.kill()
        await worker.wait()
        await until(lambda: not any(is_alive(pid) for pid in children), 5)
    finally:
        for pid in [*children, *(descendants(worker.pid) if worker.returncode is None else [])]:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            worker.kill()


async def test_a_stop_while_it_starts_leaves_no_process_behind(tiny_model: Path) -> None:
    before = set(descendants(os.getpid()))
    engine = VllmEngine(small_options(tiny_model))
    starting = asyncio.ensure_future(engine.start(Ear()))
    await asyncio.sleep(1.0)
    starting.cancel()
    await asyncio.wait({starting})
    await engine.stop()
    assert not [pid for pid in descendants(os.getpid()) if pid not in before and "tracker" not in _command(pid)]


async def test_a_model_that_is_not_there_is_a_wrong_configuration(tmp_path: Path) -> None:
    engine = VllmEngine(small_options(tmp_path / "nothing"))
    with pytest.raises(EngineConfigError, match="nothing"):
        await engine.start(Ear())
    await engine.stop()


async def test_engine_arguments_that_vllm_does_not_know_are_refused_with_those_it_does(tiny_model: Path) -> None:
    options = small_options(tiny_model)
    options["engine"]["max_num_seq"] = 3
    engine = VllmEngine(options)
    with pytest.raises(EngineConfigError, match=r"engine.max_num_seq: .*did you mean max_num_seqs\?.*gpu_memory_util"):
        await engine.start(Ear())
    await engine.stop()


async def test_a_request_that_nobody_owns_ends_the_engine(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.vllm_watch._STRAY_S", 0.5)
    async with Bed(small_options(tiny_model)) as bed:
        await bed.ask("a", [1, 2, 3])
        # As hazard 4 leaves it behind: idle in the core, unknown here.
        request = bed.engine._requests.pop(request_name("a"))
        await bed.ask("b", [1, 2, 3])
        await bed.engine.abort(request_name("b"))
        await bed.ear.until(lambda: bed.ear.deaths)
        assert "holds 1 requests that nobody owns" in bed.ear.deaths[0]
        assert request.task is not None


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""
