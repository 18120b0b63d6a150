"""Steps that end before one of their passes: ops without a result return to their run's queue."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotrain_store import redis_keys
from cotrain_store.disk.spool import INLINE_LIMIT_BYTES
from cotrain_store.disk.stored_results import RUN_STOPPED, UNLOADED
from cotrain_store.errors import Fenced, PlanOutdated
from cotrain_store.messages.ids import OpId, WeightsRef, request_id
from cotrain_store.messages.ops import OpKind, Result, RunQueue, Step
from cotrain_store.messages.runs import CheckpointRecord, RunRecord
from tests.support.log import Log, record_of
from tests.support.stack import MODEL, POOL

LARGE = b"x" * (INLINE_LIMIT_BYTES + 1)
QUEUED = (3, 14, len(LARGE) + len(b"body"))
"""Ops, tokens and bytes that a commit of `half_done` puts back."""


async def ready(log: Log) -> RunQueue:
    [queue] = await log.dispatch.ready(POOL)
    return queue


async def half_done(log: Log) -> tuple[RunRecord, Step]:
    """Plan a run's create, two passes and a step; the tests run the create and 3 tokens of a pass."""
    run = await log.new_run()
    await log.submit(run, 1, body=LARGE)
    await log.submit(run, 2)
    await log.submit(run, 3, OpKind.OPTIM_STEP, body=b"")
    return run, await log.plan()


async def test_ops_without_a_result_are_the_head_of_their_runs_queue_again(log: Log) -> None:
    run, step = await half_done(log)
    log.commit(step, opened={(run.id, 1): 3})
    queue = await ready(log)
    assert (queue.ops, queue.done_tokens) == (step.ops[1:], 3)
    assert log.queued() == QUEUED
    assert (log.result(run, 0), log.result(run, 1)) == (Result.of_json({"said": "done"}), None)
    log.commit(await log.plan(), opened={(run.id, 1): 6})
    assert (await ready(log)).done_tokens == 6
    log.commit(await log.plan())
    assert log.queued() == (0, 0, 0)
    assert log.result(run, 3) == Result.of_json({"said": "done"})
    assert b"begun" not in log.redis.hgetall(redis_keys.log(POOL, run.id))


async def test_a_second_commit_puts_nothing_back_again(log: Log) -> None:
    run, step = await half_done(log)
    log.commit(step, opened={(run.id, 1): 3})
    await log.plan()
    before = log.everything()
    log.commit(step, opened={(run.id, 1): 3})
    assert log.everything() == before


async def test_a_replaced_worker_puts_nothing_back(log: Log) -> None:
    run, step = await half_done(log)
    log.new_worker()
    before = log.everything()
    with pytest.raises(Fenced):
        log.commit(step, opened={(run.id, 1): 3})
    assert log.everything() == before


async def test_only_the_end_of_a_runs_ops_can_be_put_back(log: Log) -> None:
    run, step = await half_done(log)
    before = log.everything()
    done: dict[OpId, Result] = {(run.id, seq): Result.of_json({}) for seq in (0, 1, 3)}
    with pytest.raises(AssertionError, match="not committed"):
        log.execution.commit(step, done, {}, {}, opened={(run.id, 2): 1})
    assert log.everything() == before


async def test_a_commit_without_any_result_returns_the_whole_step(log: Log) -> None:
    """A step with only a dangerous part left waits like this while its neighbours commit."""
    _, step = await half_done(log)
    log.execution.commit(step, {}, {}, {}, opened={})
    assert (await ready(log)).ops == step.ops
    assert (await log.plan()).ops == step.ops


async def test_an_open_pass_restarts_in_a_later_process(log: Log) -> None:
    run, step = await half_done(log)
    log.commit(step, opened={(run.id, 1): 3})
    log.execution = log.new_worker()
    queue = await ready(log)
    assert (queue.ops, queue.done_tokens) == (step.ops[1:], 0)


async def test_a_plan_from_before_the_put_back_is_rejected(log: Log) -> None:
    run, step = await half_done(log)
    await log.submit(run, 4)
    behind = await ready(log)
    log.commit(step, opened={(run.id, 1): 3})
    cycle = (await log.dispatch.view(POOL)).cycle + 1
    with pytest.raises(PlanOutdated):
        await log.dispatch.plan(POOL, replace(step, cycle=cycle, ops=behind.ops))


