"""Kills at each failpoint, the first, second and third time it is reached: nothing changes.

`make test` kills once at each failpoint. `make test-faults` runs all trials.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cotrain_store.failpoints import FAILPOINTS
from tests.faults.conftest import Calm
from tests.faults.orders import Nursery
from tests.faults.traffic import programs, without_samples
from tests.faults.trial import trial

in_one_loop = pytest.mark.asyncio(loop_scope="session")

PROGRAMS = programs(1, runs=3, parts=2)
#: If background work of the worker crashes nine times, bisection would blame a concurrent sample.
#: It blames no request, since a worker runs requests that may crash without concurrent writes.
UNSAMPLED = without_samples(PROGRAMS)
#: Moments that one trial combines.
PACKS = {
    "api": ("api.before_submit", "api.after_submit", "api.before_answer", "sample.claimed"),
    "spool": (
        "spool.before_write",
        "spool.half_written",
        "spool.before_sync",
        "spool.after_sync",
        "sample.after_resolve",
    ),
    "scheduler": ("scheduler.before_plan", "scheduler.after_plan", "sample.before_resolve"),
}
UNSAMPLED_PACKS = {
    "start": ("worker.entered", "worker.replayed"),
    "step": ("worker.before_run", "worker.after_run", "worker.before_commit"),
    "copy": ("snapshot.before_write", "snapshot.half_written", "snapshot.before_rename"),
    "copied": ("snapshot.renamed", "snapshot.before_register", "snapshot.registered"),
    "save": ("weights.half_written", "weights.before_rename", "weights.renamed"),
    "saved": ("weights.before_stored", "weights.stored", "optimizer.half_written"),
    "optimizer": ("optimizer.before_rename", "optimizer.renamed", "external.half_written"),
    "export": ("worker.after_commit", "external.before_rename", "external.renamed"),
}
#: Failpoints of other trials and tests: large passes, bisection, worker ids, rollbacks, rewinds, groups.
ELSEWHERE = (
    "worker.before_risk", "worker.after_risk", "reassign.before", "reassign.after",
    "move.before", "move.after",
    "worker.before_rollback", "worker.after_rollback", "worker.before_large_pass", "group.before_pass",
    "worker.rewound",
)  # fmt: skip
#: Two crashes in a row over one step are chance; more count as the fault of the step.
APART = ("worker.before_run", "worker.after_run", "worker.before_commit")


def test_every_failpoint_is_in_some_trial() -> None:
    packs = [*PACKS.values(), *UNSAMPLED_PACKS.values(), ELSEWHERE]
    assert sorted(name for pack in packs for name in pack) == sorted(FAILPOINTS)


@in_one_loop
@pytest.mark.parametrize(
    ("packs", "is_once"),
    [
        (("api", "spool", "scheduler"), True),
        (("start", "step", "copy", "save"), True),
        (("copied", "saved", "optimizer", "export"), True),
        *(pytest.param((pack,), False, marks=pytest.mark.faults) for pack in (*PACKS, *UNSAMPLED_PACKS)),
    ],
)
async def test_a_kill_at_a_failpoint_changes_nothing(
    packs: tuple[str, ...], is_once: bool, nursery: Nursery, folder: Path, calm: Calm
) -> None:
    asked = PROGRAMS if packs[0] in PACKS else UNSAMPLED
    names = [name for pack in packs for name in (PACKS | UNSAMPLED_PACKS)[pack]]
    times = {name: (1,) if is_once else (1, 4, 7) if name in APART else (1, 2, 3) for name in names}
    faults = [f"{name}=kill@{nth}" for name in names for nth in times[name]]
    outcome = await trial(nursery, folder, asked, expected=await calm(asked), settings={"FAILPOINTS": ",".join(faults)})
    assert outcome.violations == []
    assert {n: outcome.reached[n] for n in names if outcome.reached[n] < len(times[n])} == {}
    assert len(outcome.deaths) == len(faults)
