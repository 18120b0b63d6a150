"""Time jumps of days, or files that look days old: runs end unchanged."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import pytest_asyncio

from tests.faults.conftest import TALLIES, Calm
from tests.faults.host_clock import SOURCE, Elsewhen, HostClock, jumping
from tests.faults.power_disk import compile_shim
from tests.faults.scenarios import SCENARIOS
from tests.faults.traffic import programs, with_large_results
from tests.faults.trial import at_once, trial

pytestmark = [pytest.mark.faults, pytest.mark.asyncio(loop_scope="session")]

#: Two tenants, whose bodies and results are larger than 16 KB.
PROGRAMS = with_large_results(programs(1, runs=2, parts=1))
JUMPS_H = (26, -26, 0, 26)
#: Frequent sweeps, which would find files that look old by mistake.
SETTINGS = {"ORPHAN_AGE_S": "1"}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def elsewhen(small_model: Path, request: pytest.FixtureRequest) -> AsyncIterator[Elsewhen]:
    """Parent of all processes of this file, with a settable time of day."""
    with TemporaryDirectory(prefix="cotrain-") as name:
        library = Path(name) / "clock.so"
        if reason := compile_shim(library, SOURCE):
            pytest.skip(reason)
        async with Elsewhen(small_model, HostClock(Path(name) / "ahead", library)) as opened:
            request.config.stash.setdefault(TALLIES, []).append(opened.tally)
            yield opened


async def test_a_time_of_day_that_jumps_and_files_that_look_old_change_nothing(
    elsewhen: Elsewhen, folder: Path, calm: Calm
) -> None:
    """Jump by 26 hours, and set the times of all files back by two days, in one trial."""
    old, jumps = SCENARIOS["files look two days old"], jumping(elsewhen.clock, JUMPS_H, every=1)
    assert old.disturb
    outcome = await trial(
        elsewhen, folder, PROGRAMS, expected=await calm(PROGRAMS), settings=SETTINGS,
        disturb=at_once(jumps, old.disturb),
    )  # fmt: skip
    assert outcome.violations == []
    assert outcome.reached["worker.after_commit"] > len(JUMPS_H), "a jump came too late"
