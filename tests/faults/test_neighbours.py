"""Requests that crash a worker, and deaths that no request caused: no bit of other runs changes."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from tests.faults.conftest import Calm
from tests.faults.host import Host
from tests.faults.invariants import Ending, differences
from tests.faults.neighbours import POISON, POISON_SEQ, bad_neighbour
from tests.faults.orders import Nursery
from tests.faults.scenarios import POLL_S, PROGRAMS, until_reached
from tests.faults.traffic import programs
from tests.faults.trial import Disturb, trial
from tests.support.waiting import until

pytestmark = [pytest.mark.faults, pytest.mark.asyncio(loop_scope="session")]

OTHERS = programs(3, runs=2, parts=2)


async def test_a_neighbour_that_breaks_everything_changes_nothing_for_others(
    nursery: Nursery, folder: Path, calm: Calm
) -> None:
    everybody = [*OTHERS, bad_neighbour()]
    outcome = await trial(nursery, folder, everybody, limit_s=90, settings={"FAILPOINTS": POISON})
    assert outcome.violations == []
    assert outcome.ending
    got, expected = outcome.ending, await calm(OTHERS)
    end = len(OTHERS)
    others = Ending(got.answers[:end], got.states[:end], got.weights[:end], expected.counted)
    assert differences(expected, others) == []

    answers = got.answers[-1]
    failed = {request: str(answer["error"]) for request, answer in answers.items() if "error" in answer}
    said = {int(request.rpartition(":")[2]): error for request, error in failed.items()}
    assert "not finite" in said[3]
    assert "outside the vocabulary" in said[7]
    assert "crashed the worker" in said[POISON_SEQ]
    assert POISON_SEQ + 2 not in said
    assert {death.status for death in outcome.deaths} == {-signal.SIGKILL}
    assert set(outcome.killed) == {"w0"}


#: Requests up to the end of the first part of every run, the one that creates it included.
FIRST_PARTS = sum(1 + len(program.parts[0]) for program in PROGRAMS)


def killed_over_a_full_step(before: int, after: int) -> Disturb:
    """Kill the worker twice over a step that holds much of every run, and then at two risks."""

    async def disturb(host: Host) -> None:
        await until(lambda: _created(host) >= len(PROGRAMS), POLL_S)
        host.kill("scheduler", signal.SIGSTOP)
        await until_reached(host, "api.after_submit", FIRST_PARTS)
        await until_reached(host, "worker.after_commit", host.count("worker.before_run"))
        step = host.count("worker.before_run")
        faults = [f"worker.before_run=kill@{step + nth}" for nth in (1, 2)]
        faults += [f"worker.before_risk=kill@{before}", f"worker.after_risk=kill@{after}"]
        host.restart("w0", FAILPOINTS=",".join(faults))
        host.kill("scheduler", signal.SIGCONT)
        await asyncio.Event().wait()

    return disturb


def _created(host: Host) -> int:
    lines = host.reached.read_text().splitlines()
    return len({line for line in lines if line.startswith("api.before_answer") and line.endswith(":0:0")})  # fmt: skip


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 2), (2, 1)])
async def test_deaths_over_a_suspected_request_from_outside_are_not_held_against_it(
    before: int, after: int, nursery: Nursery, folder: Path, calm: Calm
) -> None:
    outcome = await trial(
        nursery, folder, PROGRAMS, expected=await calm(PROGRAMS),
        disturb=killed_over_a_full_step(before, after),
    )  # fmt: skip
    assert outcome.violations == []
    assert outcome.reached["worker.before_risk"] >= before
    assert outcome.reached["worker.after_risk"] >= after
    assert outcome.killed == {"w0": 5}
