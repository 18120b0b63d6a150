"""Ops of a run, the step in which a worker executes them, and changes of a pool's queue.

The module also reads the rows of Redis as records: the immutable part, and the fields that changed since.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache

from cotrain_store.messages.fleet import Move, WorkerSlot
from cotrain_store.messages.ids import PoolId, RequestId, RunId, TenantId, WorkerId, decode, request_id
from cotrain_store.messages.runs import LoraSpec, PoolRecord, RunRecord, RunState, SessionRecord
from cotrain_store.messages.saves import WeightsRecord


class OpKind(StrEnum):
    """Kind of an op that a tenant requested; the value is stored in the log."""

    #: Creates the run's adapter. Always seq 0.
    CREATE = "create"
    #: Creates the run's adapter from an uploaded one. Always seq 0.
    IMPORT = "import"
    #: Computes log-probs and losses, without a gradient.
    FORWARD = "forward"
    #: Computes log-probs and losses, and adds the gradient to the run's accumulated gradient.
    FORWARD_BACKWARD = "forward_backward"
    #: Like FORWARD_BACKWARD, for the KL divergence from a student to a reference.
    REVERSE_KL = "reverse_kl"
    #: Applies AdamW to the accumulated gradient, then zeroes it. A barrier for its own run.
    OPTIM_STEP = "optim_step"
    #: Copies the adapter as the previous ops left it.
    SAVE = "save"
    #: Replaces the adapter, and the optimizer state, by those of a checkpoint. At seq 0 it creates the run.
    LOAD = "load"
    #: A request that failed validation: it takes its seq in the order and fails.
    REJECTED = "rejected"
    #: Returns the run to its state after an earlier optimizer step. Always the first of its run in a step.
    REWIND = "rewind"
    #: Adds a tenant's own metrics to the history of its run, or begins or ends an evaluation.
    METRICS = "metrics"


#: Kinds that process tokens slice by slice. A pass may take several steps, with at least one slice in each.
PASSES = (OpKind.FORWARD, OpKind.FORWARD_BACKWARD, OpKind.REVERSE_KL)


@dataclass(frozen=True)
class QueuedOp:
    """Envelope of one accepted op. The scheduler reads only this, never the body."""

    run: RunId
    seq: int
    kind: OpKind
    tokens: int
    ref: str  # location of the body: `inline` (with the op, in Redis) or a spool reference
    size: int  # bytes of the body
    accepted_at: float
    trace: str = ""  # span of its request, as a `traceparent`, if the request is traced

    def envelope(self) -> str:
        """Return the value stored in the log under this seq; the scripts read its first and last field."""
        accepted = f"{self.accepted_at!r}{self.trace and ';' + self.trace}"
        return f"{self.kind}|{self.tokens}|{self.size}|{accepted}|{self.ref}"

    @classmethod
    def parse(cls, run: RunId, seq: int, envelope: str) -> QueuedOp:
        """Return the op that `envelope` wrote."""
        kind, tokens, size, accepted, ref = envelope.split("|", 4)
        at, _, trace = accepted.partition(";")
        return cls(run, seq, OpKind(kind), int(tokens), ref, int(size), float(at), trace)

    @property
    def request_id(self) -> RequestId:
        """Id of its future; derived, so that a repeated POST gets the same one."""
        return request_id(self.run, self.seq)


@dataclass(frozen=True)
class RunQueue:
    """Ops of one run that may run next: contiguous in seq, starting at the first unplanned op."""

    run: RunId
    tenant: TenantId
    worker: WorkerId | None
    ops: tuple[QueuedOp, ...]
    done_tokens: int = 0
    """Tokens of the first op that its worker ran in earlier steps: a pass that is open there."""


@dataclass(frozen=True)
class Step:
    """Part of a cycle that one worker runs at once. A replay re-runs it unchanged.

    The last op of a run may be a pass that does not end in this step. Passes that the plan expects
    to end may also stay open: the worker returns the remainder, with all later ops of the run.
    """

    cycle: int
    worker: WorkerId
    ops: tuple[QueuedOp, ...]
    planned_at: float
    tenant_by_run: dict[RunId, TenantId]
    allowances: dict[RequestId, int] = field(default_factory=dict)
    """Approximate token budget in this step for passes that may continue in later steps. Each runs
    at least one slice. A pass without an allowance runs to its end.
    """
    limit_s: float = 10.0
    """Time on the worker after which its divided passes stop. The default applies to plans of older schedulers."""
    trace: str = ""  # span of its plan, as a `traceparent`, if one of its ops is traced

    @classmethod
    def parse(cls, text: str | bytes) -> Step:
        """Return the step that `encode` wrote."""
        raw = json.loads(text)
        raw["ops"] = tuple(decode(QueuedOp, {**op, "kind": OpKind(op["kind"])}) for op in raw["ops"])
        return decode(cls, raw)


@dataclass(frozen=True)
class RunUsage:
    """Tokens and device time that the ops of one run used in one step."""

    tokens: int
    device_s: float


#: Fields that `weights_record` reads.
WEIGHTS_FIELDS = ("record", "digest", "size", "optimizer")


def session_record(row: dict[bytes, bytes]) -> SessionRecord:
    """Return the session of a hash."""
    raw = json.loads(row[b"record"])
    raw["tags"] = tuple(raw["tags"])
    raw["project_id"] = row.get(b"project_id", b"").decode() or raw["project_id"]
    raw["finish_reason"] = row.get(b"reason", b"").decode()
    finished = row.get(b"finished_at")
    raw["finished_at"] = float(finished) if finished else None
    return decode(SessionRecord, raw)


def run_record(row: dict[bytes, bytes]) -> RunRecord:
    """Return the run of a hash."""
    last = row.get(b"last_request_at")
    later = {
        "state": RunState(row.get(b"state", b"live").decode()),
        "last_request_at": float(last) if last else None,
        "weights_epoch": int(row.get(b"weights_epoch", b"0")),
        "rolled_back_to": row.get(b"rolled_back_to", b"").decode(),
        "note": row.get(b"note", b"").decode(),
        "tags": tags_of(row.get(b"tags")),
    }
    return RunRecord(**vars(_made_run(row[b"record"])) | later)


@lru_cache(maxsize=1024)  # by the stored bytes, so that none is outdated
def _made_run(record: bytes) -> RunRecord:
    """Return a run with the immutable part of its record."""
    raw = json.loads(record)
    raw["lora"] = decode(LoraSpec, raw["lora"])
    return decode(RunRecord, raw)


def tags_of(field: bytes | None) -> tuple[str, ...]:
    """Return the tags of a run."""
    return tuple(json.loads(field)) if field else ()


@lru_cache(maxsize=64)
def pool_record(row: bytes) -> PoolRecord:
    """Return the pool that its worker wrote."""
    raw = json.loads(row)
    raw["eos_token_ids"] = tuple(raw.get("eos_token_ids", ()))
    return decode(PoolRecord, raw)


def weights_record(row: Sequence[bytes]) -> WeightsRecord:
    """Return the record of weights with its later fields (WEIGHTS_FIELDS)."""
    raw = json.loads(row[0])
    raw["lora"] = decode(LoraSpec, raw["lora"])
    return replace(
        decode(WeightsRecord, raw), digest=row[1].decode(), size=int(row[2]), optimizer_digest=(row[3] or b"").decode()
    )


@dataclass(frozen=True)
class PoolView:
    """State of a pool at one moment, with the changes of its queue since a given change number."""

    number: int  # Number for the next read. It is lower than the requested number if Redis has lost data.
    queues: Sequence[RunQueue]  # requested and changed queues; empty if the run has no runnable op
    is_complete: bool  # False if there are further changes after `number`
    ready: int  # total number of runnable runs
    cycle: int  # number of the last cycle; 0 before the first
    slots: Sequence[WorkerSlot]  # worker ids of the pool, including those without a current process
    moves: Sequence[Move]  # moves that are requested and not done yet


@dataclass(frozen=True)
class Wake:
    """Reason for a wake-up of the scheduler: a run became ready, or a worker became free."""

    pool: PoolId
    worker: WorkerId | None
    """Worker of the run; None if the run has none, and for a worker that became free."""
    is_free: bool

    @classmethod
    def parse(cls, text: str) -> Wake:
        """Return the wake-up in `ready {pool}:worker` or `free {pool}:`, the format of the scripts."""
        what, _, where = text.partition(" ")
        pool, _, worker = where.removeprefix("{").partition("}:")
        return cls(PoolId(pool), WorkerId(worker) if worker else None, what == "free")
