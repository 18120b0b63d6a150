"""Saves, and what becomes of the weights they made: named, used, stored, forgotten."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from cotrain_store import redis_keys
from cotrain_store.errors import CheckpointNotFound, Fenced, MalformedPath, SamplerNotFound, SeqConflict
from cotrain_store.messages.ids import TenantId, WeightsRef, encode
from cotrain_store.messages.ops import OpKind, Result
from cotrain_store.messages.runs import RunRecord, RunState, SamplerRecord, WeightsRecord
from tests.support.lives import life_ms
from tests.support.log import WORKER
from tests.support.samples import Samples, ref_of, sampler_record, weights_record
from tests.support.stack import POOL

A, B = TenantId("a"), TenantId("b")
DIGEST, OTHER_DIGEST = "d" * 64, "e" * 64


def path_of(run: RunRecord, name: str = "x") -> str:
    return f"tinker://{run.id}/sampler_weights/{name}"


def unused(samples: Samples) -> list[WeightsRef]:
    return sorted(weights.ref for weights in samples.saved.unused_weights())


async def test_a_save_for_a_sampler_appears_with_its_commit_and_only_then(samples: Samples) -> None:
    run = await samples.log.new_run()
    await samples.log.submit(run, 1, OpKind.SAVE, body=b"{}")
    with pytest.raises(CheckpointNotFound):
        await samples.records.checkpoint(A, path_of(run))
    await samples.log.intake.close_run(run)  # it was never planned: it fails, and saves nothing
    assert await samples.log.dispatch.ready(POOL) == []

    other = await samples.log.new_run(session="other")
    _, saves = await samples.save(other, 1, sampler=0)
    sampler = await samples.records.sampler(A, sampler_record().id)
    made = saves[other.id, 1].user
    assert isinstance(made, SamplerRecord)
    assert sampler == replace(made, step=0)
    assert sampler.weights
    assert await samples.records.weights(sampler.weights) == saves[other.id, 1].weights
    assert samples.saved.unstored() == [saves[other.id, 1].weights]


async def test_a_save_without_a_name_makes_a_sampler_at_once(samples: Samples) -> None:
    run = await samples.log.new_run()
    await samples.save(run, 1, sampler=3)
    sampler = await samples.records.sampler(A, sampler_record(number=3).id)
    assert (sampler.weights, sampler.ephemeral) == (ref_of(run, 1), True)
    assert await samples.records.samplers_of(sampler.session) == (sampler,)
    left_ms = life_ms(samples.log.redis, redis_keys.sampler(sampler.id))
    assert left_ms == pytest.approx(6 * 3600e3, abs=60e3)


async def test_a_second_commit_of_a_save_changes_nothing(samples: Samples) -> None:
    run = await samples.log.new_run()
    step, saves = await samples.save(run, 1, name="x")
    samples.saved.mark_stored(ref_of(run, 1), DIGEST, 10)
    await samples.save(run, 2, name="x")
    samples.saved.mark_stored(ref_of(run, 2), DIGEST, 10)
    before = samples.log.everything()
    results = {op.id: Result.of_json({"seq": op.seq}) for op in step.ops}
    samples.log.execution.commit(step, results, {}, {}, saves=saves)
    assert samples.log.everything() == before
    # As a store that went back in time would have it.
    samples.log.redis.hset(redis_keys.open_steps(POOL, WORKER), step.cycle, encode(step))
    samples.log.execution.commit(step, results, {}, {}, saves=saves)
    assert (await samples.records.weights(ref_of(run, 1))).digest == DIGEST
    assert (await samples.records.checkpoint(A, path_of(run))).weights == ref_of(run, 2)


async def test_the_first_digest_stays(samples: Samples) -> None:
    run = await samples.log.new_run()
    await samples.save(run, 1, name="x")
    assert samples.saved.mark_stored(ref_of(run, 1), DIGEST, 10)
    assert samples.saved.mark_stored(ref_of(run, 1), OTHER_DIGEST, 11)
    weights = samples.saved.weights(ref_of(run, 1))
    assert weights == replace(await samples.records.weights(ref_of(run, 1)), digest=DIGEST, size=10)
    assert samples.saved.unstored() == []
    assert (samples.saved.has_content(DIGEST), samples.saved.has_content(OTHER_DIGEST)) == (True, False)


async def test_a_name_given_again_moves_and_samplers_keep_what_they_have(samples: Samples) -> None:
    run = await samples.log.new_run()
    await samples.save(run, 1, name="x")
    old = sampler_record(weights=ref_of(run, 1))
    await samples.records.create_sampler(old)
    await samples.save(run, 2, name="x")
    for seq in (1, 2):
        samples.saved.mark_stored(ref_of(run, seq), DIGEST[:-1] + str(seq), 10)
    assert (await samples.records.checkpoint(A, path_of(run))).weights == ref_of(run, 2)
    assert (await samples.records.sampler(A, old.id)).weights == ref_of(run, 1)
    assert unused(samples) == []
    samples.log.redis.delete(redis_keys.sampler(old.id))
    assert unused(samples) == [ref_of(run, 1)]
    assert await samples.records.samplers_of(old.session) == ()
    assert not samples.log.redis.exists(redis_keys.session_samplers(old.session))


async def test_a_checkpoint_goes_when_its_tenant_said_so(samples: Samples) -> None:
    run = await samples.log.new_run()
    await samples.save(run, 1, name="soon", expires_at=time.time() + 3600)
    await samples.save(run, 2, name="past", expires_at=time.time() - 1)
    for seq in (1, 2):
        samples.saved.mark_stored(ref_of(run, seq), DIGEST[:-1] + str(seq), 10)
    soon = await samples.records.checkpoint(A, path_of(run, "soon"))
    life_ms = samples.log.redis.pttl(redis_keys.checkpoint(run.id, "sampler_weights", "soon"))
    assert life_ms == pytest.approx(3600e3, abs=60e3)
    assert soon.expires_at
    with pytest.raises(CheckpointNotFound):
        await samples.records.checkpoint(A, path_of(run, "past"))
    assert unused(samples) == [ref_of(run, 2)]


async def test_naming_again_without_a_time_lets_a_checkpoint_live(samples: Samples) -> None:
    run = await samples.log.new_run()
    await samples.save(run, 1, name="x", expires_at=time.time() + 3600)
    await samples.save(run, 2, name="x")
    for seq in (1, 2):
        samples.saved.mark_stored(ref_of(run, seq), DIGEST, 10)
    assert samples.log.redis.pttl(redis_keys.checkpoint(run.id, "sampler_weights", "x")) == -1


async def test_weights_that_are_not_stored_yet_are_not_unused(samples: Samples) -> None:
    run = await samples.log.new_run()
    await samples.save(run, 1, sampler=0)
    samples.log.redis.delete(redis_keys.sampler(sampler_record().id))
    assert unused(samples) == []
    samples.saved.mark_stored(ref_of(run, 1), DIGEST, 10)
    assert unused(samples) == [ref_of(run, 1)]


async def test_a_folder_goes_with_the_last_weights_of_its_content(samples: Samples) -> None:
    run = await samples.log.new_run()
    for seq in (1, 2):
        await samples.save(run, seq, sampler=seq)
        samples.saved.mark_stored(ref_of(run, seq), DIGEST, 10)
    assert not samples.saved.forget_weights(ref_of(run, 1))  # a sampler uses it
    for number in (1, 2):
        samples.log.redis.delete(redis_keys.sampler(sampler_record(number=number).id))
    assert unused(samples) == [ref_of(run, 1), ref_of(run, 2)]
    assert not samples.saved.forget_weights(ref_of(run, 1))
    assert samples.saved.has_content(DIGEST)
    assert samples.saved.forget_weights(ref_of(run, 2))
    assert not samples.saved.has_content(DIGEST)
    assert not samples.saved.forget_weights(ref_of(run, 2))
    assert (unused(samples), samples.saved.weights(ref_of(run, 2))) == ([], None)
    assert not [name for name in samples.log.everything() if b"weights" in name]
    with pytest.raises(CheckpointNotFound):
        await samples.records.weights(ref_of(run, 2))


async def test_all_weights_are_looked_at_however_many(samples: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotrain_store.weights.WEIGHTS_AT_ONCE", 2)
    run = await samples.log.new_run()
    for seq in range(1, 6):
        await samples.save(run, seq, name="x")
        samples.saved.mark_stored(ref_of(run, seq), DIGEST[:-1] + str(seq), 10)
    assert unused(samples) == [ref_of(run, seq) for seq in range(1, 5)]


async def test_forgotten_weights_are_neither_stored_nor_sampled(samples: Samples) -> None:
    run = await samples.log.new_run()
    await samples.save(run, 1, sampler=0)
    samples.log.redis.delete(redis_keys.sampler(sampler_record().id))
    assert not samples.saved.forget_weights(ref_of(run, 1))
    assert samples.saved.unstored() == []
    before = samples.log.everything()
    assert not samples.saved.mark_stored(ref_of(run, 1), DIGEST, 10)
    with pytest.raises(CheckpointNotFound):
        await samples.records.create_sampler(sampler_record(weights=ref_of(run, 1)))
    assert samples.log.everything() == before


async def test_a_replaced_worker_changes_no_weights(samples: Samples) -> None:
    run = await samples.log.new_run()
    await samples.save(run, 1, name="x")
    samples.new_worker()
    before = samples.log.everything()
    with pytest.raises(Fenced):
        samples.saved.mark_stored(ref_of(run, 1), DIGEST, 10)
    with pytest.raises(Fenced):
        samples.saved.forget_weights(ref_of(run, 1))
    assert samples.log.everything() == before


async def test_the_log_is_not_cut_past_a_save_that_is_not_stored(samples: Samples) -> None:
    run = await samples.log.new_run()
    await samples.save(run, 1, name="x")
    before = samples.log.everything()
    assert not samples.log.execution.register_snapshot(run.id, 1, "file", "sha")
    assert samples.log.everything() == before
    assert samples.log.execution.register_snapshot(run.id, 0, "file", "sha")
    samples.saved.mark_stored(ref_of(run, 1), DIGEST, 10)
    assert samples.log.execution.register_snapshot(run.id, 1, "file", "sha")


async def test_a_closed_run_is_kept_until_its_saves_are_stored(samples: Samples) -> None:
    run = await samples.log.new_run()
    await samples.save(run, 1, sampler=0)
    await samples.log.intake.close_run(run)
    assert not samples.log.execution.forget(run.id)
    position = samples.log.execution.logs.position(run.id)
    assert position
    assert position.state is RunState.CLOSED
    samples.saved.mark_stored(ref_of(run, 1), DIGEST, 10)
    assert samples.log.execution.forget(run.id)
    assert unused(samples) == []  # a sampler uses them still
    await samples.records.sampler(A, sampler_record().id)


async def test_a_save_that_failed_holds_back_nothing(samples: Samples) -> None:
    run = await samples.log.new_run()
    await samples.log.submit(run, 1, OpKind.SAVE, body=b"{}")
    await samples.log.run_all()
    assert samples.saved.unstored() == []
    assert samples.log.execution.register_snapshot(run.id, 1, "file", "sha")


async def test_a_sampler_is_made_once(samples: Samples) -> None:
    run = await samples.log.new_run()
    await samples.save(run, 1, name="x")
    record = replace(sampler_record(weights=ref_of(run, 1)), model_path=path_of(run))
    made = await samples.records.create_sampler(record)
    await samples.save(run, 2, name="x")
    before = samples.log.everything()
    moved = replace(record, weights=ref_of(run, 2), created_at=record.created_at + 1)
    assert await samples.records.create_sampler(moved) == made
    for other in (
        replace(record, model_path=None, weights=None),
        replace(record, base_model="other"),
        replace(record, ephemeral=True),
    ):
        with pytest.raises(SeqConflict):
            await samples.records.create_sampler(other)
    assert samples.log.everything() == before


async def test_a_save_never_takes_the_place_of_a_sampler(samples: Samples) -> None:
    run = await samples.log.new_run()
    first = await samples.sampler(number=3)
    await samples.save(run, 1, sampler=3)
    assert await samples.records.sampler(A, first.id) == first
    samples.saved.mark_stored(ref_of(run, 1), DIGEST, 10)
    assert unused(samples) == [ref_of(run, 1)]


@pytest.mark.parametrize("name", ["", ":", "x", "a:sample:", "\ud800:sample:0", "a:sample:0\n", "*"])
async def test_what_is_no_sampler_id_names_no_sampler(samples: Samples, name: str) -> None:
    with pytest.raises(SamplerNotFound):
        await samples.records.sampler(A, name)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "tinker://",
        "s:train:0/sampler_weights/x",
        "tinker://s:train:0/sampler_weights/",
        "tinker://s:train:0/sampler_weights/..",
        "tinker://s:train:0/sampler_weights/a..b",
        "tinker://s:train:0/sampler_weights/a/../b",
        "tinker://s:train:0/sampler_weights/%2e%2e",
        "tinker://s:train:0/sampler_weights/a\0",
        "tinker://s:train:0/sampler_weights/a\n",
        "tinker://s:train:0/sampler_weights/\u2024\u2024",
        "tinker://s:train:0/sampler_weights/\ud800",
        "tinker://s:train:0/sampler_weights/" + "a" * 129,
        "tinker://s:train:0/other_weights/x",
        "tinker://s:train:0//sampler_weights/x",
        "tinker://../sampler_weights/x",
        "tinker://" + "a" * 4096,
    ],
)
async def test_a_malformed_path_is_refused(samples: Samples, path: str) -> None:
    with pytest.raises(MalformedPath, match="The checkpoint path is malformed"):
        await samples.records.checkpoint(A, path)


@pytest.mark.parametrize("kind", ["weights", "sampler_weights", "external_weights"])
async def test_a_well_formed_path_of_nothing_is_not_found(samples: Samples, kind: str) -> None:
    with pytest.raises(CheckpointNotFound):
        await samples.records.checkpoint(A, f"tinker://s:train:0/{kind}/{'a' * 128}")


async def test_what_a_replay_must_make_again_is_listed_by_age(samples: Samples) -> None:
    run = await samples.log.new_run()
    made: list[WeightsRecord] = []
    for seq in (1, 2):
        _, saves = await samples.save(run, seq, name=f"n{seq}")
        made.append(saves[run.id, seq].weights)
    assert samples.saved.unstored() == made
    assert weights_record(run, 1).ref == ref_of(run, 1)
    samples.saved.mark_stored(ref_of(run, 1), DIGEST, 10)
    assert samples.saved.unstored() == made[1:]
