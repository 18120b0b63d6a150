"""Processor time of each process for a step with the official SDK, before and after a change.

    python -m bench step_cost --before ../other-checkout [--tenants 1,16]

Two servers run at once: that of this checkout, and that of another one, which has an environment of its own in `.venv`.
Each tenant takes steps of a few sequences on one server, then on the other. The figures are CPU seconds per process, so
other programs disturb them less than wall time; the ratios compare the two servers round by round.

With the model of one narrow layer (`--size narrow`, the default) the worker's part is mostly our own code.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path

from bench.support.processes import COTRAIN, cpu_by_role
from bench.support.record import Args, Choice, Options, Report
from bench.support.serving import Load, Server, drive, small_server
from bench.support.timing import alternate, median_ratio

OPTIONS: Options = {
    "before": (Path, "checkout of the earlier commit; without it, this one alone is measured"),
    "tenants": [1, 16], "batch": 2, "length": 128, "rank": 8, "steps": (10, "in each round, for the most tenants"), "rounds": 6, "threads": 1,
    "size": Choice(("narrow", "5m")), "client": Choice(("tinker", "cotrain")),
}  # fmt: skip
#: Processes whose work is ours. The worker's includes that of the model.
OURS = ("api", "scheduler", "redis")

Cost = dict[str, float]


def run(args: Args, report: Report) -> None:
    commands = {"now": COTRAIN} | ({"before": args.before / ".venv/bin/cotrain"} if args.before else {})
    sdk = import_module(args.client or "tinker")
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(small_server(args, max(args.tenants), args.size or "narrow", command.resolve()))
            for name, command in commands.items()
        }
        report["rows"] = []
        for tenants in args.tenants:
            ways = {
                name: partial(cost, server, [server.tenant(at, args.batch, sdk=sdk) for at in range(tenants)])
                for name, server in servers.items()
            }
            report["rows"].append(row(tenants, alternate(ways, args.rounds)))


def cost(server: Server, loads: list[Load]) -> Cost:
    """Drive all tenants; return CPU ms per step of each process, and of ours together. Few tenants take more steps."""
    steps = server.args.steps * max(server.args.tenants) // len(loads)
    before = cpu_by_role(server.pid)
    drive(loads, steps)
    after = cpu_by_role(server.pid)
    spent = {role: 1000 * (after[role] - s) / steps for role, s in before.items()}
    return {**spent, "ours": sum(spent[role] for role in OURS)}


def row(tenants: int, found: dict[str, list[Cost]]) -> dict[str, object]:
    """Print and return the medians of each server, and the medians of the ratios of pairs."""
    medians = {name: median_of(costs) for name, costs in found.items()}
    ratios = {
        role: median_ratio(*([max(each[role], 1e-3) for each in found[name]] for name in ("now", "before")))
        for role in (medians["now"] if "before" in found else ())
    }
    for name, costs in {**medians, "ratio": ratios}.items():
        print(f"T={tenants:<3} {name:<7}", *(f"{role} {number:7.2f}" for role, number in costs.items()), flush=True)
    return {"tenants": tenants, "cpu_ms_per_step": medians, "now_over_before": ratios, "all": found}


def median_of(costs: list[Cost]) -> Cost:
    return {role: statistics.median(each[role] for each in costs) for role in costs[0]}
