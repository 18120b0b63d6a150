"""Contents of a step's commit: results, saves, the cycle record, counters and usage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cotrain_store.messages.ids import OpId, RunId
from cotrain_store.messages.ops import OpKind, QueuedOp, RunUsage, Step
from cotrain_store.messages.results import Result
from cotrain_store.messages.runs import HistoryEntry, PoolRecord
from cotrain_store.messages.saves import SaveRequest
from cotrain_workers.checkpoints.save_records import DoneSave, saves_of
from cotrain_workers.engine.ops import CycleOutput, Failure, Output, SaveOutput
from cotrain_workers.op_codec import result_of
from cotrain_workers.recorder.fingerprints import fingerprint_of
from cotrain_workers.worker.step_runner import StepRun


@dataclass(frozen=True)
class StepCommit:
    """Arguments of a step's commit, and the saves that follow it."""

    results: Mapping[OpId, Result]
    record: Mapping[str, Any]
    counted: Mapping[str, float]
    crashed: frozenset[OpId]
    saves: Mapping[OpId, DoneSave]
    usage: Mapping[RunId, RunUsage]
    opened: Mapping[OpId, int]
    """Open passes, each with the number of its tokens that have run."""
    device_s: Mapping[OpId, float]
    """Compute time of each op in s; for open passes, so far."""
    found: Mapping[OpId, HistoryEntry]
    """Entries that ops add to the histories of their runs."""
    ended: tuple[RunId, ...]
    """Runs whose last save failed."""
    is_exact: bool
    """Same as `StepRun.is_exact`."""


@dataclass(frozen=True)
class StepTimes:
    """Times of a step, in seconds of the wall clock."""

    started: float
    finished: float
    sampling_s: float
    """Time at yield points, used by the decoder and others."""

    @property
    def duration_s(self) -> float:
        """Duration of the step in s."""
        return self.finished - self.started


def commit_of(
    step: Step,
    bodies: Mapping[tuple[str, int], bytes],
    ran: StepRun,
    times: StepTimes,
    record: PoolRecord,
) -> StepCommit:
    """Return the commit of an executed step.

    Unresolved ops appear only in the cycle record, with their tokens of this step. Counters of a
    tenant or a pool count an op once, when it is resolved.
    """
    outputs, cost = ran.outputs, ran.cost
    done, saves = resolved(step, outputs), {}
    if any(op.kind is OpKind.SAVE for op in done.ops):
        saves = saves_of(done, bodies, outputs, record.id, record.base_model)
    results = {
        (op.run, op.seq): saves[op.run, op.seq].result
        if (op.run, op.seq) in saves
        else result_of(op, outputs[op.run, op.seq], step.cycle)
        for op in done.ops
    }
    cycle = cycle_record(step, outputs, cost, times)
    compute_s = cost.wave_s + cost.optim_s if cost else times.duration_s
    taken_s = computing_time(step, outputs, cost, compute_s, ran.earlier_s)
    failed = [op for op in step.ops if isinstance(outputs.get((op.run, op.seq)), Failure)]
    return StepCommit(
        results=results,
        record=cycle,
        counted=counted_cycle(step, outputs, cost, cycle),
        crashed=frozenset((op.run, op.seq) for op in failed if runs_once(op, outputs)),
        saves=saves,
        usage=usage_of(step, outputs, taken_s),
        opened={
            (op.run, op.seq): cost.open_tokens[op.run, op.seq]
            for op in step.ops
            if cost and (op.run, op.seq) in cost.open_tokens
        },
        device_s=taken_s,
        found=ran.found,
        ended=tuple(op.run for op in failed if is_last(op, bodies[op.run, op.seq])),
        is_exact=ran.is_exact,
    )


def runs_once(op: QueuedOp, outputs: Mapping[tuple[str, int], Output]) -> bool:
    """Return True if a failed op must never run again, because it might succeed or crash the next
    time.

    What is the request's own fault (category user) fails in a replay, too, unless it kills; a load is left out of one
    without a look at what became of it (`recovery/replay.py`).
    """
    output = outputs[op.run, op.seq]
    return op.kind is OpKind.LOAD or (
        isinstance(output, Failure) and (output.category == "server" or output.code == "too_large")
    )


def is_last(op: QueuedOp, body: bytes) -> bool:
    """Return True for a save after which the run ends. An empty body means that the run has
    already ended.
    """
    return op.kind is OpKind.SAVE and body != b"" and SaveRequest.parse(body).last


def resolved(step: Step, outputs: Mapping[tuple[str, int], Output]) -> Step:
    """Return the step with its finished ops only. The others stay open, or wait behind open ones."""
    return replace(step, ops=tuple(op for op in step.ops if (op.run, op.seq) in outputs))


