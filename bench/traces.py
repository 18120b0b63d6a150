"""Cost of traces: a server without them, one that reports every request, and one without a reachable collector.

    python -m bench traces [--rounds 12] [--tenants 4]

Three `cotrain serve` run on one small random model. A round drives each for a few steps, with two of them in flight.
Ratios are taken within a round, of the clients' wall time and of the CPU time of all processes of a server. Other
load on the machine affects the CPU time less.
"""

from __future__ import annotations

import http.server
import os
import statistics
import threading
from contextlib import ExitStack
from functools import partial
from typing import Any

import psutil
from typing_extensions import override

from bench.support.processes import cpu_s
from bench.support.record import Args, Options, Report, show
from bench.support.serving import Load, drive, small_server
from bench.support.timing import alternate, ratios
from tests.support.ports import free_port

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


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


OPTIONS: Options = {
    "tenants": 4, "batch": 2, "length": 64, "rank": 8, "steps": 6, "rounds": 12, "threads": 1,
}  # fmt: skip


def run(args: Args, report: Report) -> None:
    collector = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    ways, known = {}, set[int]()
    with ExitStack() as stack:
        for arm, port in {"off": None, "on": collector.server_port, "gone": free_port()}.items():
            os.environ.pop(ENDPOINT, None)
            if port:
                os.environ[ENDPOINT] = f"http://127.0.0.1:{port}"
            server = stack.enter_context(small_server(args, args.tenants))
            loads = [server.tenant(number, args.batch) for number in range(args.tenants)]
            own = {each.pid for each in psutil.Process().children(recursive=True)} - known
            known |= own
            ways[arm] = partial(step_of, loads, sorted(own), args.steps)
        took = alternate(ways, args.rounds)
    for arm, steps in took.items():
        for kind in ("wall", "cpu"):
            own_s, off_s = ([each[f"{kind}_s"] for each in found] for found in (steps, took["off"]))
            over = ratios(own_s, off_s)
            report[f"{arm}_{kind}"] = {
                "s_per_step": statistics.median(own_s), "over_off": statistics.median(over),
                "least": over[0], "most": over[-1],
            }  # fmt: skip
            show({"arm": f"{arm} {kind}", **report[f"{arm}_{kind}"]})
    report |= {"received_bytes": Collector.received_bytes, "rounds": took}


def step_of(loads: list[Load], pids: list[int], steps: int) -> dict[str, float]:
    """Return the seconds of a step: the clients' wall time, and CPU time of a server's processes."""
    before_s = sum(map(cpu_s, pids))
    wall_s = drive(loads, steps)
    return {"wall_s": wall_s, "cpu_s": (sum(map(cpu_s, pids)) - before_s) / steps}
