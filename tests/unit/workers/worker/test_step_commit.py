from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

from cotrain_store.messages.ids import RunId, TenantId, WorkerId
from cotrain_store.messages.ops import OpKind, QueuedOp, RunUsage, Step
from cotrain_store.monitoring.definitions import POOL_COUNTERS
from cotrain_workers.engine.ops import (
    CycleOutput,
    Failure,
    Output,
    PassOutput,
    Progress,
    StepOutput,
)
from cotrain_workers.worker.step_commit import (
    StepTimes,
    computing_time,
    counted_cycle,
    cycle_record,
    usage_of,
)

A, B = RunId("a"), RunId("b")
STEP = Step(
    cycle=4,
    worker=WorkerId("w0"),
    ops=(
        QueuedOp(A, 1, OpKind.FORWARD_BACKWARD, 30, "inline", 1, 0.0),
        QueuedOp(A, 2, OpKind.OPTIM_STEP, 0, "inline", 1, 0.0),
        QueuedOp(B, 1, OpKind.FORWARD_BACKWARD, 12, "inline", 1, 0.0),
    ),
    planned_at=100.0,
    tenant_by_run={A: TenantId("t"), B: TenantId("u")},
)
NOT_FINITE = Failure("Loss is not finite (seq 1).", "user", "not_finite")
OUTPUTS: dict[tuple[str, int], Output] = {
    (A, 1): NOT_FINITE,
    (A, 2): StepOutput(0.5),
    (B, 1): StepOutput(0.5),
}
COST = CycleOutput(OUTPUTS, forwards=2, tokens=42, padded_tokens=64, wave_s=0.5, optim_s=0.25)
TIMES = StepTimes(started=101.0, finished=101.8, sampling_s=0.125)


def test_a_record_has_the_runs_and_the_cost_of_its_cycle() -> None:
    record = cycle_record(STEP, OUTPUTS, COST, TIMES)
    assert (record["cycle"], record["worker"], record["planned_at"]) == (4, "w0", 100.0)
    assert (record["tokens"], record["padded_tokens"], record["forwards"]) == (42, 64, 2)
    assert (record["duration_ms"], record["wave_ms"], record["optim_ms"]) == (800.0, 500.0, 250.0)
    assert record["sampling_ms"] == 125.0
    assert record["outcome"] == "ok"
    assert json.loads(json.dumps(record)) == record
    digests = [run.pop("digests") for run in record["runs"]]
    assert [list(of_run) for of_run in digests] == [["1", "2"], ["1"]]
    assert record["runs"] == [
        {
            "run": "a",
            "tenant": "t",
            "tokens": 30,
            "ops": {"forward_backward": 1, "optim_step": 1},
            "failed": 1,
        },
        {"run": "b", "tenant": "u", "tokens": 12, "ops": {"forward_backward": 1}, "failed": 0},
    ]


def test_equal_outputs_have_equal_digests_and_others_do_not() -> None:
    def digest(loss: float, cycle: int) -> str:
        outputs = {**OUTPUTS, (A, 1): PassOutput([np.zeros(2, np.float32)], loss)}
        record = cycle_record(replace(STEP, cycle=cycle), outputs, COST, StepTimes(0.0, 1.0, 0.0))
        of_op: str = record["runs"][0]["digests"]["1"]
        return of_op

    assert digest(1.0, cycle=4) == digest(1.0, cycle=5) != digest(1.5, cycle=4)


def test_a_crashed_cycle_is_recorded_without_a_cost() -> None:
    record = cycle_record(STEP, OUTPUTS, None, TIMES)
    assert (record["outcome"], record["wave_ms"], record["forwards"]) == ("isolated", None, None)
    counted = counted_cycle(STEP, OUTPUTS, None, record)
    assert (counted["forwards"], counted["padding_tokens"], counted["tokens"]) == (0, 0, 42)


def test_every_counted_value_is_shown() -> None:
    record = cycle_record(STEP, OUTPUTS, COST, TIMES)
    counted = counted_cycle(STEP, OUTPUTS, COST, record)
    assert counted == {
        "cycles": 1,
        "cycle_seconds": 0.8,
        "tokens": 42,
        "padding_tokens": 22,
        "forwards": 2,
        "optim_steps": 1,
        "resolved_ops": 3,
        "failed_ops": 1,
        "nonfinite": 1,
    }
    assert counted.keys() <= POOL_COUNTERS.keys()


HALF = CycleOutput(
    {(A, 1): StepOutput(0.5)},
    forwards=2,
    tokens=22,
    padded_tokens=32,
    wave_s=0.75,
    optim_s=0.25,
    divided={(A, 1): Progress(now=10, in_all=30), (B, 1): Progress(now=10, in_all=11)},
)


def test_each_record_of_a_divided_pass_has_the_tokens_of_its_cycle() -> None:
    """One pass ends here and another stays open. The step after it waits, and is in no cycle yet."""
    step = replace(STEP, ops=(STEP.ops[0], *STEP.ops[2:], replace(STEP.ops[1], run=B, seq=2)))
    record = cycle_record(step, HALF.outputs, HALF, TIMES)
    assert record["tokens"] == 20
    assert [(row["tokens"], row["ops"]) for row in record["runs"]] == [
        (10, {"forward_backward": 1}),
        (10, {}),
    ]
    counted = counted_cycle(step, HALF.outputs, HALF, record)
    assert (counted["tokens"], counted["resolved_ops"], counted["optim_steps"]) == (30, 1, 0)


def test_a_divided_pass_is_counted_once_with_the_time_of_all_its_cycles() -> None:
    before = {(A, 1): 2.0, (B, 1): 4.0}
    taken = computing_time(STEP, HALF.outputs, HALF, 1.0, before)
    assert taken == {(A, 1): 2.5, (B, 1): 4.5}
    assert usage_of(STEP, HALF.outputs, taken) == {A: RunUsage(30, 2.5)}
