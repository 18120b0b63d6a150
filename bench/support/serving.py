"""Server started by a benchmark, and tenants that train on it through our client."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

import cotrain
from bench.support.model import VOCAB, build
from bench.support.processes import COTRAIN, running
from bench.support.record import Args

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
def serving(
    model: Path, data_dir: Path, keys: list[str], threads: int, cotrain: Path = COTRAIN
) -> Iterator[tuple[str, int]]:
    """Run `cotrain serve` on a free port; yield its URL and process id."""
    options = {"base-model": f"bench={model}", "port": 0, "data-dir": data_dir, "torch-threads": threads}
    command = [str(cotrain), "serve", *(str(part) for name, value in options.items() for part in (f"--{name}", value))]
    given = {"COTRAIN_API_KEYS": ",".join(keys), "COTRAIN_ADMIN_KEY": OPERATOR["X-API-Key"]}
    with running(command, stdout=subprocess.PIPE, env={**os.environ, **given}) as process:
        assert process.stdout
        for line in process.stdout:
            if "cotrain ready at " in line:
                yield line.split("cotrain ready at ")[1].split()[0], process.pid
                return
        raise RuntimeError("cotrain serve ended before it was ready")


@dataclass(frozen=True)
class Server:
    """Server on a small random model, with an API key for each tenant."""

    url: str
    pid: int
    keys: list[str]
    model: Path
    args: Args
    _stack: ExitStack

    def tenant(self, number: int, count: int, seed: int | None = None, sdk: Any = cotrain) -> Load:
        """Return a tenant with a new run of `--rank` and `count` random sequences of `--length`.

        `sdk` is the client package (cotrain or tinker), `seed` by default the number.
        """
        seed = number if seed is None else seed
        service = self._stack.enter_context(sdk.ServiceClient(base_url=self.url, api_key=self.keys[number]))
        run = service.create_lora_training_client("bench", rank=self.args.rank, seed=seed)
        return Load(run, random_data(count, self.args.length, seed, sdk), sdk.AdamParams(**ADAM_VALUES))

    def cycles(self) -> list[dict[str, Any]]:
        return cycles_of(self.url)


def cycles_of(url: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{url}/status", headers=OPERATOR, timeout=120)
    records: list[dict[str, Any]] = answer.json()["pools"][0]["cycles"]
    return records


@contextmanager
def small_server(args: Args, tenants: int, size: str = "5m", cotrain: Path = COTRAIN) -> Iterator[Server]:
    """Run a server on a random model, by default of 5 M parameters, in a temporary folder, with `--threads`."""
    with tempfile.TemporaryDirectory(prefix="cotrain-bench-") as scratch, ExitStack() as stack:
        model = build(Path(scratch) / "model", size)
        keys = [f"tml-bench-{number:012}" for number in range(tenants)]
        url, pid = stack.enter_context(serving(model, Path(scratch) / "data", keys, args.threads, cotrain))
        yield Server(url, pid, keys, model, args, stack)


def random_data(count: int, length: int, seed: int, sdk: Any = cotrain) -> list[Any]:
    rows = np.random.default_rng(seed).integers(0, VOCAB, (count, length + 1)).tolist()
    return [datum(row, sdk) for row in rows]


def datum(row: list[int], sdk: Any = cotrain) -> Any:
    """Return the datum that trains every token of a row but its first."""
    shape = [len(row) - 1]
    inputs = {
        "target_tokens": sdk.TensorData(data=row[1:], dtype="int64", shape=shape),
        "weights": sdk.TensorData(data=[1.0] * shape[0], dtype="float32", shape=shape),
    }
    return sdk.Datum(model_input=sdk.ModelInput.from_ints(row[:-1]), loss_fn_inputs=inputs)


async def train(load: Load, goes_on: Callable[[int], bool], done: Callable[[Any, Any], None] = lambda *_: None) -> int:
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
