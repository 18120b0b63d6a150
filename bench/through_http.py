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

import json
import statistics
import subprocess
import sys
import time
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from bench.support.processes import cpu_by_role
from bench.support.record import Args, Choice, Options, Report
from bench.support.serving import Load, Server, drive, small_server
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


def run(args: Args, report: Report) -> None:
    with small_server(args, max(args.tenants) + 1) as server:
        report["rows"] = [measure(server, tenants) for tenants in args.tenants]
        overhead = report["overhead"] = measure_overhead(server)
    print(f"overhead p50 {overhead['p50_ms']:.1f} ms above engine time, p90 {overhead['p90_ms']:.1f}")


def measure(server: Server, tenants: int) -> dict[str, Any]:
    """Measure one number of tenants: solo and many in alternation, with PEFT in between."""
    args = server.args
    sdk = import_module(args.client or "cotrain")
    solo = [server.tenant(-1, tenants * args.batch, 999, sdk)]
    many = [server.tenant(number, args.batch, sdk=sdk) for number in range(tenants)]
    ways: dict[str, Any] = {"solo": partial(driven, solo, args.steps), "many": partial(driven, many, args.steps)}
    if not args.without_peft:
        ways["peft"] = partial(peft, server, tenants)
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
        "cpu_s_per_step": {
            way: {role: statistics.median(each.cpu_s[role] for each in found[way]) for role in found[way][0].cpu_s}
            for way in ("solo", "many")
        },
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
    before = cpu_by_role()
    step_s = drive(loads, steps)
    after = cpu_by_role()
    return Driven(step_s, {role: (after[role] - s) / steps for role, s in before.items()})


def measure_overhead(server: Server) -> dict[str, float]:
    """Return the latency of a single step minus the wave and optimizer times of its cycles."""
    load = server.tenant(-1, server.args.batch, seed=7)
    drive([load], 3)
    over_ms = []
    for _ in range(server.args.overhead_steps):
        began = time.perf_counter()
        passed = load.run.forward_backward(load.data, "cross_entropy")
        stepped = load.run.optim_step(load.adam)
        metrics = [passed.result().metrics, stepped.result().metrics]
        latency_ms = (time.perf_counter() - began) * 1000
        cycles = {int(each["clock_cycle:unique"]) for each in metrics if each}
        records = [record for record in server.cycles() if record["cycle"] in cycles]
        assert len(records) == len(cycles)
        over_ms.append(latency_ms - sum(each["wave_ms"] + each["optim_ms"] for each in records))
    return {"p50_ms": statistics.median(over_ms), "p90_ms": percentile(over_ms, 0.9)}


def peft(server: Server, tenants: int) -> float:
    """Run the PEFT loop in its own process while the server is idle; return its tokens/s."""
    command = [sys.executable, "-m", "bench.cycle.peft", "--model", str(server.model)]
    for name in ("batch", "length", "rank", "steps", "threads"):
        command += [f"--{name}", str(getattr(server.args, name))]
    done = subprocess.run([*command, "--tenants", str(tenants)], capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["tokens_per_s"])
