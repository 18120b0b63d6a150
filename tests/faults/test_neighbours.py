"""A neighbour with NaNs, bad tokens and a request that kills the worker changes no bit of other runs."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.faults.conftest import Calm
from tests.faults.invariants import Ending, differences
from tests.faults.neighbours import POISON, POISON_SEQ, bad_neighbour
from tests.faults.orders import Nursery
from tests.faults.traffic import programs
from tests.faults.trial import trial

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
