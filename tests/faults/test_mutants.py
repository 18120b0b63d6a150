"""Each mutant is caught by the scenario it names: `make mutants`. That they still apply is always tested."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.faults.conftest import Calm
from tests.faults.mutants import MUTANTS
from tests.faults.orders import Nursery
from tests.faults.scenarios import SCENARIOS
from tests.warm.sources import ROOT


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_still_applies_to_the_sources(name: str, tmp_path: Path) -> None:
    for edit in MUTANTS[name].edits:
        (tmp_path / edit.file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / edit.file, tmp_path / edit.file)
        edit.apply(tmp_path)


@pytest.mark.mutants
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("name", MUTANTS)
async def test_a_mutant_is_caught(name: str, small_model: Path, folder: Path, tmp_path: Path, calm: Calm) -> None:
    sources, scenario = MUTANTS[name].plant(tmp_path), SCENARIOS[MUTANTS[name].scenario]
    expected = await calm(scenario.programs)
    async with Nursery(small_model, sources) as nursery:
        outcome = await scenario.run(nursery, folder, expected)
    assert outcome.violations != []
    first, count = outcome.violations[0], len(outcome.violations)
    print(f"{name}, caught by {MUTANTS[name].scenario!r}: {count} violations, first {first:.160}")
