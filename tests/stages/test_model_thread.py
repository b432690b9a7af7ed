"""The model thread: order, errors, and an end that never hangs."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from stages.model_thread import ModelThread


async def test_calls_run_in_order_and_in_one_other_thread() -> None:
    thread, seen = ModelThread("model"), []
    calls = [thread.call(lambda n=n: seen.append((n, threading.current_thread().name))) for n in range(20)]
    await asyncio.gather(*calls)
    assert seen == [(n, "model") for n in range(20)]
    assert await thread.stop(10)


async def test_what_a_call_raises_reaches_its_caller_and_the_thread_goes_on() -> None:
    thread = ModelThread("model")
    for error in (ValueError, SystemExit):

        def work(error: type[BaseException] = error) -> None:
            raise error("no")

        with pytest.raises(error, match="no"):
            await thread.call(work)
    assert await thread.call(lambda: 7) == 7
    assert await thread.stop(10)


async def test_a_cancelled_caller_leaves_the_thread_in_order() -> None:
    thread, gate = ModelThread("model"), threading.Event()
    stuck = asyncio.create_task(thread.call(gate.wait))
    await asyncio.sleep(0)
    stuck.cancel()
    later = asyncio.create_task(thread.call(lambda: "later"))
    await asyncio.wait({stuck})
    gate.set()
    assert await later == "later"
    assert await thread.stop(10)


async def test_a_call_that_hangs_is_seen_and_does_not_hold_up_the_end() -> None:
    thread, gate = ModelThread("model"), threading.Event()
    assert thread.busy_s() == 0
    stuck = asyncio.create_task(thread.call(gate.wait))
    await asyncio.sleep(0.02)
    assert thread.busy_s() > 0
    assert not await thread.stop(0.01)
    gate.set()
    await stuck
    assert thread.busy_s() == 0


async def test_stopping_twice_or_without_a_call_is_harmless() -> None:
    assert await ModelThread("never").stop(10)
    thread = ModelThread("model")
    await thread.call(lambda: None)
    assert await thread.stop(10)
    await thread.stop(10)


async def test_an_idle_thread_holds_nothing_of_its_last_call() -> None:
    class Thing: ...

    thread, thing = ModelThread("model"), Thing()
    gone = weakref.ref(thing)
    await thread.call(lambda thing=thing: thing)
    del thing
    await thread.call(lambda: None)
    gc.collect()
    assert gone() is None
    assert await thread.stop(10)
