"""Cycles recorded by an earlier version (tests/data/recorded), whose replay must have the same results."""

from __future__ import annotations

from pathlib import Path

import pytest

from cotrain_workers.recorder.file import read_cycle
from cotrain_workers.recorder.replay import compared, engine_for, restore_before, run_again, tolerance_of

FOLDER = Path(__file__).parents[3] / "data" / "recorded"
FILES = sorted(FOLDER.glob("*.zip"))


def test_there_are_recorded_cycles() -> None:
    assert len(FILES) >= 5


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recorded_cycle_has_the_same_results(path: Path) -> None:
    """The bits are equal with the numerics of the recording; otherwise results are within the tolerance of a recovery."""
    cycle = read_cycle(path)
    engine = engine_for(cycle.facts, str(FOLDER / "model"), device="cpu")
    restore_before(engine, cycle)
    again = run_again(engine, cycle)
    tolerance = tolerance_of(cycle.facts.numerics, engine.facts.numerics)
    rows = list(compared(cycle, again, tolerance))
    assert len(rows) >= 6
    assert [row for row in rows if row.verdict == "DIVERGED"] == []
