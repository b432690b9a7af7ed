"""A whole system for tests: a control worker and a stage worker for each stage, as tasks over a real server."""

from __future__ import annotations

import asyncio
from typing import Self

from stages.pipeline import Pipeline
from workers.control import ControlWorker
from workers.stage import StageWorker

PATIENCE_S = 20.0


class RunningSystem:
    """`async with RunningSystem(url) as system`: two quick parrots unless a pipeline says otherwise."""

    def __init__(self, url: str, pipeline: Pipeline | None = None, *, controls: int = 1) -> None:
        self.url = url
        self.pipeline = pipeline or Pipeline.example()
        self.controls = [ControlWorker(url, self.pipeline) for _ in range(controls)]
        self.stages = [StageWorker(url, self.pipeline, number) for number in range(len(self.pipeline.stages))]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(stage.run()) for stage in self.stages]
        async with asyncio.timeout(PATIENCE_S):
            for stage in self.stages:
                await stage.wait_ready()
            self._tasks += [asyncio.create_task(control.run()) for control in self.controls]
            while sum(len(control.owned) for control in self.controls) < self.pipeline.partitions:
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.005)
        return self

    async def __aexit__(self, *exc: object) -> None:
        for control in self.controls:
            control.stop()
        for stage in self.stages:
            stage.request_stop(0)
        async with asyncio.timeout(PATIENCE_S):
            results = await asyncio.gather(*self._tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
