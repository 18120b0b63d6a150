"""Names of checkpoints: in use, overwritten, expired or lost, and the notes of their tenant."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from cotrain_store import redis_keys
from cotrain_store.messages.ids import OpId, SessionId, TenantId, run_id
from cotrain_store.messages.ops import Result
from cotrain_store.messages.runs import (
    CheckpointKind,
    RunRecord,
    SaveRecords,
    external_folder,
)
from cotrain_store.tenants.checkpoints import Checkpoints
from tests.support.samples import Samples, ref_of

A = TenantId("a")


def listed(samples: Samples, run: RunRecord) -> list[bytes]:
    names: list[bytes] = samples.log.redis.zrange(redis_keys.run_checkpoints(run.id), 0, -1)
    return names


@pytest.mark.parametrize("is_stored", [True, False])
async def test_a_name_in_use_is_not_given_again(samples: Samples, is_stored: bool) -> None:
    run = await samples.log.new_run()
    await samples.save(run, 1, name="x", kind="weights")
    if is_stored:
        samples.stored(run, 1)
    await samples.save(run, 2, name="x", kind="weights")
    result = samples.log.result(run, 2)
    assert result
    assert result.json() == {
        "error": "Checkpoint name 'x' already exists in this run; pass overwrite=true to replace it.",
        "category": "user",
    }
    assert samples.saved.weights(ref_of(run, 2)) is None
    assert not samples.stored(run, 2)
    samples.stored(run, 1)
    checkpoint = await samples.found(run)
    assert checkpoint
    assert checkpoint.weights == ref_of(run, 1)
    # The same name is free for another kind, and in another run.
    await samples.checkpoint(run, 3, "x", kind="sampler_weights")
    other = await samples.log.new_run(session="other")
    await samples.checkpoint(other, 1, "x", kind="weights")


async def test_of_two_saves_of_one_name_in_one_step_the_first_has_it(samples: Samples) -> None:
    run = await samples.log.new_run()
    saves: dict[OpId, SaveRecords] = {}
    for seq in (1, 2):
        saves |= await samples.describe_save(run, seq, name="x", kind="weights")
    step = await samples.log.plan()
    results = {op.id: Result.of_json({"seq": op.seq}) for op in step.ops}
    samples.log.execution.commit(step, results, {}, {}, saves=saves)
    refused = samples.log.result(run, 2)
    assert refused
    assert refused.json()["category"] == "user"
    assert [weights.ref for weights in samples.saved.unstored()] == [ref_of(run, 1)]


@pytest.mark.parametrize(
    ("kind", "overwrite"), [("weights", True), ("sampler_weights", False), ("external_weights", False)]
)
async def test_an_overwritten_checkpoint_stays_until_its_successor_is_stored(
    samples: Samples, kind: CheckpointKind, overwrite: bool
) -> None:
    run = await samples.log.new_run()
    old = await samples.checkpoint(run, 1, "x", kind=kind, expires_at=time.time() + 3600)
    await samples.save(run, 2, name="x", kind=kind, overwrite=overwrite)
    assert await samples.found(run, kind=kind) == old
    samples.stored(run, 2, size=20)
    new = await samples.found(run, kind=kind)
    assert new
    assert (new.weights, new.size, new.expires_at) == (ref_of(run, 2), 20, None)
    assert samples.log.redis.pttl(redis_keys.checkpoint(run.id, kind, "x")) == -1
    assert not samples.log.redis.exists(redis_keys.expiring_checkpoints(A))
    assert [w.ref for w in samples.saved.unused_weights()] == [ref_of(run, 1)]
    assert listed(samples, run) == [f"{kind}/x".encode()]


@pytest.mark.parametrize("deleted", [False, True])
async def test_a_late_store_of_an_older_save_does_not_move_the_name_back(samples: Samples, deleted: bool) -> None:
    run = await samples.log.new_run()
    for seq in (1, 2):
        await samples.save(run, seq, name="x", kind="weights", overwrite=True)
    samples.stored(run, 2)
    if deleted:
        samples.log.redis.delete(redis_keys.checkpoint(run.id, "weights", "x"))
    samples.stored(run, 1)
    checkpoint = await samples.found(run)
    assert checkpoint is None if deleted else checkpoint and checkpoint.weights == ref_of(run, 2)
    assert samples.log.result(run, 1) == Result.of_json({"seq": 1})
    assert ref_of(run, 1) in [w.ref for w in samples.saved.unused_weights()]
    assert not samples.log.redis.keys("*pending*")


async def test_a_name_is_free_again_once_its_checkpoint_expired(samples: Samples) -> None:
    run = await samples.log.new_run()
    await samples.save(run, 1, name="x", kind="weights", expires_at=time.time() - 1)
    samples.stored(run, 1)
    assert await samples.found(run) is None
    assert (await samples.checkpoint(run, 2, "x", kind="weights")).weights == ref_of(run, 2)
    assert listed(samples, run) == [b"weights/x"]


async def test_a_lost_save_fails_and_frees_its_name(samples: Samples) -> None:
    run = await samples.log.new_run()
    await samples.save(run, 1, name="x", kind="weights", external=True)
    assert samples.saved.has_external(external_folder(ref_of(run, 1)))
    for _ in range(2):
        samples.saved.fail_save(ref_of(run, 1), "The weights were lost.")
    result = samples.log.result(run, 1)
    assert result
    assert result.json() == {"error": "The weights were lost.", "category": "server"}
    assert samples.saved.unstored() == []
    assert samples.saved.weights(ref_of(run, 1)) is None
    assert not samples.saved.has_external(external_folder(ref_of(run, 1)))
    assert samples.log.execution.register_snapshot(run.id, 1, "file", "sha")
    assert not samples.stored(run, 1)
    await samples.checkpoint(run, 2, "x", kind="weights")


async def test_only_owed_names_can_be_lost(samples: Samples) -> None:
    run = await samples.log.new_run()
    await samples.checkpoint(run, 1, "x")
    await samples.save(run, 2, sampler=0)
    before = samples.log.everything()
    for seq in (1, 2, 3):
        samples.saved.fail_save(ref_of(run, seq), "The weights were lost.")
    assert samples.log.everything() == before


@pytest.mark.parametrize(
    "text", ["", "\0", "é\u2028😀", '"\\', "\ud83d"], ids=["none", "nul", "wide", "quoted", "half"]
)
async def test_whatever_a_tenant_notes_is_kept_as_far_as_it_is_unicode(samples: Samples, text: str) -> None:
    run = replace(await samples.log.new_run(), user_metadata={text: text})
    await samples.checkpoint(run, 1, "x", user_metadata={text: text})
    checkpoint = await samples.found(run, kind="sampler_weights")
    assert checkpoint
    kept = text.replace("\ud83d", "?")
    assert checkpoint.user_metadata == {kept: kept}
    assert (
        await Checkpoints(samples.log.connection).publish(A, run.id, "sampler_weights", "x", public=True)
    ).user_metadata == {kept: kept}
    other = replace(run, id=run_id(SessionId("other"), 0))
    await samples.log.intake.create_run(other)
    assert (await samples.records.run(A, other.id)).user_metadata == {kept: kept}
