"""Device time that a real worker accounts for: its phases add up to the elapsed time."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from cotrain_store.messages.runs import LoraSpec
from cotrain_store.monitoring.fleet import pool_status
from cotrain_store.monitoring.status import cycle_records
from cotrain_workers.engine.engine import Engine
from tests.support.bodies import sequences
from tests.support.redis_server import EmbeddedRedis
from tests.support.stack import POOL, Stack, make_worker


async def test_the_phases_add_up_to_the_lifetime_of_the_worker(
    empty_redis: EmbeddedRedis, tmp_path: Path, server: Stack, engine: Engine
) -> None:
    loop, opened = make_worker(empty_redis.url, tmp_path, engine)
    began = loop._device_time._lap_at
    ended: list[float] = []

    def live() -> None:
        loop.run()
        # measured here, because the delay until another thread notices does not count
        ended.append(time.monotonic())

    thread = threading.Thread(target=live)
    thread.start()
    run = await server.create("a", "s", LoraSpec(rank=4, seed=0))
    for step in range(20):  # longer than a thread may have to wait for a core
        await server.forward_backward(run, 2 * step + 1, sequences(1, 8, 100))
        await server.result(run, await server.optim_step(run, 2 * step + 2))
    records = await cycle_records(server.dispatch._redis, POOL, 100)
    heartbeat = (await pool_status(server.dispatch._redis, POOL)).workers[0]
    loop.stop()
    await asyncio.to_thread(thread.join)
    opened.close()
    booked = loop._device_time.seconds
    assert sum(booked.values()) == pytest.approx(ended[0] - began, rel=0.02)
    computed_s = sum(record["wave_ms"] + record["optim_ms"] for record in records) / 1000
    assert booked["train"] + booked["optim"] >= computed_s * 0.98
    assert 0 < booked["optim"] < booked["train"]
    assert heartbeat.device_seconds.keys() == booked.keys()
    assert all(heartbeat.device_seconds[phase] <= booked[phase] for phase in booked)
