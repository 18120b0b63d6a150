"""Cost of traces: a server without them, one that reports every request, and one without a reachable collector.

    python -m bench.traces [--rounds 12] [--tenants 4] [--out bench/results]

Three `cotrain serve` run on one small random model. A round drives each for a few steps, with two of them in flight.
Ratios are taken within a round, of the clients' wall time and of the CPU time of all processes of a server. Other
load on the machine affects the CPU time less.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from typing_extensions import override

from bench.support.model import build
from bench.support.serving import drive, serving, tenant
from tests.support.ports import free_port

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
KEY = "tml-bench-{:012}"


class Collector(http.server.BaseHTTPRequestHandler):
    """Collector that accepts every message and discards it."""

    received_bytes = 0

    def do_POST(self) -> None:
        Collector.received_bytes += len(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    @override
    def log_message(self, *_: Any) -> None:
        pass


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        model = build(Path(scratch) / "model")
        keys = [KEY.format(number) for number in range(args.tenants)]
        addresses = {
            "off": None,
            "on": stack.enter_context(collecting()),
            "gone": f"http://127.0.0.1:{free_port()}",
        }
        loads, pids = {}, {}
        for arm, address in addresses.items():
            before = children()
            with_traces(address)
            url = stack.enter_context(serving(model, Path(scratch) / arm, keys, args.threads))
            pids[arm] = sorted(children() - before)
            loads[arm] = [
                tenant(args, url, key, stack, args.batch, seed=at) for at, key in enumerate(keys)
            ]
            drive(loads[arm], 3)
        rounds: list[dict[str, tuple[float, float]]] = []
        for number in range(args.rounds):
            took = {}
            for arm in rotated(list(loads), number):
                cpu_s = cpu_seconds(pids[arm])
                wall_s = drive(loads[arm], args.steps)
                took[arm] = (wall_s, (cpu_seconds(pids[arm]) - cpu_s) / args.steps)
            rounds.append(took)
    report = summary(rounds) | {
        "command": " ".join(["python -m bench.traces", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(),
        "machine": {"cpus": os.cpu_count(), "load": os.getloadavg(), "python": platform.python_version(),
                    "torch": version("torch"), "opentelemetry": version("opentelemetry-sdk")},
        "shape": vars(args), "received_bytes": Collector.received_bytes, "rounds": rounds,
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"traces-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps(report, indent=1, default=str) + "\n")
    print(f"wrote {path}")


def summary(rounds: list[dict[str, tuple[float, float]]]) -> dict[str, Any]:
    """Return medians, and the median, minimum and maximum of the ratios within a round."""
    found: dict[str, Any] = {}
    for arm in rounds[0]:
        for at, kind in enumerate(("wall", "cpu")):
            ratios = sorted(took[arm][at] / took["off"][at] for took in rounds)
            seconds = statistics.median(took[arm][at] for took in rounds)
            found[f"{arm}_{kind}"] = {
                "s_per_step": seconds, "over_off": statistics.median(ratios),
                "least": ratios[0], "most": ratios[-1],
            }  # fmt: skip
            print(
                f"{arm:<5}{kind:<5} {seconds * 1000:8.1f} ms a step   over off"
                f" {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
            )
    return found


def rotated(arms: list[str], by: int) -> list[str]:
    return arms[by % len(arms) :] + arms[: by % len(arms)]


@contextmanager
def collecting() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def with_traces(address: str | None) -> None:
    """Set the trace endpoint of the next server; None disables traces."""
    os.environ.pop(ENDPOINT, None)
    if address:
        os.environ[ENDPOINT] = address


def children() -> set[int]:
    """Return all descendants of this process."""
    below: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # the process has ended
        below.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found: set[int] = set()
    waiting = [os.getpid()]
    while waiting:
        mine = below.get(waiting.pop(), [])
        found |= set(mine)
        waiting += mine
    return found


def cpu_seconds(pids: list[int]) -> float:
    """Return the sum of the CPU time of these processes in s."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tenants", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
