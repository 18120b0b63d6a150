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

import cotrain
from bench.support.model import VOCAB
from bench.support.processes import COTRAIN, running

ADAM_VALUES = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
ADAM = cotrain.AdamParams(**ADAM_VALUES)
OPERATOR = {"X-API-Key": "key-of-the-operator"}


@dataclass(frozen=True)
class Load:
    """One tenant: its run, the batch that it trains on repeatedly, and its optimizer parameters."""

    run: Any
    data: list[Any]
    adam: Any = ADAM


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
    args: argparse.Namespace,
    url: str,
    key: str,
    stack: ExitStack,
    count: int,
    seed: int,
    sdk: Any = cotrain,
) -> Load:
    """Return a tenant with a new run and `count` random sequences; `sdk` is the client package (cotrain or tinker)."""
    service = stack.enter_context(sdk.ServiceClient(base_url=url, api_key=key))
    run = service.create_lora_training_client("bench", rank=args.rank, seed=seed)
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, VOCAB, (count, args.length + 1)).tolist()
    return Load(run, [datum(row, sdk) for row in rows], sdk.AdamParams(**ADAM_VALUES))


def datum(row: list[int], sdk: Any = cotrain) -> Any:
    """Return the datum that trains every token of a row but its first."""
    length = len(row) - 1
    inputs = {
        "target_tokens": sdk.TensorData(data=row[1:], dtype="int64", shape=[length]),
        "weights": sdk.TensorData(data=[1.0] * length, dtype="float32", shape=[length]),
    }
    return sdk.Datum(model_input=sdk.ModelInput.from_ints(row[:-1]), loss_fn_inputs=inputs)


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
        flying.append(await load.run.optim_step_async(load.adam))
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
