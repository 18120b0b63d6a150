"""Arguments of the scripts that commit a step, reject an op, or roll a run back."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cotrain_store import redis_keys
from cotrain_store.disk.spool import SpoolRef
from cotrain_store.disk.stored_results import RUN_STOPPED, UNLOADED
from cotrain_store.messages.ids import OpId, RequestId, RunId, TenantId, WorkerId, encode, run_of
from cotrain_store.messages.ops import OpKind, QueuedOp, Result, ResultKind, Step
from cotrain_store.messages.runs import (
    HISTORY_POINTS,
    CheckpointRecord,
    HistoryEntry,
    RunState,
    SamplerRecord,
    SaveRecords,
    external_folder,
)

_FAILURES: dict[str, str] = {
    RunState.CLOSED: UNLOADED.encode().decode(),
    RunState.FAILED: RUN_STOPPED.encode().decode(),
}


@dataclass(frozen=True)
class OpRow:
    """One finished op of a step."""

    run: RunId
    seq: int
    tenant: TenantId
    tokens: int
    size: int  # bytes of its body
    ttl_ms: int  # lifetime of its result
    result_bytes: int  # bytes of the whole result, in Redis or in a file
    released: str | None
    """Location of the body that is not needed any more: `inline` or a spool segment."""
    envelope: str | None  # new envelope of the op in the log, if it changes
    found: HistoryEntry | None  # entry that it adds to the history of its run
    replaces_state: bool
    """True if earlier passes without an optimizer step are dropped from the history."""


@dataclass(frozen=True)
class PutBack:
    """One run whose ops return to the head of its queue, from `seq` on."""

    run: RunId
    seq: int
    tenant: TenantId
    begun: int  # executed tokens of the first op; 0 if it is not open in its worker
    waits_since_ms: int  # time when that op was accepted


@dataclass(frozen=True)
class Commit:
    """Argument of `commit.lua`; the cycle's record and the results of `ops`, in order, follow it."""

    fence: str  # key of the epoch of its worker
    epoch: str
    prefix: str
    worker: WorkerId
    cycle: str
    numerics: str
    ops: Sequence[OpRow]
    back: Sequence[PutBack]
    saves: Mapping[RequestId, Mapping[str, Any]]
    counted: Mapping[str, float]
    used: Mapping[str, Mapping[str, float]]
    """Usage of runs, by the keys and fields of their tenants' hours."""
    minute: str  # key of the hash with the counts of this minute
    minute_counts: Mapping[str, float]
    time_s: float  # time by the clock of this host
    failures: Mapping[str, str] = field(default_factory=lambda: dict(_FAILURES))
    """State of a run → result of an op that returns to the run and cannot run any more."""
    failure_ttl_ms: int = redis_keys.SMALL_RESULT_TTL_MS
    failure_kind: str = ResultKind.FAILURE
    cycles_kept: int = redis_keys.CYCLES_KEPT
    usage_ttl_s: int = redis_keys.USAGE_TTL_S
    minute_ttl_s: int = redis_keys.MINUTE_TTL_S
    history_points: int = HISTORY_POINTS
    """Quota of a tenant whose last run was made before histories existed."""


def op_rows(
    step: Step,
    results: Mapping[OpId, Result],
    crashed: Collection[OpId],
    ttls_ms: Sequence[int],
    found: Mapping[OpId, HistoryEntry],
) -> list[OpRow]:
    """Return the arguments of `commit.lua` for the ops of a step that have results.

    `ttls_ms` are the lifetimes of their results, in order; `found` has their history entries.
    """
    rows: list[OpRow] = []
    done = [op for op in step.ops if (op.run, op.seq) in results]
    for op, ttl_ms in zip(done, ttls_ms, strict=True):
        has_crashed = (op.run, op.seq) in crashed
        rows.append(
            OpRow(
                run=op.run,
                seq=op.seq,
                tenant=step.tenant_by_run[op.run],
                tokens=op.tokens,
                size=op.size,
                ttl_ms=ttl_ms,
                result_bytes=len(results[op.run, op.seq].payload),
                released=_body_of(op) if has_crashed or op.kind is OpKind.FORWARD else None,
                envelope=_rejected(op).envelope() if has_crashed else None,
                found=found.get((op.run, op.seq)),
                replaces_state=op.kind is OpKind.LOAD and results[op.run, op.seq].kind is not ResultKind.FAILURE,
            )
        )
    return rows