@pytest.mark.parametrize("how", ["closed", "failed"])
@pytest.mark.parametrize("when", ["during", "after"])
async def test_a_run_that_ends_with_an_open_pass_fails_pending_ops(log: Log, how: str, when: str) -> None:
    run, step = await half_done(log)
    if when == "after":
        log.commit(step, opened={(run.id, 1): 3})
    if how == "closed":
        await log.intake.close_run(run)
    else:
        log.execution.fail_run(run.id, run.tenant)
    if when == "during":
        assert log.result(run, 1) is None  # planned ops may still complete
        log.commit(step, opened={(run.id, 1): 3})
    assert log.result(run, 0) == Result.of_json({"said": "done"})
    failure = UNLOADED if how == "closed" else RUN_STOPPED
    assert {log.result(run, seq) for seq in (1, 2, 3)} == {failure}
    assert (log.queued(), log.references()) == ((0, 0, 0), {})
    assert await log.dispatch.ready(POOL) == []
    row = log.redis.hgetall(redis_keys.log(POOL, run.id))
    assert b"begun" not in row
    assert not log.redis.hexists(redis_keys.bodies(POOL, run.id), "2")
    if how == "closed":
        assert log.execution.forget(run.id)


async def test_a_waiter_for_an_op_put_back_to_a_closed_run_is_answered_at_once(log: Log) -> None:
    run, step = await half_done(log)
    await log.intake.close_run(run)
    async with log.futures() as futures:
        log.commit(step, opened={(run.id, 1): 3})
        assert await futures.wait(run.tenant, step.ops[1].request_id, 30) == UNLOADED


async def test_a_gap_after_an_op_put_back_counts_only_once_it_is_planned(log: Log) -> None:
    run = await log.new_run()
    await log.submit(run, 1)
    await log.submit(run, 3)
    step = await log.plan()
    await log.dispatch.expire_gap(POOL, run.id, run.tenant)
    assert log.queued()[0] == 2
    log.commit(step, opened={(run.id, 1): 3})
    assert log.queued()[0] == 2  # seq 1 and 3: the expired gap is not next any more
    assert not log.redis.zscore(redis_keys.gaps(POOL), run.id)
    await log.submit(run, 2)  # while it is after the ops that were put back
    await log.run_all()
    assert log.queued() == (0, 0, 0)


async def test_the_age_of_a_gap_starts_at_the_plan_of_the_op_before_it(log: Log) -> None:
    run = await log.new_run()
    await log.submit(run, 1)
    await log.submit(run, 3)
    log.commit(await log.plan(), opened={(run.id, 1): 3})
    assert not log.redis.zscore(redis_keys.gaps(POOL), run.id)
    log.commit(await log.plan())
    assert log.redis.zscore(redis_keys.gaps(POOL), run.id)
    await log.submit(run, 2)
    await log.run_all()
    assert log.queued() == (0, 0, 0)


async def test_an_op_put_back_is_as_old_as_its_request(log: Log) -> None:
    run, step = await half_done(log)
    neighbour = record_of("b")
    await log.intake.create_run(neighbour)
    log.commit(step, opened={(run.id, 1): 3})
    assert [queue.run for queue in await log.dispatch.ready(POOL)] == [run.id, neighbour.id]


async def test_a_rollback_cancels_an_open_pass(log: Log) -> None:
    run, step = await half_done(log)
    log.commit(step, opened={(run.id, 1): 3})
    await log.plan(allowances={request_id(run.id, 1): 2})
    weights = WeightsRef(f"{run.id}:0")
    checkpoint = CheckpointRecord(run.id, run.tenant, "weights", "x", weights, MODEL, 0.0)
    assert log.execution.roll_back(checkpoint, "file", "sha") == 1
    [rejected] = log.execution.open_steps()
    assert {op.kind for op in rejected.ops} == {OpKind.REJECTED}
    assert rejected.allowances == {}
    assert b"begun" not in log.redis.hgetall(redis_keys.log(POOL, run.id))
    log.commit(rejected)
    assert log.queued() == (0, 0, 0)
