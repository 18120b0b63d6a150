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

import argparse
import asyncio
import os
import statistics
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np

from bench.support.model import VOCAB, build
from bench.support.options import Options
from bench.support.report import Report
from bench.support.serving import OPERATOR, Load, drive, serving, tenant, train
from bench.support.timing import percentile
from cotrain import ModelInput, SamplingClient, SamplingParams

OPTIONS: Options = {
    "requests": 200, "adapters": 8, "room": (16, "sequences the KV cache can hold"),
    "prompt": (64, "tokens of a prompt"), "generate": (64, "tokens generated for it"),
    "batch": 8, "length": 128, "rank": 8, "steps": 10, "threads": 2,
}  # fmt: skip


def run(args: argparse.Namespace, report: Report) -> None:
    """Measure the requests alone, the training alone, and both together."""
    os.environ["COTRAIN_KV_CACHE_TOKENS"] = str(args.room * (args.prompt + args.generate))
    with tempfile.TemporaryDirectory(prefix="cotrain-bench-") as scratch, ExitStack() as stack:
        model = build(Path(scratch) / "model")
        keys = [f"tml-bench-{number:012}" for number in range(args.adapters + 1)]
        url = stack.enter_context(serving(model, Path(scratch) / "data", keys, args.threads))
        loads = [tenant(args, url, key, stack, args.batch, seed=i) for i, key in enumerate(keys)]
        trainer, *others = loads
        drive(loads, 2)
        samplers = [load.run.save_weights_and_get_sampling_client() for load in others]
        asyncio.run(sample(args, samplers, count=args.adapters))  # warm-up: loads everything
        alone = measure(args, samplers)
        training_alone = args.batch * args.length / drive([trainer], args.steps)
        with Training(args, trainer) as training:
            beside = measure(args, samplers)
        time_share = share_of_time(url)
    speed = training.tokens_per_s / training_alone
    print(f"training beside them: {time_share:.3f} of the worker's time")
    print(f"   {speed:.2f} of its speed alone ({training_alone:.0f} tokens/s)")
    report |= {
        "alone": alone,
        "beside_training": beside,
        "training": {
            "alone_tokens_per_s": training_alone,
            "beside_tokens_per_s": training.tokens_per_s,
            "speed": speed,
            "share_of_time": time_share,
        },
    }


class Training:
    """One tenant that trains without a pause in a thread of its own, inside the `with` block."""

    def __init__(self, args: argparse.Namespace, load: Load) -> None:
        self.tokens_per_s = 0.0
        self._tokens = args.batch * args.length
        self._load = load
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._train)

    def __enter__(self) -> Training:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        self._thread.join()

    def _train(self) -> None:
        """Count the steps that finish inside the block."""
        began, ended, steps = time.perf_counter(), 0.0, 0

        def count(*_: object) -> None:
            nonlocal ended, steps
            if not self._leaving.is_set():
                ended, steps = time.perf_counter(), steps + 1

        asyncio.run(train(self._load, lambda _: not self._leaving.is_set(), count))
        self.tokens_per_s = steps * self._tokens / (ended - began) if steps else 0.0


def measure(args: argparse.Namespace, samplers: list[SamplingClient]) -> dict[str, float]:
    """Send all requests at once; return latencies and throughput."""
    began = time.perf_counter()
    latencies = asyncio.run(sample(args, samplers, count=args.requests))
    elapsed = time.perf_counter() - began
    row = {
        "requests": len(latencies),
        "p50_s": statistics.median(latencies),
        "p95_s": percentile(latencies, 0.95),
        "tokens_per_s": args.requests * args.generate / elapsed,
        "elapsed_s": elapsed,
    }
    print(
        f"{row['requests']} requests done: p50 {row['p50_s']:.2f} s   p95 {row['p95_s']:.2f} s"
        f"   {row['tokens_per_s']:.0f} generated tokens/s",
        flush=True,
    )
    return row


def share_of_time(url: str) -> float:
    """Return training's share of the time from the first to the last cycle with sampling."""
    (pool,) = httpx.get(f"{url}/status", headers=OPERATOR).json()["pools"]
    busy = [record for record in pool["cycles"] if record["sampling_ms"]]
    first, last = min(r["started_at"] for r in busy), max(r["started_at"] for r in busy)
    trained_ms = sum(
        record["duration_ms"] - record["sampling_ms"]
        for record in pool["cycles"]
        if first <= record["started_at"] < last
    )
    return float(trained_ms / 1000 / (last - first))


async def sample(
    args: argparse.Namespace, samplers: list[SamplingClient], count: int
) -> list[float]:
    """Request `count` sequences at once, adapters in turn; return the latency of each in s."""
    rng = np.random.default_rng(count)
    prompts = rng.integers(0, VOCAB, (count, args.prompt)).tolist()

    async def one(number: int) -> float:
        params = SamplingParams(max_tokens=args.generate, seed=number, stop=[])
        began = time.perf_counter()
        future = samplers[number % len(samplers)].sample(
            ModelInput.from_ints(prompts[number]), num_samples=1, sampling_params=params
        )
        (sequence,) = (await future).sequences
        assert len(sequence.tokens) == args.generate
        return time.perf_counter() - began

    return list(await asyncio.gather(*(one(number) for number in range(count))))
