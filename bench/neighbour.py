"""Effect of a bad neighbour: waits of an ordinary tenant next to each of 25 bad ones, and alone.

    python -m bench neighbour [--neighbours long_pass,heavy_sampler,…] [--seconds 45]

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
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from bench.neighbours.attacks import ATTACKER_ADDRESS, ATTACKS
from bench.neighbours.ordinary import Probe, ordinary
from bench.neighbours.samplers import SAMPLERS
from bench.neighbours.tokenizer import add_tokenizer
from bench.neighbours.trainers import TRAINERS
from bench.support.edge import edge
from bench.support.model import build
from bench.support.options import Choice, Options, Some
from bench.support.processes import tethered
from bench.support.report import Report
from bench.support.serving import OPERATOR, serving
from bench.support.timing import percentile

Neighbour = Callable[[str, str], Awaitable[None]]

NEIGHBOURS: dict[str, Neighbour] = {**TRAINERS, **SAMPLERS, **ATTACKS}
PERIOD_S = 10.0
KEYS = ("tml-ordinary_trainer00", "tml-ordinary_sampler00", "tml-neighbour_00000000")
#: Seconds after the start of a neighbour that are not counted, because it creates its runs first.
SETTLING_S = 8.0
BEGUN = "begun"


OPTIONS: Options = {
    "neighbours": Some(tuple(NEIGHBOURS)),
    "seconds": (45.0, "beside each neighbour"), "alone_seconds": 15.0,
    "threads": (os.cpu_count() or 1, "of torch"),
    "edge": (False, "put HAProxy in front, and send attacks from another address"),
    "be": (Choice(tuple(NEIGHBOURS)), "run this neighbour until it is killed, and measure nothing"),
    "address": (str, "URL of a server, for --be"), "key": (KEYS[2], "API key, for --be"),
}  # fmt: skip


def run(args: argparse.Namespace, report: Report) -> None:
    """Measure next to each neighbour, or be one."""
    if args.be:
        print(BEGUN, flush=True)
        asyncio.run(NEIGHBOURS[args.be](args.address, args.key))  # type: ignore[arg-type]
        return
    with tempfile.TemporaryDirectory(prefix="cotrain-bench-") as scratch:
        model = add_tokenizer(build(Path(scratch) / "model"))
        rows = report["rows"] = [
            row for name in args.neighbours for row in beside(name, args, model, Path(scratch) / name)
        ]
    print(f"{sum(row['kept'] for row in rows)} of {len(rows)} promises kept")


def beside(name: str, args: argparse.Namespace, model: Path, folder: Path) -> list[dict[str, Any]]:
    """Measure the probes alone, then next to one neighbour; return a row per probe."""
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(serving(model, folder, list(KEYS), args.threads))
        direct = address
        if args.edge:
            address = stack.enter_context(edge(address))
        probes = ordinary(address, KEYS[:2], stack)
        alone = watched(probes, args.alone_seconds)
        command = [sys.executable, "-m", "bench", "neighbour", "--be", name, "--address", address]
        log = stack.enter_context(folder.with_suffix(".log").open("w"))
        neighbour = subprocess.Popen(
            tethered(command), stdout=subprocess.PIPE, stderr=log, text=True,
            env=os.environ | ({ATTACKER_ADDRESS: "127.0.0.2"} if args.edge else {}),
        )  # fmt: skip
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
        longest_s = max(cycles_of(direct), default=0.0)
    shared = {"neighbour": name, "longest_cycle_s": longest_s, "neighbour_ended": ended}
    rows = []
    for probe in probes:
        row = judged(probe.name, alone[probe.name], found[probe.name])
        rows.append({**shared, "probe": probe.name, **row})
        show(rows[-1])
    print(f"   longest cycle {longest_s:.1f} s", flush=True)
    if ended is not None:
        last = (folder.with_suffix(".log").read_text().strip().splitlines() or [""])[-1]
        print(f"   the neighbour ended by itself ({ended}): {last}")
    return rows


def cycles_of(address: str) -> list[float]:
    """Return the durations of the server's cycles in s; none if it does not respond."""
    with contextlib.suppress(httpx.HTTPError):
        answer = httpx.get(f"{address}/status", headers=OPERATOR, timeout=120)
        return [each["duration_ms"] / 1000 for each in answer.json()["pools"][0]["cycles"]]
    return []


def watched(probes: Sequence[Probe], seconds: float) -> dict[str, dict[str, Any]]:
    """Return the results of each probe within this time."""
    for probe in probes:
        probe.take()
    time.sleep(seconds)
    found = {}
    for probe in probes:
        waits, failures = probe.take()
        found[probe.name] = {
            "count": len(waits), "p50_s": percentile(waits, 0.5, math.inf), "p99_s": percentile(waits, 0.99, math.inf),
            "failures": len(failures), "first_failure": failures[:1],
        }  # fmt: skip
    return found


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
