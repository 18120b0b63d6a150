"""The server's own limits, with no engine behind it: throughput, waiting clients, overload, restarts.

    python -m bench.load [store,http,waiting,overload,api_restart,redis_restart] [--out bench/results]

Real processes and a real Redis that fsyncs every write; the worker commits whatever is planned. All
clients run on the same cores. Rates move with the machine and with what else it does: the report
holds the load average before and after each part.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.load import overload, restarts, throughput, waiting

PARTS = {
    "store": throughput.measure_store,
    "http": throughput.measure_http,
    "waiting": waiting.measure,
    "overload": overload.measure,
    "api_restart": restarts.measure_api,
    "redis_restart": restarts.measure_redis,
}


def main() -> None:
    args = parse()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    found = {}
    for name in args.parts:
        before = os.getloadavg()[0]
        found[name] = {**PARTS[name](args), "load_before": before, "load_after": os.getloadavg()[0]}
        show(name, found[name])
    command = " ".join(["python -m bench.load", *sys.argv[1:]])
    report = {"command": command, "date": datetime.now(UTC).isoformat(), "machine": machine(),
              "shape": vars(args), "parts": found}  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"load-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps(report, indent=1, default=str) + "\n")
    print(f"wrote {path}")


def show(name: str, row: dict[str, Any]) -> None:
    print(name)
    for field, value in row.items():
        for label, number in value.items() if isinstance(value, dict) else ((field, value),):
            prefix = f"{field}: " if label != field else ""
            shown = f"{number:,.2f}" if isinstance(number, float) else f"{number}"
            print(f"  {prefix + label:<40} {shown:>14}", flush=True)


def machine() -> dict[str, Any]:
    packages = ("redis", "fastapi", "uvicorn", "starlette")
    return {"cpus": os.cpu_count(), "platform": platform.platform(),
            "python": platform.python_version(), **{name: version(name) for name in packages}}  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="?", type=lambda s: s.split(","), default=list(PARTS))
    parser.add_argument("--tenants", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4, help="requests in flight per tenant")
    parser.add_argument("--seconds", type=float, default=15.0, help="of store, http and overload")
    parser.add_argument("--waiting", type=int, default=10_000, help="futures outstanding at once")
    parser.add_argument("--wakes-per-s", type=float, default=500.0)
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
