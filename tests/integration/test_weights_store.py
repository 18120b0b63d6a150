"""Saved weights from memory to disk: used at once, written once, there for whoever asks for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cotrain_store.blobs.folder import Folder
from cotrain_store.disk.checksums import REMEDY, SUMS
from cotrain_store.errors import CheckpointNotFound
from cotrain_store.messages.ids import WeightsRef
from cotrain_workers.checkpoints.files import CheckpointFiles
from cotrain_workers.checkpoints.peft_folder import TENSORS
from cotrain_workers.checkpoints.weights_store import LOST, WeightsStore
from cotrain_workers.engine.ops import WeightsMissing
from tests.support.samples import Samples
from tests.support.saved_files import (
    KEY,
    SIZE,
    SPEC,
    folders,
    full,
    layout_of,
    saved,
    state_of,
    weights_of,
    weights_store,
    written,
)
from tests.support.stack import MODEL
from tests.support.waiting import PATIENCE_S


@pytest.fixture
def store_of(samples: Samples, tmp_path: Path) -> Callable[..., WeightsStore]:
    return partial(weights_store, samples, tmp_path)


async def test_weights_are_there_before_their_file_and_the_same_after(
    samples: Samples, store_of: Callable[..., WeightsStore], tmp_path: Path
) -> None:
    run = await samples.log.new_run()
    store, record = store_of(), await saved(samples, run, 1, sampler=0)
    store.put(record, weights_of(1.5))
    assert store.host(record.ref).flat.equal(weights_of(1.5).weights.flat)
    assert store.first_unstored(run.id) == 1
    assert store.digest(record.ref) is None
    written(store)
    assert store.first_unstored(run.id) is None
    assert store.digest(record.ref) == folders(tmp_path)[0].name
    again = store_of().host(record.ref)
    assert again.spec == SPEC
    assert again.flat.equal(weights_of(1.5).weights.flat)


async def test_equal_weights_share_one_folder(
    samples: Samples, store_of: Callable[..., WeightsStore], tmp_path: Path
) -> None:
    runs = [await samples.log.new_run(tenant) for tenant in ("a", "b")]
    store = store_of()
    for run in runs:
        store.put(await saved(samples, run, 1, sampler=0), weights_of(1.0))
    store.put(await saved(samples, runs[0], 2, sampler=1), weights_of(2.0))
    written(store)
    assert len(folders(tmp_path)) == 2


async def test_memory_holds_what_was_used_last_and_the_rest_comes_from_disk(
    samples: Samples, store_of: Callable[..., WeightsStore]
) -> None:
    run = await samples.log.new_run()
    store = store_of(memory_bytes=2 * SIZE)
    records = [await saved(samples, run, seq, sampler=seq) for seq in range(1, 4)]
    for record in records:
        store.put(record, weights_of(float(record.ref[-1])))
    assert len(store._unstored) == 3  # none is let go before it is on disk
    written(store)
    assert len(store._cache._weights) == 2
    for record in records:
        assert store.host(record.ref).flat[0] == float(record.ref[-1])


async def test_weights_lost_with_a_process_are_owed_until_a_replay_makes_them_again(
    samples: Samples, store_of: Callable[..., WeightsStore]
) -> None:
    run = await samples.log.new_run()
    first, second = [await saved(samples, run, seq, sampler=seq) for seq in (1, 2)]
    store = store_of()
    assert [record.ref for record in store.lost()] == [first.ref, second.ref]
    assert store.first_unstored(run.id) == 1
    with pytest.raises(WeightsMissing):
        store.host(first.ref)
    store.put_again(first.ref, weights_of(1.0))
    assert not store.is_lost(first.ref)
    store.give_up(second.ref)
    written(store)
    store.reload()
    assert store.lost() == []
    assert store.first_unstored(run.id) is None
    with pytest.raises(WeightsMissing):
        store.digest(second.ref)
    store.put_again(WeightsRef("other:train:0:9"), weights_of(1.0))
    assert store.first_unstored(run.id) is None


async def test_a_damaged_folder_fails_whoever_asks_for_it(
    samples: Samples, store_of: Callable[..., WeightsStore], tmp_path: Path
) -> None:
    run = await samples.log.new_run()
    store, record = store_of(memory_bytes=0), await saved(samples, run, 1, sampler=0)
    store.put(record, weights_of(1.0))
    written(store)
    file = folders(tmp_path)[0] / TENSORS
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(WeightsMissing):
        store.host(record.ref)


async def test_a_named_save_has_all_its_files_before_it_has_its_name(
    samples: Samples, store_of: Callable[..., WeightsStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that never had the run loads the promised checkpoint."""
    run = await samples.log.new_run()
    store, record = store_of(), await saved(samples, run, 1, name="x", kind="weights")
    path = f"tinker://{run.id}/weights/x"
    may_write = threading.Event()
    write = CheckpointFiles.write

    def held(*args: Any) -> Any:
        may_write.wait(PATIENCE_S)
        return write(*args)

    monkeypatch.setattr(CheckpointFiles, "write", held)
    store.put(record, state_of(1.0))
    store.maintain()
    assert samples.log.result(run, 1) is None
    with pytest.raises(CheckpointNotFound):
        await samples.records.checkpoint(run.tenant, path)
    ours = store.optimizer(record.ref)
    may_write.set()
    written(store)
    assert samples.log.result(run, 1) is not None
    checkpoint = await samples.records.checkpoint(run.tenant, path)
    theirs = store_of().optimizer(checkpoint.weights)
    assert ours
    assert theirs
    assert theirs.step == 7
    assert theirs.m.equal(ours.m)
    assert theirs.v.equal(ours.v)
    assert checkpoint.size > 3 * SIZE
    assert store._unstored == {}  # and with it the only copy of the optimizer state in memory


