"""What is recorded of one cycle: what it was made of, and what came out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cotrain_store.bodies.reverse_kl_body import decode_reverse_kl
from cotrain_store.errors import MalformedBody
from cotrain_store.messages.ops import OpKind
from cotrain_store.messages.saves import LoadRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cotrain_store.messages.ids import OpId, RunId, WeightsRef
    from cotrain_store.messages.ops import QueuedOp, Step
    from cotrain_workers.engine.adapters.bank import AdapterState
    from cotrain_workers.engine.numerics import Numerics
    from cotrain_workers.engine.ops import HostOptimizer, HostWeights
    from cotrain_workers.recorder.fingerprints import Fingerprint


@dataclass(frozen=True)
class CycleFacts:
    """Which cycle it was, and where it ran."""

    recorded_at: float
    pool: str
    base_model: str
    """As clients ask for it."""
    model: str
    """As the worker loaded it: a hub id or a folder."""
    numerics: Numerics
    step: Step


@dataclass(frozen=True)
class ReadCheckpoints:
    """What the ops of a cycle read of checkpoints, by the checkpoint's weights."""

    weights: Mapping[str, HostWeights] = field(default_factory=dict)
    optimizers: Mapping[str, HostOptimizer | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Findings:
    """What came out of a cycle: of every op that is over, and each run's state after it."""

    by_op: Mapping[OpId, Fingerprint]
    by_run: Mapping[RunId, Fingerprint]


@dataclass(frozen=True)
class RecordedCycle:
    """All of a file."""

    facts: CycleFacts
    bodies: Sequence[bytes]
    """In the order of the plan's ops."""
    before: Mapping[RunId, AdapterState]
    """Of the runs that the cycle did not make."""
    read: ReadCheckpoints
    found: Findings | None
    """None: the process did not live to see it."""


def only_run(cycle: RecordedCycle, run: RunId) -> RecordedCycle:
    """Leave out all other runs: a run's numbers do not depend on them (on a CPU, not to the last bit else)."""
    step = cycle.facts.step
    kept = [(op, body) for op, body in zip(step.ops, cycle.bodies, strict=True) if op.run == run]
    refs = {ref for op, body in kept for ref, _ in checkpoints_of(op, body)}
    ops, tenants = tuple(op for op, _ in kept), {run: step.tenant_by_run[run]}
    return RecordedCycle(
        replace(cycle.facts, step=replace(step, ops=ops, tenant_by_run=tenants)),
        [body for _, body in kept],
        {name: state for name, state in cycle.before.items() if name == run},
        ReadCheckpoints(
            {ref: weights for ref, weights in cycle.read.weights.items() if ref in refs},
            {ref: optimizer for ref, optimizer in cycle.read.optimizers.items() if ref in refs},
        ),
        cycle.found and _only_found(cycle.found, run),
    )


def _only_found(found: Findings, run: RunId) -> Findings:
    return Findings(
        {op_id: each for op_id, each in found.by_op.items() if op_id[0] == run},
        {name: each for name, each in found.by_run.items() if name == run},
    )


def checkpoints_of(op: QueuedOp, body: bytes) -> list[tuple[WeightsRef, bool]]:
    """Name the weights that an op reads, each with whether it reads their optimizer state, too."""
    if not body:
        return []
    if op.kind is OpKind.LOAD:
        request = LoadRequest.parse(body)
        return [(source.ref, request.optimizer) for source in request.sources]
    if op.kind is OpKind.REVERSE_KL:
        try:
            reference = decode_reverse_kl(body).reference
        except MalformedBody:
            return []
        return [(reference, False)] if reference else []
    return []
