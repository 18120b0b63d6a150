"""Kill a server's processes again and again, and count: `make soak ARGS="--minutes 10 --seed 7"`.

Every trial is drawn from its seed, printed first: `--seed S --minutes 0` repeats one. A violation keeps
the trial's folder, logs included, and ends the soak with status 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.orders import Nursery
from tests.faults.traffic import programs
from tests.faults.trial import Outcome, random_kills, trial

#: Each set of programs is played undisturbed once, and then disturbed this often.
PLAYS = 8


async def soak(seed: int, minutes: float) -> int:
    """Soak from a seed on; return the exit status."""
    folder, until = Path(tempfile.mkdtemp(prefix="soak-")), time.monotonic() + 60 * minutes
    try:
        async with Nursery(_model(folder)) as nursery:
            return await _trials(nursery, folder, seed, until)
    finally:
        shutil.rmtree(folder / "model")
        with contextlib.suppress(OSError):
            folder.rmdir()  # noqa: ASYNC240  # at the end, and not where something is kept


async def _trials(nursery: Nursery, folder: Path, seed: int, until: float) -> int:
    while True:
        asked = programs(seed // PLAYS)
        calm = await trial(nursery, folder / f"{seed}-calm", asked)
        if not _is_fine(calm, folder / f"{seed}-calm"):
            return 1
        for _ in range(PLAYS):
            print(f"seed {seed}: ", end="", flush=True)
            here = folder / str(seed)
            mean_s = random.Random(seed).choice([0.3, 0.5, 1.0])
            outcome = await trial(
                nursery, here, asked, seed=seed, expected=calm.ending,
                disturb=random_kills(seed, mean_s), crowded=True,
            )  # fmt: skip
            print(f"{outcome.killed.total()} deaths; so far {nursery.tally}", flush=True)
            if not _is_fine(outcome, here):
                return 1
            seed += 1
            if time.monotonic() > until:
                return 0


def _is_fine(outcome: Outcome, folder: Path) -> bool:
    for violation in outcome.violations:
        print(f"VIOLATION {violation}", flush=True)
    if not outcome.violations:
        shutil.rmtree(folder)
        return True
    print(f"kept: {folder}", flush=True)
    return False


def _model(folder: Path) -> Path:
    from tests.support.tiny_models import build_tiny

    return build_tiny("qwen3", folder / "model")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    sys.exit(asyncio.run(soak(arguments.seed, arguments.minutes)))
