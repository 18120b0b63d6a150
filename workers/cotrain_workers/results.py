"""Commit of a step, made from the outputs of the engine: results, saves, cycle record, counters, usage.

`op_rows` makes one table of the step: a row per op that ran, also in part. `commit_of` builds all else from it.
A *finished* op has an output. The others are open passes, or wait behind one. They return to their queues.
`result_of` encodes one output as the result of a future; a replay compares it with the stored result.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

import numpy as np

from cotrain_store.bodies.adapter_bodies import SaveRequest
from cotrain_store.bodies.pass_body import encode_pass_output
from cotrain_store.bodies.reverse_kl_body import reverse_kl_answer
from cotrain_store.messages.ids import OpId, PoolId, RunId, SessionId, WeightsRef, decode
from cotrain_store.messages.ops import OpKind, QueuedOp, Result, ResultKind, RunUsage, Step
from cotrain_store.messages.runs import (
    CheckpointRecord,
    HistoryEntry,
    LoraSpec,
    MetricsEntry,
    PassEntry,
    PoolRecord,
    RewindEntry,
    SamplerRecord,
    SaveRecords,
    StepEntry,
    WeightsRecord,
)
from cotrain_workers.checkpoints.files import Saved
from cotrain_workers.engine.ops import (
    CreateOutput,
    CycleOutput,
    Failure,
    LoadOutput,
    NoteOutput,
    Op,
    OptimStep,
    Output,
    Pass,
    PassOutput,
    ReverseKl,
    ReverseKlOutput,
    SaveOutput,
    StepOutput,
)
from cotrain_workers.engine.training.drift import lag_sums
from cotrain_workers.fingerprints import fingerprint_of

#: Metric of every training result: the cycle in which it ran.
CYCLE_METRIC = "clock_cycle:unique"
#: Share of the tokens of a pass that were not computed, because an earlier datum has the same prompt.
SHARED_METRIC = "shared_prompts:mean"

#: `type` of a save's result on the wire.
TYPE_BY_KIND = {
    "weights": "save_weights",
    "sampler_weights": "save_weights_for_sampler",
    "external_weights": "save_weights_external",
}


@dataclass(frozen=True)
class StepRun:
    """Outcome of an executed step: the outputs of its finished ops, and its cost."""

    outputs: Mapping[OpId, Output]
    cost: CycleOutput | None  # cost of the cycle; None if the step did not run as a whole
    is_exact: bool
    """False if memory ran out, so that the last bits of some op differ from this worker's numerics."""
    requests: Sequence[Op] = ()  # ops that the engine ran
    earlier_s: Mapping[OpId, float] = field(default_factory=dict)
    """Compute time in s of earlier steps, for passes that this step continued."""
    decode_s: float = 0.0  # time in which requests were decoded


@dataclass(frozen=True)
class OpRow:
    """Op of which a step ran at least a part."""

    op: QueuedOp
    body: bytes
    request: Op | None  # None if the op did not run on the engine
    output: Output | None  # None for a pass that stays open
    tokens: int  # tokens that ran in this step
    device_s: float
    """Compute time in s, with that of earlier steps. A step's time is divided by tokens, at least one per op."""


@dataclass(frozen=True)
class StepTimes:
    """Start of a step on the wall clock, and its durations, in s."""

    started: float
    duration_s: float
    sampling_s: float  # time at yield points, used by the decoder and others


@dataclass(frozen=True)
class DoneSave:
    """Successful save, with the records that its commit writes, the content of its files, and its result."""

    records: SaveRecords
    saved: Saved
    result: Result
    accepted_at: float  # in s since 1970

    @property
    def is_named(self) -> bool:
        """True for a save with a name, whose result becomes visible only when its files are durable."""
        return isinstance(self.records.user, CheckpointRecord)


@dataclass(frozen=True)
class StepCommit:
    """Arguments of a step's commit, and the saves that follow it."""

    rows: Sequence[OpRow]
    results: Mapping[OpId, Result]
    record: Mapping[str, Any]  # record of the cycle (`cycle_record`)
    counted: Mapping[str, float]  # increments of the pool's totals (`counted_cycle`)
    crashed: frozenset[OpId]  # failed ops that must never run again, not even in a replay
    saves: Mapping[OpId, DoneSave]
    usage: Mapping[RunId, RunUsage]
    opened: Mapping[OpId, int]  # open passes, each with the number of its tokens that have run
    history: Mapping[OpId, HistoryEntry]  # entries that ops add to the histories of their runs
    ended: tuple[RunId, ...]  # runs whose last save failed
    is_exact: bool  # same as `StepRun.is_exact`

    @property
    def device_s(self) -> dict[OpId, float]:
        """Compute time of each op in s; for open passes, so far."""
        return {row.op.id: row.device_s for row in self.rows}


