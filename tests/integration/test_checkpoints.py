"""Operations of an owner on a checkpoint: delete, publish, keep, copy, count; lists stay
consistent."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from cotrain_store import redis_keys
from cotrain_store.errors import CheckpointNotFound, RunClosed, SeqConflict
from cotrain_store.messages.ids import TenantId, WeightsRef
from cotrain_store.messages.runs import CheckpointRecord, RunRecord, RunState
from cotrain_store.tenants.checkpoints import Checkpoints
from tests.support.log import record_of
from tests.support.samples import Samples
from tests.support.stack import POOL

A, B = TenantId("a"), TenantId("b")
WEEK_S = 7 * 24 * 3600


@pytest.fixture
def checkpoints(samples: Samples) -> Checkpoints:
    return Checkpoints(samples.log.connection)


def traces(samples: Samples) -> list[bytes]:
    """Return every key that refers to a checkpoint."""
    words = (b"checkpoint", b"expiring", b"published", b"owed", b"pending")
    return sorted(name for name in samples.log.everything() if any(w in name for w in words))


def unused(samples: Samples) -> list[WeightsRef]:
    return [weights.ref for weights in samples.saved.unused_weights()]


async def is_readable(samples: Samples, tenant: TenantId, checkpoint: CheckpointRecord) -> bool:
    try:
        await samples.records.checkpoint(tenant, checkpoint.path)
    except CheckpointNotFound:
        return False
    return True


def expired(samples: Samples, checkpoint: CheckpointRecord) -> None:
    """Expire a checkpoint now, as Redis does: only its record is removed."""
    record = redis_keys.checkpoint(checkpoint.run, checkpoint.kind, checkpoint.name)
    member = redis_keys.checkpoint_member(checkpoint.run, checkpoint.kind, checkpoint.name)
    samples.log.redis.delete(record)
    expiring = redis_keys.expiring_checkpoints(checkpoint.tenant)
    samples.log.redis.zadd(expiring, {member: time.time()}, xx=True)


async def test_a_deleted_checkpoint_leaves_no_trace(samples: Samples, checkpoints: Checkpoints) -> None:
    run = await samples.log.new_run()
    ends_at = time.time() + WEEK_S
    checkpoint = await samples.checkpoint(run, 1, "x", kind="weights", expires_at=ends_at)
    await checkpoints.publish(A, run.id, "weights", "x", public=True)
    assert len(traces(samples)) == 7
    await checkpoints.delete(A, run.id, "weights", "x")
    assert traces(samples) == []
    assert unused(samples) == [checkpoint.weights]
    with pytest.raises(CheckpointNotFound):
        await checkpoints.delete(A, run.id, "weights", "x")
    await samples.checkpoint(run, 2, "x", kind="weights")  # its name is free again


async def test_only_its_owner_changes_a_checkpoint(samples: Samples, checkpoints: Checkpoints) -> None:
    run = await samples.log.new_run()
    await samples.checkpoint(run, 1, "x", kind="weights")
    await checkpoints.publish(A, run.id, "weights", "x", public=True)
    before = samples.log.everything()
    for tenant, name in ((B, "x"), (A, "unknown"), (B, "unknown")):
        with pytest.raises(CheckpointNotFound):
            await checkpoints.delete(tenant, run.id, "weights", name)
        with pytest.raises(CheckpointNotFound):
            await checkpoints.publish(tenant, run.id, "weights", name, public=False)
        with pytest.raises(CheckpointNotFound):
            await checkpoints.set_ttl(tenant, run.id, "weights", name, None)
    assert samples.log.everything() == before


async def test_an_unstored_checkpoint_cannot_be_changed(samples: Samples, checkpoints: Checkpoints) -> None:
    run = await samples.log.new_run()
    await samples.save(run, 1, name="x", kind="weights")
    with pytest.raises(CheckpointNotFound):
        await checkpoints.delete(A, run.id, "weights", "x")
    with pytest.raises(CheckpointNotFound):
        await checkpoints.publish(A, run.id, "weights", "x", public=True)
    samples.stored(run, 1)
    stored = await samples.records.checkpoint(A, f"tinker://{run.id}/weights/x")
    assert not stored.public


async def test_deleting_a_checkpoint_does_not_stop_a_save_that_overwrites_it(
    samples: Samples, checkpoints: Checkpoints
) -> None:
    run = await samples.log.new_run()
    await samples.checkpoint(run, 1, "x")
    await samples.save(run, 2, name="x")
    await checkpoints.delete(A, run.id, "sampler_weights", "x")
    samples.stored(run, 2)
    found = await samples.records.checkpoint(A, f"tinker://{run.id}/sampler_weights/x")
    assert found.weights == f"{run.id}:2"


async def test_a_published_checkpoint_is_readable_by_all_until_unpublished(
    samples: Samples, checkpoints: Checkpoints
) -> None:
    run = await samples.log.new_run()
    checkpoint = await samples.checkpoint(run, 1, "x", kind="weights")
    member = redis_keys.checkpoint_member(run.id, "weights", "x").encode()
    assert not await is_readable(samples, B, checkpoint)
    published = await checkpoints.publish(A, run.id, "weights", "x", public=True)
    assert published == replace(checkpoint, public=True)
    assert await checkpoints.publish(A, run.id, "weights", "x", public=True) == published
    assert await samples.records.checkpoint(B, checkpoint.path) == published
    assert samples.log.redis.smembers(redis_keys.published()) == {member}
    await checkpoints.publish(A, run.id, "weights", "x", public=False)
    assert not await is_readable(samples, B, checkpoint)
    assert not samples.log.redis.exists(redis_keys.published())


async def test_a_save_over_a_published_checkpoint_is_not_published(samples: Samples, checkpoints: Checkpoints) -> None:
    run = await samples.log.new_run()
    await samples.checkpoint(run, 1, "x")
    await checkpoints.publish(A, run.id, "sampler_weights", "x", public=True)
    after = await samples.checkpoint(run, 2, "x")
    assert not await is_readable(samples, B, after)
    assert not samples.log.redis.exists(redis_keys.published())


async def test_a_time_to_live_is_set_and_removed(samples: Samples, checkpoints: Checkpoints) -> None:
    run = await samples.log.new_run()
    checkpoint = await samples.checkpoint(run, 1, "x", kind="weights")
    key, member = redis_keys.checkpoint(run.id, "weights", "x"), f"{run.id}/weights/x"
    limited = await checkpoints.set_ttl(A, run.id, "weights", "x", WEEK_S)
    assert limited.expires_at == pytest.approx(time.time() + WEEK_S, abs=60)
    assert samples.log.redis.pttl(key) == pytest.approx(WEEK_S * 1000, abs=60_000)
    ends_at = samples.log.redis.zscore(redis_keys.expiring_checkpoints(A), member)
    assert ends_at == limited.expires_at
    assert await samples.records.checkpoint(A, checkpoint.path) == limited
    assert await checkpoints.set_ttl(A, run.id, "weights", "x", None) == checkpoint
    assert samples.log.redis.pttl(key) == -1
    assert not samples.log.redis.exists(redis_keys.expiring_checkpoints(A))


async def test_concurrent_changes_are_all_applied(
    samples: Samples, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await samples.log.new_run()
    checkpoint = await samples.checkpoint(run, 1, "x", kind="weights")
    write, others = checkpoints._replace, Checkpoints(samples.log.connection)

    async def write_second(*args: Any) -> Any:
        monkeypatch.undo()
        await others.publish(A, run.id, "weights", "x", public=True)
        return await write(*args)

    monkeypatch.setattr(checkpoints, "_replace", write_second)
    changed = await checkpoints.set_ttl(A, run.id, "weights", "x", WEEK_S)
    assert (changed.public, changed.expires_at is None) == (True, False)
    assert await samples.records.checkpoint(A, checkpoint.path) == changed


@pytest.mark.parametrize("public", [False, True])
async def test_expired_checkpoints_are_in_no_list(samples: Samples, checkpoints: Checkpoints, public: bool) -> None:
    run = await samples.log.new_run()
    ends_at = time.time() + WEEK_S
    short = await samples.checkpoint(run, 1, "short", expires_at=ends_at)
    await samples.checkpoint(run, 2, "long", expires_at=ends_at)
    await samples.checkpoint(run, 3, "ever")
    await checkpoints.publish(A, run.id, "sampler_weights", "short", public=public)
    assert await checkpoints.stored_bytes(A) == (3, 30)
    expired(samples, short)
    assert await checkpoints.stored_bytes(A) == (2, 20)
    left = [b"sampler_weights/long", b"sampler_weights/ever"]
    assert samples.log.redis.zrange(redis_keys.run_checkpoints(run.id), 0, -1) == left
    assert samples.log.redis.zcard(redis_keys.tenant_checkpoints(A)) == 2
    assert samples.log.redis.zcard(redis_keys.expiring_checkpoints(A)) == 1
    assert not samples.log.redis.exists(redis_keys.published())
    assert unused(samples) == [short.weights]


async def test_all_stored_checkpoints_of_a_tenant_are_counted(samples: Samples, checkpoints: Checkpoints) -> None:
    run = await samples.log.new_run()
    assert await checkpoints.stored_bytes(A) == (0, 0)
    await samples.save(run, 1, name="x")
    # pending: it counts as a checkpoint before its bytes count
    assert await checkpoints.stored_bytes(A) == (1, 0)
    samples.stored(run, 1, size=2**40)
    await samples.save(run, 2, name="x")
    assert await checkpoints.stored_bytes(A) == (2, 2**40)
    samples.stored(run, 2, size=5)
    assert await checkpoints.stored_bytes(A) == (1, 5)
    await samples.save(run, 3, sampler=0)  # a sampler's weights are temporary
    samples.stored(run, 3)
    await samples.save(run, 4, name="lost")
    samples.saved.fail_save(samples.saved.unstored()[0].ref, "gone")
    assert await checkpoints.stored_bytes(A) == (1, 5)
    assert await checkpoints.stored_bytes(B) == (0, 0)


def copy_run(source: CheckpointRecord, tenant: str, session: str = "") -> RunRecord:
    return replace(record_of(tenant, session or f"copies-of-{tenant}"), state=RunState.CLOSED)


async def test_a_copy_shares_the_weights_and_keeps_them(samples: Samples, checkpoints: Checkpoints) -> None:
    run = await samples.log.new_run()
    source = await samples.checkpoint(run, 1, "x", kind="weights", expires_at=time.time() + WEEK_S)
    destination = copy_run(source, "a")
    copy = await checkpoints.copy(source, destination, None)
    assert copy.path == f"tinker://{destination.id}/weights/x"
    assert (copy.weights, copy.size, copy.expires_at) == (source.weights, source.size, None)
    assert await samples.records.checkpoint(A, copy.path) == copy
    assert await checkpoints.stored_bytes(A) == (2, 20)
    await checkpoints.delete(A, run.id, "weights", "x")
    assert unused(samples) == []
    await checkpoints.delete(A, destination.id, "weights", "x")
    assert unused(samples) == [source.weights]


async def test_the_run_of_a_copy_rejects_requests_and_is_not_counted_as_live(
    samples: Samples, checkpoints: Checkpoints
) -> None:
    run = await samples.log.new_run()
    source = await samples.checkpoint(run, 1, "x")
    destination = copy_run(source, "a")
    await checkpoints.copy(source, destination, None)
    found = await samples.records.run(A, destination.id)
    assert (found.state, found.lora) == (RunState.CLOSED, destination.lora)
    assert samples.log.redis.zrange(redis_keys.training_runs(A), 0, -1) == [run.id.encode(), destination.id.encode()]
    before = samples.log.everything()
    with pytest.raises(RunClosed):
        await samples.log.submit(destination, 1)
    with pytest.raises(SeqConflict):
        await samples.log.intake.create_run(destination)
    assert samples.log.everything() == before
    assert not samples.log.redis.sismember(redis_keys.tenant_runs(A), destination.id)
    assert not samples.log.redis.exists(redis_keys.log(POOL, destination.id))
    unloaded = await samples.log.intake.close_run(destination)  # as at the end of its session
    assert samples.log.redis.exists(redis_keys.result(unloaded))


async def test_a_repeated_copy_is_made_once(samples: Samples, checkpoints: Checkpoints) -> None:
    run = await samples.log.new_run()
    source = await samples.checkpoint(run, 1, "x")
    other = await samples.checkpoint(run, 2, "y")
    destination = copy_run(source, "a")
    trained = await samples.log.new_run(session="trained")
    copy = await checkpoints.copy(source, destination, None)
    before = samples.log.everything()
    assert await checkpoints.copy(source, destination, WEEK_S) == copy
    with pytest.raises(SeqConflict):
        await checkpoints.copy(other, destination, None)
    with pytest.raises(SeqConflict):
        await checkpoints.copy(other, trained, None)
    assert samples.log.everything() == before


async def test_a_published_checkpoint_of_another_tenant_can_be_copied(
    samples: Samples, checkpoints: Checkpoints
) -> None:
    run = await samples.log.new_run()
    private = await samples.checkpoint(run, 1, "x")
    destination = copy_run(private, "b")
    before = samples.log.everything()
    with pytest.raises(CheckpointNotFound):  # it was public when it was found, and is private now
        await checkpoints.copy(private, destination, None)
    assert samples.log.everything() == before
    public = await checkpoints.publish(A, run.id, "sampler_weights", "x", public=True)
    copy = await checkpoints.copy(public, destination, WEEK_S)
    assert (copy.tenant, copy.public) == (B, False)
    await checkpoints.publish(A, run.id, "sampler_weights", "x", public=False)
    assert await samples.records.checkpoint(B, copy.path) == copy
    assert not await is_readable(samples, A, copy)
    assert await checkpoints.stored_bytes(B) == (1, 10)


async def test_a_copy_requires_read_access_to_the_source(samples: Samples, checkpoints: Checkpoints) -> None:
    run = await samples.log.new_run()
    private = await samples.checkpoint(run, 1, "x")
    destination = copy_run(private, "b")
    with pytest.raises(CheckpointNotFound):
        await checkpoints.copy(private, destination, None, reader=TenantId("c"))
    copy = await checkpoints.copy(private, destination, None, reader=A)  # B presented a key of A
    assert copy.tenant == B
    assert await samples.records.checkpoint(B, copy.path) == copy


async def test_a_missing_checkpoint_cannot_be_copied(samples: Samples, checkpoints: Checkpoints) -> None:
    run = await samples.log.new_run()
    old = await samples.checkpoint(run, 1, "x")
    await samples.checkpoint(run, 2, "x")  # the name refers to another save now
    with pytest.raises(CheckpointNotFound):
        await checkpoints.copy(old, copy_run(old, "a"), None)
    await checkpoints.delete(A, run.id, "sampler_weights", "x")
    with pytest.raises(CheckpointNotFound):
        await checkpoints.copy(old, copy_run(old, "a"), None)
