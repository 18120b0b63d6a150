"""Sampling while Redis is killed repeatedly: no accepted request is lost, and every result is
published."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from cotrain_store.keys import fleet_keys
from cotrain_store.messages.ids import RequestId
from cotrain_store.messages.results import Result, ResultKind
from cotrain_store.messages.runs import SamplerRecord
from cotrain_store.redis_client.connection import CONNECTION_LOST
from cotrain_store.sampling.completions import Completions
from tests.support.redis_server import EmbeddedRedis
from tests.support.samples import BODY, LARGE_BODY, Samples, open_samples
from tests.support.stack import POOL

REQUESTS = 120
KILLS_PATIENCE_S = 300.0


def work(samples: Samples, stop: threading.Event) -> None:
    """Claim and resolve like a worker: claimed requests are kept until their results are stored."""
    while not stop.is_set():
        try:
            claimed = samples.sampling.claim(5)
        except CONNECTION_LOST:
            continue
        results = {one.request: Result(ResultKind.SAMPLE, one.request.encode()) for one in claimed}
        while results and not stop.is_set():
            try:
                samples.sampling.resolve(results, {"sample_requests": len(results)})
                break
            except CONNECTION_LOST:
                pass
        if not claimed:
            stop.wait(0.01)


async def accepted(samples: Samples, sampler: SamplerRecord, seq: int) -> RequestId:
    while True:
        try:
            body = LARGE_BODY if seq % 5 == 0 else BODY
            return await samples.intake.submit(sampler, seq, body)
        except CONNECTION_LOST:
            await asyncio.sleep(0.02)


async def told(completions: Completions, sampler: SamplerRecord, count: int) -> list[RequestId]:
    found: list[RequestId] = []
    cursor = 0
    while len(found) < count:
        ended, cursor = await completions.wait(sampler, 0, cursor, 1.0)
        found += [one.request for one in ended]
    return found


async def test_every_request_ends_and_is_published_once_across_kills_of_redis(tmp_path: Path) -> None:
    with EmbeddedRedis() as server:
        async with (
            open_samples(server.url, tmp_path) as samples,
            samples.completions() as completions,
            asyncio.timeout(KILLS_PATIENCE_S),
        ):
            samplers = [await samples.sampler(tenant) for tenant in ("a", "b")]
            stop = threading.Event()
            worker = threading.Thread(target=work, args=(samples, stop))
            worker.start()
            try:
                submits = [
                    asyncio.create_task(accepted(samples, sampler, seq))
                    for seq in range(REQUESTS)
                    for sampler in samplers
                ]
                polls = [asyncio.create_task(told(completions, sampler, REQUESTS)) for sampler in samplers]
                for _ in range(3):
                    await asyncio.sleep(0.05)
                    await asyncio.to_thread(server.kill)
                    await asyncio.to_thread(server.restart)
                requests = await asyncio.gather(*submits)
                ends = [request for poll in polls for request in await poll]
            finally:
                stop.set()
                worker.join()
            assert sorted(ends) == sorted(requests)
            assert all(samples.result(request) == Result(ResultKind.SAMPLE, request.encode()) for request in requests)
            assert (samples.load("a"), samples.load("b")) == ((0, 0, 0), (0, 0, 0))
            assert samples.log.references() == {}
            assert float(samples.log.redis.hget(fleet_keys.counters(POOL), "sample_requests")) == len(requests)
