"""Sampler weights from memory to disk: used at once, written once, kept while anybody can ask for them."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cotrain_store import keys
from cotrain_store.messages import SamplerId, WeightsRef
from cotrain_workers.peft_folder import TENSORS, write_folder
from cotrain_workers.sample_ops import HostWeights, WeightsGone
from cotrain_workers.spec import AdapterSpec, Layout, Target, plan_layout
from cotrain_workers.weights_store import ORPHAN_AGE_S, WeightsStore, base_model_of
from tests.support.samples import Samples, open_samples
from tests.support.stack import MODEL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from cotrain_store.messages import RunRecord, WeightsRecord
    from tests.support.redis_server import EmbeddedRedis

SPEC = AdapterSpec(rank=2, seed=0)


def layout_of(spec: AdapterSpec) -> Layout:
    return plan_layout(spec, [Target("model.q_proj", "attn", 16, 16)])


SIZE = 4 * layout_of(SPEC).size  # bytes


def weights_of(value: float) -> HostWeights:
    return HostWeights(SPEC, torch.full((layout_of(SPEC).size,), value))


@pytest.fixture
async def samples(empty_redis: EmbeddedRedis, tmp_path: Path) -> AsyncIterator[Samples]:
    async with open_samples(empty_redis.url, tmp_path) as opened:
        yield opened


@pytest.fixture
def store_of(samples: Samples, tmp_path: Path) -> Callable[..., WeightsStore]:
    def make(memory_bytes: int = 10 * SIZE) -> WeightsStore:
        folder = tmp_path / "weights"
        return WeightsStore(samples.sampling, folder, MODEL, layout_of, memory_bytes)

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
    for folder in folders(tmp_path):
        os.utime(folder, (long_ago, long_ago))


def folders(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "weights").glob("??/*"))


async def test_weights_are_there_before_their_file_and_the_same_after(
    samples: Samples, store_of: Callable[..., WeightsStore], tmp_path: Path
) -> None:
    run = await samples.log.new_run()
    store, record = store_of(), await saved(samples, run, 1, sampler=0)
    store.put(record, weights_of(1.5))
    assert store.host(record.ref).flat.equal(weights_of(1.5).flat)
    assert store.unstored(run.id) == 1
    assert store.path(record.ref) is None
    written(store)
    assert store.unstored(run.id) is None
    assert store.path(record.ref) == folders(tmp_path)[0]
    again = store_of().host(record.ref)
    assert again.spec == SPEC
    assert again.flat.equal(weights_of(1.5).flat)


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
    samples.log.redis.delete(keys.sampler(SamplerId(f"{run.session}:sample:3")))
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
        samples.log.redis.delete(keys.sampler(SamplerId(f"{runs[0].session}:sample:{seq}")))
    assert set(store.sweep()) == {gone.ref, shared.ref}
    store.remove_orphans()
    assert len(folders(tmp_path)) == 2  # young: another worker may be about to refer to one
    make_old(tmp_path)
    store.remove_orphans()
    assert folders(tmp_path) == [store.path(kept.ref)]


async def test_folders_of_other_base_models_are_their_own_workers_business(
    store_of: Callable[..., WeightsStore], tmp_path: Path
) -> None:
    store = store_of()
    for base_model in (MODEL, "another"):
        write_folder(tmp_path / "weights", weights_of(1.0), layout_of(SPEC), base_model)
    make_old(tmp_path)
    store.remove_orphans()
    (left,) = folders(tmp_path)
    assert base_model_of(left) == "another"


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
