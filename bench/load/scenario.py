"""Limits of the server without an engine: small passes, waiting clients, overload, bursts, a restarted Redis.

    python -m bench load [--parts small_passes,waiting,overload,burst,redis_restart]

Real processes use a real Redis that fsyncs every write, and the worker commits planned ops without computing. All
clients run on the same cores. Rates depend on the machine and on its other load. The report has the load average
before and after each part.
"""

from __future__ import annotations

import argparse
import os
import resource
from typing import Any

from bench.load import burst, overload, redis_restart, small_passes, waiting
from bench.support.record import Options, Report, Some
from cotrain_store.monitoring.logs import configure_logs

PARTS = {
    "small_passes": small_passes.measure,
    "waiting": waiting.measure,
    "overload": overload.measure,
    "burst": burst.measure,
    "redis_restart": redis_restart.measure,
}


OPTIONS: Options = {
    "parts": Some(tuple(PARTS)), "seconds": (15.0, "of small_passes and overload"),
    "waiting": (10_000, "futures outstanding at once"), "wakes_per_s": 500.0,
}  # fmt: skip


def run(args: argparse.Namespace, report: Report) -> None:
    """Measure each part on a server of its own."""
    configure_logs("bench", "warning")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    report["parts"] = {}
    for name in args.parts:
        before = os.getloadavg()[0]
        found = {**PARTS[name](args), "load_before": before, "load_after": os.getloadavg()[0]}
        show(name, found)
        report["parts"][name] = found


def show(name: str, row: dict[str, Any]) -> None:
    print(name)
    for field, value in row.items():
        for label, number in value.items() if isinstance(value, dict) else ((field, value),):
            prefix = f"{field}: " if label != field else ""
            shown = f"{number:,.2f}" if isinstance(number, float) else f"{number}"
            print(f"  {prefix + label:<40} {shown:>14}", flush=True)