def commit_of(
    step: Step, bodies: Mapping[OpId, bytes], ran: StepRun, times: StepTimes, record: PoolRecord
) -> StepCommit:
    """Return the commit of an executed step.

    Unfinished ops appear only in the cycle record, with their tokens of this step. Counters of a
    tenant or a pool count an op once, when it is finished.
    """
    cost = ran.cost
    rows = op_rows(step, bodies, ran, cost.wave_s + cost.optim_s if cost else times.duration_s)
    saves = saves_of(step, rows, record.id, record.base_model)
    open_tokens = cost.open_tokens if cost else {}
    return StepCommit(
        rows=rows,
        results={
            row.op.id: saves[row.op.id].result if row.op.id in saves else result_of(row.op, row.output, step.cycle)
            for row in rows
            if row.output is not None
        },
        record=cycle_record(step, rows, cost, times),
        counted=counted_cycle(rows, cost, times),
        crashed=frozenset(row.op.id for row in rows if must_not_rerun(row)),
        saves=saves,
        usage=usage_of(rows),
        opened={row.op.id: open_tokens[row.op.id] for row in rows if row.op.id in open_tokens},
        history=history_of(rows),
        ended=tuple(row.op.run for row in rows if ends_run(row)),
        is_exact=ran.is_exact,
    )


def op_rows(step: Step, bodies: Mapping[OpId, bytes], ran: StepRun, step_s: float) -> list[OpRow]:
    """Return the ops of which a step ran at least a part, in the order of the plan. `step_s` is its compute time."""
    divided = ran.cost.divided if ran.cost else {}
    request_by_id = {request.id: request for request in ran.requests}
    tokens_by_op = {
        op: divided[op.id].now if op.id in divided else op.tokens
        for op in step.ops
        if op.id in divided or op.id in ran.outputs
    }
    total = sum(tokens or 1 for tokens in tokens_by_op.values())
    return [
        OpRow(
            op,
            bodies[op.id],
            request_by_id.get(op.id),
            ran.outputs.get(op.id),
            tokens,
            ran.earlier_s.get(op.id, 0.0) + step_s * (tokens or 1) / total,
        )
        for op, tokens in tokens_by_op.items()
    ]


def result_of(op: QueuedOp, output: Output, cycle: int) -> Result:
    """Return the result of an op's future. Training results name their cycle.

    The result of a save needs its records: see `saves_of`.
    """
    ran_in = {CYCLE_METRIC: float(cycle)}
    match output:
        case PassOutput(logprobs, loss_sum, drift, shared_tokens):
            shared = {SHARED_METRIC: shared_tokens / op.tokens} if shared_tokens else {}
            metrics = {"loss:sum": loss_sum, **shared, **drift, **ran_in}
            payload = encode_pass_output(logprobs, metrics)
            return Result(ResultKind.PASS, payload)
        case ReverseKlOutput():
            return Result.of_json(reverse_kl_answer(output.losses, kl_metrics(output) | ran_in))
        case StepOutput(grad_norm):
            return Result.of_json({"metrics": {"grad_norm": grad_norm} | ran_in})
        case CreateOutput():
            return Result.of_json({"model_id": op.run, "type": "create_model"})
        case LoadOutput(path):
            return Result.of_json({"path": path, "model_id": op.run, "type": "load_weights"})
        case NoteOutput(answer):
            kind = "rewind" if op.kind is OpKind.REWIND else "log_metrics"
            return Result.of_json({"type": kind, **answer})
        case SaveOutput():
            raise AssertionError("the result of a save is made with its records")
        case Failure(message, category):
            return Result.failed(message, category)


def kl_metrics(output: ReverseKlOutput) -> dict[str, float]:
    """Return the metrics of the hosted service. Means are over targets with a non-zero weight."""
    tokens = max(output.weighted_tokens, 1)
    return {
        "loss:sum": output.loss_sum,
        "loss:mean": output.loss_sum / tokens,
        "reverse_kl:mean": output.kl_sum / tokens,
        "num_samples:sum": float(len(output.losses)),
        "num_tokens:sum": float(output.weighted_tokens),
    }


