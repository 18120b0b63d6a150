"""The span of a plan, where some op of it is traced: the root of its cycle's trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cotrain_store.monitoring.tracing import tracer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cotrain_store.messages.ids import PoolId
    from cotrain_store.messages.ops import QueuedOp, Step
    from cotrain_store.monitoring.tracing import Span


def begin_plan(ops: Sequence[QueuedOp], began: float) -> Span | None:
    """Begin the span of what was begun then; a plan that is not written leaves none."""
    traces = tracer()
    if traces is None or not any(op.trace for op in ops):
        return None
    return traces.begin("plan", began=began)


def end_plan(span: Span, pool: PoolId, step: Step) -> None:
    """Report the plan of a step that is written."""
    span.end(
        pool=pool, worker=step.worker, cycle=step.cycle, runs=len(step.tenant_by_run),
        ops=len(step.ops), tokens=sum(op.tokens for op in step.ops),
    )  # fmt: skip
