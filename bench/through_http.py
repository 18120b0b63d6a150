"""Through HTTP: many tenants against one, against PEFT by hand, and what the road costs.

    python -m bench.through_http [--tenants 1,4,16,64] [--out bench/results]

Starts `cotrain serve` on a small random model and drives it with our client, one API key and one
session per tenant, two steps in flight. Ratios are taken within one run, in alternation, because
absolute figures move with the machine:

  (a) many/solo   time of a step of T tenants with B sequences over one tenant with T*B
  (b) vs PEFT     our tokens/s over a PEFT `set_adapter` loop's on the same work and threads
  (c) overhead    latency of a step on its own above what the engine took for it (ms, p50)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np

from bench.model import VOCAB, build
from bench.tethered import tethered
from cotrain import AdamParams, Datum, ModelInput, ServiceClient, TensorData

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cotrain import TrainingClient

ADAM = AdamParams(learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8)
READY_TIMEOUT_S = 120.0
OPERATOR = {"X-API-Key": "key-of-the-operator"}


@dataclass(frozen=True)
class Load:
    """One tenant: its run and the batch it trains on again and again."""

    run: TrainingClient
    data: list[Datum]


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory(prefix="cotrain-bench-") as scratch, ExitStack() as stack:
        model = build(Path(scratch) / "model")
        keys = [f"tml-bench-{number:012}" for number in range(max(args.tenants) + 1)]
        url = stack.enter_context(serving(model, Path(scratch) / "data", keys, args.threads))
        rows = [measure(args, url, keys, model, stack, tenants) for tenants in args.tenants]
        overhead = measure_overhead(args, url, keys[-1], stack)
    print(
        f"overhead p50 {overhead['p50_ms']:.1f} ms above engine time, p90 {overhead['p90_ms']:.1f}"
    )
    command = " ".join(["python -m bench.through_http", *sys.argv[1:]])
    report = {"command": command, "date": datetime.now(UTC).isoformat(), "machine": machine(args),
              "shape": vars(args), "rows": rows, "overhead": overhead}  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"through_http-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps(report, indent=1, default=str) + "\n")
    print(f"wrote {path}")


def measure(
    args: argparse.Namespace,
    url: str,
    keys: list[str],
    model: Path,
    stack: ExitStack,
    tenants: int,
) -> dict[str, Any]:
    """Measure one number of tenants: solo and many in alternation, PEFT between them."""
    solo = [tenant(args, url, keys[-1], stack, tenants * args.batch, seed=999)]
    many = [tenant(args, url, keys[i], stack, args.batch, seed=i) for i in range(tenants)]
    drive(solo, 1)
    drive(many, 1)
    solo_s, many_s, by_hand = [], [], []
    for _ in range(args.repeats):
        solo_s.append(drive(solo, args.steps))
        many_s.append(drive(many, args.steps))
        by_hand.append(peft(args, model, tenants))
    for load in solo + many:
        load.run.unload()
    tokens = tenants * args.batch * args.length
    ours = [tokens / seconds for seconds in many_s]
    row = {
        "tenants": tenants,
        "solo_s_per_step": statistics.median(solo_s),
        "many_s_per_step": statistics.median(many_s),
        "many_over_solo": statistics.median(m / s for m, s in zip(many_s, solo_s, strict=True)),
        "tokens_per_s": statistics.median(ours),
        "peft_tokens_per_s": statistics.median(by_hand),
        "over_peft": statistics.median(o / p for o, p in zip(ours, by_hand, strict=True)),
        "all": {"solo_s": solo_s, "many_s": many_s, "peft_tokens_per_s": by_hand},
    }
    print(
        f"T={tenants:<3} many/solo {row['many_over_solo']:.2f}   ours {row['tokens_per_s']:6.0f} tok/s"
        f"   PEFT {row['peft_tokens_per_s']:6.0f} tok/s   ours/PEFT {row['over_peft']:.2f}",
        flush=True,
    )
    return row


def measure_overhead(
    args: argparse.Namespace, url: str, key: str, stack: ExitStack
) -> dict[str, float]:
    """Compare a lone step's latency with the wave and optimizer times of the cycles it ran in."""
    load = tenant(args, url, key, stack, args.batch, seed=7)
    drive([load], 3)
    over_ms = []
    for _ in range(args.overhead_steps):
        began = time.perf_counter()
        step = (load.run.forward_backward(load.data, "cross_entropy"), load.run.optim_step(ADAM))
        metrics = [future.result().metrics for future in step]
        latency_ms = (time.perf_counter() - began) * 1000
        cycles = {int(m["clock_cycle:unique"]) for m in metrics if m}
        over_ms.append(latency_ms - engine_ms(url, cycles))
    over_ms.sort()
    return {"p50_ms": statistics.median(over_ms), "p90_ms": over_ms[int(0.9 * len(over_ms))]}


