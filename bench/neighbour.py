"""Effect of a bad neighbour: waits of an ordinary tenant next to each of 24 bad ones, and alone.

    python -m bench.neighbour [long_pass,heavy_sampler,…] [--seconds 45] [--out bench/results]

Each neighbour gets a new `cotrain serve` on a small random model. Three probes use that server
(`bench/neighbours/ordinary.py`): a tenant that trains 256 tokens per step, one that samples 8 tokens, and a
health check. They run alone first, then next to the neighbour, which is a process of its own. All processes
share this machine's cores, clients included.

* alone, beside: p50 and p99 of a probe's waits (s); a pending call counts with its age
* promised: limit of p99 (docs/develop/benchmarks.md), for training one clock period + 2 x alone, for sampling and health
  2 x alone + 1 s
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from bench.neighbours.attacks import ATTACKS
from bench.neighbours.ordinary import Probe, ordinary
from bench.neighbours.picture import plot
from bench.neighbours.samplers import SAMPLERS
from bench.neighbours.tokenizer import add_tokenizer
from bench.neighbours.trainers import TRAINERS
from bench.support.machine import machine
from bench.support.model import build
from bench.support.serving import OPERATOR, serving
from bench.support.tethered import tethered

Neighbour = Callable[[str, str], Awaitable[None]]

NEIGHBOURS: dict[str, Neighbour] = {**TRAINERS, **SAMPLERS, **ATTACKS}
PERIOD_S = 10.0
KEYS = ("tml-ordinary_trainer00", "tml-ordinary_sampler00", "tml-neighbour_00000000")
#: Seconds after the start of a neighbour that are not counted, because it creates its runs first.
SETTLING_S = 8.0
BEGUN = "begun"


def main() -> None:
    args = parse()
    if args.be:
        print(BEGUN, flush=True)
        asyncio.run(NEIGHBOURS[args.be](args.address, KEYS[2]))  # type: ignore[arg-type]
        return
    with tempfile.TemporaryDirectory(prefix="cotrain-bench-") as scratch:
        model = add_tokenizer(build(Path(scratch) / "model"))
        rows = [
            row
            for name in args.neighbours
            for row in beside(name, args, model, Path(scratch) / name)
        ]
    report = {"machine": machine("cpu"), "shape": vars(args), "rows": rows}
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"neighbour-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps(report, indent=1, default=str) + "\n")
    plot(rows, path.with_suffix(".png"))
    kept = sum(row["kept"] for row in rows)
    print(f"{kept} of {len(rows)} promises kept; wrote {path}")


def beside(name: str, args: argparse.Namespace, model: Path, folder: Path) -> list[dict[str, Any]]:
    """Measure the probes alone, then next to one neighbour; return a row per probe."""
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(serving(model, folder, list(KEYS), args.threads))
        probes = ordinary(address, KEYS[:2], stack)
        alone = watched(probes, args.alone_seconds)
        command = [sys.executable, "-m", "bench.neighbour", "--be", name, "--address", address]
        log = stack.enter_context(folder.with_suffix(".log").open("w"))
        neighbour = subprocess.Popen(
            tethered(command), stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            assert neighbour.stdout is not None
            neighbour.stdout.readline()  # it has started or ended
            time.sleep(SETTLING_S)
            watched(probes, 0.0)
            found = watched(probes, args.seconds)
            ended = neighbour.poll()
        finally:
            neighbour.kill()
            neighbour.wait()
        status = _status(address)
        cycles = [record["duration_ms"] / 1000 for record in status["pools"][0]["cycles"]]
    rows = []
    for probe in probes:
        row = judged(probe.name, alone[probe.name], found[probe.name])
        rows.append({"neighbour": name, "probe": probe.name, **row})
        show(rows[-1])
    print(f"   longest cycle {max(cycles, default=0.0):.1f} s", flush=True)
    if ended is not None:
        print(
            f"   the neighbour ended by itself ({ended}): {last_line(folder.with_suffix('.log'))}"
        )
    for row in rows:
        row |= {"longest_cycle_s": max(cycles, default=0.0), "neighbour_ended": ended}
    return rows


def _status(address: str) -> dict[str, Any]:
    with contextlib.suppress(httpx.HTTPError):
        return dict(httpx.get(f"{address}/status", headers=OPERATOR, timeout=120).json())
    return {"pools": [{"cycles": []}]}


def watched(probes: Sequence[Probe], seconds: float) -> dict[str, dict[str, Any]]:
    """Return the results of each probe within this time."""
    for probe in probes:
        probe.take()
    time.sleep(seconds)
    found = {}
    for probe in probes:
        waits, failures = probe.take()
        waits.sort()
        found[probe.name] = {
            "count": len(waits), "p50_s": at(waits, 0.5), "p99_s": at(waits, 0.99),
            "failures": len(failures), "first_failure": failures[:1],
        }  # fmt: skip
    return found


def at(waits: Sequence[float], part: float) -> float:
    """Return a percentile by nearest rank; infinite for an empty list."""
    return waits[min(len(waits) - 1, math.ceil(part * len(waits)) - 1)] if waits else math.inf


def judged(probe: str, alone: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return a probe's waits with and without a neighbour, and the verdict on the promised limit."""
    promised = 2 * alone["p99_s"] + (PERIOD_S if probe == "training" else 1.0)
    return {
        "alone": alone, "beside": found, "promised_p99_s": promised,
        "p99_over_alone": found["p99_s"] / alone["p99_s"],
        "kept": found["p99_s"] <= promised and not found["failures"],
    }  # fmt: skip


def show(row: dict[str, Any]) -> None:
    alone, found = row["alone"], row["beside"]
    print(
        f"{row['neighbour']:<18} {row['probe']:<9} alone p50 {alone['p50_s']:6.3f} p99 {alone['p99_s']:6.3f}"
        f"   beside p50 {found['p50_s']:7.3f} p99 {found['p99_s']:7.3f} ({found['count']},"
        f" {found['failures']} failed)   promised {row['promised_p99_s']:6.2f}"
        f"   {'kept' if row['kept'] else 'BROKEN'} {' '.join(found['first_failure'])}",
        flush=True,
    )


def last_line(log: Path) -> str:
    """Return the last line of the neighbour's log."""
    return (log.read_text().strip().splitlines() or [""])[-1]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "neighbours", nargs="?", type=lambda s: s.split(","), default=list(NEIGHBOURS),
        help=f"of {', '.join(NEIGHBOURS)}; all",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=45.0, help="beside each neighbour")
    parser.add_argument("--alone-seconds", type=float, default=15.0)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--be", choices=list(NEIGHBOURS), help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