def saves_of(step: Step, rows: Iterable[OpRow], pool: PoolId, base_model: str) -> dict[OpId, DoneSave]:
    """Return the successful saves of a step, by run and seq."""
    saves: dict[OpId, DoneSave] = {}
    for row in rows:
        op, output = row.op, row.output
        if not isinstance(output, SaveOutput):
            continue
        request = SaveRequest.parse(row.body)
        weights = WeightsRecord(
            ref=WeightsRef(op.request_id),
            run=op.run,
            tenant=step.tenant_by_run[op.run],
            pool=pool,
            worker=step.worker,
            base_model=base_model,
            lora=LoraSpec(**asdict(output.weights.spec)),
            created_at=time.time(),
            has_optimizer=output.optimizer is not None,
            external=bool(request.age_recipients),
        )
        user = _user_of(request, weights)
        answer: dict[str, Any] = {"path": None, "type": TYPE_BY_KIND[request.kind]}
        if isinstance(user, SamplerRecord):
            answer["sampling_session_id"] = user.id
        else:
            answer["path"] = user.path
        saves[row.op.id] = DoneSave(
            SaveRecords(weights, user, overwrite=request.overwrite, last=request.last),
            saved_of(request, output),
            Result.of_json(answer | request.answer),
            op.accepted_at,
        )
    return saves


def saved_of(request: SaveRequest, output: SaveOutput) -> Saved:
    """Return the content of a save's files."""
    return Saved(output.weights, output.optimizer, request.age_recipients)


def _user_of(request: SaveRequest, weights: WeightsRecord) -> SamplerRecord | CheckpointRecord:
    """Return the record that refers to saved weights: a sampler, or a named checkpoint."""
    if request.sampler:
        return SamplerRecord(
            id=request.sampler,
            tenant=weights.tenant,
            session=SessionId(request.sampler.partition(":")[0]),
            pool=weights.pool,
            base_model=weights.base_model,
            model_path=None,
            weights=weights.ref,
            ephemeral=True,
            created_at=weights.created_at,
        )
    assert request.name
    ttl_s = request.ttl_seconds
    return CheckpointRecord(
        run=weights.run,
        tenant=weights.tenant,
        kind=request.kind,
        name=request.name,
        weights=weights.ref,
        base_model=weights.base_model,
        created_at=weights.created_at,
        expires_at=None if ttl_s is None else weights.created_at + ttl_s,
        user_metadata=request.user_metadata,
    )


def history_of(rows: Iterable[OpRow]) -> dict[OpId, HistoryEntry]:
    """Return the entries that ops add to the histories of their runs. Failed ops have none."""
    found: dict[OpId, HistoryEntry] = {}
    for row in rows:
        entry = _entry(row)
        # JSON has no NaN and no infinity.
        if entry and (isinstance(entry, MetricsEntry) or all(map(isfinite, vars(entry).values()))):
            found[row.op.id] = entry
    return found


def _entry(row: OpRow) -> HistoryEntry | None:
    match row.request, row.output:
        case ((Pass() | ReverseKl()) as request, (PassOutput() | ReverseKlOutput()) as output):
            weight = _weight(request)
            drift = output.drift if isinstance(output, PassOutput) else {}
            return PassEntry(
                output.loss_sum,
                weight,
                not request.needs_grad,
                **drift_entry(drift, weight),
                **(lag_sums(request) if isinstance(request, Pass) else {}),
            )
        case OptimStep(learning_rate=learning_rate), StepOutput(grad_norm):
            return StepEntry(grad_norm, learning_rate)
        case _, NoteOutput(answer) if row.op.kind is OpKind.REWIND:
            return RewindEntry(answer["seq"], answer["step"])
        case _, NoteOutput():
            return decode(MetricsEntry, json.loads(row.body))
    return None


def drift_entry(drift: Mapping[str, float], rewarded: float) -> dict[str, float]:
    """Return the fields of a PassEntry for the drift of a pass with `rewarded` tokens with an advantage."""
    if "sampled_tokens:sum" not in drift:
        return {}
    sampled = drift["sampled_tokens:sum"]
    is_bounded = "clip_fraction:mean" in drift
    return {
        "sampled": sampled,
        "gap": drift["rollout_gap:mean"] * sampled,
        "gap_max": drift["rollout_gap:max"],
        "effective": drift["effective_sample_size:mean"] * sampled,
        "bounded": rewarded if is_bounded else 0.0,
        "clipped": drift["clip_fraction:mean"] * rewarded if is_bounded else 0.0,
    }


def _weight(request: Pass | ReverseKl) -> float:
    """Return the sum of the weights, or the number of non-zero advantages if the loss has no
    weights. For a custom loss it is the number of datums, over which its losses are summed.
    """
    if isinstance(request, Pass) and request.graph is not None:
        return float(len(request.datums))
    if isinstance(request, ReverseKl):
        weights = [datum.weights for datum in request.datums]
    elif all("weights" in datum.inputs for datum in request.datums):
        weights = [datum.inputs["weights"] for datum in request.datums]
    else:
        weights = [datum.inputs["advantages"] != 0 for datum in request.datums]
    return float(sum(each.sum(dtype=np.float64) for each in weights))


