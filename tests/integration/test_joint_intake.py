"""Acceptance of ops of several runs as one change: one stored body, quotas, and repeats."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotrain_store.disk.spool import INLINE_LIMIT_BYTES, SpoolRef
from cotrain_store.errors import Reason, RunClosed
from cotrain_store.messages.ids import TenantId
from cotrain_store.messages.ops import OpKind
from cotrain_store.messages.runs import RunRecord
from cotrain_store.oplog.joint_intake import JointIntake, JointOp
from cotrain_store.tenants.policies import TenantLimits
from tests.support.limits import always
from tests.support.log import Log
from tests.support.refusals import refused

A = TenantId("a")
BODY = b"x" * (INLINE_LIMIT_BYTES // 2)
RUNS = 4


@pytest.fixture
async def runs(log: Log) -> list[RunRecord]:
    made = [await log.new_run(session=f"s{number}") for number in range(RUNS)]
    await log.run_all()
    return made


def intake_of(log: Log, limits: TenantLimits | None = None) -> JointIntake:
    return JointIntake(log.connection, log.spool, always(limits or TenantLimits()))


def ops_of(runs: list[RunRecord], seq: int = 1) -> list[JointOp]:
    """Return a pass with a common body, and an optimizer step, for each run."""
    made = []
    for run in runs:
        made += [
            JointOp(run, seq, OpKind.FORWARD_BACKWARD, BODY, 7, "pass"),
            JointOp(run, seq + 1, OpKind.OPTIM_STEP, b"{}", 0, "step"),
        ]
    return made


async def test_all_ops_are_in_one_plan_and_share_one_body(log: Log, runs: list[RunRecord]) -> None:
    ops = ops_of(runs)
    accepted = await intake_of(log).submit_together(A, ops)
    assert accepted == [f"{op.run.id}:{op.seq}" for op in ops]
    assert log.queued() == (2 * RUNS, 7 * RUNS, RUNS * (len(BODY) + 2))
    before = log.everything()
    assert await intake_of(log).submit_together(A, ops) == accepted
    assert {key: log.everything()[key] for key in before} == before

    step = await log.plan()
    assert len(step.ops) == 2 * RUNS
    (ref,) = {op.ref for op in step.ops if op.kind is OpKind.FORWARD_BACKWARD}
    assert {op.ref for op in step.ops if op.kind is OpKind.OPTIM_STEP} == {"inline"}
    assert log.execution.bodies(step.ops) == [BODY, b"{}"] * RUNS
    assert log.references() == {SpoolRef.parse(ref).segment: RUNS}


async def test_an_ended_run_does_not_affect_the_others(log: Log, runs: list[RunRecord]) -> None:
    await log.intake.close_run(runs[1])
    accepted = await intake_of(log).submit_together(A, ops_of(runs))
    assert [type(each) for each in accepted[2:4]] == [RunClosed, RunClosed]
    assert len([each for each in accepted if isinstance(each, str)]) == 2 * (RUNS - 1)
    assert len((await log.plan()).ops) == 2 * (RUNS - 1)


async def test_a_full_queue_accepts_a_part_and_the_repeat_the_remainder(log: Log, runs: list[RunRecord]) -> None:
    intake = intake_of(log, replace(TenantLimits(), ops=5))
    with refused(Reason.QUEUE_FULL):
        await intake.submit_together(A, ops_of(runs))
    assert log.queued()[0] == 5
    stored = log.references()
    with refused(Reason.QUEUE_FULL):  # and nothing is stored for it
        await intake.submit_together(A, ops_of(runs))
    assert log.references() == stored
    await log.run_all()
    assert len(await intake.submit_together(A, ops_of(runs))) == 2 * RUNS
    assert log.queued()[0] == 2 * RUNS - 5
    assert {op.run for op in (await log.plan()).ops} <= {run.id for run in runs}


async def test_a_body_is_removed_with_the_last_log_that_needs_it(log: Log, runs: list[RunRecord]) -> None:
    await intake_of(log).submit_together(A, ops_of(runs))
    await log.run_all()
    for left, run in zip((3, 2, 1, 0), runs, strict=True):
        await log.cover(run, 2)
        assert sum(log.references().values()) == left