def tokens_now(
    op: QueuedOp, outputs: Mapping[tuple[str, int], Output], cost: CycleOutput | None
) -> int | None:
    """Return the number of an op's tokens that ran in this step; None if the op waited."""
    if cost and (op.run, op.seq) in cost.divided:
        return cost.divided[op.run, op.seq].now
    return op.tokens if (op.run, op.seq) in outputs else None


def computing_time(
    step: Step,
    outputs: Mapping[tuple[str, int], Output],
    cost: CycleOutput | None,
    compute_s: float,
    before: Mapping[OpId, float],
) -> dict[OpId, float]:
    """Return the computing time of each op: its share of the step by tokens, plus the time in
    `before`.

    An op without tokens counts as one token.
    """
    parts = {
        (op.run, op.seq): tokens or 1
        for op in step.ops
        if (tokens := tokens_now(op, outputs, cost)) is not None
    }
    total = sum(parts.values())
    return {
        op_id: before.get(op_id, 0.0) + compute_s * part / total for op_id, part in parts.items()
    }


def usage_of(
    step: Step, outputs: Mapping[tuple[str, int], Output], device_s: Mapping[OpId, float]
) -> dict[RunId, RunUsage]:
    """Return the usage of the finished ops by run. Tokens of failed ops are not counted as used."""
    usage: dict[RunId, RunUsage] = {}
    for op in resolved(step, outputs).ops:
        has_failed = isinstance(outputs[op.run, op.seq], Failure)
        before = usage.get(op.run, RunUsage(0, 0.0))
        usage[op.run] = RunUsage(
            before.tokens + (0 if has_failed else op.tokens),
            before.device_s + device_s[op.run, op.seq],
        )
    return usage


def cycle_record(
    step: Step,
    outputs: Mapping[tuple[str, int], Output],
    cost: CycleOutput | None,
    times: StepTimes,
) -> dict[str, Any]:
    """Return the history record of a cycle: its runs, tokens, and the durations of its parts.

    Each op has a digest of its output that does not depend on the cycle; `cotrain replay` shows
    it, too. Saves have none, because their weights are stored under the digest of their content.
    An open pass has only its tokens in the record, and no op.
    """
    runs: dict[RunId, dict[str, Any]] = {}
    for op in step.ops:
        tokens = tokens_now(op, outputs, cost)
        if tokens is None:
            continue
        row = runs.setdefault(op.run, {"run": op.run, "tenant": step.tenant_by_run[op.run],
                                       "tokens": 0, "ops": {}, "failed": 0, "digests": {}})  # fmt: skip
        row["tokens"] += tokens
        output = outputs.get((op.run, op.seq))
        if output is None:
            continue
        row["ops"][op.kind.value] = row["ops"].get(op.kind.value, 0) + 1
        row["failed"] += isinstance(output, Failure)
        if not isinstance(output, SaveOutput):
            row["digests"][str(op.seq)] = fingerprint_of(output).digest
    return {
        "cycle": step.cycle,
        "worker": step.worker,
        "planned_at": step.planned_at,
        "started_at": times.started,
        "duration_ms": round(times.duration_s * 1000, 3),
        "wave_ms": round(cost.wave_s * 1000, 3) if cost else None,
        "optim_ms": round(cost.optim_s * 1000, 3) if cost else None,
        "sampling_ms": round(times.sampling_s * 1000, 3) if cost else None,
        "tokens": sum(row["tokens"] for row in runs.values()),
        "padded_tokens": cost.padded_tokens if cost else None,
        "forwards": cost.forwards if cost else None,
        "outcome": "ok" if cost else "isolated",
        "runs": list(runs.values()),
    }


def counted_cycle(
    step: Step,
    outputs: Mapping[tuple[str, int], Output],
    cost: CycleOutput | None,
    record: Mapping[str, Any],
) -> dict[str, float]:
    """Return the increments of the pool's totals (`definitions.POOL_COUNTERS`)."""
    ops = resolved(step, outputs).ops
    failed = [output for output in outputs.values() if isinstance(output, Failure)]
    return {
        "cycles": 1,
        "cycle_seconds": record["duration_ms"] / 1000,
        "tokens": sum(op.tokens for op in ops),
        "padding_tokens": cost.padded_tokens - cost.tokens if cost else 0,
        "forwards": cost.forwards if cost else 0,
        "optim_steps": _count(ops, OpKind.OPTIM_STEP),
        "resolved_ops": len(ops),
        "failed_ops": len(failed),
        "nonfinite": sum(failure.code == "not_finite" for failure in failed),
    }


def _count(ops: Sequence[QueuedOp], kind: OpKind) -> int:
    return sum(op.kind is kind for op in ops)