def put_backs(step: Step, results: Mapping[OpId, Result], opened: Mapping[OpId, int]) -> list[PutBack]:
    """Return the runs with ops without a result, each with its first such op.

    `opened` holds the executed tokens of ops that have begun.
    """
    first: dict[RunId, QueuedOp] = {}
    for op in step.ops:
        if (op.run, op.seq) not in results:
            first.setdefault(op.run, op)
    return [
        PutBack(
            run=run,
            seq=op.seq,
            tenant=step.tenant_by_run[run],
            begun=opened.get((run, op.seq), 0),
            waits_since_ms=int(op.accepted_at * 1000),
        )
        for run, op in first.items()
    ]


def _body_of(op: QueuedOp) -> str:
    """Return the location of a committed op's body, which is not needed any more: `inline` or a spool segment."""
    return "inline" if op.ref == "inline" else SpoolRef.parse(op.ref).segment


def _rejected(op: QueuedOp, size: int = 0) -> QueuedOp:
    """Return an op of which the log keeps only the seq, and possibly `size` bytes of a failure."""
    return replace(op, kind=OpKind.REJECTED, tokens=0, size=size, ref="inline")


def save_row(records: SaveRecords) -> dict[str, Any]:
    """Return the records of one save in the format of `commit.lua`."""
    weights, user = records.weights, records.user
    row: dict[str, Any] = {
        "weights": encode(weights), "worker": weights.worker, "tenant": weights.tenant,
        "user": encode(user), "last": int(records.last),
    }  # fmt: skip
    if weights.external:
        row["folder"] = external_folder(weights.ref)
    if isinstance(user, SamplerRecord):
        idle_ms = redis_keys.sampler_idle_ms(ephemeral=user.ephemeral)
        return row | {"kind": "s", "name": user.id, "session": user.session, "idle_ms": idle_ms}
    row |= {"kind": "c", "name": redis_keys.checkpoint_member(user.run, user.kind, user.name)}
    if user.kind == "weights" and not records.overwrite:
        row["collision"] = _collision(user).encode().decode()
    return row


def _collision(checkpoint: CheckpointRecord) -> Result:
    """Return the result of a save whose name is in use."""
    message = f"Checkpoint name {checkpoint.name!r} already exists in this run; pass overwrite=true to replace it."
    return Result.failed(message, "user")


def rejection(run: RunId, failure: Result) -> dict[str, Any]:
    """Return the arguments of `reject.lua`: the result of the op, and its remaining envelope in the log."""
    op = QueuedOp(run, 0, OpKind.REJECTED, 0, "inline", len(failure.payload), time.time())
    return {
        "result": failure.encode().decode(),
        "ttl_ms": redis_keys.SMALL_RESULT_TTL_MS,
        "body": failure.payload.decode(),
        "envelope": op.envelope(),
    }


def steps_without(open_steps: Mapping[bytes, bytes], run: RunId, size: int) -> list[dict[str, str]]:
    """Return each open step with ops of a run, before and after they are rejected with a failure of `size` bytes."""
    changes: list[dict[str, str]] = []
    for cycle, text in open_steps.items():
        step = Step.parse(text)
        ops = tuple(_rejected(op, size) if op.run == run and op.kind is not OpKind.REJECTED else op for op in step.ops)
        if ops != step.ops:
            left = {at: n for at, n in step.allowances.items() if run_of(at) != run}
            after = encode(replace(step, ops=ops, allowances=left))
            changes.append({"cycle": cycle.decode(), "before": text.decode(), "after": after})
    return changes
