"""`bargein demo`: its options, its files, and the order of things.

Responsible for everything that is checked before anything starts, for joining the parts, and for an end in order,
however the demo ends: nothing that it started stays behind. Leaves the processes to `system.py`, the conversation to
`dialogue.py`, what is seen to `view.py`.

    0 well   1 something stale was delivered, a request was not released, or the demo broke off   2 arguments
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from bargein_client import AsyncBargein, BargeinError
from control.store.keys import partition_of
from stages.pipeline import SHIPPED, Pipeline, load_pipeline
from workers.cli.endings import Failure, Status, plainly
from workers.cli.leaving import SIGNALS, leave_at_once
from workers.cli.run import load_policy_plainly
from workers.demo import llm
from workers.demo.board import Board
from workers.demo.dialogue import RATE_HZ, Dialogue, NotingRedis
from workers.demo.findings import Findings, conclude
from workers.demo.llm import PIPELINE, ModelRun, require_vllm
from workers.demo.speech import find_utterances, plan_turns
from workers.demo.system import SOCKET_TIMEOUT_S, System
from workers.demo.view import View
from workers.demo.watch import Watch
from workers.demo.wav import NotSpeech, read_wav, resample, to_pcm, write_wav
from workers.settings import PACKAGED_PIPELINE
from workers.tasks import end_tasks

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from bargein_client import AsyncSession
    from workers.demo.speech import Turn

SPEECH = Path(__file__).with_name("speech.wav")
OUT = Path("demo-out")
SESSION_ID = "demo"
INCARNATION = 0
OPEN_S = 10.0
OPEN_AGAIN_S = 0.1
MOST_S = 75.0
CROWD_SPEECH_S = 2.0


@plainly
def demo(
    wav: Annotated[
        Path | None,
        typer.Option("--wav", help="The user's speech: any WAV file. Else the one that is shipped", show_default=False),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the table at the end as data into this file")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Where to put what was heard and logged")] = OUT,
    pipeline: Annotated[
        Path | None,
        typer.Option(
            "--pipeline",
            help="Another pipeline file, whose stages take and speak audio. Else the demo's own",
            show_default=False,
        ),
    ] = None,
    kill: Annotated[bool, typer.Option("--kill/--no-kill", help="Kill a control worker half way")] = True,
    vllm: Annotated[
        bool, typer.Option("--vllm", help="With vLLM and a tiny model as the first stage; see `make demo-vllm`")
    ] = False,
    most: Annotated[
        int, typer.Option("--most", min=0, max=63, help="With --vllm: try up to so many sessions at once; 0: none")
    ] = 32,
) -> None:
    """Hold a conversation with interruptions, on a server and workers of its own, and check what came of it.

    Speech goes to the model in real time; the model speaks back, and the user talks over it. It takes less than a
    minute and ends with a table and the sound that the user would have heard. With --vllm it takes three: afterwards it
    finds out how many sessions this machine bears at once. Ctrl-C ends all of it.
    """
    if vllm:
        if pipeline is not None:
            raise Failure("--vllm and --pipeline: one of them", Status.SETTINGS)
        require_vllm()
    pipeline_path, remark = (PIPELINE, "") if vllm else (pipeline, "") if pipeline is not None else choose_pipeline()
    described = load_pipeline(pipeline_path)
    if not described.stages:
        raise Failure(f"{pipeline_path} has no stages, so nobody would answer", Status.SETTINGS)
    load_policy_plainly(described)
    wav = wav or SPEECH
    turns = plan_from(wav, kill=kill)
    prepare_files(out, json_file)
    run = _Run(described, pipeline_path, wav, turns, out, most if vllm else None)
    board = Board(stages=[f"{stage.name} ({stage.engine.rpartition(':')[2]})" for stage in described.stages])
    findings = asyncio.run(_until_told(run.run(board, remark), run))
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(findings), indent=2) + b"\n")
    if not findings.ok:
        raise typer.Exit(Status.REFUSED)


def choose_pipeline() -> tuple[Path, str]:
    """The demo's pipeline file for this machine, and what there is to say about the choice."""
    full, plain = SHIPPED / "demo.yaml", SHIPPED / "demo-parrot.yaml"
    if find_spec("torch") is not None and full.is_file():
        return full, ""
    lacks = "PyTorch isn't installed" if find_spec("torch") is None else f"{full} isn't there"
    remark = f"{lacks}, so the second stage passes the voice on as it is"
    return (plain if plain.is_file() else PACKAGED_PIPELINE), remark


