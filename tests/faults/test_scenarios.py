"""Scenarios that reveal the mutants change nothing in the unchanged server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.conftest import Calm
from tests.faults.orders import Nursery
from tests.faults.scenarios import SCENARIOS

pytestmark = [pytest.mark.faults, pytest.mark.asyncio(loop_scope="session")]


@pytest.mark.parametrize("name", SCENARIOS)
async def test_a_scenario_changes_nothing(name: str, nursery: Nursery, folder: Path, calm: Calm) -> None:
    scenario = SCENARIOS[name]
    outcome = await scenario.run(nursery, folder, await calm(scenario.programs))
    assert outcome.violations == []
