"""Cost of metrics: requests, cycles and decode steps with them and without.

    python -m bench metrics [--parts requests,cycles,decoding] [--blocks 20]

Everything but Redis runs in this process (API or log, scheduler, worker, a random model of two layers of 64), so its
CPU time covers all the work. Wall time on a busy machine cannot resolve 3 %. Prints the time of a block with metrics
over that without, as the median over pairs of adjacent blocks, and the duration of a scrape.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from prometheus_client import Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from bench.support.model import build
from bench.support.record import Args, Options, Report, Some, prepare_torch, show
from bench.support.timing import ratios, turns
from cotrain_scheduler.pool_clock import PoolClock
from cotrain_store.messages.ids import TenantId, WorkerId
from cotrain_store.messages.runs import LoraSpec
from cotrain_store.monitoring.logs_and_traces import configure_logs
from cotrain_store.monitoring.metrics import REGISTRIES, Series, WorkerMetrics
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import HostWeights
from cotrain_workers.sampling.token_times import TokenTimes
from cotrain_workers.worker import loop
from cotrain_workers.worker.device_time import DeviceTime
from tests.support.decoding import request as sample
from tests.support.http_api import running_api
from tests.support.redis_server import EmbeddedRedis
from tests.support.stack import Home, stack, worker

Work = Callable[[], Awaitable[None]]
REQUESTS, STEPS, SEQUENCES = 200, 10, 64
SCRAPES = 20
#: Functions that count; each becomes an empty function in a block without metrics.
COUNTING = (
    (Counter, "inc"), (Gauge, "set"), (Histogram, "observe"), (Series, "observe"),
    (TokenTimes, "accept"), (TokenTimes, "begin"), (TokenTimes, "step"), (TokenTimes, "end"),
    (DeviceTime, "lap"), (DeviceTime, "optimized"), (PoolClock, "_count"), (loop, "count_cycle"),
)  # fmt: skip


def run(args: Args, report: Report) -> int:
    if args.blocks < 2:
        print("--blocks must be 2 or more, because the spread of their ratios is shown")
        return 2
    prepare_torch(threads=1)
    configure_logs("bench", "warning")
    for name in args.parts:
        report[name] = show({"part": name, **asyncio.run(compare(PARTS[name], args.blocks))})
    cpu = time.process_time()
    for _ in range(SCRAPES):
        for registry in REGISTRIES.values():
            generate_latest(registry)
    took_s = (time.process_time() - cpu) / SCRAPES
    print(f"one scrape of all: {1000 * took_s:.1f} ms of CPU, every 10 s {took_s / 10:.2%}")
    return 0


async def compare(part: Callable[[str, Path], Any], blocks: int) -> dict[str, Any]:
    """Run blocks in alternation; return medians of their times and ratios, and the quartiles of the CPU ratios."""
    wall: dict[bool, list[float]] = {True: [], False: []}
    cpu: dict[bool, list[float]] = {True: [], False: []}
    with EmbeddedRedis() as redis, tempfile.TemporaryDirectory() as folder:
        async with part(redis.url, Path(folder)) as work:
            await work()
            for counted in turns((True, False), blocks):
                with contextlib.nullcontext() if counted else without():
                    cpu_from, wall_from = time.process_time(), time.perf_counter()
                    await work()
                    wall[counted].append(time.perf_counter() - wall_from)
                    cpu[counted].append(time.process_time() - cpu_from)
    low, middle, high = statistics.quantiles(ratios(cpu[True], cpu[False]), n=4)
    return {
        "cpu_ratio": middle, "cpu_ratio_low": low, "cpu_ratio_high": high,
        "wall_ratio": statistics.median(ratios(wall[True], wall[False])),
        "wall_ms_with": 1000 * statistics.median(wall[True]), "wall_ms_without": 1000 * statistics.median(wall[False]),
        "blocks": blocks,
    }  # fmt: skip


@contextlib.contextmanager
def without() -> Iterator[None]:
    with contextlib.ExitStack() as patches:
        for kind, name in COUNTING:
            patches.enter_context(patch.object(kind, name, lambda *_, **__: None))
        patches.enter_context(patch.object(MetricWrapperBase, "labels", lambda self, *_: self))
        yield


@contextlib.asynccontextmanager
async def requests(url: str, _: Path) -> AsyncIterator[Work]:
    """Yield a block of the cheapest requests that are counted per tenant."""
    async with running_api(url) as api:

        async def block() -> None:
            for _ in range(REQUESTS):
                answer = await api.get("get_server_capabilities")
                assert answer.status_code == 200

        yield block


@contextlib.asynccontextmanager
async def cycles(url: str, folder: Path) -> AsyncIterator[Work]:
    """Yield a block that trains one run, a forward_backward and an optim_step per cycle."""
    engine = Engine.load(str(build(folder / "model", "tiny")))
    with worker(Home(url, folder), engine):
        async with stack(url, folder) as server:
            run = await server.create("a", "s", LoraSpec(rank=8, seed=0))
            data = np.random.default_rng(0).integers(0, 128, (4, 64)).tolist()
            seqs = itertools.count(1)

            async def block() -> None:
                for _ in range(STEPS):
                    await server.forward_backward(run, next(seqs), data)
                    await server.result(run, await server.optim_step(run, next(seqs)))

            yield block


@contextlib.asynccontextmanager
async def decoding(_: str, folder: Path) -> AsyncIterator[Work]:
    """Yield a block that generates 64 sequences of 32 tokens, counted as in `SamplingService`."""
    engine = Engine.load(str(build(folder / "model", "tiny")))
    weights: dict[str, HostWeights] = {}
    decoder = engine.decoder(weights.__getitem__, kv_tokens=8192, text=None)
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

    yield block


PARTS = {"requests": requests, "cycles": cycles, "decoding": decoding}
OPTIONS: Options = {
    "parts": Some(tuple(PARTS)), "blocks": (20, "pairs of them, 2 or more"),
}  # fmt: skip
