"""The brake: one worker may always be given up, many at once may not (S86)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from control.store import keys
from control.store.lives import Entry, fetch_lives, register_life, release_brake, say_goodbye
from tests.security.guarded import GuardedServer
from workers.brake import WINDOW_S, Brake
from workers.embedded import require_valkey_binary
from workers.observer import Observer
from workers.placement import Directory

HEARTBEAT_MS = 1_000
BRAKE_MS = 30_000


def test_a_single_silent_worker_is_no_reason_to_brake() -> None:
    assert not Brake(60.0).holds(silent=1, present=1, now_s=0.0)
    assert not Brake(60.0).holds(silent=1, present=9, now_s=0.0)


def test_more_than_a_third_at_once_is_and_a_third_is_not() -> None:
    assert not Brake(60.0).holds(silent=2, present=6, now_s=0.0)
    assert Brake(60.0).holds(silent=3, present=6, now_s=0.0)


def test_those_that_went_within_the_last_minute_count_and_older_ones_do_not() -> None:
    brake = Brake(60.0)
    brake.note_lost(0.0)
    assert brake.holds(silent=1, present=3, now_s=WINDOW_S)
    assert not brake.holds(silent=1, present=3, now_s=WINDOW_S + 0.1)


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Any]:
    async with Redis.from_url(redis_url) as client:
        yield client


class Watch:
    """An observer of stages with some workers each, whose time a test moves."""

    def __init__(self, redis: Any) -> None:
        self.redis = redis
        self.observer = Observer(
            redis, Directory(2), 2, HEARTBEAT_MS, lambda: None, BRAKE_MS, interval_ms=HEARTBEAT_MS // 5
        )

    async def begin(self, *workers: str) -> None:
        """Each worker's stage is the first letter of its name."""
        for worker_id in workers:
            stage = worker_id[0]
            entry = Entry(stage_id="ab".index(stage), stage=stage, capacity=4, engine="x")
            await register_life(self.redis, worker_id, entry)
            await self.redis.hset(keys.worker_slots(worker_id), f"session of {worker_id}", "1 1")
        await self.observer.look()

    async def pass_s(self, seconds: float, *silent: str) -> set[str]:
        """Time in which everybody but `silent` beats; the lives that are over after it."""
        for worker_id, pulse in self.observer._pulses.items():
            pulse.since_s -= seconds
            if worker_id not in silent:
                await self.redis.hincrby(keys.worker_state(worker_id), "beat", 1)
        await self.observer.look()
        return {life.worker_id for life in await fetch_lives(self.redis) if life.state == "dead"}


async def test_s86_when_many_workers_fall_silent_at_once_nobody_is_given_up(redis: Any) -> None:
    watch = Watch(redis)
    await watch.begin("a1", "a2", "a3", "b1", "b2", "b3")
    assert await watch.pass_s(1.5, "a1", "a2") == set()
    assert watch.observer.lost == {}
    assert await watch.pass_s(10.0, "a1", "a2") == set()
    # They were only out of reach, and nothing has happened to their sessions.
    assert await watch.pass_s(1.5) == set()
    assert watch.observer.lost == {}


async def test_s86_the_brake_of_one_stage_does_not_hold_for_another(redis: Any) -> None:
    watch = Watch(redis)
    await watch.begin("a1", "a2", "a3", "b1", "b2", "b3")
    assert await watch.pass_s(1.5, "a1", "a2", "b1") == {"b1"}
    assert set(watch.observer.lost) == {"b1"}


async def test_s86_silent_workers_get_no_new_sessions_while_the_brake_holds(redis: Any) -> None:
    watch = Watch(redis)
    await watch.begin("a1", "a2", "a3", "b1")
    await watch.pass_s(1.5, "a1", "a2")
    assert watch.observer.directory.choose_route() == ("a3", "b1")
    assert watch.observer.directory.choose_route() == ("a3", "b1")


async def test_the_brake_lets_go_when_its_time_is_over(redis: Any) -> None:
    watch = Watch(redis)
    await watch.begin("a1", "a2", "a3", "b1")
    assert await watch.pass_s(1.5, "a1", "a2") == set()
    assert await watch.pass_s(BRAKE_MS / 1000, "a1", "a2") == {"a1", "a2"}
    assert set(watch.observer.lost) == {"a1", "a2"}


async def test_an_operator_can_release_the_brake_of_a_stage(redis: Any) -> None:
    watch = Watch(redis)
    await watch.begin("a1", "a2", "a3", "b1")
    await release_brake(redis, "b")
    assert await watch.pass_s(1.5, "a1", "a2") == set()
    await release_brake(redis, "a")
    assert await watch.pass_s(0.1, "a1", "a2") == {"a1", "a2"}
    assert await redis.pttl(keys.brake("a")) > 0


async def test_workers_that_said_goodbye_do_not_count_as_lost(redis: Any) -> None:
    watch = Watch(redis)
    await watch.begin("a1", "a2", "a3", "b1")
    for leaving in ("a1", "a2"):
        await say_goodbye(redis, leaving)
    await watch.pass_s(0.5)
    assert "a3" in await watch.pass_s(1.5, "a3")


async def test_s86_workers_that_stop_at_once_are_held_though_their_heartbeats_were_not_in_step(redis: Any) -> None:
    watch = Watch(redis)
    await watch.begin("a1", "a2")
    watch.observer._pulses["a1"].since_s -= HEARTBEAT_MS / 5000  # it beat an interval before the other
    for _ in range(8):
        for pulse in watch.observer._pulses.values():
            pulse.since_s -= 0.12 * HEARTBEAT_MS / 1000
        watch.observer._looked_s = time.monotonic()
        await watch.observer.look()
    assert watch.observer.lost == {}
    assert watch.observer.braked == {"a"}


async def test_a_lone_silent_worker_is_given_up_though_the_others_heartbeats_are_just_due(redis: Any) -> None:
    watch = Watch(redis)
    await watch.begin("a1", "a2", "a3", "a4")
    for name in ("a2", "a3", "a4"):
        watch.observer._pulses[name].since_s -= 0.3 * HEARTBEAT_MS / 1000
    watch.observer._pulses["a1"].since_s -= 1.1 * HEARTBEAT_MS / 1000
    watch.observer._looked_s = time.monotonic()
    await watch.observer.look()
    assert set(watch.observer.lost) == {"a1"}


async def test_silences_are_counted_anew_after_a_moment_in_which_nobody_could_be_heard(redis: Any) -> None:
    watch = Watch(redis)
    await watch.begin("a1", "a2", "a3", "a4")
    watch.observer._pulses["a1"].since_s -= 1.1 * HEARTBEAT_MS / 1000
    watch.observer.start_over()
    watch.observer._looked_s = time.monotonic()
    await watch.observer.look()
    assert watch.observer.lost == {}


async def test_s86_the_control_role_may_look_whether_a_brake_is_released() -> None:
    """Where it might not, its looks failed as soon as the brake held, and nobody was ever given up."""
    with GuardedServer(require_valkey_binary()) as server:
        async with Redis.from_url(server.url_of("root")) as root, Redis.from_url(server.url_of("control")) as client:
            watch = Watch(root)
            watch.observer.redis = client
            await watch.begin("a1", "a2", "a3", "b1")
            assert await watch.pass_s(1.5, "a1", "a2") == set()
            assert watch.observer.braked == {"a"}
            await release_brake(root, "a")
            assert await watch.pass_s(0.1, "a1", "a2") == {"a1", "a2"}
        assert server.fetch_denials() == []
