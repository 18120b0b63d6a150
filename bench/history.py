"""Cost of the run history per commit: the same steps with and without it, in alternation, in one Redis.

    python -m bench.history [--runs 8] [--cycles 200]

Each cycle commits a pass and an optimizer step of every run. Prints the medians and the ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import tempfile
import time
from pathlib import Path

import structlog

from cotrain_store.keys import run_keys
from cotrain_store.messages.ids import OpId
from cotrain_store.messages.ops import OpKind
from cotrain_store.messages.results import Result
from cotrain_store.messages.runs import HistoryEntry, PassEntry, StepEntry
from tests.support.log import open_log
from tests.support.redis_server import EmbeddedRedis

RESULT = Result.of_json({"metrics": {"loss:sum": 1.5, "grad_norm": 0.5}, "padding": "x" * 4_000})


async def measure(runs: int, cycles: int) -> dict[str, object]:
    """Commit `cycles` cycles, every second one with history entries, and return the figures."""
    taken_s: dict[bool, list[float]] = {True: [], False: []}
    with EmbeddedRedis() as server, tempfile.TemporaryDirectory() as folder:
        async with open_log(server.url, Path(folder)) as log:
            made = [await log.new_run(f"t{n % 4}", f"s{n}") for n in range(runs)]
            await log.run_all()
            seq = 1
            for cycle in range(cycles):
                for run in made:
                    await log.submit(run, seq)
                    await log.submit(run, seq + 1, OpKind.OPTIM_STEP)
                step = await log.plan()
                found: dict[OpId, HistoryEntry] = {}
                for run in made:
                    found[run.id, seq] = PassEntry(1 / 3, 512.0, is_forward=False)
                    found[run.id, seq + 1] = StepEntry(1 / 7, 1e-4)
                keeps = cycle % 2 == 0
                results = {(op.run, op.seq): RESULT for op in step.ops}
                began = time.perf_counter()
                log.execution.commit(
                    step, results, {"cycle": step.cycle}, {}, found=found if keeps else None
                )
                taken_s[keeps].append(time.perf_counter() - began)
                seq += 2
            points = log.redis.llen(run_keys.steps(made[0].id))
            size = log.redis.memory_usage(run_keys.steps(made[0].id), samples=0)
    median = {keeps: statistics.median(times) * 1000 for keeps, times in taken_s.items()}
    return {
        "runs": runs, "cycles": cycles, "commit_ms_with": median[True],
        "commit_ms_without": median[False], "added_ms": median[True] - median[False],
        "ratio": median[True] / median[False], "bytes_per_point": size / points,
    }  # fmt: skip


def main() -> None:
    """Measure and print JSON."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--cycles", type=int, default=200)
    asked = parser.parse_args()
    print(json.dumps(asyncio.run(measure(asked.runs, asked.cycles)), indent=1))


if __name__ == "__main__":
    main()
