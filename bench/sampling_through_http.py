"""Sample requests through HTTP over several adapters, alone and next to training.

    python -m bench sampling_through_http [--requests 200] [--adapters 8] [--room 16]

It starts `cotrain serve` on a small random model with a KV cache for `--room` of the sequences. Then it sends all
requests at once, each tenant from a client of its own. This is repeated next to a tenant that trains without a
pause.

* latency: of a request, from its call to its result (s, p50 and p95)
* share of time: training's share of the worker's time, by the server's records, from the first to the last cycle
  with sampling (promised: 1 - COTRAIN_SAMPLING_SHARE)
* speed: tokens/s of training next to the requests, divided by tokens/s without them
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from typing import Any

import numpy as np

from bench.support.model import VOCAB
from bench.support.record import Args, Options, Report, show
from bench.support.serving import Load, Server, drive, small_server, train
from bench.support.timing import percentile
from cotrain import ModelInput, SamplingClient, SamplingParams

OPTIONS: Options = {
    "requests": 200, "adapters": 8, "room": (16, "sequences the KV cache can hold"),
    "prompt": (64, "tokens of a prompt"), "generate": (64, "tokens generated for it"),
    "batch": 8, "length": 128, "rank": 8, "steps": 10, "threads": 2,
}  # fmt: skip


def run(args: Args, report: Report) -> None:
    os.environ["COTRAIN_KV_CACHE_TOKENS"] = str(args.room * (args.prompt + args.generate))
    with small_server(args, args.adapters + 1) as server:
        loads = [server.tenant(number, args.batch) for number in range(args.adapters + 1)]
        trainer, *others = loads
        drive(loads, 2)
        samplers = [load.run.save_weights_and_get_sampling_client() for load in others]
        asyncio.run(sample(args, samplers, count=args.adapters))  # warm-up: loads everything
        report["alone"] = show(asyncio.run(measure(args, samplers)))
        alone = args.batch * args.length / drive([trainer], args.steps)
        beside, trained = asyncio.run(measure_beside(args, samplers, trainer))
        report["beside_training"] = show(beside)
        rates = {"alone_tokens_per_s": alone, "beside_tokens_per_s": trained, "speed": trained / alone}
        report["training"] = show({**rates, "share_of_time": share_of_time(server)})


async def measure(args: Args, samplers: list[SamplingClient]) -> dict[str, Any]:
    """Send all requests at once; return latencies and throughput."""
    began = time.perf_counter()
    latencies = await sample(args, samplers, count=args.requests)
    elapsed = time.perf_counter() - began
    return {
        "requests": len(latencies), "p50_s": statistics.median(latencies), "p95_s": percentile(latencies, 0.95),
        "tokens_per_s": args.requests * args.generate / elapsed, "elapsed_s": elapsed,
    }  # fmt: skip


async def measure_beside(args: Args, samplers: list[SamplingClient], trainer: Load) -> tuple[dict[str, Any], float]:
    """Measure the requests next to a tenant that trains without a pause; return also its tokens/s."""
    is_over, began, ended = False, time.perf_counter(), list[float]()

    def note(*_: object) -> None:
        if not is_over:
            ended.append(time.perf_counter())

    training = asyncio.create_task(train(trainer, lambda _: not is_over, note))
    row = await measure(args, samplers)
    is_over = True
    await training
    tokens = len(ended) * args.batch * args.length
    return row, tokens / (ended[-1] - began) if ended else 0.0


def share_of_time(server: Server) -> float:
    """Return training's share of the time from the first to the last cycle with sampling."""
    records = server.cycles()
    busy = [record["started_at"] for record in records if record["sampling_ms"]]
    trained_ms = sum(
        record["duration_ms"] - record["sampling_ms"]
        for record in records
        if min(busy) <= record["started_at"] < max(busy)
    )
    return float(trained_ms / 1000 / (max(busy) - min(busy)))


async def sample(args: Args, samplers: list[SamplingClient], count: int) -> list[float]:
    """Request `count` sequences at once, adapters in turn; return the latency of each in s."""
    prompts = np.random.default_rng(count).integers(0, VOCAB, (count, args.prompt)).tolist()

    async def one(number: int) -> float:
        params = SamplingParams(max_tokens=args.generate, seed=number, stop=[])
        began = time.perf_counter()
        future = samplers[number % len(samplers)].sample(ModelInput.from_ints(prompts[number]), 1, params)
        (sequence,) = (await future).sequences
        assert len(sequence.tokens) == args.generate
        return time.perf_counter() - began

    return list(await asyncio.gather(*(one(number) for number in range(count))))