def plan_from(wav: Path, *, kill: bool) -> list[Turn]:
    """The plan of a conversation with this file's speech. Raises `Failure`."""
    try:
        utterances = find_utterances(read_wav(wav, RATE_HZ), RATE_HZ)
    except NotSpeech as error:
        raise Failure(str(error), Status.SETTINGS) from None
    if not utterances:
        raise Failure(f"{wav} holds no speech: it is silent, or shorter than a word", Status.SETTINGS)
    return plan_turns(utterances, RATE_HZ, kill=kill)


def prepare_files(out: Path, json_file: Path | None) -> None:
    """See that what is written at the end can be written. Raises `Failure`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(f"--out {out}: can't be made: {error.strerror}", Status.SETTINGS) from None
    if not os.access(out, os.W_OK | os.X_OK):
        raise Failure(f"--out {out}: can't be written to", Status.SETTINGS)
    if json_file is not None:
        if json_file.is_dir() or not json_file.parent.is_dir():
            raise Failure(f"--json {json_file}: is no file in an existing folder", Status.SETTINGS)
        if not os.access(json_file if json_file.exists() else json_file.parent, os.W_OK):
            raise Failure(f"--json {json_file}: can't be written to", Status.SETTINGS)


class _Run:
    """One run of the demo."""

    def __init__(
        self, pipeline: Pipeline, pipeline_path: Path, wav: Path, turns: list[Turn], out: Path, most: int | None
    ) -> None:
        """`most`: with a language model, and a crowd of up to so many afterwards."""
        self._most = most
        self._pipeline = pipeline
        self._pipeline_path = pipeline_path.absolute()
        self._wav = wav
        self._turns = turns
        self._out = out
        self._log_path = out / "workers.log"
        self._model: ModelRun | None = None
        self.system: System | None = None
        self.view: View | None = None

    async def run(self, board: Board, remark: str) -> Findings:
        with tempfile.TemporaryDirectory(prefix="bargein-demo-") as folder:
            view = self.view = View(board)
            model, more = None, {}
            most_s = MOST_S + self._pipeline.control.lease_s
            if self._most is not None:
                model = self._model = ModelRun(Path(folder), self._out, self._most, board, view.say)
                self._pipeline_path, most_s = model.pipeline_path, llm.MOST_S
                more = {"ready_s": llm.READY_S, "beyond_grace_s": llm.BEYOND_GRACE_S}
            system = self.system = System(
                self._pipeline, self._pipeline_path, Path(folder), self._log_path, board, view.say, **more
            )
            with view:
                showing = asyncio.create_task(view.run())
                try:
                    view.say(self._introduce(board))
                    if remark:
                        view.say(remark)
                    if model is not None:
                        await model.prepare()
                    await system.start()
                    async with asyncio.timeout(most_s):
                        findings = await _first_of(self._converse(board), system.guard())
                    if model is not None:
                        await _first_of(model.meet_crowd(system.url, self._speech()), system.guard())
                except TimeoutError:
                    raise Failure(f"the conversation has not come to its end within {most_s:g} s") from None
                except RedisError as error:
                    raise Failure(f"the server doesn't answer any more: {error}") from None
                except OSError as error:
                    raise Failure(f"{error.filename or self._out}: {error.strerror or error}") from None
                finally:
                    board.doing = "ending every process"
                    await system.end()
                    await end_tasks(showing)
            if model is not None:
                findings = model.complete(findings)
            view.finish(findings)
            return findings

    def _introduce(self, board: Board) -> str:
        spoken_s = sum(turn.sound.size for turn in self._turns) / RATE_HZ
        return (
            f"speech from {self._wav}: {len(self._turns)} turns, {spoken_s:.1f} s in all\n"
            f"starting a server, two control workers and the stages {' and '.join(board.stages)}"
        )

    async def _converse(self, board: Board) -> Findings:
        system, view = self.system, self.view
        assert system is not None
        assert view is not None
        noted = NotingRedis.from_url(
            system.url, socket_timeout=SOCKET_TIMEOUT_S, retry=Retry(NoBackoff(), 0), client_name="bargein-demo"
        )
        noted.signals_ms = []
        partition = partition_of(SESSION_ID, self._pipeline.partitions)
        stages = [stage.name for stage in self._pipeline.stages]
        watch = Watch(system.redis, SESSION_ID, INCARNATION, partition, stages, board)

        async def find_owner() -> str:
            return board.name_of(await watch.fetch_owner())

        async def kill() -> tuple[str, int]:
            owner = await watch.fetch_owner()
            board.killed = board.name_of(owner)
            return board.killed, await system.kill(owner)

        async with noted, AsyncBargein(noted) as client:
            session = await _open(client)
            view.say(f"session {SESSION_ID!r} is open; {await find_owner()} owns its partition, {partition}")
            dialogue = Dialogue(
                session, noted, self._turns, board, view.say, kill, find_owner, lease_s=self._pipeline.control.lease_s
            )
            await _first_of(dialogue.run(), watch.run())
            board.doing = "waiting for the stage workers' last figures"
            await watch.read_stream()
            await watch.settle()
            dropped_by_client = session.dropped_locally
        if self._model is not None:
            for each in dialogue.interruptions:
                self._model.note_barge_in(SESSION_ID, INCARNATION, each.epoch, dialogue.began_s + each.at_s)
        heard_wav, conversation_wav = self._write_sound(dialogue)
        return conclude(
            dialogue=dialogue,
            watch=watch,
            dropped_by_client=dropped_by_client,
            lease_ms=self._pipeline.control.lease_ms,
            pipeline=str(self._pipeline_path),
            wav=str(self._wav),
            total_s=board.elapsed_s,
            heard_wav=heard_wav,
            conversation_wav=conversation_wav,
            log=self._log_path,
        )

    def _speech(self) -> bytes:
        """A few seconds of it, whatever there is."""
        sound = to_pcm(self._turns[0].sound)
        return sound * (1 + round(CROWD_SPEECH_S * RATE_HZ * 2) // len(sound))

    def _write_sound(self, dialogue: Dialogue) -> tuple[Path, Path]:
        heard_wav, conversation_wav = self._out / "heard.wav", self._out / "conversation.wav"
        model = dialogue.model.track
        heard = model.lay_out(dialogue.length_s)
        write_wav(heard_wav, (heard,), model.rate_hz)
        user = dialogue.user.lay_out(dialogue.length_s)
        right = resample(heard, model.rate_hz, RATE_HZ)
        length = min(user.size, right.size)
        write_wav(conversation_wav, (user[:length], right[:length]), RATE_HZ)
        return heard_wav, conversation_wav


async def _open(client: AsyncBargein) -> AsyncSession:
    """The session. Control workers learn of a new stage worker a moment after it is there, hence more than one try."""
    give_up_s = asyncio.get_running_loop().time() + OPEN_S
    while True:
        try:
            return await client.open(SESSION_ID, incarnation=INCARNATION)
        except BargeinError as error:
            if not error.retryable or asyncio.get_running_loop().time() > give_up_s:
                raise Failure(f"the session can't be opened: {error}") from None
        await asyncio.sleep(OPEN_AGAIN_S)


async def _first_of(work: Coroutine[Any, Any, Any], guard: Coroutine[Any, Any, None]) -> Any:
    """What `work` returns, while `guard` runs beside it; what either of them raises."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(guard)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task is tasks[1] or task.exception() is not None:
                task.result()
        return tasks[0].result()
    finally:
        await end_tasks(*tasks)


async def _until_told(work: Coroutine[Any, Any, Findings], run: _Run) -> Findings:
    """Do `work` until it ends or a signal comes, then end it in order; a second signal doesn't wait."""
    task = asyncio.ensure_future(work)
    told: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        if told:
            if run.system is not None:
                run.system.kill_all()
            leave_at_once(128 + number)
        told.append(number)
        if run.view is not None:
            run.view.say(f"{number.name}: ending every process; once more ends them at once")
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not told:
            raise
        sys.stdout.flush()
        raise typer.Exit(128 + told[0]) from None
    finally:
        for number in SIGNALS:
            with contextlib.suppress(ValueError):
                loop.remove_signal_handler(number)
