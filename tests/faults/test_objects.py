"""Blobs in an object store, and each process on a host of its own: the same promises as with one folder."""

from __future__ import annotations

import asyncio
import itertools
import signal
from pathlib import Path

import pytest

from cotrain_store import redis_keys
from cotrain_store.disk.spool import SpoolRef
from tests.faults.conftest import Calm
from tests.faults.host import Host
from tests.faults.orders import Nursery
from tests.faults.scenarios import until_reached
from tests.faults.test_directed import PACKS, UNSAMPLED, UNSAMPLED_PACKS
from tests.faults.test_directed import PROGRAMS as SAMPLED
from tests.faults.traffic import programs, with_large_results, without_samples
from tests.faults.trial import trial
from tests.support.object_store import BadNetwork, SeaweedFS
from tests.support.waiting import until

in_one_loop = pytest.mark.asyncio(loop_scope="session")
#: Every pass has a body, and a result, that lie in the spool.
LARGE = with_large_results(without_samples(programs(1, runs=2, parts=1)))
#: What writes blobs, and what refers to them.
OF_BLOBS = ("spool", "copy", "copied", "save", "saved", "optimizer", "export")


@in_one_loop
async def test_a_worker_is_gone_and_another_host_goes_on_with_the_same_numbers(
    nursery: Nursery, folder: Path, calm: Calm, object_store: SeaweedFS
) -> None:
    async def remove(host: Host) -> None:
        await until_reached(host, "worker.after_commit", 6)
        host.kill("w1")
        host.retire("w1")
        await asyncio.Event().wait()

    outcome = await trial(
        nursery, folder, SAMPLED, expected=await calm(SAMPLED), disturb=remove,
        workers=("w0", "w1"), settings={"REASSIGN_AFTER_S": "0.5"}, objects=object_store,
    )  # fmt: skip
    assert outcome.violations == []
    assert outcome.reached["reassign.after"] >= 1
    assert outcome.killed == {"w1": 1}
    kept = {host: _names(folder / f"host-of-{host}") for host in ("api", "w0", "w1")}
    for names in kept.values():  # nothing of it is needed elsewhere
        assert names <= {"run", "admin-key", "micro_batches.json"}


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@in_one_loop
@pytest.mark.faults
async def test_a_store_that_fails_again_and_again_is_waited_for(
    nursery: Nursery, folder: Path, calm: Calm, object_store: SeaweedFS
) -> None:
    with BadNetwork(object_store.port) as network:

        async def fail(host: Host) -> None:
            for fault in itertools.cycle(("refuse", "cut", "away", "stall")):
                await asyncio.sleep(0.7)
                with network.failing(fault):
                    await asyncio.sleep(0.7)

        outcome = await trial(
            nursery, folder, SAMPLED, expected=await calm(SAMPLED), disturb=fail,
            objects=object_store, network=network,
        )  # fmt: skip
    assert outcome.violations == []
    assert outcome.deaths == []
    assert network.struck > 10
    assert "object_store_unavailable" in outcome.logs["w0"]


@in_one_loop
@pytest.mark.faults
@pytest.mark.parametrize("process", ["api", "w0"])
async def test_what_was_swept_while_its_writer_stood_still_is_written_again(
    process: str, nursery: Nursery, folder: Path, calm: Calm, object_store: SeaweedFS
) -> None:
    mine, swept = {"api": "spool:api-", "w0": "spool:answers-"}[process], ""

    async def stand_still(host: Host) -> None:
        nonlocal swept
        if process == "w0":
            host.add_worker("w1", "w1", BASE_MODEL=f"other={host.nursery.model}")
        await until(lambda: host.count("spool.after_sync", mine) >= 2)
        if process == "w0":
            with host.store() as store:  # the other one sweeps at once, and not a minute later
                store.delete(redis_keys.sweeper())
        written = [line for line in host.moments() if line.startswith("spool.after_sync ") and mine in line]
        swept = SpoolRef.parse(written[1].split()[2]).segment
        spool = object_store.store(f"{host.settings['BLOBS']}/spool")
        await until(lambda: not any(meta["path"] == swept for some in spool.list() for meta in some))
        host.kill(process, signal.SIGCONT)
        await asyncio.Event().wait()

    outcome = await trial(
        nursery, folder, LARGE, expected=await calm(LARGE), disturb=stand_still, objects=object_store,
        settings={"ORPHAN_AGE_S": "0.2", "FAILPOINTS": f"spool.after_sync~{mine}=stop@2"},
    )  # fmt: skip
    assert outcome.violations == []
    assert outcome.deaths == []
    assert swept
    assert process != "api" or outcome.told_to_wait[503]


@in_one_loop
@pytest.mark.faults
@pytest.mark.parametrize("pack", OF_BLOBS)
async def test_death_at_a_failpoint_changes_nothing_with_objects(
    pack: str, nursery: Nursery, folder: Path, calm: Calm, object_store: SeaweedFS
) -> None:
    asked = SAMPLED if pack in PACKS else UNSAMPLED
    names = (PACKS | UNSAMPLED_PACKS)[pack]
    faults = [f"{name}=kill@{nth}" for name in names for nth in (1, 2, 3)]
    outcome = await trial(
        nursery, folder, asked, expected=await calm(asked),
        settings={"FAILPOINTS": ",".join(faults)}, objects=object_store,
    )  # fmt: skip
    assert outcome.violations == []
    assert {name: outcome.reached[name] for name in names if outcome.reached[name] < 3} == {}
    assert len(outcome.deaths) == len(faults)
