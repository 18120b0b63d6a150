"""Saved weights from memory to disk: used at once, written once, kept while anybody can ask for them."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyrage
import pytest
import torch

from cotrain_store.errors import CheckpointNotFound
from cotrain_store.keys import sample_keys, weights_keys
from cotrain_store.messages.ids import SamplerId, WeightsRef
from cotrain_workers.checkpoint_files import (
    ORPHAN_AGE_S,
    CheckpointFiles,
    Saved,
    base_model_of_adapter,
)
from cotrain_workers.ops import HostOptimizer
from cotrain_workers.peft_folder import TENSORS, write_folder
from cotrain_workers.sample_ops import HostWeights, WeightsGone
from cotrain_workers.spec import AdapterSpec, Layout, Target, plan_layout
from cotrain_workers.weights_store import LOST, WeightsStore
from tests.support.samples import Samples, open_samples
from tests.support.stack import MODEL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from cotrain_store.messages.runs import RunRecord
    from cotrain_store.messages.weights import WeightsRecord
    from tests.support.redis_server import EmbeddedRedis

SPEC = AdapterSpec(rank=2, seed=0)


def layout_of(spec: AdapterSpec) -> Layout:
    return plan_layout(spec, [Target("model.q_proj", "attn", 16, 16)])


KEY = pyrage.x25519.Identity.generate()
SIZE = 4 * layout_of(SPEC).size  # bytes


def weights_of(value: float) -> Saved:
    return Saved(HostWeights(SPEC, torch.full((layout_of(SPEC).size,), value)))


def state_of(value: float) -> Saved:
    """Make what a save to train on from copies."""
    m, v = (torch.full((layout_of(SPEC).size,), value * factor) for factor in (2, 3))
    return replace(weights_of(value), optimizer=HostOptimizer(SPEC, m, v, step=7))


def full(*_: object) -> None:
    raise OSError("No space left on device")


@pytest.fixture
async def samples(empty_redis: EmbeddedRedis, tmp_path: Path) -> AsyncIterator[Samples]:
    async with open_samples(empty_redis.url, tmp_path) as opened:
        yield opened


@pytest.fixture
def store_of(samples: Samples, tmp_path: Path) -> Callable[..., WeightsStore]:
    def make(memory_bytes: int = 10 * SIZE, owed_bytes: int = 10 * SIZE) -> WeightsStore:
        files = CheckpointFiles.below(tmp_path, MODEL)
        return WeightsStore(samples.saved, files, layout_of, memory_bytes, owed_bytes)

    return make


async def saved(samples: Samples, run: RunRecord, seq: int, **as_what: Any) -> WeightsRecord:
    _, saves = await samples.save(run, seq, **as_what)
    return saves[run.id, seq].weights


def written(store: WeightsStore) -> None:
    """Wait for the writer."""
    for owed in list(store._owed.values()):
        if owed.writing:
            owed.writing.exception(60)
    store._note_written()


def make_old(tmp_path: Path) -> None:
    long_ago = time.time() - 2 * ORPHAN_AGE_S
    for path in tmp_path.glob("[weo]*/**/*"):
        os.utime(path, (long_ago, long_ago))


def files_in(tmp_path: Path) -> set[str]:
    """List the files of all saves, and what is left of unfinished ones."""
    found = [
        path for path in tmp_path.glob("[weo]*/**/*") if path.is_file() or ".torn" in path.name
    ]
    return {str(path.relative_to(tmp_path)) for path in found}


def folders(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "weights").glob("??/*"))


async def test_weights_are_there_before_their_file_and_the_same_after(
    samples: Samples, store_of: Callable[..., WeightsStore], tmp_path: Path
) -> None:
    run = await samples.log.new_run()
    store, record = store_of(), await saved(samples, run, 1, sampler=0)
    store.put(record, weights_of(1.5))
    assert store.host(record.ref).flat.equal(weights_of(1.5).weights.flat)
    assert store.unstored(run.id) == 1
    assert store.path(record.ref) is None
    written(store)
    assert store.unstored(run.id) is None
    assert store.path(record.ref) == folders(tmp_path)[0]
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
    assert len(store._owed) == 3  # none is let go before it is on disk
    written(store)
    assert len(store._recent) == 2
    for record in records:
        assert store.host(record.ref).flat[0] == float(record.ref[-1])


async def test_only_weights_that_nobody_can_ask_for_are_swept(
    samples: Samples, store_of: Callable[..., WeightsStore], tmp_path: Path
) -> None:
    run = await samples.log.new_run()
    store = store_of()
    old_name = await saved(samples, run, 1, name="best")
    new_name = await saved(samples, run, 2, name="best")
    expired = await saved(samples, run, 3, sampler=3)
    in_use = await saved(samples, run, 4, sampler=4)
    for record in (old_name, new_name, expired, in_use):
        store.put(record, weights_of(float(record.ref[-1])))
    written(store)
    assert set(store.sweep()) == {old_name.ref}
    samples.log.redis.delete(sample_keys.sampler(SamplerId(f"{run.session}:sample:3")))
    assert set(store.sweep()) == {expired.ref}
    assert store.sweep() == []
    for gone in (old_name, expired):
        with pytest.raises(WeightsGone):
            store.host(gone.ref)
    assert {store.host(kept.ref).flat[0].item() for kept in (new_name, in_use)} == {2.0, 4.0}


async def test_folders_go_once_they_are_old_and_nothing_refers_to_their_content(
    samples: Samples, store_of: Callable[..., WeightsStore], tmp_path: Path
) -> None:
    runs = [await samples.log.new_run(tenant) for tenant in ("a", "b")]
    store = store_of()
    gone, shared, kept = [
        await saved(samples, run, seq, sampler=seq)
        for run, seq in ((runs[0], 1), (runs[0], 2), (runs[1], 1))
    ]
    for record, value in ((gone, 1.0), (shared, 2.0), (kept, 2.0)):
        store.put(record, weights_of(value))
    written(store)
    for seq in (1, 2):
        samples.log.redis.delete(sample_keys.sampler(SamplerId(f"{runs[0].session}:sample:{seq}")))
    assert set(store.sweep()) == {gone.ref, shared.ref}
    store._files.remove_orphans(samples.saved)
    assert len(folders(tmp_path)) == 2  # young: another worker may be about to refer to one
    make_old(tmp_path)
    store._files.remove_orphans(samples.saved)
    assert folders(tmp_path) == [store.path(kept.ref)]


async def test_folders_of_other_base_models_are_their_own_workers_business(
    samples: Samples, store_of: Callable[..., WeightsStore], tmp_path: Path
) -> None:
    store = store_of()
    for base_model in (MODEL, "another"):
        write_folder(tmp_path / "weights", weights_of(1.0).weights, layout_of(SPEC), base_model)
    make_old(tmp_path)
    store._files.remove_orphans(samples.saved)
    (left,) = folders(tmp_path)
    assert base_model_of_adapter(left) == "another"


async def test_a_folder_that_is_found_there_is_young_again(
    samples: Samples, store_of: Callable[..., WeightsStore], tmp_path: Path
) -> None:
    run = await samples.log.new_run()
    store = store_of()
    for seq in (1, 2):
        store.put(await saved(samples, run, seq, sampler=seq), weights_of(1.0))
        written(store)
        (folder,) = folders(tmp_path)
        assert time.time() - folder.stat().st_mtime < ORPHAN_AGE_S
        os.utime(folder, (0, 0))


async def test_weights_lost_with_a_process_are_owed_until_a_replay_makes_them_again(
    samples: Samples, store_of: Callable[..., WeightsStore]
) -> None:
    run = await samples.log.new_run()
    first, second = [await saved(samples, run, seq, sampler=seq) for seq in (1, 2)]
    store = store_of()
    assert [record.ref for record in store.lost()] == [first.ref, second.ref]
    assert store.unstored(run.id) == 1
    with pytest.raises(WeightsGone):
        store.host(first.ref)
    store.put_again(first.ref, weights_of(1.0))
    assert not store.is_lost(first.ref)
    store.give_up(second.ref)
    written(store)
    store.recall()
    assert store.lost() == []
    assert store.unstored(run.id) is None
    with pytest.raises(WeightsGone):
        store.path(second.ref)
    store.put_again(WeightsRef("other:train:0:9"), weights_of(1.0))
    assert store.unstored(run.id) is None


async def test_a_damaged_folder_fails_whoever_asks_for_it(
    samples: Samples, store_of: Callable[..., WeightsStore], tmp_path: Path
) -> None:
    run = await samples.log.new_run()
    store, record = store_of(memory_bytes=0), await saved(samples, run, 1, sampler=0)
    store.put(record, weights_of(1.0))
    written(store)
    file = folders(tmp_path)[0] / TENSORS
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(WeightsGone):
        store.host(record.ref)


async def test_a_named_save_has_all_its_files_before_it_has_its_name(
    samples: Samples, store_of: Callable[..., WeightsStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a client was promised can be loaded by a worker that never saw it."""
    run = await samples.log.new_run()
    store, record = store_of(), await saved(samples, run, 1, name="x", kind="weights")
    path = f"tinker://{run.id}/weights/x"
    may_write = threading.Event()
    write = CheckpointFiles.write

    def held(*args: Any) -> Any:
        may_write.wait(60)
        return write(*args)

    monkeypatch.setattr(CheckpointFiles, "write", held)
    store.put(record, state_of(1.0))
    store.tend()
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
    assert store._owed == {}  # and with it the only copy of the optimizer state in memory


