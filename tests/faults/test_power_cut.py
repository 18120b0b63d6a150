"""Power cuts while runs train, save and sample: they end unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import pytest_asyncio

from tests.faults.conftest import TALLIES, Calm
from tests.faults.host import REDIS, Host
from tests.faults.power_cut import Cutter, Mains, broken_promises, cuts_at, cuts_at_random, places, server_below
from tests.faults.power_disk import Disk, compile_shim
from tests.faults.test_power_disk import SYNCS
from tests.faults.traffic import programs
from tests.faults.trial import trial

pytestmark = pytest.mark.faults
in_one_loop = pytest.mark.asyncio(loop_scope="session")

PROGRAMS = programs(1, parts=2)
#: Moments between writing and syncing, or between two promises, that one trial combines.
MOMENTS = {
    "bodies": ("spool.half_written", "spool.before_sync", "spool.after_sync", "api.after_submit"),
    "copies": ("snapshot.before_rename", "snapshot.renamed", "snapshot.before_register", "snapshot.registered"),
    "saves": ("weights.before_rename", "weights.renamed", "weights.before_stored", "weights.stored"),
    "states": ("optimizer.half_written", "optimizer.renamed", "external.half_written", "external.renamed"),
    "steps": ("scheduler.after_plan", "worker.after_commit", "sample.after_resolve"),
}  # fmt: skip


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def nursery(small_model: Path, request: pytest.FixtureRequest) -> AsyncIterator[Mains]:
    """Parent of all processes of this file, whose power fails."""
    with TemporaryDirectory(prefix="cotrain-") as name:
        library = Path(name) / "power.so"
        if reason := compile_shim(library):
            pytest.skip(reason)
        async with Mains(small_model, Disk(Path(name), library)) as opened:
            request.config.stash.setdefault(TALLIES, []).append(opened.tally)
            yield opened


@pytest.fixture
def folder(nursery: Mains) -> Iterator[Path]:
    """A new data folder on the disk that loses power."""
    with TemporaryDirectory(dir=nursery.disk.root) as name:
        yield Path(name)


@in_one_loop
@pytest.mark.parametrize("moments", MOMENTS)
async def test_a_power_cut_at_a_moment_changes_nothing(moments: str, nursery: Mains, folder: Path, calm: Calm) -> None:
    cutter = Cutter(nursery)
    faults = ",".join(f"{moment}=stop" for moment in MOMENTS[moments])
    outcome = await trial(
        nursery, folder, PROGRAMS, expected=await calm(PROGRAMS),
        disturb=cuts_at(cutter, MOMENTS[moments]), limit_s=60, settings={"FAILPOINTS": faults},
    )  # fmt: skip
    assert outcome.violations + cutter.broken == []
    assert set(MOMENTS[moments]) <= set(outcome.reached)
    assert cutter.cuts


@in_one_loop
@pytest.mark.parametrize("seed", [None, 1])
async def test_power_cuts_at_any_time_change_nothing(
    seed: int | None, nursery: Mains, folder: Path, calm: Calm
) -> None:
    cutter = Cutter(nursery, seed)
    outcome = await trial(
        nursery, folder, PROGRAMS, seed=7, expected=await calm(PROGRAMS),
        disturb=cuts_at_random(cutter, times=5), limit_s=90,
    )  # fmt: skip
    assert outcome.violations + cutter.broken == []
    assert cutter.cuts


@in_one_loop
@pytest.mark.parametrize("delay_ms", [300, 1500])
async def test_a_slow_disk_delays_but_loses_nothing_at_kills_and_power_cuts(
    delay_ms: int, nursery: Mains, folder: Path, calm: Calm
) -> None:
    cutter, short = Cutter(nursery), programs(2, runs=2, parts=1)

    async def disturb(host: Host) -> None:
        nursery.disk.be_slow(delay_ms)
        for victim in ("w0", "api", REDIS, "scheduler"):
            await asyncio.sleep(delay_ms / 1000)  # most likely in the middle of a sync
            host.kill(victim)
        await asyncio.sleep(delay_ms / 1000)
        await cutter.cut(host)  # /readyz fails while a sync takes longer than its timeout
        nursery.disk.be_slow(0)

    outcome = await trial(nursery, folder, short, expected=await calm(short), disturb=disturb, limit_s=90)
    nursery.disk.be_slow(0)
    assert outcome.violations + cutter.broken == []


@in_one_loop
async def test_a_power_cut_reveals_every_missing_sync_of_a_server(nursery: Mains, folder: Path) -> None:
    outcome = await trial(nursery, folder, PROGRAMS, snapshot_ops=1000)
    assert outcome.violations == []
    nursery.disk.leave(folder, folder / "whole")
    with server_below(folder / "whole") as store:
        before = places(store)
    assert broken_promises(folder / "whole", before) == []
    for number, (what, pattern) in enumerate({"what Redis syncs": "F*/redis/*", **SYNCS}.items()):
        left = folder / str(number)
        nursery.disk.leave(folder, left, unsynced=pattern)
        assert broken_promises(left, before), what
