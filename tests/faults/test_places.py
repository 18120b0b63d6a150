"""Two workers of one pool: one is gone or paused for long, and the other goes on with its runs."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from tests.faults.conftest import Calm
from tests.faults.host import Host
from tests.faults.orders import Nursery
from tests.faults.scenarios import PROGRAMS, until_reached
from tests.faults.trial import trial

pytestmark = [pytest.mark.faults, pytest.mark.asyncio(loop_scope="session")]

WORKERS = ("w0", "w1")
SOON = {"REASSIGN_AFTER_S": "0.5"}


async def test_what_a_dead_worker_had_is_given_away_whatever_the_scheduler_dies_of(
    nursery: Nursery, folder: Path, calm: Calm
) -> None:
    gone = ("w1", "w2", "w3")

    async def remove(host: Host) -> None:
        await until_reached(host, "worker.after_commit", 6)
        for worker in gone:
            host.kill(worker)
            host.retire(worker)
        await asyncio.Event().wait()

    moments = ("reassign.before", "reassign.after")
    faults = ",".join(f"{moment}=kill@{nth}" for moment in moments for nth in (1, 2, 3))
    outcome = await trial(
        nursery, folder, PROGRAMS, expected=await calm(PROGRAMS), disturb=remove,
        workers=("w0", *gone), settings=SOON | {"FAILPOINTS": faults},
    )  # fmt: skip
    assert outcome.violations == []
    assert {moment: outcome.reached[moment] for moment in moments if outcome.reached[moment] < 3} == {}
    assert outcome.killed == {"scheduler": 6, **dict.fromkeys(gone, 1)}


async def test_two_workers_give_equal_turns_to_their_runs(nursery: Nursery, folder: Path) -> None:
    outcome = await trial(nursery, folder, PROGRAMS, workers=WORKERS, crowded=True)
    assert outcome.violations == []
    assert outcome.passed_over > 0


async def test_a_worker_that_was_paused_while_another_took_its_runs_changes_nothing(
    nursery: Nursery, folder: Path, calm: Calm
) -> None:
    async def pause(host: Host) -> None:
        await until_reached(host, "worker.after_commit", 6)
        host.kill("w1", signal.SIGSTOP)
        await until_reached(host, "reassign.after", 1)
        await until_reached(host, "worker.after_commit", host.count("worker.after_commit") + 3)
        host.kill("w1", signal.SIGCONT)
        await asyncio.Event().wait()

    outcome = await trial(
        nursery, folder, PROGRAMS, expected=await calm(PROGRAMS), disturb=pause, workers=WORKERS,
        settings=SOON,
    )  # fmt: skip
    assert outcome.violations == []
    assert outcome.reached["reassign.after"] >= 1


async def test_runs_that_move_about_while_their_workers_are_killed_end_with_the_same_numbers(
    nursery: Nursery, folder: Path, calm: Calm
) -> None:
    async def move_about(host: Host) -> None:
        await until_reached(host, "worker.after_commit", 2)
        while True:
            with host.store() as store:
                for log in store.scan_iter("cotrain:{*}:log:*"):
                    prefix, _, run = log.partition(b"log:")
                    owner = store.hget(log, "worker")
                    to = b"w1" if owner == b"w0" else b"w0"
                    if owner:
                        store.hset(prefix + b"moves", run, owner + b">" + to)
            await asyncio.sleep(0.1)

    moments = ("move.before", "move.after")
    faults = ",".join(f"{moment}=kill@{nth}" for moment in moments for nth in (1, 2, 4))
    outcome = await trial(
        nursery, folder, PROGRAMS, expected=await calm(PROGRAMS), disturb=move_about, workers=WORKERS,
        settings={"FAILPOINTS": faults},
    )  # fmt: skip
    assert outcome.violations == []
    assert min(outcome.reached[moment] for moment in moments) >= 4
    assert sum(outcome.killed.values()) == 6
