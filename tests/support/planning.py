"""Queue for the planner, made of the pending runs."""

from __future__ import annotations

from collections.abc import Iterable

from cotrain_scheduler.queue import FairQueue, Waiting
from cotrain_store.messages.ids import RunId, TenantId
from cotrain_store.messages.ops import PASSES, OpKind, QueuedOp, RunQueue


def waiting_of(rows: Iterable[RunQueue], fair_queue: FairQueue) -> Waiting:
    """Return a queue of runs in the order of their turns, with every waiting tenant marked as changed."""
    waiting = Waiting()
    for row in rows:
        waiting.put(row)
    waiting.changed.update(fair_queue.waiting)
    return waiting


def leads(fair_queue: FairQueue) -> dict[TenantId, float]:
    """Return the tokens by which each tenant is ahead of a newcomer."""
    served = {name: tokens - fair_queue._floor for name, tokens in fair_queue._served.items()}
    return {name: lead for name, lead in served.items() if lead > 0}


def op(run: str, seq: int, kind: OpKind = OpKind.FORWARD_BACKWARD, tokens: int = 10) -> QueuedOp:
    """Make an op, with 10 tokens if it is a pass."""
    return QueuedOp(RunId(run), seq, kind, tokens if kind in PASSES else 0, "inline", 1, 0.0)
