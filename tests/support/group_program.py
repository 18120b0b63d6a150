"""Program that runs groups without a worker, for tests: `python -m tests.support.group_program
FOLDER OUT SIZE RECOMPUTE SCENARIO…`.

Results are written to OUT: digests of runs by scenario, and the parts of the base model in each
member.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.model.activation_checkpointing import Choice
from cotrain_workers.group.engine import GroupEngine
from cotrain_workers.group.lock_step import GroupLockStep, follow
from cotrain_workers.group.processes import Links, launch
from cotrain_workers.group.sharded_base import load_sharded, own_bytes
from tests.support.group_scenarios import SCENARIOS

MICRO_BATCH = 256


def main(folder: str, out: str, size: str, recompute: Choice, *names: str) -> int:
    """Run one group to its end."""
    return launch(int(size), partial(member, folder, Path(out), recompute, names))


def member(folder: str, out: Path, recompute: Choice, names: Sequence[str]) -> None:
    """Run one member."""
    torch.set_num_threads(1)
    links = Links("cpu", timeout_s=60)
    lock_step = GroupLockStep(links)
    own = Engine.load(
        folder,
        device="cpu",
        micro_batch_tokens=MICRO_BATCH,
        recompute=recompute,
        load_base=partial(load_sharded, lock_step=lock_step),
    )
    found: dict[str, Any] = {"base_bytes": own_bytes(own._base), "sharding": own.facts.numerics.sharding}
    if links.number:
        follow(own, lock_step)
    else:
        engine = GroupEngine(own, lock_step)
        found["numerics_id"] = engine.facts.numerics_id
        for name in names:
            found[name] = SCENARIOS[name](engine)
            found[f"{name} members"] = [each.runs for each in engine.processes]
            for run in found[name]:
                engine.adapters.drop(run)
        engine.followers.end()
    (out / f"{links.number}.json").write_text(json.dumps(found))
    links.close()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(*sys.argv[1:]))  # type: ignore[arg-type]
