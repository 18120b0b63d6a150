"""Soak test that kills a server's processes repeatedly and counts: `make soak ARGS="--minutes 10
--seed 7"`.

Every trial is drawn from its seed, which is printed first: `--seed S --minutes 0` repeats one. A
violation keeps the trial's folder, logs included, and ends the soak with status 1.

With `--objects`, blobs are in a SeaweedFS behind a network that fails. The SeaweedFS is killed,
too. Each process has its own data folder. The runs must end as with blobs in files and without
faults.
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
from dataclasses import dataclass
from pathlib import Path

from tests.faults.orders import Nursery
from tests.faults.traffic import programs
from tests.faults.trial import Outcome, at_once, random_kills, store_faults, trial
from tests.support.object_store import BadNetwork, SeaweedFS

#: Disturbed trials per set of programs, after one undisturbed trial.
PLAYS = 8


@dataclass(frozen=True)
class ObjectStore:
    """Object store for blobs, and the network to it."""

    server: SeaweedFS
    network: BadNetwork


async def soak(seed: int, minutes: float, store: ObjectStore | None = None) -> int:
    """Run trials from a seed on. Return the exit status."""
    folder, until = Path(tempfile.mkdtemp(prefix="soak-")), time.monotonic() + 60 * minutes
    try:
        async with Nursery(_model(folder)) as nursery:
            return await _trials(nursery, folder, seed, until, store)
    finally:
        shutil.rmtree(folder / "model")
        with contextlib.suppress(OSError):
            folder.rmdir()  # noqa: ASYNC240  # at the end, and not where something is kept


async def _trials(nursery: Nursery, folder: Path, seed: int, until: float, store: ObjectStore | None) -> int:
    while True:
        asked = programs(seed // PLAYS)
        calm = await trial(nursery, folder / f"{seed}-calm", asked)
        if not _is_fine(calm, folder / f"{seed}-calm"):
            return 1
        for _ in range(PLAYS):
            print(f"seed {seed}: ", end="", flush=True)
            here = folder / str(seed)
            kills = random_kills(seed, random.Random(seed).choice([0.3, 0.5, 1.0]))
            if store is None:
                outcome = await trial(
                    nursery, here, asked, seed=seed, expected=calm.ending, disturb=kills, crowded=True,
                )  # fmt: skip
            else:
                outcome = await trial(
                    nursery, here, asked, seed=seed, expected=calm.ending, crowded=True,
                    disturb=at_once(kills, store_faults(seed, store.server, store.network)),
                    objects=store.server, network=store.network,
                )  # fmt: skip
            print(f"{outcome.killed.total()} deaths; so far {nursery.tally}{_struck(store)}", flush=True)
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


def _struck(store: ObjectStore | None) -> str:
    if store is None:
        return ""
    return f"; {store.network.struck} requests to the object store struck, {store.server.restarts} restarts of it"


def _model(folder: Path) -> Path:
    from tests.support.tiny_models import build_tiny

    return build_tiny("qwen3", folder / "model")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--objects", action="store_true", help="blobs in an object store that fails")
    asked = parser.parse_args()
    with contextlib.ExitStack() as opened:
        store = None
        if asked.objects:
            server = opened.enter_context(SeaweedFS())
            store = ObjectStore(server, opened.enter_context(BadNetwork(server.port)))
        sys.exit(asyncio.run(soak(asked.seed, asked.minutes, store)))
