"""What a run is asked to do, in its order, and the step in which a worker does it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from cotrain_store.messages.encoding import decode
from cotrain_store.messages.ids import request_id

if TYPE_CHECKING:
    from cotrain_store.messages.ids import RequestId, RunId, TenantId, WorkerId


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
    begun_tokens: int = 0
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
