"""Training through HTTP: many tenants against one, against PEFT without a server, and the overhead.

    python -m bench.through_http [--tenants 1,4,16,64] [--out bench/results]

It starts `cotrain serve` on a small random model and drives it with our client, with one API key and one session per
tenant and two steps in flight. Ratios are measured within one run, in alternation, because absolute figures depend
on the machine.

* (a) many/solo: time of a step of T tenants with B sequences over that of one tenant with T*B
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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from bench.support.model import build
from bench.support.serving import ADAM, OPERATOR, drive, host, serving, tenant


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
    report = {"command": command, "date": datetime.now(UTC).isoformat(), "machine": host(args.threads),
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
    """Measure one number of tenants: solo and many in alternation, with PEFT in between."""
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
    """Return the latency of a single step minus the wave and optimizer times of its cycles."""
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
