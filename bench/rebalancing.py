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

from bench.support.model import build
from bench.support.options import Options
from bench.support.processes import COTRAIN, a_redis, running
from bench.support.report import Report
from bench.support.serving import Load, serving, tenant, train
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
        for row in self.store.lrange(fleet_keys.cycles(POOL), 0, 30):
            record = json.loads(row)
            if record["cycle"] > self._last:
                self.cycles[record["worker"]] += 1
            if record["worker"] == SECOND and self.first_cycle_at is None:
                self.first_cycle_at = now
        records = [
            json.loads(row)["cycle"] for row in self.store.lrange(fleet_keys.cycles(POOL), 0, 0)
        ]
        self._last = max([self._last, *records])


OPTIONS: Options = {
    "runs": 8, "batch": 2, "length": 64, "rank": 8, "threads": 1, "joins_after": 45.0, "seconds": 720.0, "alone": 3,
}  # fmt: skip


def run(args: argparse.Namespace, report: Report) -> bool:
    """Train, let the worker join, and train some runs alone; return True if a guarantee is broken."""
    with tempfile.TemporaryDirectory(prefix="cotrain-bench-") as scratch, ExitStack() as stack:
        folder = Path(scratch)
        model = build(folder / "model")
        url, _ = stack.enter_context(a_redis(folder))
        os.environ["COTRAIN_REDIS_URL"] = url
        keys = [f"tml-bench-{number:012}" for number in range(args.runs)]
        address = stack.enter_context(serving(model, folder / "data", keys, args.threads))
        loads = [
            tenant(args, address, key, stack, args.batch, seed=n) for n, key in enumerate(keys)
        ]
        store = stack.enter_context(closing(open_sync_connection(url)))
        watch = Watch(store)
        began_s, together = asyncio.run(phase(args, loads, watch, folder, model, url, stack))
        runs = [load.run.model_id for load in loads]
        for load in loads:
            load.run.unload()
        same = {}
        for number in range(0, args.runs, max(1, args.runs // max(1, args.alone)))[: args.alone]:
            load = tenant(args, address, keys[number], stack, args.batch, seed=number)
            steps, digest = together[number]
            _, alone = asyncio.run(digested(load, lambda done, most=steps: done < most))  # type: ignore[misc]
            same[number] = alone == digest
            print(f"run {number}: {steps} steps, together {digest}, alone {alone}", flush=True)
            load.run.unload()
    report |= summary(args, watch, began_s, together, same, runs)
    return not report["kept"]


async def phase(
    args: argparse.Namespace, loads: list[Load], watch: Watch, folder: Path, model: Path, url: str, stack: ExitStack
) -> tuple[float, list[tuple[int, str]]]:  # fmt: skip
    """Train all runs and let the second worker join; return its start time, and steps and digest of each run."""
    over = False
    trained = asyncio.gather(*(digested(load, lambda _: not over) for load in loads))
    started_at = 0.0
    while (now := time.monotonic() - watch.began) < args.seconds:
        if not started_at and now >= args.joins_after:
            command: list[str | Path] = [
                COTRAIN, "worker", "--base-model", f"bench={model}", "--redis-url", url, "--data-dir", folder / "data",
                "--name", "second", "--torch-threads", str(args.threads),
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
    args: argparse.Namespace, watch: Watch, started_at: float, together: list[tuple[int, str]],
    same: dict[int, bool], runs: list[str],
) -> dict[str, Any]:  # fmt: skip
    """Return the measurements and the verdict on the guarantees."""
    serving_at = watch.serving_at or float("inf")
    moves = [
        (round(at - serving_at, 1), f"run {runs.index(run)}", one, to)
        for at, run, one, to in watch.moves
    ]
    first_run = min((at for at, _, _, to in moves if to == SECOND), default=None)
    first_cycle = watch.first_cycle_at and round(watch.first_cycle_at - serving_at, 1)
    twice = [
        (one, other)
        for n, one in enumerate(moves)
        for other in moves[n + 1 :]
        if other[1] == one[1] and other[0] - one[0] < REST_S
    ]
    is_kept = (
        first_cycle is not None and first_cycle < BUSY_WITHIN_S and not twice and all(same.values())
    )
    for move in moves:
        print(f"{move[0]:7.1f} s  {move[1]}  {move[2]} -> {move[3]}")
    found = {
        "serving": round(serving_at - started_at, 1), "first_run": first_run, "first_cycle": first_cycle,
        "watched_s": round(args.seconds - serving_at, 1), "cycles": dict(watch.cycles), "moves": moves,
        "moved_twice": twice, "steps": [steps for steps, _ in together], "same_as_alone": same, "kept": is_kept,
    }  # fmt: skip
    print({name: found[name] for name in ("serving", "first_run", "first_cycle", "cycles", "moved_twice",
                                          "same_as_alone", "kept")})  # fmt: skip
    return found