async def test_weights_that_were_saved_for_sampling_have_no_optimizer_state(
    samples: Samples, store_of: Callable[..., WeightsStore]
) -> None:
    run = await samples.log.new_run()
    store, record = store_of(), await saved(samples, run, 1, name="x")
    store.put(record, weights_of(1.0))
    assert store.optimizer(record.ref) is None
    written(store)
    assert store.optimizer(record.ref) is None
    with pytest.raises(WeightsMissing):
        store.optimizer(WeightsRef("other:train:0:9"))


async def test_a_folder_without_its_sums_fails_with_a_sentence_for_its_tenant(
    samples: Samples, store_of: Callable[..., WeightsStore], tmp_path: Path
) -> None:
    run = await samples.log.new_run()
    store, record = store_of(memory_bytes=0), await saved(samples, run, 1, sampler=0)
    store.put(record, weights_of(1.0))
    written(store)
    (folders(tmp_path)[0] / SUMS).unlink()
    with pytest.raises(WeightsMissing) as missing:
        store.host(record.ref)
    assert missing.value.reason == f"SHA256SUMS is missing. {REMEDY}"


async def test_a_damaged_optimizer_state_fails_whoever_asks_for_it(
    samples: Samples, store_of: Callable[..., WeightsStore], tmp_path: Path
) -> None:
    run = await samples.log.new_run()
    store, record = store_of(), await saved(samples, run, 1, name="x", kind="weights")
    store.put(record, state_of(1.0))
    written(store)
    (file,) = (tmp_path / "optimizers").glob("??/*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(WeightsMissing):
        store.optimizer(record.ref)


@pytest.mark.parametrize("part", ["write_folder", "write_optimizer", "write_external"])
async def test_a_full_disk_keeps_a_named_save_waiting_and_loses_nothing(
    samples: Samples, store_of: Callable[..., WeightsStore], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr("cotrain_workers.checkpoints.weights_store.RETRY_S", 0.0)
    run = await samples.log.new_run()
    store, record = store_of(), await saved(samples, run, 1, name="x", kind="weights")
    with monkeypatch.context() as broken:
        broken.setattr(f"cotrain_workers.checkpoints.files.{part}", full)
        store.put(record, replace(state_of(1.0), recipients=(str(KEY.to_public()),)))
        for _ in range(3):
            written(store)
            assert samples.log.result(run, 1) is None
            assert store.first_unstored(run.id) == 1
    while store._unstored:
        written(store)
    assert samples.log.result(run, 1) is not None
    assert store_of().optimizer(record.ref) is not None


async def test_the_time_of_a_named_save_ends_with_its_files(
    samples: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotrain_workers.checkpoints.weights_store.RETRY_S", 0.0)
    run, took = await samples.log.new_run(), list[float]()
    files = CheckpointFiles(Folder(tmp_path), MODEL)
    store = WeightsStore(samples.saved, files, layout_of, count_answered=took.append)
    sampler = await saved(samples, run, 1, sampler=0)
    named = await saved(samples, run, 2, name="x", kind="weights")
    store.put(sampler, weights_of(1.0))
    with monkeypatch.context() as broken:
        broken.setattr("cotrain_workers.checkpoints.files.write_folder", full)
        store.put(named, state_of(2.0), accepted_at=time.time() - 100)
        written(store)
        assert took == []
    while store._unstored:
        written(store)
    [seconds] = took
    assert 100 <= seconds < 200


async def test_there_is_no_room_for_another_save_while_the_disk_is_behind(
    samples: Samples, store_of: Callable[..., WeightsStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotrain_workers.checkpoints.weights_store.RETRY_S", 0.0)
    run = await samples.log.new_run()
    store = store_of(unstored_bytes=2 * SIZE)
    assert store.has_capacity_for(())
    with monkeypatch.context() as broken:
        broken.setattr("cotrain_workers.checkpoints.files.write_folder", full)
        store.put(await saved(samples, run, 1, name="x", kind="weights"), state_of(1.0))
        for _ in range(3):
            written(store)
            assert not store.has_capacity_for(())  # it takes three times SIZE, weights and two moments
    while store._unstored:
        written(store)
    assert store.has_capacity_for(())


async def test_a_save_that_nothing_can_make_again_fails_and_frees_its_name(
    samples: Samples, store_of: Callable[..., WeightsStore]
) -> None:
    run = await samples.log.new_run()
    record = await saved(samples, run, 1, name="x", kind="weights")
    store_of().give_up(record.ref)
    failure = samples.log.result(run, 1)
    assert failure
    assert failure.json() == {"error": LOST, "category": "server"}
    again = await saved(samples, run, 2, name="x", kind="weights")
    store = store_of()
    store.put(again, state_of(1.0))
    written(store)
    path = f"tinker://{run.id}/weights/x"
    assert (await samples.records.checkpoint(run.tenant, path)).weights == again.ref


async def test_a_save_whose_name_was_in_use_leaves_nothing_behind(
    samples: Samples, store_of: Callable[..., WeightsStore]
) -> None:
    run = await samples.log.new_run()
    store = store_of()
    first, second = [await saved(samples, run, seq, name="x", kind="weights") for seq in (1, 2)]
    for record in (first, second):
        store.put(record, state_of(float(record.ref[-1])))
    written(store)
    assert store._unstored == {}
    assert store.host(first.ref).flat[0] == 1.0
    with pytest.raises(WeightsMissing):
        store.host(second.ref)
