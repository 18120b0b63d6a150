"""Server started by a benchmark, and tenants that train on it through our client."""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.support.model import VOCAB
from bench.support.processes import COTRAIN, running
from cotrain import AdamParams, Datum, ModelInput, ServiceClient, TensorData, TrainingClient

ADAM = AdamParams(learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8)
OPERATOR = {"X-API-Key": "key-of-the-operator"}


@dataclass(frozen=True)
class Load:
    """One tenant: its run, and the batch that it trains on repeatedly."""

    run: TrainingClient
    data: list[Datum]


@contextmanager
def serving(model: Path, data_dir: Path, keys: list[str], threads: int) -> Iterator[str]:
    """Run `cotrain serve` on a free port; yield its URL."""
    command = [str(COTRAIN), "serve", "--base-model", f"bench={model}",
               "--port", "0", "--data-dir", str(data_dir), "--torch-threads", str(threads)]  # fmt: skip
    environment = {
        **os.environ, "COTRAIN_API_KEYS": ",".join(keys), "COTRAIN_ADMIN_KEY": OPERATOR["X-API-Key"],
    }  # fmt: skip
    with running(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout
        for line in process.stdout:
            if "cotrain ready at " in line:
                yield line.split("cotrain ready at ")[1].split()[0]
                return
        raise RuntimeError("cotrain serve ended before it was ready")


def tenant(
    args: argparse.Namespace, url: str, key: str, stack: ExitStack, count: int, seed: int
) -> Load:
    service = stack.enter_context(ServiceClient(base_url=url, api_key=key))
    run = service.create_lora_training_client("bench", rank=args.rank, seed=seed)
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, VOCAB, (count, args.length + 1)).tolist()
    return Load(run, [datum(row) for row in rows])


def datum(row: list[int]) -> Datum:
    length = len(row) - 1
    inputs = {
        "target_tokens": TensorData(data=row[1:], dtype="int64", shape=[length]),
        "weights": TensorData(data=[1.0] * length, dtype="float32", shape=[length]),
    }
    return Datum(model_input=ModelInput.from_ints(row[:-1]), loss_fn_inputs=inputs)


async def train(
    load: Load,
    goes_on: Callable[[int], bool],
    done: Callable[[Any, Any], None] = lambda passed, stepped: None,
) -> int:
    """Train with two steps in flight as long as `goes_on(steps)`; return the number of steps.

    The results of each step are passed to `done` in order.
    """
    flying, steps = list[Any](), 0
    while goes_on(steps):
        flying.append(await load.run.forward_backward_async(load.data, "cross_entropy"))
        flying.append(await load.run.optim_step_async(ADAM))
        steps += 1
        if len(flying) > 2:
            done(await flying.pop(0), await flying.pop(0))
    while flying:
        done(await flying.pop(0), await flying.pop(0))
    return steps


def drive(loads: list[Load], steps: int) -> float:
    """Train all tenants concurrently; return seconds per step."""

    async def everyone() -> None:
        await asyncio.gather(*(train(load, lambda done: done < steps) for load in loads))

    began = time.perf_counter()
    asyncio.run(everyone())
    return (time.perf_counter() - began) / steps
