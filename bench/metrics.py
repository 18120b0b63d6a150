"""Cost of metrics and of the run history: requests, cycles, decode steps and commits with them and without.

    python -m bench metrics [--parts requests,cycles,decoding,history] [--blocks 20]

Everything but Redis runs in this process (API or log, scheduler, worker, a random model of two layers of 64), so its
CPU time covers all the work. Wall time on a busy machine cannot resolve 3 %. Prints the time of a block with metrics
over that without, as the median over pairs of adjacent blocks, and the duration of a scrape. A block of `history` is
the commit of a pass and an optimizer step of eight runs, with history entries and without.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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
from bench.support.options import Options, Some
from bench.support.report import Report, prepare_torch, show
from bench.support.timing import Took, measure, ratios, turns
from cotrain_scheduler.pool_clock import PoolClock
from cotrain_store.keys import run_keys
from cotrain_store.messages.ids import OpId, TenantId, WorkerId
from cotrain_store.messages.ops import OpKind
from cotrain_store.messages.results import Result
from cotrain_store.messages.runs import HistoryEntry, LoraSpec, PassEntry, StepEntry
from cotrain_store.monitoring.logs import configure_logs
from cotrain_store.monitoring.metrics import REGISTRIES, Series, WorkerMetrics
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import HostWeights, WeightsMissing
from cotrain_workers.sampling.token_times import TokenTimes
from cotrain_workers.worker import loop
from cotrain_workers.worker.device_time import DeviceTime
from tests.support.decoding import request as sample
from tests.support.http_api import Api, running_api
from tests.support.log import open_log
from tests.support.redis_server import EmbeddedRedis
from tests.support.stack import Stack, stack, worker

Work = Callable[[], Awaitable[None]]
#: Runs a block with metrics or without, and returns its times.
Block = Callable[[bool], Awaitable[Took]]

PARTS = ("requests", "cycles", "decoding", "history")
REQUESTS, STEPS, SEQUENCES, RUNS = 200, 10, 64, 8
SCRAPES = 20
RESULT = Result.of_json({"metrics": {"loss:sum": 1.5, "grad_norm": 0.5}, "padding": "x" * 4_000})

OPTIONS: Options = {"parts": Some(PARTS), "blocks": (20, "pairs of them, 2 or more")}


def run(args: argparse.Namespace, report: Report) -> int:
    """Measure each part, then a scrape."""
    if args.blocks < 2:
        print("--blocks must be 2 or more, because the spread of their ratios is shown")
        return 2
    prepare_torch(threads=1)
    configure_logs("bench", "warning")
    asyncio.run(measure_parts(args, report))
    scrape()
    return 0


async def measure_parts(args: argparse.Namespace, report: Report) -> None:
    for name in args.parts:
        with EmbeddedRedis() as redis, tempfile.TemporaryDirectory() as folder:
            async with PLACES[name](redis.url, Path(folder)) as block:
                report[name] = show({"part": name, **await compare(block, args.blocks)})


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


async def compare(block: Block, blocks: int) -> dict[str, Any]:
    """Run blocks in alternation; return medians of their times and ratios, and the quartiles of the CPU ratios."""
    await block(True)
    took: dict[bool, list[Took]] = {True: [], False: []}
    for counted in turns((True, False), blocks):
        took[counted].append(await block(counted))
    wall, cpu = (
        ratios(*([getattr(each, kind) for each in took[counted]] for counted in (True, False)))
        for kind in ("wall_s", "cpu_s")
    )
    low, middle, high = statistics.quantiles(cpu, n=4)
    with_ms, without_ms = (
        1000 * statistics.median(each.wall_s for each in took[counted]) for counted in (True, False)
    )
    return {
        "cpu_ratio": middle, "cpu_ratio_low": low, "cpu_ratio_high": high, "wall_ratio": statistics.median(wall),
        "wall_ms_with": with_ms, "wall_ms_without": without_ms, "blocks": blocks,
    }  # fmt: skip


def timed(work: Work) -> Block:
    """Return a block that does this work with all metrics or with none."""

    async def block(counted: bool) -> Took:
        with contextlib.nullcontext() if counted else without():
            cpu, wall = time.process_time(), time.perf_counter()
            await work()
            return Took(time.perf_counter() - wall, time.process_time() - cpu)

    return block


@contextlib.asynccontextmanager
async def requests_place(url: str, _: Path) -> AsyncIterator[Block]:
    async with running_api(url) as api:
        yield timed(requests_to(api))


@contextlib.asynccontextmanager
async def cycles_place(url: str, folder: Path) -> AsyncIterator[Block]:
    engine = Engine.load(str(build(folder / "model", "tiny")))
    with worker(url, folder, engine):
        async with stack(url, folder) as server:
            yield timed(await cycles_of(server))


@contextlib.asynccontextmanager
async def decoding_place(_: str, folder: Path) -> AsyncIterator[Block]:
    yield timed(decode_steps(Engine.load(str(build(folder / "model", "tiny")))))


@contextlib.asynccontextmanager
async def history_place(url: str, folder: Path) -> AsyncIterator[Block]:
    """Yield a block that commits a cycle of RUNS runs; at the end, print the bytes of a point."""
    async with open_log(url, folder) as log:
        runs = [await log.new_run(f"t{number % 4}", f"s{number}") for number in range(RUNS)]
        await log.run_all()
        seq = 1

        async def block(counted: bool) -> Took:
            nonlocal seq
            found: dict[OpId, HistoryEntry] = {}
            for each in runs:
                await log.submit(each, seq)
                await log.submit(each, seq + 1, OpKind.OPTIM_STEP)
                found[each.id, seq] = PassEntry(1 / 3, 512.0, is_forward=False)
                found[each.id, seq + 1] = StepEntry(1 / 7, 1e-4)
            seq += 2
            step = await log.plan()
            results = {(op.run, op.seq): RESULT for op in step.ops}
            record = {"cycle": step.cycle}
            return measure(
                lambda: log.execution.commit(
                    step, results, record, {}, found=found if counted else None
                )
            )

        yield block
        key = run_keys.steps(runs[0].id)
        size, points = log.redis.memory_usage(key, samples=0), log.redis.llen(key)
        print(f"history: {size / points:.0f} bytes of Redis per point")


PLACES = {
    "requests": requests_place,
    "cycles": cycles_place,
    "decoding": decoding_place,
    "history": history_place,
}


def requests_to(api: Api) -> Work:
    """Return a block of the cheapest requests that are counted per tenant."""

    async def block() -> None:
        for _ in range(REQUESTS):
            answer = await api.get("get_server_capabilities")
            assert answer.status_code == 200

    return block


async def cycles_of(server: Stack) -> Work:
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


def decode_steps(engine: Engine) -> Work:
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
