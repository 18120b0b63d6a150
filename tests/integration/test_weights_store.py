"""Saved weights from memory to disk and to their deletion: used at once, written once, swept when long unreferenced."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cotrain_store import redis_keys
from cotrain_store.blobs.folder import Folder
from cotrain_store.disk.checksums import REMEDY, SUMS
from cotrain_store.disk.sweep import ORPHAN_AGE_S
from cotrain_store.errors import CheckpointNotFound
from cotrain_store.messages.ids import SamplerId, WeightsRef
from cotrain_store.messages.runs import WeightsRecord
from cotrain_store.tenants.checkpoints import Checkpoints
from cotrain_workers.checkpoints.files import CheckpointFiles, base_model_of
from cotrain_workers.checkpoints.peft_folder import CONFIG, TENSORS, write_folder
from cotrain_workers.checkpoints.weights_store import LOST, WeightsStore
from cotrain_workers.engine.ops import WeightsMissing
from tests.support.samples import Samples
from tests.support.saved_files import (
    KEY,
    SIZE,
    SPEC,
    files_in,
    folders,
    full,
    layout_of,
    saved,
    state_of,
    sweep_files,
    weights_of,
    weights_store,
    written,
)
from tests.support.stack import MODEL, POOL
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
    assert store.stored(record.ref) is None
    written(store)
    assert store.first_unstored(run.id) is None
    found = store.stored(record.ref)
    assert found is not None
    assert found.digest == folders(tmp_path)[0].name
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
        store.stored(second.ref)
    store.put_again(WeightsRef("other:train:0:9"), weights_of(1.0))
    assert store.first_unstored(run.id) is None


async def test_weights_of_a_run_that_has_just_arrived_may_be_unstored(
    samples: Samples, store_of: Callable[..., WeightsStore]
) -> None:
    """Another worker crashed before they were durable, and this one has not read the list since."""
    run = await samples.log.new_run()
    store, other = store_of(), store_of()
    record = await saved(samples, run, 1, sampler=0)
    with pytest.raises(WeightsMissing):
        store.host(record.ref)
    assert other.stored(record.ref) is None


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


async def test_only_unreachable_weights_are_swept(samples: Samples, tmp_path: Path) -> None:
    run = await samples.log.new_run()
    store = weights_store(samples, tmp_path)
    old_name = await saved(samples, run, 1, name="best")
    new_name = await saved(samples, run, 2, name="best")
    expired = await saved(samples, run, 3, sampler=3)
    in_use = await saved(samples, run, 4, sampler=4)
    for record in (old_name, new_name, expired, in_use):
        store.put(record, weights_of(float(record.ref[-1])))
    written(store)
    assert set(store.sweep()) == {old_name.ref}
    samples.log.redis.delete(redis_keys.sampler(SamplerId(f"{run.session}:sample:3")))
    assert set(store.sweep()) == {expired.ref}
    assert store.sweep() == []
    for gone in (old_name, expired):
        with pytest.raises(WeightsMissing):
            store.host(gone.ref)
    assert {store.host(kept.ref).flat[0].item() for kept in (new_name, in_use)} == {2.0, 4.0}


async def test_folders_are_deleted_once_they_are_old_and_unreferenced(samples: Samples, tmp_path: Path) -> None:
    runs = [await samples.log.new_run(tenant) for tenant in ("a", "b")]
    store = weights_store(samples, tmp_path)
    gone, shared, kept = [
        await saved(samples, run, seq, sampler=seq) for run, seq in ((runs[0], 1), (runs[0], 2), (runs[1], 1))
    ]
    for record, value in ((gone, 1.0), (shared, 2.0), (kept, 2.0)):
        store.put(record, weights_of(value))
    written(store)
    for seq in (1, 2):
        samples.log.redis.delete(redis_keys.sampler(SamplerId(f"{runs[0].session}:sample:{seq}")))
    assert set(store.sweep()) == {gone.ref, shared.ref}
    for folder in folders(tmp_path):
        os.utime(folder, (0, 0))  # its date must not matter
    sweep_files(store, samples)
    assert len(folders(tmp_path)) == 2  # young: another worker may be about to refer to one
    sweep_files(store, samples, ORPHAN_AGE_S + 1)
    stored = store.stored(kept.ref)
    assert stored is not None
    assert [folder.name for folder in folders(tmp_path)] == [stored.digest]


async def test_folders_of_other_base_models_are_left_to_their_own_workers(samples: Samples, tmp_path: Path) -> None:
    store = weights_store(samples, tmp_path)
    for base_model in (MODEL, "another"):
        write_folder(Folder(tmp_path / "weights"), weights_of(1.0).weights, layout_of(SPEC), base_model)
    sweep_files(store, samples)
    sweep_files(store, samples, ORPHAN_AGE_S + 1)
    (left,) = folders(tmp_path)
    folder = f"{left.parent.name}/{left.name}"
    assert base_model_of(Folder(tmp_path / "weights"), f"{folder}/{CONFIG}") == "another"


async def test_existing_files_of_a_new_save_count_as_young_again(samples: Samples, tmp_path: Path) -> None:
    run = await samples.log.new_run()
    store, other = (weights_store(samples, tmp_path) for _ in range(2))
    other._files.write(WeightsRef("dead:1"), state_of(1.0), layout_of(SPEC))
    sweep_files(other, samples)
    record = await saved(samples, run, 1, name="x", kind="weights")
    store.put(record, state_of(1.0))
    for owed in store._unstored.values():
        owed.writing and owed.writing.result(60)  # written, but not yet recorded
    left = files_in(tmp_path)
    sweep_files(other, samples, ORPHAN_AGE_S + 1)
    assert files_in(tmp_path) == left
    sweep_files(other, samples, 2 * (ORPHAN_AGE_S + 1))
    assert files_in(tmp_path) == set()  # Redis was unavailable for long
    store._finish_writes()  # finds that the files are missing, and writes them again
    written(store)
    assert files_in(tmp_path) == left
    assert not store._unstored


async def test_files_of_all_kinds_are_deleted_once_old_and_unreferenced(samples: Samples, tmp_path: Path) -> None:
    run = await samples.log.new_run()
    store = weights_store(samples, tmp_path)
    names = {}
    for seq in (1, 2):
        record = await saved(samples, run, seq, name=f"n{seq}", kind="external_weights", external=True)
        store.put(record, replace(state_of(float(seq)), recipients=(str(KEY.to_public()),)))
        written(store)
        names[seq] = files_in(tmp_path)
    kept = names[1]
    assert len(kept) == 3 + 1 + 4  # an encrypted export has sums, too
    for torn in ("weights/ab/.torn", "optimizers/ab/.torn", "external/.torn"):
        (tmp_path / torn).mkdir(parents=True)
        (tmp_path / torn / "half").touch()
    samples.log.redis.delete(redis_keys.checkpoint(run.id, "external_weights", "n2"))
    assert store.sweep() == [f"{run.id}:2"]
    everything = files_in(tmp_path)
    sweep_files(store, samples)
    assert files_in(tmp_path) == everything  # young
    sweep_files(store, samples, ORPHAN_AGE_S + 1)
    assert files_in(tmp_path) == kept


def off_the_round(samples: Samples) -> None:
    """Restrict the sweep to weights that have lost a reference."""
    samples.log.redis.delete(redis_keys.pool_weights(POOL))


async def stored(samples: Samples, tmp_path: Path, *asked: Mapping[str, Any]) -> list[WeightsRecord]:
    """Save a run several times and store each save."""
    run = await samples.log.new_run()
    store = weights_store(samples, tmp_path)
    records = [await saved(samples, run, seq, **what) for seq, what in enumerate(asked, 1)]
    for number, record in enumerate(records):
        store.put(record, weights_of(float(number)))
    written(store)
    return records


def unused(samples: Samples) -> list[WeightsRef]:
    return sorted(record.ref for record in samples.saved.unused_weights())


async def test_newly_unreferenced_weights_are_found_without_a_full_scan(samples: Samples, tmp_path: Path) -> None:
    names: list[dict[str, Any]] = [{"name": "a"}, {"name": "b"}, {"name": "b"}, {"sampler": 4}]
    first, older, newer, sampled = await stored(samples, tmp_path, *names)
    off_the_round(samples)
    assert unused(samples) == [older.ref]
    released = redis_keys.released_weights(POOL)
    assert samples.log.redis.zrange(released, 0, -1) == [older.ref.encode()]
    await Checkpoints(samples.log.connection).delete(first.tenant, first.run, "sampler_weights", "a")
    assert unused(samples) == [first.ref]
    sampler = redis_keys.sampler(SamplerId(f"{sampled.run.partition(':')[0]}:sample:4"))
    samples.log.redis.zadd(redis_keys.ends(), {sampler: 1})
    await samples.log.dispatch.pass_time()
    assert unused(samples) == [sampled.ref]
    for record in (first, older, sampled):
        assert samples.saved.forget_weights(record.ref)
    assert samples.log.redis.exists(released) == 0
    assert newer.ref not in unused(samples)


async def test_temporarily_used_weights_are_checked_until_they_are_unused(samples: Samples, tmp_path: Path) -> None:
    (record,) = await stored(samples, tmp_path, {"name": "a"})
    off_the_round(samples)
    released = redis_keys.released_weights(POOL)
    await Checkpoints(samples.log.connection).set_ttl(record.tenant, record.run, "sampler_weights", "a", 100)
    assert unused(samples) == []
    assert samples.log.redis.zcard(released) == 1
    samples.log.redis.delete(redis_keys.checkpoint(record.run, "sampler_weights", "a"))  # as Redis does
    assert unused(samples) == []  # it is too early
    samples.log.redis.zadd(released, {record.ref: 0})
    assert unused(samples) == [record.ref]


async def test_a_full_redis_is_swept_too(samples: Samples, tmp_path: Path) -> None:
    await stored(samples, tmp_path, {"name": "a"}, {"name": "a"})
    off_the_round(samples)
    before = samples.log.redis.config_get("maxmemory")["maxmemory"]
    samples.log.redis.config_set("maxmemory", 1)
    try:
        assert len(unused(samples)) == 1
    finally:
        samples.log.redis.config_set("maxmemory", before)


async def test_a_sweep_checks_few_weights_and_reaches_all_in_turn(samples: Samples, tmp_path: Path) -> None:
    (record,) = await stored(samples, tmp_path, {"name": "a"})
    old = [f"old:{number}" for number in range(2_000)]
    row = samples.log.redis.hgetall(redis_keys.weights(record.ref))
    with samples.log.redis.pipeline(transaction=False) as batch:
        batch.sadd(redis_keys.pool_weights(POOL), *old)
        for ref in old:
            text = row[b"record"].replace(record.ref.encode(), ref.encode(), 1)
            batch.hset(redis_keys.weights(WeightsRef(ref)), mapping={**row, "record": text})
        batch.execute()
    found: set[WeightsRef] = set()
    for looks in range(1, 100):  # noqa: B007
        some = unused(samples)
        assert len(some) < 400
        found |= set(some)
        if len(found) == len(old):
            break
    assert found == set(old)
    assert looks > 4
