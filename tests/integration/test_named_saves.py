"""Saves under a name: stored or lost after their commit, and the log that recreates them until then."""

from __future__ import annotations

import asyncio

import pytest

from cotrain_store import redis_keys
from cotrain_store.errors import Fenced
from cotrain_store.messages.ids import RequestId, TenantId
from cotrain_store.messages.ops import OpKind, Result
from cotrain_store.messages.runs import (
    HistoryEntry,
    RewindEntry,
    RunRecord,
    RunState,
    StepEntry,
    external_folder,
)
from cotrain_store.results.pending import Pending
from cotrain_store.weights import SavedWeights
from tests.support.log import WORKER
from tests.support.samples import Samples, ref_of
from tests.support.stack import POOL
from tests.support.waiting import until

A = TenantId("a")


def listed(samples: Samples, run: RunRecord) -> tuple[list[bytes], list[bytes]]:
    redis = samples.log.redis
    return (
        redis.zrange(redis_keys.run_checkpoints(run.id), 0, -1),
        redis.zrange(redis_keys.tenant_checkpoints(run.tenant), 0, -1),
    )


async def test_a_save_appears_with_its_result_when_it_is_stored(samples: Samples) -> None:
    run = await samples.log.new_run()
    _, saves = await samples.save(run, 1, name="x", kind="weights")
    assert await samples.found(run) is None
    assert (listed(samples, run), samples.log.result(run, 1)) == (([], []), None)
    position = samples.log.execution.logs.position(run.id)
    assert position
    assert position.done == 1  # the run goes on meanwhile
    assert samples.log.queued()[0] == 0

    assert samples.stored(run, 1, size=77)
    checkpoint = await samples.found(run)
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
    assert await samples.found(run)
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
    assert (await samples.found(run, kind="sampler_weights") is None) == is_lost


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
    results = {op.id: large for op in step.ops}
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
    assert await samples.found(run, kind="sampler_weights")
    assert samples.log.execution.forget(run.id)
    assert not samples.log.redis.exists(redis_keys.unnumbered_ops(POOL, run.id))


async def test_a_refused_removal_keeps_the_steps_and_rewinds_of_the_log(samples: Samples) -> None:
    """A replay that recreates the owed weights needs them."""
    log, run = samples.log, await samples.log.new_run()
    entries: dict[int, HistoryEntry] = {1: StepEntry(norm=1.0, rate=0.1), 2: RewindEntry(to_seq=1, to_step=1)}
    for seq, kind in ((1, OpKind.OPTIM_STEP), (2, OpKind.REWIND)):
        await log.submit(run, seq, kind)
        step = await log.plan()
        results = {op.id: Result.of_json({}) for op in step.ops}
        log.execution.commit(step, results, {}, {}, found={(run.id, seq): entries[seq]})
    await samples.save(run, 3, name="x")
    await log.intake.close_run(run)
    before = log.execution.logs.position(run.id)
    assert before
    assert (before.steps, before.rewinds) == ({1: 1}, {2: 1})
    assert not log.execution.forget(run.id)
    assert log.execution.logs.position(run.id) == before
