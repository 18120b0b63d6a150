"""Loads of saved weights, which stay while a log needs them, and runs made of them."""

from __future__ import annotations

import pytest

from cotrain_store import redis_keys
from cotrain_store.bodies.adapter_bodies import LoadRequest, LoadSource
from cotrain_store.errors import RunClosed, SeqConflict, WeightsDeleted
from cotrain_store.messages.ids import RequestId, WeightsRef, encode
from cotrain_store.messages.ops import OpKind
from cotrain_store.messages.runs import (
    CheckpointRecord,
    LoraSpec,
    RunRecord,
)
from tests.support.log import record_of
from tests.support.samples import Samples, sampler_record

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
