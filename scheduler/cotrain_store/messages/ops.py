"""What a run is asked to do, in its order, and the step in which a worker does it.

How the rows of Redis are read as records: what was written once, with what became of it since.

What the scheduler hears of a pool's queue: what changed, and why it is woken.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from cotrain_store.messages.ids import (
    PoolId,
    RequestId,
    RunId,
    TenantId,
    WorkerId,
    decode,
    request_id,
)
from cotrain_store.messages.runs import LoraSpec, PoolRecord, RunRecord, RunState, SessionRecord
from cotrain_store.messages.saves import WeightsRecord


class OpKind(StrEnum):
    """One op asked for by a tenant; the value is what the log stores."""

    #: Make the run's adapter. Always seq 0.
    CREATE = "create"
    #: Make the run's adapter of an uploaded one. Always seq 0.
    IMPORT = "import"
    #: Log-probs and losses, no gradient.
    FORWARD = "forward"
    #: Log-probs, losses, and the gradient added to what the run has accumulated.
    FORWARD_BACKWARD = "forward_backward"
    #: The like, of the KL divergence from a student to a reference.
    REVERSE_KL = "reverse_kl"
    #: AdamW on the accumulated gradient, then zero it. A barrier for its own run.
    OPTIM_STEP = "optim_step"
    #: Copy the adapter out, as the ops before it left it.
    SAVE = "save"
    #: Replace the adapter, and the optimizer state, by a checkpoint's. As seq 0 it makes the run.
    LOAD = "load"
    #: A request that failed validation: it only takes its seq in the order and fails.
    REJECTED = "rejected"


#: These run over tokens, slice by slice: one may take several steps, a slice at least in each.
PASSES = (OpKind.FORWARD, OpKind.FORWARD_BACKWARD, OpKind.REVERSE_KL)


@dataclass(frozen=True)
class QueuedOp:
    """The envelope of one accepted op: all the scheduler reads. The body stays closed to it."""

    run: RunId
    seq: int
    kind: OpKind
    tokens: int
    ref: str
    """Where the body is: `inline` (with the op, in Redis) or a spool reference."""
    size: int
    """Bytes of the body."""
    accepted_at: float
    trace: str = ""
    """The span of its request, as a `traceparent`, where that is reported."""

    def envelope(self) -> str:
        """Write what the log stores under this seq; the scripts read its first and last field."""
        accepted = f"{self.accepted_at!r}{self.trace and ';' + self.trace}"
        return f"{self.kind}|{self.tokens}|{self.size}|{accepted}|{self.ref}"

    @classmethod
    def parse(cls, run: RunId, seq: int, envelope: str) -> QueuedOp:
        """Read `envelope` back."""
        kind, tokens, size, accepted, ref = envelope.split("|", 4)
        at, _, trace = accepted.partition(";")
        return cls(run, seq, OpKind(kind), int(tokens), ref, int(size), float(at), trace)

    @property
    def request_id(self) -> RequestId:
        """The id its future is polled under; derived, so that a repeated POST gets the same one."""
        return request_id(self.run, self.seq)


@dataclass(frozen=True)
class RunQueue:
    """The ops of one run that may run next: contiguous in seq, starting at the first unplanned."""

    run: RunId
    tenant: TenantId
    worker: WorkerId | None
    ops: tuple[QueuedOp, ...]
    done_tokens: int = 0
    """Of the first op, what its worker ran in steps before: it is a pass that is open there."""


@dataclass(frozen=True)
class Step:
    """The part of a cycle that one worker runs at once. A replay re-runs it as it stands.

    The last op of a run may be a pass that does not end in this step. What the plan expects to end may
    not, either: the worker hands back what it did not finish, with all of its run behind it.
    """

    cycle: int
    worker: WorkerId
    ops: tuple[QueuedOp, ...]
    planned_at: float
    tenant_by_run: dict[RunId, TenantId]
    allowances: dict[RequestId, int] = field(default_factory=dict)
    """About how many more tokens of these passes shall run in this step: they may stay open behind it.
    Each runs one slice at least. A pass without an allowance runs to its end."""
    limit_s: float = 10.0
    """After so long on the worker its divided passes stop. What no plan says is that of older schedulers."""
    trace: str = ""
    """The span of its plan, as a `traceparent`, where some op of it is traced."""

    @classmethod
    def parse(cls, text: str | bytes) -> Step:
        """Read what `encode` wrote."""
        raw = json.loads(text)
        raw["ops"] = tuple(
            decode(QueuedOp, {**op, "kind": OpKind(op["kind"])}) for op in raw["ops"]
        )
        return decode(cls, raw)


@dataclass(frozen=True)
class RunUsage:
    """What the ops of one run took in one step."""

    tokens: int
    device_s: float


#: What `weights_record` reads.
WEIGHTS_FIELDS = ("record", "digest", "size", "optimizer")


def session_record(row: dict[bytes, bytes]) -> SessionRecord:
    """Read a session, as its hash has it."""
    raw = json.loads(row[b"record"])
    raw["tags"] = tuple(raw["tags"])
    raw["project_id"] = row.get(b"project_id", b"").decode() or raw["project_id"]
    raw["finish_reason"] = row.get(b"reason", b"").decode()
    finished = row.get(b"finished_at")
    raw["finished_at"] = float(finished) if finished else None
    return decode(SessionRecord, raw)


def run_record(row: dict[bytes, bytes]) -> RunRecord:
    """Read a run, as its hash has it."""
    raw = json.loads(row[b"record"])
    raw["lora"] = decode(LoraSpec, raw["lora"])
    raw["state"] = RunState(row.get(b"state", b"live").decode())
    last = row.get(b"last_request_at")
    raw["last_request_at"] = float(last) if last else None
    raw["weights_epoch"] = int(row.get(b"weights_epoch", b"0"))
    raw["rolled_back_to"] = row.get(b"rolled_back_to", b"").decode()
    raw["note"] = row.get(b"note", b"").decode()
    raw["tags"] = tags_of(row.get(b"tags"))
    return decode(RunRecord, raw)


def tags_of(field: bytes | None) -> tuple[str, ...]:
    """Read the tags of a run."""
    return tuple(json.loads(field)) if field else ()


def pool_record(row: bytes) -> PoolRecord:
    """Read a pool, as its worker wrote it."""
    raw = json.loads(row)
    raw["eos_token_ids"] = tuple(raw.get("eos_token_ids", ()))
    return decode(PoolRecord, raw)


def weights_record(row: Sequence[bytes]) -> WeightsRecord:
    """Read a record of weights and what became of them (WEIGHTS_FIELDS)."""
    raw = json.loads(row[0])
    raw["lora"] = decode(LoraSpec, raw["lora"])
    return replace(
        decode(WeightsRecord, raw),
        digest=row[1].decode(),
        size=int(row[2]),
        optimizer_digest=(row[3] or b"").decode(),
    )


@dataclass(frozen=True)
class QueueChanges:
    """What changed in a pool's queue since a number that the store gave."""

    number: int
    """To ask for next. Less than what was asked for: Redis has lost what it knew."""
    queues: Sequence[RunQueue]
    """As they are now; without ops where a run can not go on any more."""
    ready: int
    """How many runs can go on in all."""
    are_all: bool


@dataclass(frozen=True)
class Wake:
    """Why the scheduler is woken: an op of a run became ready, or a worker became free."""

    pool: PoolId
    worker: WorkerId | None
    """Which has the run; None where none has it, and for one that became free."""
    is_free: bool

    @classmethod
    def parse(cls, text: str) -> Wake:
        """Read `ready {pool}:worker` or `free {pool}:`, as the scripts write it."""
        what, _, where = text.partition(" ")
        pool, _, worker = where.removeprefix("{").partition("}:")
        return cls(PoolId(pool), WorkerId(worker) if worker else None, what == "free")
