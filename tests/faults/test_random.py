"""Every process dies at random moments, Redis too: nothing changes.

`make test` kills each kind of process at chosen moments (`test_directed.py`), and Redis in
`tests/integration/test_serve.py`. Longer: `make soak`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.conftest import Calm
from tests.faults.orders import Nursery
from tests.faults.test_directed import PROGRAMS
from tests.faults.trial import random_kills, trial

pytestmark = [pytest.mark.faults, pytest.mark.asyncio(loop_scope="session")]


@pytest.mark.parametrize("seed", [1, 2])
async def test_deaths_at_random_moments_change_nothing(seed: int, nursery: Nursery, folder: Path, calm: Calm) -> None:
    asked = PROGRAMS
    outcome = await trial(
        nursery,
        folder,
        asked,
        seed=seed,
        expected=await calm(asked),
        disturb=random_kills(seed, mean_s=0.2),
        crowded=True,
    )
    assert outcome.violations == []
    assert outcome.deaths
    assert outcome.passed_over
