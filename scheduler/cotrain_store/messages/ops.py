"""Ops of a run, the step in which a worker executes them, their results, and changes of a pool's queue."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from cotrain_store.messages.fleet import Move, WorkerSlot
from cotrain_store.messages.ids import OpId, PoolId, RequestId, RunId, TenantId, WorkerId, decode, request_id


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
    def id(self) -> OpId:
        """Run and position in the run's order."""
        return self.run, self.seq

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

    @property
    def requests(self) -> list[RequestId]:
        """Request ids of the ops."""
        return [request_id(op.run, op.seq) for op in self.ops]


@dataclass(frozen=True)
class RunUsage:
    """Tokens and device time that the ops of one run used in one step."""

    tokens: int
    device_s: float


Category = Literal["user", "server", "unknown"]


class ResultKind(StrEnum):
    """Encoding of a result's payload."""

    #: A JSON object, returned unchanged.
    JSON = "j"
    #: A serialized ForwardBackwardOutput message.
    PASS = "p"  # noqa: S105  # a forward pass
    #: A large JSON object; the payload is its spool reference.
    SPOOLED_JSON = "k"
    #: `{"error": …, "category": …}`: the op failed.
    FAILURE = "e"
    #: A large ForwardBackwardOutput message; the payload is its spool reference.
    SPOOLED_PASS = "r"  # noqa: S105  # a forward pass
    #: A serialized SampleResponse message.
    SAMPLE = "s"
    #: A large SampleResponse message; the payload is its spool reference.
    SPOOLED_SAMPLE = "t"


@dataclass(frozen=True)
class Result:
    """Result of a future: a kind and its payload."""

    kind: ResultKind
    payload: bytes

    @classmethod
    def of_json(cls, value: dict[str, Any]) -> Result:
        """Return the result of a JSON object."""
        return cls(ResultKind.JSON, json.dumps(value, separators=(",", ":")).encode())

    @classmethod
    def failed(cls, message: str, category: Category) -> Result:
        """Return a failure: a category and a sentence the tenant can act on."""
        payload = json.dumps({"error": message, "category": category}, separators=(",", ":"))
        return cls(ResultKind.FAILURE, payload.encode())

    def encode(self) -> bytes:
        """Return the result as one Redis value."""
        return self.kind.encode() + self.payload

    @classmethod
    def decode(cls, value: bytes) -> Result:
        """Return the result that `encode` wrote."""
        return cls(ResultKind(value[:1].decode()), value[1:])

    def json(self) -> dict[str, Any]:
        """Return the object of a JSON or failure payload."""
        decoded: dict[str, Any] = json.loads(self.payload)
        return decoded


@dataclass(frozen=True)
class SampleUsage:
    """Usage of one sample request. `cached_tokens` is the part of `prompt_tokens` that was not computed for it."""

    prompt_tokens: int
    cached_tokens: int
    sampled_tokens: int
    device_s: float = 0.0


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
