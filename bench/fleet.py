"""Cost and fairness of planning with 100 to 10,000 runs, without an engine, in virtual time.

    python -m bench.fleet [--runs 100,1000,10000] [--turns 10] [--out bench/results]

The real clock, planner, messages and scripts run on a real Redis without fsync. Tenants of four kinds (naive,
submit-both, pipelined, burst; ten runs each) send more than the capacity. Workers are noisy token rates that crash
and restart. Each size is played three times: with one worker, with an idle second worker, and with a scheduler that
is killed half-way. Costs are processor time of the scheduler's ticks, and of Redis during them. The exit status is 1
if a guarantee is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog
from redis import ConnectionError as RedisConnectionError
from redis import Redis

from bench.pool.measures import LEAST_TURNS
from bench.pool.world import Shape, World
from bench.support.tethered import tethered
from cotrain_store.disk.spool import Spool, new_writer
from cotrain_store.redis_client.embedded_server import (
    find_redis_binary,
    redis_command,
    redis_version,
)

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


def main() -> None:
    args = parse()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    rows = []
    for way in args.ways:
        for runs in args.runs:
            shape = Shape(runs, args.turns, max_s=args.max_s, seed=args.seed, **WAYS[way])
            load = os.getloadavg()[0]
            rows.append({"way": way, **play(shape), "load_before": load})
            show(rows[-1])
    verdicts = judge(rows)
    report = {
        "command": shlex.join(["python", "-m", "bench.fleet", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine(),
        "rows": rows, "verdicts": verdicts,
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"fleet-{args.label}{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print("\n" + table(rows) + "\n")
    for verdict in verdicts:
        print(
            f"{'kept  ' if verdict['kept'] else 'BROKEN'} {verdict['what']}: {verdict['found']:.3f}"
        )
    print(f"wrote {path}")
    sys.exit(not all(verdict["kept"] for verdict in verdicts))


def play(shape: Shape) -> dict[str, Any]:
    """Run one shape on a Redis of its own."""
    with tempfile.TemporaryDirectory(prefix="ctfleet-") as name, a_redis(Path(name)) as (url, pid):
        spool = Spool(Path(name) / "spool", new_writer("fleet"))
        try:
            return asyncio.run(_played(shape, url, pid, spool))
        finally:
            spool.close()


async def _played(shape: Shape, url: str, pid: int, spool: Spool) -> dict[str, Any]:
    return await World(shape, url, pid, spool).play()


def judge(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a verdict for each guarantee."""
    verdicts = []

    def add(what: str, found: float, kept: bool) -> None:
        verdicts.append({"what": what, "found": found, "kept": kept})

    for way in dict.fromkeys(row["way"] for row in rows):
        of_way = [row for row in rows if row["way"] == way]
        sizes = f"{of_way[0]['runs']:,} to {of_way[-1]['runs']:,} runs"
        for what, cost in (
            ("all costs", cost_of_all),
            ("cost of ticks that plan", cost_of_planning),
        ):
            growth = cost(of_way[-1]) / cost(of_way[0])
            add(f"{way}: {what} per op, from {sizes}, times", growth, growth <= MAX_GROWTH)
        for row in of_way:
            where = f"{way}, {row['runs']:,} runs"
            unseen, jain = row["longest_unseen_turns"], row["jain"]
            add(f"{where}: longest unseen, in fair turns", unseen, unseen <= MAX_UNSEEN)
            off = row["farthest_off_quanta"] / new_rounds(row)
            add(f"{where}: farthest off its share, in quanta per round begun", off, off <= MAX_OFF)
            if row["turns"] >= LEAST_TURNS:
                add(f"{where}: Jain's index", jain, jain >= LEAST_JAIN)
    return verdicts


def new_rounds(row: dict[str, Any]) -> int:
    """Return the maximum number of restarts of fairness: by schedulers, and by runs that move to another worker."""
    return int(1 + row["scheduler_killed"] + (row["deaths"] if row["idle_worker"] else 0))


def cost_of_all(row: dict[str, Any]) -> float:
    """Return the planning cost of an op, in ms of both processes."""
    return float(row["scheduler_ms_per_op"] + row["redis_ms_per_op"])


def cost_of_planning(row: dict[str, Any]) -> float:
    """Return the same without idle ticks, four per second, which would hide growth."""
    return float(row["planning_ms_per_op"])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the report as a Markdown table."""
    head = (
        "| | runs | turns | scheduler, ms/op | Redis, ms/op | both, planning, ms/op | tick p99, ms | naive p50/p99, s | submit-both "
        "| pipelined | burst | Jain | farthest off, quanta | longest unseen, turns | idle |\n|---|"
        + "--:|"
        * 14
    )
    lines = [head]
    for row in rows:
        of_kinds = (f"{one['p50']:,.0f} / {one['p99']:,.0f}" for one in row["waits_s"].values())
        idle = " ".join(f"{share:.2f}" for share in row["idle_share"].values())
        cells = [
            row["way"], f"{row['runs']:,}", f"{row['turns']:.1f}", f"{row['scheduler_ms_per_op']:.3f}",
            f"{row['redis_ms_per_op']:.3f}", f"{row['planning_ms_per_op']:.3f}", f"{row['tick_p99_ms']:.1f}", *of_kinds,
            f"{row['jain']:.4f}", f"{row['farthest_off_quanta']:.2f}", f"{row['longest_unseen_turns']:.2f}", idle,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def show(row: dict[str, Any]) -> None:
    print("  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()),
          flush=True)  # fmt: skip


def machine() -> dict[str, Any]:
    version = ".".join(map(str, redis_version(find_redis_binary())))
    return {"cpus": os.cpu_count(), "platform": platform.platform(),
            "python": platform.python_version(), "redis": version}  # fmt: skip


@contextlib.contextmanager
def a_redis(folder: Path) -> Iterator[tuple[str, int]]:
    """Run a Redis without persistence; yield its address and process id."""
    socket = folder / "redis.sock"
    command = redis_command(find_redis_binary(), folder, socket, maxmemory="8gb")
    with (folder / "redis.log").open("wb") as log:
        process = subprocess.Popen(
            tethered([*command, "--appendonly", "no"]), stdout=log, stderr=log
        )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with (
            contextlib.suppress(RedisConnectionError),
            Redis(unix_socket_path=str(socket)) as redis,
        ):
            redis.ping()
            break
        time.sleep(0.02)
    try:
        yield f"unix://{socket}", process.pid
    finally:
        process.kill()
        process.wait()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=lambda s: [int(n) for n in s.split(",")], default=[100, 1_000, 10_000],
        help="sizes, the smallest first; ten runs are a tenant",
    )  # fmt: skip
    parser.add_argument("--ways", type=lambda s: s.split(","), default=list(WAYS), metavar="WAYS",
                        help=f"some of: {', '.join(WAYS)}")  # fmt: skip
    parser.add_argument("--turns", type=float, default=10.0, help="fair turns of each tenant")
    parser.add_argument("--max-s", type=float, default=600.0, help="real time of one trial at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--label", default="", help="of the file's name, as `before-`")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
