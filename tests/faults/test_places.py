"""Two workers of one pool: one is gone or paused for long, and the other goes on with its runs."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import pytest

from tests.faults.scenarios import PROGRAMS, until
from tests.faults.trial import trial

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.conftest import Calm
    from tests.faults.host import Host, Nursery

pytestmark = [pytest.mark.faults, pytest.mark.asyncio(loop_scope="session")]

WORKERS = ("w0", "w1")
SOON = {"REASSIGN_AFTER_S": "0.5"}


@pytest.mark.timeout(400)
async def test_what_a_dead_worker_had_is_given_away_whatever_the_scheduler_dies_of(
    nursery: Nursery, folder: Path, calm: Calm
) -> None:
    async def remove(host: Host) -> None:
        await until(host, "worker.after_commit", 6)
        host.kill("w1")
        host.retire("w1")
        await asyncio.Event().wait()

    faults = [f"reassign.before=kill@{nth}" for nth in (1, 2)] + ["reassign.after=kill@1"]
    outcome = await trial(
        nursery, folder, PROGRAMS, expected=await calm(PROGRAMS), disturb=remove, workers=WORKERS,
        settings=SOON | {"FAILPOINTS": ",".join(faults)},
    )  # fmt: skip
    assert outcome.violations == []
    assert outcome.killed == {"scheduler": 3, "w1": 1}


@pytest.mark.timeout(400)
async def test_a_worker_that_was_paused_while_another_took_its_runs_changes_nothing(
    nursery: Nursery, folder: Path, calm: Calm
) -> None:
    async def pause(host: Host) -> None:
        await until(host, "worker.after_commit", 6)
        host.kill("w1", signal.SIGSTOP)
        await until(host, "reassign.after", 1)
        await until(host, "worker.after_commit", host.count("worker.after_commit") + 3)
        host.kill("w1", signal.SIGCONT)
        await asyncio.Event().wait()

    outcome = await trial(
        nursery, folder, PROGRAMS, expected=await calm(PROGRAMS), disturb=pause, workers=WORKERS,
        settings=SOON,
    )  # fmt: skip
    assert outcome.violations == []
    assert outcome.reached["reassign.after"] >= 1
