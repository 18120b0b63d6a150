"""A run whose newest state was lost: it continues from a checkpoint and reports the rollback."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotrain_store import redis_keys
from cotrain_store.disk.spool import INLINE_LIMIT_BYTES
from cotrain_store.errors import Fenced, SpoolCorrupt
from cotrain_store.messages.ops import OpKind
from cotrain_store.messages.runs import CheckpointRecord, RunRecord, RunState
from tests.support.log import Log, record_of
from tests.support.samples import Samples
from tests.support.stack import POOL

LARGE = b"x" * (INLINE_LIMIT_BYTES + 1)


async def run_with_a_checkpoint(samples: Samples) -> tuple[RunRecord, CheckpointRecord]:
    """Make a run that is committed to seq 3, with a checkpoint of its state after seq 1."""
    run = await samples.log.new_run()
    checkpoint = await samples.checkpoint(run, 1, "x", kind="weights")
    for seq in (2, 3):
        await samples.log.submit(run, seq, body=LARGE)
    await samples.log.run_all()
    return run, checkpoint


def error_of(log: Log, run: RunRecord, seq: int) -> tuple[str, str]:
    result = log.result(run, seq)
    assert result is not None
    answer = result.json()
    return answer["error"], answer["category"]


async def test_planned_and_waiting_ops_fail_and_later_ones_run(samples: Samples) -> None:
    log = samples.log
    run, checkpoint = await run_with_a_checkpoint(samples)
    await log.submit(run, 4, OpKind.FORWARD, body=LARGE)
    await log.plan()
    for seq, kind in ((5, OpKind.OPTIM_STEP), (6, OpKind.LOAD), (8, OpKind.FORWARD_BACKWARD)):
        await log.submit(run, seq, kind, body=LARGE)
    assert log.execution.roll_back(checkpoint, "f3", "sha") == 1

    said = (
        f"The server lost this run's newest state; it goes on from {checkpoint.path} (after request 1). "
        "weights_epoch is now 1."
    )
    for seq in (4, 5, 6, 8):
        assert error_of(log, run, seq) == (said, "server")
    assert log.result(run, 3)
    assert log.references() == {}
    [step] = log.execution.open_steps()
    assert [op.kind for op in step.ops] == [OpKind.REJECTED]
    log.commit(step, said="as if nothing had happened")
    assert error_of(log, run, 4) == (said, "server")
    await log.submit(run, 7)
    await log.submit(run, 9)
    await log.run_all()
    kinds = [op.kind for op in log.execution.logs.logged_ops(run.id, 4, 9)]
    passed = OpKind.FORWARD_BACKWARD
    assert kinds == [*[OpKind.REJECTED] * 3, passed, OpKind.REJECTED, passed]
    for seq in (7, 9):
        result = log.result(run, seq)
        assert result
        assert "error" not in result.json()
    assert log.queued() == (0, 0, 0)


async def test_only_the_file_remains_and_precedes_the_next_snapshot(samples: Samples) -> None:
    log = samples.log
    run, checkpoint = await run_with_a_checkpoint(samples)
    log.execution.register_snapshot(run.id, 2, "f2", "sha 2")
    log.execution.roll_back(checkpoint, "f3", "sha 3")
    position = log.execution.logs.position(run.id)
    assert position is not None
    assert (position.done, position.snap, position.older_snap) == (3, 3, 3)
    assert (position.snapshot_file, position.snapshot_sha256) == ("f3", "sha 3")
    assert (position.older_file, position.numerics_id, position.older_numerics_id) == ("", "", "")
    assert (position.weights_epoch, position.rolled_back_to) == (1, checkpoint.path)
    assert position.state is RunState.LIVE
    with pytest.raises(SpoolCorrupt):
        log.execution.logs.logged_ops(run.id, 3, 3)
    await log.submit(run, 4)
    await log.run_all()
    assert log.execution.register_snapshot(run.id, 4, "f4", "sha 4")
    position = log.execution.logs.position(run.id)
    assert position is not None
    assert (position.older_snap, position.older_file, position.weights_epoch) == (3, "f3", 1)


async def test_a_rollback_is_reported_with_its_run_and_counted(samples: Samples) -> None:
    run, checkpoint = await run_with_a_checkpoint(samples)
    assert (await samples.records.run(run.tenant, run.id)).weights_epoch == 0
    samples.log.execution.roll_back(checkpoint, "f3", "sha")
    samples.log.execution.roll_back(checkpoint, "f3", "sha")
    told = await samples.records.run(run.tenant, run.id)
    assert (told.weights_epoch, told.rolled_back_to) == (2, checkpoint.path)
    assert told.state is RunState.LIVE
    assert samples.log.redis.hget(redis_keys.counters(POOL), "rollbacks") == b"2"


async def test_a_repeat_after_a_lost_answer_changes_nothing(samples: Samples) -> None:
    log = samples.log
    run, checkpoint = await run_with_a_checkpoint(samples)
    before = log.execution.logs.position(run.id)
    assert before is not None
    log.execution.roll_back(checkpoint, "f3", "sha")
    await log.submit(run, 4)
    once = log.everything()
    log.execution._roll_back(before, checkpoint, "f3", "sha")
    assert log.everything() == once
    assert log.result(run, 4) is None


async def test_other_runs_of_the_step_run_as_planned(samples: Samples) -> None:
    log = samples.log
    run, checkpoint = await run_with_a_checkpoint(samples)
    other = await log.new_run("b")
    await log.submit(run, 4)
    planned = await log.plan()
    log.execution.roll_back(checkpoint, "f3", "sha")
    [step] = log.execution.open_steps()
    others = [op for op in planned.ops if op.run == other.id]
    assert [op for op in step.ops if op.run == other.id] == others
    log.commit(step)
    assert log.result(other, 0)
    assert (log.queued("a"), log.queued("b")) == ((0, 0, 0), (0, 0, 0))


async def test_a_replaced_worker_rolls_nothing_back(samples: Samples) -> None:
    run, checkpoint = await run_with_a_checkpoint(samples)
    await samples.log.submit(run, 4)
    samples.log.new_worker()
    before = samples.log.everything()
    with pytest.raises(Fenced):
        samples.log.execution.roll_back(checkpoint, "f3", "sha")
    assert samples.log.everything() == before


async def test_a_run_can_go_back_only_to_its_own_training_checkpoints(samples: Samples) -> None:
    log = samples.log
    run, first = await run_with_a_checkpoint(samples)
    await samples.checkpoint(run, 4, "for-sampling")
    second = await samples.checkpoint(run, 5, "y", kind="weights")
    await samples.save(run, 6, name="not-stored", kind="weights")
    copied = replace(record_of("a", "copy"), state=RunState.CLOSED)
    assert log.execution.logs.checkpoints(run.id) == [second, first]
    assert log.execution.logs.checkpoints(copied.id) == []