async def test_weights_that_were_saved_for_sampling_have_no_optimizer_state(
    samples: Samples, store_of: Callable[..., WeightsStore]
) -> None:
    run = await samples.log.new_run()
    store, record = store_of(), await saved(samples, run, 1, name="x")
    store.put(record, weights_of(1.0))
    assert store.optimizer(record.ref) is None
    written(store)
    assert store.optimizer(record.ref) is None
    with pytest.raises(WeightsGone):
        store.optimizer(WeightsRef("other:train:0:9"))


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
    with pytest.raises(WeightsGone):
        store.optimizer(record.ref)


@pytest.mark.parametrize("part", ["write_folder", "write_optimizer", "write_external"])
async def test_a_full_disk_keeps_a_named_save_waiting_and_loses_nothing(
    samples: Samples,
    store_of: Callable[..., WeightsStore],
    monkeypatch: pytest.MonkeyPatch,
    part: str,
) -> None:
    monkeypatch.setattr("cotrain_workers.weights_store.RETRY_S", 0.0)
    run = await samples.log.new_run()
    store, record = store_of(), await saved(samples, run, 1, name="x", kind="weights")
    with monkeypatch.context() as broken:
        broken.setattr(f"cotrain_workers.checkpoint_files.{part}", full)
        store.put(record, replace(state_of(1.0), recipients=(str(KEY.to_public()),)))
        for _ in range(3):
            written(store)
            assert samples.log.result(run, 1) is None
            assert store.unstored(run.id) == 1
    while store._owed:
        written(store)
    assert samples.log.result(run, 1) is not None
    assert store_of().optimizer(record.ref) is not None


