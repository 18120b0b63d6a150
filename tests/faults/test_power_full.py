"""The disk is full, for a while: nothing that was accepted is lost, and saves come when there is room."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.conftest import Calm
from tests.faults.host import MODEL, REDIS, Host
from tests.faults.orders import Nursery
from tests.faults.power_full import RESERVE_BYTES, CannotMount, empty, fill, full_until_something_dies, small_disk
from tests.faults.traffic import client_of, programs
from tests.faults.trial import trial

pytestmark = [pytest.mark.faults, pytest.mark.asyncio(loop_scope="session")]

PROGRAMS = programs(1, runs=3, parts=2)
#: Where a write can fail for want of room, outside of Redis.
WRITES = (
    "spool.before_write", "spool.half_written", "spool.before_sync", "snapshot.half_written",
    "snapshot.before_rename", "weights.half_written", "optimizer.half_written", "external.half_written",
)  # fmt: skip


@pytest.fixture
def small_folder(folder: Path) -> Iterator[Path]:
    try:
        with small_disk(folder):
            yield folder
    except CannotMount as reason:
        pytest.skip(str(CannotMount.__doc__ or reason))


async def test_a_write_that_finds_no_room_is_done_later(nursery: Nursery, folder: Path, calm: Calm) -> None:
    faults = ",".join(f"{name}=error@{nth}" for name in WRITES for nth in (1, 2))
    outcome = await trial(
        nursery, folder, PROGRAMS, expected=await calm(PROGRAMS), limit_s=90,
        settings={"FAILPOINTS": faults},
    )  # fmt: skip
    assert outcome.violations == []
    assert outcome.deaths == []
    assert set(outcome.told_to_wait) <= {408, 503}
    assert outcome.told_to_wait[503]
    assert {name for name in WRITES if outcome.reached[name] < 2} == set()


async def test_nothing_new_is_taken_at_the_reserve_and_what_was_taken_is_finished(
    nursery: Nursery, small_folder: Path, calm: Calm
) -> None:
    refused = []

    async def disturb(host: Host) -> None:
        client = client_of(host.address, 0)
        session = json.loads(await client.post("create_session", {}))["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 2}}
        fill(host.folder, RESERVE_BYTES // 2)
        refused.append((await client.http.post("/api/v1/create_model", json=body)).status_code)
        empty(host.folder)
        await client.http.aclose()

    outcome = await trial(
        nursery, small_folder, PROGRAMS, expected=await calm(PROGRAMS), disturb=disturb, limit_s=90,
        settings={"DISK_RESERVE_BYTES": str(RESERVE_BYTES)},
    )  # fmt: skip
    assert outcome.violations == []
    assert outcome.deaths == []
    assert refused == [503]


async def test_a_disk_without_a_byte_left_loses_nothing(nursery: Nursery, small_folder: Path, calm: Calm) -> None:
    outcome = await trial(
        nursery, small_folder, PROGRAMS, expected=await calm(PROGRAMS), limit_s=90,
        disturb=full_until_something_dies(), excused=(f"I8 {REDIS} ended with 1",),
    )  # fmt: skip
    assert outcome.violations == []
    assert outcome.killed[REDIS]
