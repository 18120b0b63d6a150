"""A recorded cycle runs again to the same bits; what does not is named."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cotrain_workers.recorded_cycle import read_cycle
from cotrain_workers.replay import compared, run_again
from tests.support.flight import B, C, Flight, whole_story

if TYPE_CHECKING:
    from pathlib import Path

    from cotrain_workers.recorded_cycle import RecordedCycle
    from cotrain_workers.replay import Compared
    from tests.unit.workers.conftest import NewEngine


@pytest.fixture
def flight(new_engine: NewEngine, tmp_path: Path) -> Flight:
    return Flight(new_engine(), tmp_path)


def replayed(new_engine: NewEngine, cycle: RecordedCycle, tolerance: float = 0.0) -> list[Compared]:
    return list(compared(cycle, run_again(new_engine(), cycle), tolerance))


def test_every_cycle_of_a_whole_story_runs_again_to_the_same_bits(
    flight: Flight, new_engine: NewEngine
) -> None:
    whole_story(flight)
    cycles = [read_cycle(path) for path in flight.files]
    rows = [row for cycle in cycles for row in replayed(new_engine, cycle)]
    assert {row.verdict for row in rows} == {"equal", "left out"}
    left_out = [(row.run, row.seq) for row in rows if row.verdict == "left out"]
    assert left_out == [(C, 5), (B, 7)]  # a checkpoint that was gone; a crash
    assert len(rows) == sum(len(c.facts.step.ops) + len(c.found.by_run) for c in cycles if c.found)