async def test_there_is_no_room_for_another_save_while_the_disk_is_behind(
    samples: Samples, store_of: Callable[..., WeightsStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotrain_workers.weights_store.RETRY_S", 0.0)
    run = await samples.log.new_run()
    store = store_of(owed_bytes=2 * SIZE)
    assert store.has_room
    with monkeypatch.context() as broken:
        broken.setattr("cotrain_workers.checkpoint_files.write_folder", full)
        store.put(await saved(samples, run, 1, name="x", kind="weights"), state_of(1.0))
        for _ in range(3):
            written(store)
            assert not store.has_room  # it takes three times SIZE, weights and two moments
    while store._owed:
        written(store)
    assert store.has_room


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
    assert store._owed == {}
    assert store.host(first.ref).flat[0] == 1.0
    with pytest.raises(WeightsGone):
        store.host(second.ref)


async def test_files_of_all_kinds_go_once_they_are_old_and_nobody_knows_them(
    samples: Samples, store_of: Callable[..., WeightsStore], tmp_path: Path
) -> None:
    run = await samples.log.new_run()
    store = store_of()
    names = {}
    for seq in (1, 2):
        record = await saved(
            samples, run, seq, name=f"n{seq}", kind="external_weights", external=True
        )
        store.put(record, replace(state_of(float(seq)), recipients=(str(KEY.to_public()),)))
        written(store)
        names[seq] = files_in(tmp_path)
    kept = names[1]
    assert len(kept) == 2 + 1 + 3
    for torn in ("weights/ab/.torn", "optimizers/ab/.torn", "external/.torn"):
        (tmp_path / torn).mkdir(parents=True)
    samples.log.redis.delete(weights_keys.checkpoint(run.id, "external_weights", "n2"))
    assert store.sweep() == [f"{run.id}:2"]
    everything = files_in(tmp_path)
    store._files.remove_orphans(samples.saved)
    assert files_in(tmp_path) == everything  # young
    make_old(tmp_path)
    store._files.remove_orphans(samples.saved)
    assert files_in(tmp_path) == kept
