"""What the commit script is told of each op of a step: its result, and what it needs no more."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cotrain_store.disk.spool import SpoolRef
from cotrain_store.messages.ops import OpKind

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from cotrain_store.messages.ids import RunId
    from cotrain_store.messages.ops import QueuedOp, Step
    from cotrain_store.messages.results import Result


def op_rows(
    step: Step,
    results: Mapping[tuple[RunId, int], Result],
    crashed: Collection[tuple[RunId, int]],
    all_packed: Sequence[tuple[bytes, int]],
) -> list[str | int | bytes]:
    """Write the ops of a step as `commit.lua` reads them; `all_packed` are their results, in order."""
    rows: list[str | int | bytes] = []
    for op, (packed, ttl_ms) in zip(step.ops, all_packed, strict=True):
        tenant = step.tenant_by_run[op.run]
        has_crashed = (op.run, op.seq) in crashed
        released = _body_of(op) if has_crashed or op.kind is OpKind.FORWARD else ""
        kept = _place_of(op) if has_crashed else ""
        size = len(results[op.run, op.seq].payload)
        rows += [
            op.run, op.seq, tenant, op.tokens, op.size, ttl_ms, packed, released, kept, size,
        ]  # fmt: skip
    return rows


def _body_of(op: QueuedOp) -> str:
    """Name where the body is that a committed op needs no more: `inline` or a spool segment."""
    return "inline" if op.ref == "inline" else SpoolRef.parse(op.ref).segment


def _place_of(op: QueuedOp) -> str:
    """Write the envelope of an op of which only the place in the order is left."""
    return replace(op, kind=OpKind.REJECTED, tokens=0, size=0, ref="inline").envelope()