def must_not_rerun(row: OpRow) -> bool:
    """Return True for a failed op that must not run in a replay, because it might succeed or crash there.

    A fault of the request itself (category user) fails in a replay, too, unless it crashes the
    process (`too_large`). A failed load counts, too, because a replay drops the ops before the
    newest load without checking its outcome (`recovery/replay.py`).
    """
    failure = row.output
    if not isinstance(failure, Failure):
        return False
    return row.op.kind is OpKind.LOAD or failure.category == "server" or failure.code == "too_large"


def ends_run(row: OpRow) -> bool:
    """Return True for a failed save after which the run ends. An empty body means that the run has already ended."""
    is_failed_save = row.op.kind is OpKind.SAVE and isinstance(row.output, Failure)
    return is_failed_save and row.body != b"" and SaveRequest.parse(row.body).last


def usage_of(rows: Iterable[OpRow]) -> dict[RunId, RunUsage]:
    """Return the usage of the finished ops by run. Tokens of failed ops are not counted as used."""
    usage: dict[RunId, RunUsage] = {}
    for row in rows:
        if row.output is not None:
            used = 0 if isinstance(row.output, Failure) else row.op.tokens
            so_far = usage.get(row.op.run, RunUsage(0, 0.0))
            usage[row.op.run] = RunUsage(so_far.tokens + used, so_far.device_s + row.device_s)
    return usage


def cycle_record(step: Step, rows: Iterable[OpRow], cost: CycleOutput | None, times: StepTimes) -> dict[str, Any]:
    """Return the history record of a cycle: its runs, tokens, and the durations of its parts.

    Each op has a digest of its output that does not depend on the cycle; `cotrain replay` shows
    it, too. Saves have none, because their weights are stored under the digest of their content.

    `shared` has the tokens of each pass that were not computed, as its datums have one prompt.
    An open pass has only its tokens in the record, and no op.
    """
    runs: dict[RunId, dict[str, Any]] = {}
    for row in rows:
        op, output = row.op, row.output
        of_run = runs.setdefault(op.run, {"run": op.run, "tenant": step.tenant_by_run[op.run],
                                          "tokens": 0, "ops": {}, "failed": 0, "digests": {}})  # fmt: skip
        of_run["tokens"] += row.tokens
        if output is None:
            continue
        of_run["ops"][op.kind.value] = of_run["ops"].get(op.kind.value, 0) + 1
        of_run["failed"] += isinstance(output, Failure)
        if isinstance(output, PassOutput) and output.shared_tokens:
            of_run.setdefault("shared", {})[str(op.seq)] = output.shared_tokens
        if not isinstance(output, SaveOutput):
            of_run["digests"][str(op.seq)] = fingerprint_of(output).digest
    return {
        "cycle": step.cycle,
        "worker": step.worker,
        "planned_at": step.planned_at,
        "started_at": times.started,
        "duration_ms": round(times.duration_s * 1000, 3),
        "wave_ms": round(cost.wave_s * 1000, 3) if cost else None,
        "optim_ms": round(cost.optim_s * 1000, 3) if cost else None,
        "sampling_ms": round(times.sampling_s * 1000, 3) if cost else None,
        "tokens": sum(of_run["tokens"] for of_run in runs.values()),
        "computed_tokens": cost.tokens if cost else None,  # fewer where datums share a prompt
        "padded_tokens": cost.padded_tokens if cost else None,
        "forwards": cost.forwards if cost else None,
        "outcome": "ok" if cost else "isolated",
        "runs": list(runs.values()),
    }


def counted_cycle(rows: Iterable[OpRow], cost: CycleOutput | None, times: StepTimes) -> dict[str, float]:
    """Return the increments of the pool's totals (`definitions.POOL_COUNTERS`)."""
    finished = [row for row in rows if row.output is not None]
    ops, failed = [row.op for row in finished], [row.output for row in finished if isinstance(row.output, Failure)]
    return {
        "cycles": 1,
        "cycle_seconds": round(times.duration_s, 6),
        "tokens": sum(op.tokens for op in ops),
        "padding_tokens": cost.padded_tokens - cost.tokens if cost else 0,
        "forwards": cost.forwards if cost else 0,
        "optim_steps": sum(op.kind is OpKind.OPTIM_STEP for op in ops),
        "resolved_ops": len(ops),
        "failed_ops": len(failed),
        "nonfinite": sum(failure.code == "not_finite" for failure in failed),
    }
