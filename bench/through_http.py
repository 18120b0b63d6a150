"""Training through HTTP: many tenants against one, against PEFT without a server, and the overhead.

    python -m bench through_http [--tenants 1,4,16,64] [--client tinker]

It starts `cotrain serve` on a small random model and drives it with our client or the official SDK. Each tenant has
an API key, a session, and two steps in flight. Ratios are measured within one run, in alternation, because absolute
figures depend on the machine.

* (a) many/solo: time of a step of T tenants with B sequences over that of one tenant with T*B, and the CPU seconds
  of both per process
* (b) vs PEFT: our tokens/s over those of a PEFT `set_adapter` loop on the same work and threads
* (c) overhead: latency of a single step minus the time of the engine (ms, p50)
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from bench.support.model import build
from bench.support.options import Choice, Options
from bench.support.processes import cpu_by_role
from bench.support.report import Report
from bench.support.serving import OPERATOR, Load, drive, serving, tenant
from bench.support.timing import alternate, median_ratio, percentile

OPTIONS: Options = {
    "tenants": [1, 4, 8, 16, 64], "batch": 2, "length": 128, "rank": 8, "steps": 5, "repeats": 3,
    "overhead_steps": 30, "threads": 2, "client": Choice(("cotrain", "tinker")),
    "without_peft": (False, "measure the server alone"),
}  # fmt: skip


class Driven(NamedTuple):
    """Wall time of a step, and the CPU time of each process per step, in s."""

    step_s: float
    cpu_s: dict[str, float]


def run(args: argparse.Namespace, report: Report) -> None:
    """Measure each number of tenants, then the overhead."""
    with tempfile.TemporaryDirectory(prefix="cotrain-bench-") as scratch, ExitStack() as stack:
        model = build(Path(scratch) / "model")
        keys = [f"tml-bench-{number:012}" for number in range(max(args.tenants) + 1)]
        url = stack.enter_context(serving(model, Path(scratch) / "data", keys, args.threads))
        report["rows"] = [
            measure(args, url, keys, model, stack, tenants) for tenants in args.tenants
        ]
        overhead = report["overhead"] = measure_overhead(args, url, keys[-1], stack)
    print(
        f"overhead p50 {overhead['p50_ms']:.1f} ms above engine time, p90 {overhead['p90_ms']:.1f}"
    )


def measure(
    args: argparse.Namespace,
    url: str,
    keys: list[str],
    model: Path,
    stack: ExitStack,
    tenants: int,
) -> dict[str, Any]:
    """Measure one number of tenants: solo and many in alternation, with PEFT in between."""
    sdk = import_module(args.client or "cotrain")
    solo = [tenant(args, url, keys[-1], stack, tenants * args.batch, 999, sdk)]
    many = [tenant(args, url, keys[i], stack, args.batch, i, sdk) for i in range(tenants)]
    ways: dict[str, Any] = {
        "solo": partial(driven, solo, args.steps),
        "many": partial(driven, many, args.steps),
    }
    if not args.without_peft:
        ways["peft"] = partial(peft, args, model, tenants)
    found = alternate(ways, args.repeats)
    solo_s, many_s = ([each.step_s for each in found[way]] for way in ("solo", "many"))
    if sdk.__name__ == "cotrain":
        for load in solo + many:
            load.run.unload()
    tokens = tenants * args.batch * args.length
    ours = [tokens / seconds for seconds in many_s]
    row = {
        "tenants": tenants,
        "solo_s_per_step": statistics.median(solo_s),
        "many_s_per_step": statistics.median(many_s),
        "many_over_solo": median_ratio(many_s, solo_s),
        "tokens_per_s": statistics.median(ours),
        "cpu_s_per_step": {way: median_cpu_s(found[way]) for way in ("solo", "many")},
        "all": found,
    }
    line = f"T={tenants:<3} many/solo {row['many_over_solo']:.2f}   ours {row['tokens_per_s']:6.0f} tok/s"
    if by_hand := found.get("peft"):
        row["peft_tokens_per_s"] = statistics.median(by_hand)
        row["over_peft"] = median_ratio(ours, by_hand)
        line += f"   PEFT {row['peft_tokens_per_s']:6.0f} tok/s   ours/PEFT {row['over_peft']:.2f}"
    print(line)
    for way, took in row["cpu_s_per_step"].items():
        print(f"      CPU s per step, {way}: ", *(f"{role} {s:.3f}" for role, s in took.items()))
    return row


def driven(loads: list[Load], steps: int) -> Driven:
    """Train all tenants concurrently; return the times of a step."""
    before = cpu_by_role()
    step_s = drive(loads, steps)
    after = cpu_by_role()
    return Driven(step_s, {role: (after[role] - s) / steps for role, s in before.items()})


def median_cpu_s(rounds: list[Driven]) -> dict[str, float]:
    """Return the median CPU time of each process over the rounds, in s per step."""
    return {
        role: statistics.median(each.cpu_s[role] for each in rounds) for role in rounds[0].cpu_s
    }


def measure_overhead(
    args: argparse.Namespace, url: str, key: str, stack: ExitStack
) -> dict[str, float]:
    """Return the latency of a single step minus the wave and optimizer times of its cycles."""
    load = tenant(args, url, key, stack, args.batch, seed=7)
    drive([load], 3)
    over_ms = []
    for _ in range(args.overhead_steps):
        began = time.perf_counter()
        step = (
            load.run.forward_backward(load.data, "cross_entropy"),
            load.run.optim_step(load.adam),
        )
        metrics = [future.result().metrics for future in step]
        latency_ms = (time.perf_counter() - began) * 1000
        cycles = {int(m["clock_cycle:unique"]) for m in metrics if m}
        over_ms.append(latency_ms - engine_ms(url, cycles))
    return {"p50_ms": statistics.median(over_ms), "p90_ms": percentile(over_ms, 0.9)}


def engine_ms(url: str, cycles: set[int]) -> float:
    """Return the engine time of these cycles in ms, from the server's own records."""
    (pool,) = httpx.get(f"{url}/status", headers=OPERATOR).json()["pools"]
    records = [record for record in pool["cycles"] if record["cycle"] in cycles]
    assert len(records) == len(cycles)
    return float(sum(record["wave_ms"] + record["optim_ms"] for record in records))


def peft(args: argparse.Namespace, model: Path, tenants: int) -> float:
    """Run the PEFT loop in its own process while the server is idle; return its tokens/s."""
    command = [sys.executable, "-m", "bench.cycle.peft_loop", "--model", str(model)]
    for name in ("batch", "length", "rank", "steps", "threads"):
        command += [f"--{name}", str(getattr(args, name))]
    done = subprocess.run(
        [*command, "--tenants", str(tenants)], capture_output=True, text=True, check=True
    )
    return float(json.loads(done.stdout.splitlines()[-1])["tokens_per_s"])
