"""Saves under a name and loads of them: effects of their commits, and weights that stay while a log needs them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from cotrain_store import redis_keys
from cotrain_store.bodies.adapter_bodies import LoadRequest, LoadSource
from cotrain_store.errors import CheckpointNotFound, Fenced, RunClosed, SeqConflict, WeightsDeleted
from cotrain_store.messages.ids import OpId, RequestId, SessionId, TenantId, WeightsRef, encode, run_id
from cotrain_store.messages.ops import OpKind, Result
from cotrain_store.messages.runs import (
    CheckpointKind,
    CheckpointRecord,
    HistoryEntry,
    LoraSpec,
    RewindEntry,
    RunRecord,
    RunState,
    SaveRecords,
    StepEntry,
    external_folder,
)
from cotrain_store.results.pending import Pending
from cotrain_store.tenants.checkpoints import Checkpoints
from cotrain_store.weights import SavedWeights
from tests.support.log import WORKER, record_of
from tests.support.samples import Samples, sampler_record
from tests.support.stack import POOL
from tests.support.waiting import until

A = TenantId("a")


def ref_of(run: RunRecord, seq: int) -> WeightsRef:
    return WeightsRef(f"{run.id}:{seq}")


async def found(
    samples: Samples, run: RunRecord, name: str = "x", kind: CheckpointKind = "weights"
) -> CheckpointRecord | None:
    try:
        return await samples.records.checkpoint(A, f"tinker://{run.id}/{kind}/{name}")
    except CheckpointNotFound:
        return None


def listed(samples: Samples, run: RunRecord) -> tuple[list[bytes], list[bytes]]:
    redis = samples.log.redis
    return (
        redis.zrange(redis_keys.run_checkpoints(run.id), 0, -1),
        redis.zrange(redis_keys.tenant_checkpoints(run.tenant), 0, -1),
    )


async def test_a_save_appears_with_its_result_when_it_is_stored(samples: Samples) -> None:
    run = await samples.log.new_run()
    _, saves = await samples.save(run, 1, name="x", kind="weights")
    assert await found(samples, run) is None
    assert (listed(samples, run), samples.log.result(run, 1)) == (([], []), None)
    position = samples.log.execution.logs.position(run.id)
    assert position
    assert position.done == 1  # the run goes on meanwhile
    assert samples.log.queued()[0] == 0

    assert samples.stored(run, 1, size=77)
    checkpoint = await found(samples, run)
    assert checkpoint
    assert checkpoint.weights == saves[run.id, 1].weights.ref
    assert (checkpoint.size, checkpoint.public) == (77, False)
    member = f"{run.id}/weights/x".encode()
    assert listed(samples, run) == ([b"weights/x"], [member])
    assert samples.log.result(run, 1) == Result.of_json({"seq": 1})
    assert not samples.log.redis.keys("*pending*")
    assert not samples.log.redis.exists(redis_keys.unstored_checkpoints(A))


async def test_storing_twice_changes_nothing(samples: Samples) -> None:
    run = await samples.log.new_run()
    await samples.checkpoint(run, 1, "x")
    before = samples.log.everything()
    assert samples.stored(run, 1, size=99)
    assert samples.log.everything() == before


async def test_a_replaced_worker_stores_and_loses_nothing(samples: Samples) -> None:
    run = await samples.log.new_run()
    await samples.save(run, 1, name="x")
    samples.new_worker()
    before = samples.log.everything()
    with pytest.raises(Fenced):
        samples.stored(run, 1)
    with pytest.raises(Fenced):
        samples.saved.fail_save(ref_of(run, 1), "gone")
    assert samples.log.everything() == before


async def test_a_successor_stores_what_its_predecessor_owed(samples: Samples) -> None:
    run = await samples.log.new_run()
    await samples.save(run, 1, name="x", kind="weights")
    epoch = samples.log.new_worker().epoch
    successor = SavedWeights(samples.log.redis, POOL, WORKER, epoch)
    assert [weights.ref for weights in successor.unstored()] == [ref_of(run, 1)]
    assert successor.mark_stored(ref_of(run, 1), "digest", 5)
    assert await found(samples, run)
    assert samples.log.result(run, 1)


@pytest.mark.parametrize("is_lost", [False, True])
async def test_the_end_of_a_save_is_told(samples: Samples, is_lost: bool) -> None:
    run = await samples.log.new_run()
    await samples.save(run, 1, name="x")
    with samples.log.redis.pubsub(ignore_subscribe_messages=True) as heard:
        heard.subscribe(redis_keys.notify_results())
        assert heard.get_message(timeout=120) is None  # that it has subscribed
        if is_lost:
            samples.saved.fail_save(ref_of(run, 1), "gone")
        else:
            samples.stored(run, 1)
        message = heard.get_message(timeout=120)
        assert message
        assert message["data"] == f"{run.id}:1".encode()


async def test_a_waiter_gets_what_a_save_resolves_to(samples: Samples) -> None:
    run = await samples.log.new_run()
    request = RequestId(f"{run.id}:1")
    await samples.save(run, 1, name="x")
    async with samples.log.futures() as futures:
        assert await futures.wait(A, request, 0.0) == Pending()
        held = asyncio.create_task(futures.wait(A, request, 30.0))
        await until(lambda: futures.waiters)
        samples.stored(run, 1)
        assert await held == Result.of_json({"seq": 1})


async def test_a_save_owed_for_long_is_pending_and_one_read_long_ago_has_expired(samples: Samples) -> None:
    run = await samples.log.new_run()
    request = RequestId(f"{run.id}:1")
    await samples.save(run, 1, name="x")
    async with samples.log.futures() as futures:
        assert await futures.wait(A, request, 0.0) == Pending()
        samples.stored(run, 1)
        samples.log.redis.delete(redis_keys.result(request))
        with pytest.raises(Exception, match="expired"):
            await futures.wait(A, request, 0.0)


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
    checkpoint = await found(samples, run)
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
    results = {(op.run, op.seq): Result.of_json({"seq": op.seq}) for op in step.ops}
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
    assert await found(samples, run, kind=kind) == old
    samples.stored(run, 2, size=20)
    new = await found(samples, run, kind=kind)
    assert new
    assert (new.weights, new.size, new.expires_at) == (ref_of(run, 2), 20, None)
    assert samples.log.redis.pttl(redis_keys.checkpoint(run.id, kind, "x")) == -1
    assert not samples.log.redis.exists(redis_keys.expiring_checkpoints(A))
    assert [w.ref for w in samples.saved.unused_weights()] == [ref_of(run, 1)]
    assert listed(samples, run)[0] == [f"{kind}/x".encode()]


@pytest.mark.parametrize("deleted", [False, True])
async def test_a_late_store_of_an_older_save_does_not_move_the_name_back(samples: Samples, deleted: bool) -> None:
    run = await samples.log.new_run()
    for seq in (1, 2):
        await samples.save(run, seq, name="x", kind="weights", overwrite=True)
    samples.stored(run, 2)
    if deleted:
        samples.log.redis.delete(redis_keys.checkpoint(run.id, "weights", "x"))
    samples.stored(run, 1)
    checkpoint = await found(samples, run)
    assert checkpoint is None if deleted else checkpoint and checkpoint.weights == ref_of(run, 2)
    assert samples.log.result(run, 1) == Result.of_json({"seq": 1})
    assert ref_of(run, 1) in [w.ref for w in samples.saved.unused_weights()]
    assert not samples.log.redis.keys("*pending*")


async def test_a_name_is_free_again_once_its_checkpoint_expired(samples: Samples) -> None:
    run = await samples.log.new_run()
    await samples.save(run, 1, name="x", kind="weights", expires_at=time.time() - 1)
    samples.stored(run, 1)
    assert await found(samples, run) is None
    assert (await samples.checkpoint(run, 2, "x", kind="weights")).weights == ref_of(run, 2)
    assert listed(samples, run)[0] == [b"weights/x"]


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


async def test_owed_weights_are_not_forgotten(samples: Samples) -> None:
    run = await samples.log.new_run()
    await samples.save(run, 1, name="x")
    before = samples.log.everything()
    assert not samples.saved.forget_weights(ref_of(run, 1))
    assert samples.log.everything() == before


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_run_ends_with_its_last_save(samples: Samples, is_lost: bool) -> None:
    run = await samples.log.new_run()
    await samples.save(run, 1, name="x", last=True)
    await samples.log.submit(run, 2)
    if is_lost:
        samples.saved.fail_save(ref_of(run, 1), "gone")
    else:
        samples.stored(run, 1)
    assert (await samples.records.run(A, run.id)).state is RunState.CLOSED
    behind = samples.log.result(run, 2)
    assert behind
    assert "unloaded" in behind.json()["error"]
    assert samples.log.queued() == (0, 0, 0)
    assert samples.log.execution.runs_to_drop() == [run.id]
    assert samples.log.execution.forget(run.id)
    assert (await found(samples, run, kind="sampler_weights") is None) == is_lost


async def test_a_worker_ends_a_run_whose_last_save_failed(samples: Samples) -> None:
    run = await samples.log.new_run()
    await samples.log.submit(run, 1, OpKind.SAVE)
    await samples.log.run_all()
    for _ in range(2):
        samples.log.execution.close_run(run.id, run.tenant)
    assert (await samples.records.run(A, run.id)).state is RunState.CLOSED
    samples.new_worker()
    with pytest.raises(Fenced):
        samples.log.execution.close_run(run.id, run.tenant)


async def test_external_files_tell_their_size_and_are_known_by_their_folder(samples: Samples) -> None:
    run = await samples.log.new_run()
    await samples.save(run, 1, name="x", kind="external_weights", external=True)
    samples.stored(run, 1, size=123)
    assert samples.log.result(run, 1) == Result.of_json({"seq": 1, "size_bytes": 123})
    folder = external_folder(ref_of(run, 1))
    assert samples.saved.has_external(folder)
    samples.log.redis.delete(redis_keys.checkpoint(run.id, "external_weights", "x"))
    samples.saved.forget_weights(ref_of(run, 1))
    assert not samples.saved.has_external(folder)


async def test_an_optimizer_state_goes_with_the_last_weights_that_have_it(samples: Samples) -> None:
    run = await samples.log.new_run()
    for seq in (1, 2):
        await samples.save(run, seq, name=f"n{seq}", kind="weights")
        samples.stored(run, seq, optimizer="adam")
    weights = samples.saved.weights(ref_of(run, 1))
    assert weights
    assert (weights.has_optimizer, weights.optimizer_digest) == (True, "adam")
    assert await samples.records.weights(ref_of(run, 1)) == weights
    for seq in (1, 2):
        assert samples.saved.has_optimizer("adam")
        samples.log.redis.delete(redis_keys.checkpoint(run.id, "weights", f"n{seq}"))
        samples.saved.forget_weights(ref_of(run, seq))
    assert not samples.saved.has_optimizer("adam")


async def test_a_large_answer_of_a_save_comes_from_the_spool(samples: Samples) -> None:
    run = await samples.log.new_run()
    saves = await samples.describe_save(run, 1, name="x")
    step = await samples.log.plan()
    large = Result.of_json({"sources": "s" * 100_000})
    results = {(op.run, op.seq): large for op in step.ops}
    samples.log.execution.commit(step, results, {}, {}, saves=saves)
    samples.stored(run, 1)
    async with samples.log.futures() as futures:
        assert await futures.wait(A, RequestId(f"{run.id}:1"), 0.0) == large
    assert samples.log.redis.strlen(redis_keys.result(RequestId(f"{run.id}:1"))) < 1_000


async def test_the_log_is_kept_while_a_named_save_is_owed(samples: Samples) -> None:
    run = await samples.log.new_run()
    await samples.save(run, 1, name="x")
    assert not samples.log.execution.register_snapshot(run.id, 1, "file", "sha")
    await samples.log.intake.close_run(run)
    assert not samples.log.execution.forget(run.id)
    samples.stored(run, 1)
    assert await found(samples, run, kind="sampler_weights")
    assert samples.log.execution.forget(run.id)
    assert not samples.log.redis.exists(redis_keys.unnumbered_ops(POOL, run.id))


async def test_a_refused_removal_keeps_the_steps_and_rewinds_of_the_log(samples: Samples) -> None:
    """A replay that recreates the owed weights needs them."""
    log, run = samples.log, await samples.log.new_run()
    entries: dict[int, HistoryEntry] = {1: StepEntry(norm=1.0, rate=0.1), 2: RewindEntry(to_seq=1, to_step=1)}
    for seq, kind in ((1, OpKind.OPTIM_STEP), (2, OpKind.REWIND)):
        await log.submit(run, seq, kind)
        step = await log.plan()
        results = {(op.run, op.seq): Result.of_json({}) for op in step.ops}
        log.execution.commit(step, results, {}, {}, found={(run.id, seq): entries[seq]})
    await samples.save(run, 3, name="x")
    await log.intake.close_run(run)
    before = log.execution.logs.position(run.id)
    assert before
    assert (before.steps, before.rewinds) == ({1: 1}, {2: 1})
    assert not log.execution.forget(run.id)
    assert log.execution.logs.position(run.id) == before


@pytest.mark.parametrize(
    "text", ["", "\0", "é\u2028😀", '"\\', "\ud83d"], ids=["none", "nul", "wide", "quoted", "half"]
)
async def test_whatever_a_tenant_notes_is_kept_as_far_as_it_is_unicode(samples: Samples, text: str) -> None:
    run = replace(await samples.log.new_run(), user_metadata={text: text})
    await samples.checkpoint(run, 1, "x", user_metadata={text: text})
    checkpoint = await found(samples, run, kind="sampler_weights")
    assert checkpoint
    kept = text.replace("\ud83d", "?")
    assert checkpoint.user_metadata == {kept: kept}
    assert (
        await Checkpoints(samples.log.connection).publish(A, run.id, "sampler_weights", "x", public=True)
    ).user_metadata == {kept: kept}
    other = replace(run, id=run_id(SessionId("other"), 0))
    await samples.log.intake.create_run(other)
    assert (await samples.records.run(A, other.id)).user_metadata == {kept: kept}


UNKNOWN = WeightsRef("nobody:train:0:1")


def body_of(*refs: WeightsRef, lora: LoraSpec | None = None) -> bytes:
    sources = tuple(LoadSource(ref) for ref in refs)
    return encode(LoadRequest("tinker://…", sources, optimizer=True, lora=lora)).encode()


async def load(samples: Samples, run: RunRecord, seq: int, *refs: WeightsRef, digest: str = "d") -> RequestId:
    return await samples.log.intake.submit(run, seq, OpKind.LOAD, body_of(*refs), 0, digest, uses=refs)


def delete(samples: Samples, checkpoint: CheckpointRecord) -> None:
    samples.log.redis.delete(redis_keys.checkpoint(checkpoint.run, checkpoint.kind, checkpoint.name))


def unused(samples: Samples) -> list[WeightsRef]:
    return [weights.ref for weights in samples.saved.unused_weights()]


async def test_a_load_keeps_its_weights_until_two_recovery_copies_cover_it(samples: Samples) -> None:
    run, other = await samples.log.new_run(), await samples.log.new_run(session="other")
    checkpoint = await samples.checkpoint(run, 1, "x", kind="weights")
    await load(samples, other, 1, checkpoint.weights)
    delete(samples, checkpoint)
    assert unused(samples) == []  # waiting
    await samples.log.run_all()
    assert unused(samples) == []  # done: a replay would need them
    assert not samples.saved.forget_weights(checkpoint.weights)
    assert samples.log.execution.register_snapshot(other.id, 0, "file", "sha")
    assert unused(samples) == []
    assert samples.log.execution.register_snapshot(other.id, 1, "newer", "sha")
    assert unused(samples) == []  # should that copy be lost, the log is replayed from the older one
    await samples.log.submit(other, 2)
    await samples.log.run_all()
    assert samples.log.execution.register_snapshot(other.id, 2, "newest", "sha")
    assert unused(samples) == [checkpoint.weights]
    samples.saved.forget_weights(checkpoint.weights)
    assert samples.saved.weights(checkpoint.weights) is None


async def test_each_user_alone_keeps_weights(samples: Samples) -> None:
    run, other = await samples.log.new_run(), await samples.log.new_run(session="other")
    checkpoint = await samples.checkpoint(run, 1, "x")
    sampler = sampler_record(weights=checkpoint.weights)
    await samples.records.create_sampler(sampler)
    await load(samples, other, 1, checkpoint.weights)
    delete(samples, checkpoint)
    await samples.log.run_all()
    assert unused(samples) == []
    await samples.log.cover(other, 1)
    assert unused(samples) == []
    samples.log.redis.delete(redis_keys.sampler(sampler.id))
    assert unused(samples) == [checkpoint.weights]


@pytest.mark.parametrize("is_planned", [False, True])
async def test_a_closed_run_needs_its_loads_no_more_once_its_log_is_gone(samples: Samples, is_planned: bool) -> None:
    run, other = await samples.log.new_run(), await samples.log.new_run(session="other")
    checkpoint = await samples.checkpoint(run, 1, "x")
    await samples.log.run_all()
    await load(samples, other, 1, checkpoint.weights)
    if is_planned:
        await samples.log.run_all()
    delete(samples, checkpoint)
    await samples.log.intake.close_run(other)
    assert unused(samples) == ([] if is_planned else [checkpoint.weights])
    assert samples.log.execution.forget(other.id)
    assert unused(samples) == [checkpoint.weights]


async def test_a_repeated_load_does_not_ask_for_its_weights_again(samples: Samples) -> None:
    run, other = await samples.log.new_run(), await samples.log.new_run(session="other")
    checkpoint = await samples.checkpoint(run, 1, "x")
    once = await load(samples, other, 1, checkpoint.weights)
    await samples.log.run_all()
    await samples.log.cover(other, 1)
    delete(samples, checkpoint)
    samples.saved.forget_weights(checkpoint.weights)
    before = samples.log.everything()
    assert await load(samples, other, 1, checkpoint.weights) == once
    assert await samples.log.intake.repeated(other, 1, "d") == once
    assert await samples.log.intake.repeated(other, 1, "e") is None
    assert await samples.log.intake.repeated(other, 2, "d") is None
    with pytest.raises(SeqConflict):
        await load(samples, other, 1, checkpoint.weights, digest="e")
    assert samples.log.everything() == before


async def test_weights_that_are_gone_or_owed_cannot_be_loaded(samples: Samples) -> None:
    run, other = await samples.log.new_run(), await samples.log.new_run(session="other")
    stored = await samples.checkpoint(run, 1, "x")
    _, saves = await samples.save(run, 2, name="y")
    owed = saves[run.id, 2].weights.ref
    before = samples.log.everything()
    for refs in ((owed,), (stored.weights, owed), (UNKNOWN,)):
        with pytest.raises(WeightsDeleted):
            await load(samples, other, 1, *refs)
    with pytest.raises(WeightsDeleted):
        await samples.log.intake.create_run(record_of("a", "new"), kind=OpKind.LOAD, body=body_of(owed), uses=[owed])
    assert samples.log.everything() == before


async def test_a_merge_keeps_every_source(samples: Samples) -> None:
    run, other = await samples.log.new_run(), await samples.log.new_run(session="other")
    sources = [await samples.checkpoint(run, seq, f"n{seq}") for seq in (1, 2)]
    await load(samples, other, 1, *(source.weights for source in sources))
    for source in sources:
        delete(samples, source)
    assert unused(samples) == []
    await samples.log.run_all()
    await samples.log.cover(other, 1)
    assert unused(samples) == [source.weights for source in sources]


@pytest.mark.parametrize("kind", [OpKind.LOAD, OpKind.IMPORT])
async def test_a_run_is_made_once_of_other_weights(samples: Samples, kind: OpKind) -> None:
    run = await samples.log.new_run()
    checkpoint = await samples.checkpoint(run, 1, "x", kind="weights")
    made = record_of("a", "new", LoraSpec(rank=3, seed=5))
    body = body_of(checkpoint.weights, lora=made.lora) if kind is OpKind.LOAD else b"adapter"
    uses = [checkpoint.weights] if kind is OpKind.LOAD else []
    create = samples.log.intake.create_run
    request = await create(made, kind=kind, body=body, uses=uses, digest="d")
    assert request == f"{made.id}:0"
    before = samples.log.everything()
    assert await create(made, kind=kind, body=body + b"!", uses=uses, digest="d") == request
    assert await samples.log.intake.repeated(made, 0, "d") == request
    for digest in ("e", ""):
        with pytest.raises(SeqConflict):
            await create(made, kind=kind, body=body, uses=uses, digest=digest)
    assert samples.log.everything() == before
    found = await samples.records.run(made.tenant, made.id)
    assert found.lora == made.lora
    step = await samples.log.plan()
    assert [(op.kind, op.seq) for op in step.ops] == [(kind, 0)]
    assert samples.log.execution.bodies(step.ops) == [body]


async def test_the_body_tells_two_imports_apart(samples: Samples) -> None:
    made = record_of("a", "new")
    create = samples.log.intake.create_run
    request = await create(made, kind=OpKind.IMPORT, body=b"one")
    assert await create(made, kind=OpKind.IMPORT, body=b"one") == request
    with pytest.raises(SeqConflict):
        await create(made, kind=OpKind.IMPORT, body=b"two")


async def test_nothing_is_loaded_into_a_closed_run(samples: Samples) -> None:
    run, other = await samples.log.new_run(), await samples.log.new_run(session="other")
    checkpoint = await samples.checkpoint(run, 1, "x")
    await samples.log.intake.close_run(other)
    with pytest.raises(RunClosed):
        await load(samples, other, 1, checkpoint.weights)


async def test_a_run_is_listed_from_its_first_request_and_says_when_its_last_was(samples: Samples) -> None:
    run = await samples.log.new_run()
    redis = samples.log.redis
    listed = redis.zrange(redis_keys.training_runs(run.tenant), 0, -1, withscores=True)
    assert listed == [(run.id.encode(), run.created_at)]
    redis.hset(redis_keys.run(run.id), "last_request_at", "1.5")
    assert (await samples.records.run(run.tenant, run.id)).last_request_at == 1.5
    await samples.log.submit(run, 2)
    later = (await samples.records.run(run.tenant, run.id)).last_request_at
    assert later
    assert later > 1.5
    redis.hset(redis_keys.run(run.id), "last_request_at", "1.5")
    await samples.log.submit(run, 2)  # a repeat is no request
    assert (await samples.records.run(run.tenant, run.id)).last_request_at == 1.5
