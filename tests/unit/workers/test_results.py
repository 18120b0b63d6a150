"""Results of a step: saves, history entries, the cycle record, counters and usage."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from cotrain.wire.codec import decode_pass_output
from cotrain_server.ui.run_tables import log_rows
from cotrain_store.bodies.adapter_bodies import SaveRequest
from cotrain_store.messages.ids import OpId, PoolId, RunId, SamplerId, TenantId, WorkerId, encode
from cotrain_store.messages.ops import OpKind, QueuedOp, ResultKind, RunUsage, Step
from cotrain_store.messages.runs import (
    CheckpointRecord,
    HistoryEntry,
    LoraSpec,
    MetricsEntry,
    PassEntry,
    RewindEntry,
    SamplerRecord,
    StepEntry,
)
from cotrain_store.monitoring.definitions import POOL_COUNTERS
from cotrain_store.monitoring.recent_activity import LoggedOp
from cotrain_workers.checkpoints.files import Saved
from cotrain_workers.engine.ops import (
    CycleOutput,
    Datum,
    Failure,
    HostOptimizer,
    HostWeights,
    KlDatum,
    NoteOutput,
    Op,
    OptimStep,
    Output,
    Pass,
    PassOutput,
    PassProgress,
    ReverseKl,
    ReverseKlOutput,
    Save,
    SaveOutput,
    StepOutput,
)
from cotrain_workers.engine.spec import AdapterSpec
from cotrain_workers.results import (
    DoneSave,
    OpRow,
    StepRun,
    StepTimes,
    counted_cycle,
    cycle_record,
    history_of,
    op_rows,
    result_of,
    saves_of,
    usage_of,
)
from cotrain_workers.worker.step_runner import finished_outputs

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
OUTPUTS: dict[tuple[str, int], Output] = {(A, 1): NOT_FINITE, (A, 2): StepOutput(0.5), (B, 1): StepOutput(0.5)}
COST = CycleOutput(OUTPUTS, forwards=2, tokens=42, padded_tokens=64, wave_s=0.5, optim_s=0.25)
TIMES = StepTimes(started=101.0, duration_s=0.8, sampling_s=0.125)


def rows_of(
    outputs: Mapping[tuple[str, int], Output], cost: CycleOutput | None = None, step: Step = STEP
) -> list[OpRow]:
    bodies: dict[tuple[str, int], bytes] = {op.id: b"" for op in step.ops}
    return op_rows(step, bodies, StepRun(outputs, cost, is_exact=True), 1.0)


def test_a_record_says_who_was_in_a_cycle_and_what_it_took() -> None:
    record = cycle_record(STEP, rows_of(OUTPUTS), COST, TIMES)
    assert (record["cycle"], record["worker"], record["planned_at"]) == (4, "w0", 100.0)
    assert (record["tokens"], record["computed_tokens"], record["padded_tokens"], record["forwards"]) == (42, 42, 64, 2)
    assert (record["duration_ms"], record["wave_ms"], record["optim_ms"]) == (800.0, 500.0, 250.0)
    assert record["sampling_ms"] == 125.0
    assert record["outcome"] == "ok"
    assert json.loads(json.dumps(record)) == record
    digests = [run.pop("digests") for run in record["runs"]]
    assert [list(of_run) for of_run in digests] == [["1", "2"], ["1"]]
    assert record["runs"] == [
        {"run": "a", "tenant": "t", "tokens": 30, "ops": {"forward_backward": 1, "optim_step": 1}, "failed": 1},
        {"run": "b", "tenant": "u", "tokens": 12, "ops": {"forward_backward": 1}, "failed": 0},
    ]


def test_a_pass_with_shared_prompts_reports_the_saved_share() -> None:
    outputs = {**OUTPUTS, (A, 1): PassOutput([np.zeros(30, np.float32)], 1.0, {}, 12)}
    result = result_of(STEP.ops[0], outputs[A, 1], 4)
    assert decode_pass_output(result.payload).metrics["shared_prompts:mean"] == 0.4
    a, b = cycle_record(STEP, rows_of(outputs), COST, TIMES)["runs"]
    assert a["shared"] == {"1": 12}
    assert "shared" not in b
    op = LoggedOp(1, OpKind.FORWARD_BACKWARD, 30, 90.0, ResultKind.PASS, "")
    record = cycle_record(STEP, rows_of(outputs), COST, TIMES)
    (row,) = log_rows([op], [record], A, planned=1, done=1)
    assert row["shared"] == 0.4


def test_equal_outputs_have_equal_digests_and_others_do_not() -> None:
    def digest(loss: float, cycle: int) -> str:
        outputs = {**OUTPUTS, (A, 1): PassOutput([np.zeros(2, np.float32)], loss)}
        record = cycle_record(replace(STEP, cycle=cycle), rows_of(outputs), COST, StepTimes(0.0, 1.0, 0.0))
        of_op: str = record["runs"][0]["digests"]["1"]
        return of_op

    assert digest(1.0, cycle=4) == digest(1.0, cycle=5) != digest(1.5, cycle=4)


def test_a_cycle_that_broke_has_no_cost_and_says_so() -> None:
    record = cycle_record(STEP, rows_of(OUTPUTS), None, TIMES)
    assert (record["outcome"], record["wave_ms"], record["forwards"]) == ("isolated", None, None)
    counted = counted_cycle(rows_of(OUTPUTS), None, TIMES)
    assert (counted["forwards"], counted["padding_tokens"], counted["tokens"]) == (0, 0, 42)


def test_what_is_counted_is_shown() -> None:
    counted = counted_cycle(rows_of(OUTPUTS), COST, TIMES)
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
    divided={(A, 1): PassProgress(now=10, in_all=30), (B, 1): PassProgress(now=10, in_all=11)},
)


def test_of_a_pass_of_several_cycles_each_record_has_the_tokens_that_ran_in_it() -> None:
    """Here one ends and another stays open; the step behind waits, and is in no cycle yet."""
    step = replace(STEP, ops=(STEP.ops[0], *STEP.ops[2:], replace(STEP.ops[1], run=B, seq=2)))
    rows = rows_of(HALF.outputs, HALF, step)
    record = cycle_record(step, rows, HALF, TIMES)
    assert record["tokens"] == 20
    assert [(row["tokens"], row["ops"]) for row in record["runs"]] == [(10, {"forward_backward": 1}), (10, {})]
    counted = counted_cycle(rows, HALF, TIMES)
    assert (counted["tokens"], counted["resolved_ops"], counted["optim_steps"]) == (30, 1, 0)


def test_a_tenant_is_counted_a_pass_once_with_the_time_of_all_its_cycles() -> None:
    ran = StepRun(HALF.outputs, HALF, is_exact=True, earlier_s={(A, 1): 2.0, (B, 1): 4.0})
    rows = op_rows(STEP, {op.id: b"" for op in STEP.ops}, ran, 1.0)
    assert {row.op.id: row.device_s for row in rows} == {(A, 1): 2.5, (B, 1): 4.5}
    assert usage_of(rows) == {A: RunUsage(30, 2.5)}


RUN = RunId("s:train:0")
SPEC = AdapterSpec(rank=2, seed=5, train_mlp=False)
WEIGHTS = HostWeights(SPEC, torch.zeros(4))
OPTIMIZER = HostOptimizer(SPEC, torch.zeros(4), torch.zeros(4), step=1)


def saved(request: SaveRequest, optimizer: HostOptimizer | None = None) -> DoneSave:
    op = QueuedOp(RUN, 3, OpKind.SAVE, 0, "inline", 0, 0.0)
    step = Step(1, WorkerId("w0"), (op,), 0.0, {RUN: TenantId("t")})
    row = OpRow(op, encode(request).encode(), None, SaveOutput(WEIGHTS, optimizer), 0, 0.0)
    return saves_of(step, [row], PoolId("p"), "m")[RUN, 3]


def test_a_save_without_a_name_makes_the_sampler_it_was_asked_for() -> None:
    done = saved(SaveRequest(sampler=SamplerId("s:sample:4")))
    sampler, weights = done.records.user, done.records.weights
    assert isinstance(sampler, SamplerRecord)
    assert (sampler.id, sampler.session, sampler.tenant) == ("s:sample:4", "s", "t")
    assert (sampler.ephemeral, sampler.weights) == (True, "s:train:0:3")
    assert (weights.ref, weights.worker, weights.digest) == ("s:train:0:3", "w0", "")
    assert weights.lora == LoraSpec(rank=2, seed=5, train_mlp=False)
    assert done.saved == Saved(WEIGHTS)
    assert done.result.json() == {
        "path": None, "sampling_session_id": "s:sample:4", "type": "save_weights_for_sampler",
    }  # fmt: skip


def test_a_save_with_a_name_makes_a_checkpoint_that_may_expire() -> None:
    done = saved(SaveRequest(name="best", ttl_seconds=60, user_metadata={"step": 3}))
    checkpoint = done.records.user
    assert isinstance(checkpoint, CheckpointRecord)
    assert checkpoint.expires_at == checkpoint.created_at + 60
    assert checkpoint.user_metadata == {"step": 3}
    path = "tinker://s:train:0/sampler_weights/best"
    assert done.result.json() == {"path": path, "type": "save_weights_for_sampler"}
    forever = saved(SaveRequest(name="best")).records.user
    assert isinstance(forever, CheckpointRecord)
    assert forever.expires_at is None


def test_a_save_to_train_on_from_keeps_the_optimizer_and_says_so() -> None:
    request = SaveRequest(name="best", kind="weights", overwrite=True, last=True)
    done = saved(request, OPTIMIZER)
    assert done.saved == Saved(WEIGHTS, OPTIMIZER)
    assert done.records.weights.has_optimizer
    assert (done.records.overwrite, done.records.last) == (True, True)
    path = "tinker://s:train:0/weights/best"
    assert done.result.json() == {"path": path, "type": "save_weights"}


def test_an_export_knows_whom_it_is_encrypted_to_and_answers_what_it_was_asked_to() -> None:
    request = SaveRequest(name="out", kind="external_weights", age_recipients=("age1x",), answer={"type": "other"})
    done = saved(request)
    assert done.saved.recipients == ("age1x",)
    assert done.records.weights.external
    path = "tinker://s:train:0/external_weights/out"
    assert done.result.json() == {"path": path, "type": "other"}
    plain = saved(SaveRequest(name="out", kind="external_weights"))
    assert not plain.records.weights.external
    assert plain.result.json() == {"path": path, "type": "save_weights_external"}


def test_a_save_that_failed_leaves_nothing() -> None:
    op = QueuedOp(RUN, 3, OpKind.SAVE, 0, "inline", 0, 0.0)
    step = Step(1, WorkerId("w0"), (op,), 0.0, {RUN: TenantId("t")})
    assert saves_of(step, [OpRow(op, b"", None, Failure("No.", "server"), 0, 0.0)], PoolId("p"), "m") == {}


OPTIM = OptimStep("a", 2, 1e-4, 0.9, 0.95, 1e-12, 0.0, 0.0)


def a_pass(needs_grad: bool, **inputs: list[float]) -> Pass:
    arrays = {name: np.array(values, np.float32) for name, values in inputs.items()}
    datum = Datum(np.arange(3), {"target_tokens": np.arange(3), **arrays})
    return Pass("a", 1, [datum, datum], "any", {}, needs_grad=needs_grad)


def history_by(requests: Sequence[Op], outputs: Mapping[tuple[str, int], Output]) -> dict[OpId, HistoryEntry]:
    return history_of(
        OpRow(
            QueuedOp(RunId(each.run), each.seq, OpKind.FORWARD_BACKWARD, 0, "inline", 0, 0.0),
            b"", each, outputs.get((each.run, each.seq)), 0, 0.0,
        )
        for each in requests
    )  # fmt: skip


def test_passes_and_steps_are_found_and_nothing_else() -> None:
    outputs: dict[tuple[str, int], Output] = {("a", 1): PassOutput([], 0.1), ("a", 2): StepOutput(0.3)}
    training = a_pass(needs_grad=True, weights=[0.1, 0.0, -2.0])
    weight = 2 * (float(np.float32(0.1)) - 2.0)
    assert history_by([training, OPTIM, Save("a", 3)], outputs) == {
        ("a", 1): PassEntry(0.1, weight, is_forward=False),
        ("a", 2): StepEntry(0.3, 1e-4),
    }
    evaluation = a_pass(needs_grad=False, weights=[1.0, 1.0, 1.0])
    assert history_by([evaluation], outputs) == {("a", 1): PassEntry(0.1, 6.0, is_forward=True)}


def test_without_weights_it_is_targets_that_have_an_advantage_that_count() -> None:
    policy = a_pass(needs_grad=True, logprobs=[0.0, 0.0, 0.0], advantages=[-0.5, 0.0, 2.0])
    [entry] = history_by([policy], {("a", 1): PassOutput([], 0.1)}).values()
    assert entry == PassEntry(0.1, 4.0, is_forward=False)


def test_a_reverse_kl_counts_its_weights() -> None:
    datum = KlDatum(np.arange(3), np.arange(3), np.array([0.5, 0.0], np.float32))
    request = ReverseKl("a", 1, [datum], None, 1.0)
    found = history_by([request], {("a", 1): ReverseKlOutput([], 0.25, 0.5, 1)})
    assert found == {("a", 1): PassEntry(0.25, 0.5, is_forward=False)}


def test_what_failed_or_is_open_or_is_no_number_for_json_is_left_out() -> None:
    training = a_pass(needs_grad=True, weights=[1.0])
    failed: dict[tuple[str, int], Output] = {("a", 1): Failure("no", "user")}
    assert history_by([training, OPTIM], failed) == {}
    endless: dict[tuple[str, int], Output] = {("a", 1): PassOutput([], float("inf"))}
    assert history_by([training], endless) == {}


def test_an_op_that_does_not_run_waits_for_an_open_pass_before_it() -> None:
    note, failed = NoteOutput(), Failure("no", "user")
    ops = [*STEP.ops, QueuedOp(A, 3, OpKind.METRICS, 0, "inline", 1, 0.0)]
    outputs: dict[tuple[str, int], Output] = {("a", 2): failed, ("a", 3): note, ("b", 1): failed}
    assert finished_outputs(ops, outputs) == {("b", 1): failed}
    whole = {("a", 1): failed, **outputs}
    assert finished_outputs(ops, whole) == whole


def test_notes_and_rewinds_that_did_not_fail_have_an_entry() -> None:
    entry = MetricsEntry({"reward": 0.5}, "eval/nll", 2)
    note, back = (
        QueuedOp(A, seq, kind, 0, "inline", 1, 0.0) for seq, kind in enumerate((OpKind.METRICS, OpKind.REWIND))
    )
    rows = [
        OpRow(note, encode(entry).encode(), None, NoteOutput(), 0, 0.0),
        OpRow(back, b"", None, NoteOutput({"seq": 2, "step": 1}), 0, 0.0),
    ]
    assert history_of(rows) == {("a", 0): entry, ("a", 1): RewindEntry(2, 1)}
    assert history_of([replace(rows[1], output=Failure("no", "user"))]) == {}
