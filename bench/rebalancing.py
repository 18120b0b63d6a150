"""Rebalancing of a server's runs when a second worker joins: timing, and bit-identical results.

    nice python -m bench rebalancing [--runs 8] [--joins-after 45] [--seconds 720] [--alone 3]

`cotrain serve` with one worker trains `--runs` runs, each of a tenant of its own, with two steps in flight. After
`--joins-after` seconds `cotrain worker` joins from a process of its own. The bench reads directly from Redis which
worker has which run, and whose cycles are committed. At the end some runs are trained once more, each alone on the
server, for the same number of steps. All their results must be identical.

* serving: from the start of the second worker's process to its first heartbeat (s)
* first_run: from there until a run was moved to it (s)
* first_cycle: from there until it had committed a cycle (s)
* moves: time (s, from the second worker's first heartbeat), run, source and destination
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.support.options import Options
from bench.support.processes import COTRAIN, a_redis, running
from bench.support.report import Report, show
from bench.support.serving import Load, Server, small_server, train
from cotrain_store.keys import fleet_keys, run_keys
from cotrain_store.messages.ids import RunId, WorkerId
from cotrain_store.redis_client.connection import SyncConnection, open_sync_connection
from cotrain_store.settings.worker import pool_of

POOL = pool_of("bench")
SECOND = WorkerId("second-w0")
LOOK_S = 0.25
#: Guarantees.
BUSY_WITHIN_S = 60.0
REST_S = 600.0


@dataclass
class Watch:
    """Owners of runs and committed cycles by worker; times in s since the watch began."""

    store: SyncConnection
    began: float = field(default_factory=time.monotonic)
    owners: dict[str, str] = field(default_factory=dict)
    moves: list[tuple[float, str, str, str]] = field(default_factory=list)
    serving_at: float | None = None
    first_cycle_at: float | None = None
    cycles: Counter[str] = field(default_factory=Counter)
    _last: int = 0

    def look(self) -> None:
        """Record changes."""
        now = time.monotonic() - self.began
        if self.serving_at is None and self.store.exists(fleet_keys.worker(POOL, SECOND)):
            self.serving_at = now
        prefix = run_keys.log(POOL, RunId(""))
        for name in self.store.scan_iter(f"{prefix}*", 1_000):
            owner = (self.store.hget(name, "worker") or b"").decode()
            run = name.decode().removeprefix(prefix)
            before = self.owners.get(run)
            if before and owner and owner != before:
                self.moves.append((now, run, before, owner))
            if owner:
                self.owners[run] = owner
        last = self._last
        for row in self.store.lrange(fleet_keys.cycles(POOL), 0, 30):
            record = json.loads(row)
            self._last = max(self._last, record["cycle"])
            self.cycles[record["worker"]] += record["cycle"] > last
            if record["worker"] == SECOND and self.first_cycle_at is None:
                self.first_cycle_at = now


OPTIONS: Options = {
    "runs": 8, "batch": 2, "length": 64, "rank": 8, "threads": 1, "joins_after": 45.0, "seconds": 720.0, "alone": 3,
}  # fmt: skip


def run(args: argparse.Namespace, report: Report) -> bool:
    """Train, let the worker join, and train some runs alone; return True if a guarantee is broken."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        url, _ = stack.enter_context(a_redis(Path(folder)))
        os.environ["COTRAIN_REDIS_URL"] = url
        server = stack.enter_context(small_server(args, args.runs))
        loads = [server.tenant(number, args.batch) for number in range(args.runs)]
        watch = Watch(stack.enter_context(closing(open_sync_connection(url))))
        began_s, together = asyncio.run(phase(server, loads, watch, url, stack))
        runs = [load.run.model_id for load in loads]
        for load in loads:
            load.run.unload()
        same = {}
        for number in range(0, args.runs, max(1, args.runs // max(1, args.alone)))[: args.alone]:
            load = server.tenant(number, args.batch)
            steps, digest = together[number]
            _, alone = asyncio.run(digested(load, lambda done, most=steps: done < most))  # type: ignore[misc]
            same[number] = alone == digest
            print(f"run {number}: {steps} steps, together {digest}, alone {alone}", flush=True)
            load.run.unload()
    report |= show(summary(args, watch, began_s, same, runs))
    report["steps"] = [steps for steps, _ in together]
    return not report["kept"]


async def phase(
    server: Server, loads: list[Load], watch: Watch, url: str, stack: ExitStack
) -> tuple[float, list[tuple[int, str]]]:
    """Train all runs and let the second worker join; return its start time, and steps and digest of each run."""
    args, over, started_at = server.args, False, 0.0
    trained = asyncio.gather(*(digested(load, lambda _: not over) for load in loads))
    while (now := time.monotonic() - watch.began) < args.seconds:
        if not started_at and now >= args.joins_after:
            command: list[str | Path] = [
                COTRAIN, "worker", "--base-model", f"bench={server.model}", "--redis-url", url,
                "--data-dir", server.folder / "data", "--name", "second", "--torch-threads", str(args.threads),
            ]  # fmt: skip
            stack.enter_context(running(command, stdout=subprocess.DEVNULL))
            started_at = now
        await asyncio.to_thread(watch.look)
        await asyncio.sleep(LOOK_S)
    over = True
    return started_at, await trained


async def digested(load: Load, goes_on: Callable[[int], bool]) -> tuple[int, str]:
    """Train; return the number of steps, and a digest of all results."""
    digest = hashlib.sha256()

    def add(passed: Any, stepped: Any) -> None:
        outputs = [{k: v.data for k, v in sorted(row.items())} for row in passed.loss_fn_outputs]
        norm = (stepped.metrics or {}).get("grad_norm")
        digest.update(json.dumps([outputs, norm]).encode())

    return await train(load, goes_on, add), digest.hexdigest()[:16]


def summary(
    args: argparse.Namespace,
    watch: Watch,
    started_at: float,
    same: dict[int, bool],
    runs: list[str],
) -> dict[str, Any]:
    """Return the measurements and the verdict on the guarantees."""
    serving_at = watch.serving_at or float("inf")
    moves = [
        (round(at - serving_at, 1), f"run {runs.index(run)}", one, to)
        for at, run, one, to in watch.moves
    ]
    first_cycle = watch.first_cycle_at and round(watch.first_cycle_at - serving_at, 1)
    twice = [
        (one, other)
        for at, one in enumerate(moves)
        for other in moves[at + 1 :]
        if other[1] == one[1] and other[0] - one[0] < REST_S
    ]
    is_busy = first_cycle is not None and first_cycle < BUSY_WITHIN_S
    return {
        "serving": round(serving_at - started_at, 1),
        "first_run": min((at for at, _, _, to in moves if to == SECOND), default=None),
        "first_cycle": first_cycle, "watched_s": round(args.seconds - serving_at, 1),
        "cycles": dict(watch.cycles), "moves": moves, "moved_twice": twice, "same_as_alone": same,
        "kept": is_busy and not twice and all(same.values()),
    }  # fmt: skip