def engine_ms(url: str, cycles: set[int]) -> float:
    """Read what the engine took for these cycles from the server's own records."""
    (pool,) = httpx.get(f"{url}/status", headers=OPERATOR).json()["pools"]
    records = [record for record in pool["cycles"] if record["cycle"] in cycles]
    assert len(records) == len(cycles)
    return sum(record["wave_ms"] + record["optim_ms"] for record in records)


def drive(loads: list[Load], steps: int) -> float:
    """Train all tenants at once with two steps in flight each; return seconds per step."""

    async def one(load: Load) -> None:
        flying: list[Any] = []
        for _ in range(steps):
            flying.append(await load.run.forward_backward_async(load.data, "cross_entropy"))
            flying.append(await load.run.optim_step_async(ADAM))
            if len(flying) > 2:
                await flying.pop(0)
                await flying.pop(0)
        for future in flying:
            await future

    async def everyone() -> None:
        await asyncio.gather(*(one(load) for load in loads))

    began = time.perf_counter()
    asyncio.run(everyone())
    return (time.perf_counter() - began) / steps


def peft(args: argparse.Namespace, model: Path, tenants: int) -> float:
    """Run the loop by hand in its own process while the server is idle; return its tokens/s."""
    command = [sys.executable, "-m", "bench.peft_loop", "--model", str(model)]
    for name in ("batch", "length", "rank", "steps", "threads"):
        command += [f"--{name}", str(getattr(args, name))]
    done = subprocess.run(
        [*command, "--tenants", str(tenants)], capture_output=True, text=True, check=True
    )
    return float(json.loads(done.stdout.splitlines()[-1])["tokens_per_s"])


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


@contextmanager
def serving(model: Path, data_dir: Path, keys: list[str], threads: int) -> Iterator[str]:
    """Run `cotrain serve` on a free port; yield its URL."""
    cotrain = Path(sys.executable).with_name("cotrain")
    command = [cotrain, "serve", "--base-model", f"bench={model}",
               "--port", "0", "--data-dir", str(data_dir), "--torch-threads", str(threads)]  # fmt: skip
    environment = {
        **os.environ, "COTRAIN_API_KEYS": ",".join(keys), "COTRAIN_ADMIN_KEY": OPERATOR["X-API-Key"],
    }  # fmt: skip
    process = subprocess.Popen(
        tethered(command), stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout
    try:
        for line in process.stdout:
            if "cotrain ready at " in line:
                yield line.split("cotrain ready at ")[1].split()[0]
                return
        raise RuntimeError("cotrain serve ended before it was ready")
    finally:
        process.terminate()
        process.wait(timeout=60)


def machine(args: argparse.Namespace) -> dict[str, Any]:
    packages = ("torch", "transformers", "peft", "redis", "fastapi", "uvicorn")
    return {"cpus": os.cpu_count(), "threads": args.threads, "platform": platform.platform(),
            "load": os.getloadavg(), "python": platform.python_version(),
            **{name: version(name) for name in packages}}  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tenants", type=lambda s: [int(x) for x in s.split(",")], default=[1, 4, 8, 16, 64]
    )
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--overhead-steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
