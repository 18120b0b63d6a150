"""Cost and fairness of planning with 100 to 10,000 runs, without an engine, in virtual time.

    python -m bench fleet [--runs 100,1000,10000] [--turns 10]

The real clock, planner, messages and scripts run on a real Redis without fsync. Tenants of four kinds (naive,
submit-both, pipelined, burst; ten runs each) send more than the capacity. Workers are noisy token rates. Each size is
played three times: with one worker, with an idle second worker, and with a scheduler that is killed half-way. Costs are processor time of the scheduler's ticks, and of Redis during them. The exit status is 1
if a guarantee is broken.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from bench.fleet.measures import LEAST_TURNS
from bench.fleet.world import Shape, played
from bench.support.processes import a_redis
from bench.support.record import Args, Options, Report, Some, show
from cotrain_store.disk.embedded_redis import find_redis_binary, redis_version
from cotrain_store.disk.spool import Spool, new_writer
from cotrain_store.monitoring.logs import configure_logs

#: Guarantees, as ratios.
MAX_GROWTH = 2.0
MAX_UNSEEN = 1.5
LEAST_JAIN = 0.99
#: In quanta: two passes, by which a tenant may be ahead at the beginning and at the end.
MAX_OFF = 2.0
WAYS: dict[str, dict[str, bool]] = {
    "one worker": {},
    "idle second worker": {"idle_worker": True},
    "scheduler killed": {"scheduler_killed": True},
}
OPTIONS: Options = {
    "runs": ([100, 1_000, 10_000], "sizes, the smallest first; ten runs are a tenant"),
    "ways": Some(tuple(WAYS)), "turns": (10.0, "fair turns of each tenant"),
}  # fmt: skip


def run(args: Args, report: Report) -> bool:
    """Play every size in every way; return True if a guarantee is broken."""
    configure_logs("bench", "error")
    report["machine"]["redis_server"] = ".".join(map(str, redis_version(find_redis_binary())))
    rows = report["rows"] = []
    for way in args.ways:
        for runs in args.runs:
            shape = Shape(runs, args.turns, **WAYS[way])
            load = os.getloadavg()[0]
            rows.append(show({"way": way, **play(shape), "load_before": load}))
    report["verdicts"] = judge(rows)
    for verdict in report["verdicts"]:
        print(f"{'kept  ' if verdict['kept'] else 'BROKEN'} {verdict['what']}: {verdict['found']:.3f}")
    return not all(verdict["kept"] for verdict in report["verdicts"])


def play(shape: Shape) -> dict[str, Any]:
    """Run one shape on a Redis of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="ctfleet-") as name,
        a_redis(Path(name), "--appendonly", "no", maxmemory="8gb") as (url, pid),
        closing(Spool(Path(name) / "spool", new_writer("fleet"))) as spool,
    ):
        return asyncio.run(played(shape, url, pid, spool))


def judge(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a verdict for each guarantee."""
    verdicts = []

    def add(what: str, found: float, kept: bool) -> None:
        verdicts.append({"what": what, "found": found, "kept": kept})

    for way in dict.fromkeys(row["way"] for row in rows):
        of_way = [row for row in rows if row["way"] == way]
        sizes = f"{of_way[0]['runs']:,} to {of_way[-1]['runs']:,} runs"
        # Also without idle ticks, four per second, which would hide growth.
        both = {
            "all costs": ("scheduler_ms_per_op", "redis_ms_per_op"),
            "cost of ticks that plan": ("planning_ms_per_op",),
        }
        for what, names in both.items():
            first, last = (sum(row[name] for name in names) for row in (of_way[0], of_way[-1]))
            growth = last / first
            add(f"{way}: {what} per op, from {sizes}, times", growth, growth <= MAX_GROWTH)
        for row in of_way:
            where = f"{way}, {row['runs']:,} runs"
            unseen, jain = row["longest_unseen_turns"], row["jain"]
            add(f"{where}: longest unseen, in fair turns", unseen, unseen <= MAX_UNSEEN)
            # A new scheduler starts a round of fairness.
            off = row["farthest_off_quanta"] / (1 + row["scheduler_killed"])
            add(f"{where}: farthest off its share, in quanta per round begun", off, off <= MAX_OFF)
            if row["turns"] >= LEAST_TURNS:
                add(f"{where}: Jain's index", jain, jain >= LEAST_JAIN)
    return verdicts
