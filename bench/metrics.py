"""Cost of metrics: requests, cycles and decode steps with all metrics and with none, in alternation.

    python -m bench.metrics [--blocks 20]

Everything runs in this process (API or log, scheduler, worker, a random model of two layers of 64), so its CPU time
covers all the work. Wall time on a busy machine cannot resolve 3 %. Prints the duration of a block with metrics
divided by that without, as the median over pairs of adjacent blocks, and the duration of a scrape.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from prometheus_client import Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from bench.support.model import build
from cotrain_scheduler.pool_clock import PoolClock
from cotrain_store.messages.ids import TenantId, WorkerId
from cotrain_store.messages.runs import LoraSpec
from cotrain_store.monitoring.logs import configure_logs
from cotrain_store.monitoring.metrics import REGISTRIES, Series, WorkerMetrics
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import HostWeights, WeightsMissing
from cotrain_workers.sampling.token_times import TokenTimes
from cotrain_workers.worker import loop
from cotrain_workers.worker.device_time import DeviceTime
from tests.support.decoding import request as sample
from tests.support.http_api import Api, running_api
from tests.support.redis_server import EmbeddedRedis
from tests.support.stack import Stack, stack, worker

Block = Callable[[], Awaitable[None]]

REQUESTS, STEPS, SEQUENCES = 200, 10, 64
SCRAPES = 20


@contextlib.contextmanager
def without() -> Iterator[None]:
    """Disable all counting."""
    with contextlib.ExitStack() as patches:
        for kind, name in (
            (Counter, "inc"), (Gauge, "set"), (Histogram, "observe"), (Series, "observe"),
            (TokenTimes, "accept"), (TokenTimes, "begin"), (TokenTimes, "step"), (TokenTimes, "end"),
            (DeviceTime, "lap"), (DeviceTime, "optimized"), (PoolClock, "_count"), (loop, "count_cycle"),
        ):  # fmt: skip
            patches.enter_context(patch.object(kind, name, lambda *_, **__: None))
        patches.enter_context(patch.object(MetricWrapperBase, "labels", lambda self, *_: self))
        yield


def scrape() -> None:
    """Print the CPU time of one scrape of an API, a scheduler and a worker, with the metrics counted so far."""
    cpu = time.process_time()
    for _ in range(SCRAPES):
        for registry in REGISTRIES.values():
            generate_latest(registry)
    took_s = (time.process_time() - cpu) / SCRAPES
    print(f"one scrape of all: {1000 * took_s:.1f} ms of CPU, every 10 s {took_s / 10:.2%}")


async def compare(name: str, block: Block, blocks: int) -> None:
    """Run blocks in alternation; print the median of their ratios and the interquartile range."""
    await block()
    cpu_ratios, wall_ratios, cpu_s = [], [], []
    for number in range(blocks):
        took = {}
        for counted in (True, False) if number % 2 else (False, True):
            with contextlib.nullcontext() if counted else without():
                cpu, wall = time.process_time(), time.perf_counter()
                await block()
                took[counted] = time.process_time() - cpu, time.perf_counter() - wall
        cpu_ratios.append(took[True][0] / took[False][0])
        wall_ratios.append(took[True][1] / took[False][1])
        cpu_s.append(took[False][0])
    low, middle, high = statistics.quantiles(cpu_ratios, n=4)
    print(
        f"{name:10} CPU time {100 * (middle - 1):+.1f} % (middle half {100 * (low - 1):+.1f} to"
        f" {100 * (high - 1):+.1f} %), wall {100 * (statistics.median(wall_ratios) - 1):+.1f} %,"
        f" {blocks} pairs of blocks of {1000 * statistics.median(cpu_s):.0f} ms of CPU"
    )


def requests_to(api: Api) -> Block:
    """Return a block of the cheapest requests that are counted per tenant."""

    async def block() -> None:
        for _ in range(REQUESTS):
            answer = await api.get("get_server_capabilities")
            assert answer.status_code == 200

    return block


async def cycles_of(server: Stack) -> Block:
    """Return a block that trains one run, a forward_backward and an optim_step per cycle."""
    run = await server.create("a", "s", LoraSpec(rank=8, seed=0))
    data = np.random.default_rng(0).integers(0, 128, (4, 64)).tolist()
    seq = 0

    async def block() -> None:
        nonlocal seq
        for _ in range(STEPS):
            await server.forward_backward(run, seq + 1, data)
            seq += 2
            await server.result(run, await server.optim_step(run, seq))

    return block


def decode_steps(engine: Engine) -> Block:
    """Return a block that generates 64 sequences of 32 tokens, counted as in `SamplingService`."""
    decoder = engine.decoder(_no_weights, kv_tokens=8192, text=None)
    times = TokenTimes(WorkerMetrics("bench", WorkerId("w0")))

    async def block() -> None:
        for number in range(SEQUENCES):
            request = sample(f"r{number}", [1 + number, 2, 3], max_tokens=32)
            times.accept(request.id, TenantId(f"t{number % 8}"), time.time())
            decoder.add(request)
            times.begin(request.id)
        while decoder.busy:
            began = time.monotonic()
            progress = decoder.step()
            times.step(progress.tokens, time.monotonic() - began)
            for name, _ in progress.finished:
                times.end(name)

    return block


def _no_weights(key: str) -> HostWeights:
    raise WeightsMissing(key)


async def main(blocks: int) -> None:
    """Measure requests, cycles, decoding and a scrape."""
    torch.set_num_threads(1)
    configure_logs("bench", "warning")
    with EmbeddedRedis() as redis:
        async with running_api(redis.url) as api:
            await compare("requests", requests_to(api), blocks)
    with EmbeddedRedis() as redis, tempfile.TemporaryDirectory() as folder:
        engine = Engine.load(str(build(Path(folder) / "model", "tiny")))
        with worker(redis.url, Path(folder), engine):
            async with stack(redis.url, Path(folder)) as server:
                await compare("cycles", await cycles_of(server), blocks)
        await compare("decoding", decode_steps(engine), blocks)
    scrape()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=20, help="pairs of them, 2 or more")
    if (blocks := parser.parse_args().blocks) < 2:
        parser.error("--blocks: 2 or more, as the spread of their ratios is shown")
    asyncio.run(main(blocks))
