"""Decide what the next cycle of one worker holds. Pure: the queue in, a plan out.

Order: a run's ops are taken in seq order, as the longest prefix of the form
`(create | import)? (forward | forward_backward | reverse_kl)* optim_step? (save | load)*`, so that a
step submitted whole trains in one cycle, weights never change under a forward, and what is saved is
what the step left. A barrier holds back its own run only.

Fairness: fair queueing by tokens between tenants; the runs of one take turns. Next is the tenant whose next
part would end first, had all who wait been served alike (Demers, Keshav and Shenker, SIGCOMM 1989). A pass
of two quanta or more is taken by the quantum; what of it a cycle does not hold goes on in the next one.
Among tenants that always have passes waiting, the tokens served since they all had differ by less than two
quanta; and a tenant that had nothing waiting is served before another gets more than that request's tokens
and two quanta. A tenant with a weight of its own counts each token as 1/weight: it gets weight times the tokens
of one without, the tokens served of each over its weight differ by less than two quanta over the least weight,
and of a tenant that is `n` times as heavy as the newcomer comes at most `n` times as much before it. What has
no tokens (a create, a step, a save, a load) is always taken: it takes nothing of a cycle that could be shared,
and would hold up its run. So a run has few saves and one load in a cycle (`backlog.MOST`).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from cotrain_scheduler.backlog import Backlog, first_part, part
from cotrain_scheduler.fair_queue import FairQueue

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cotrain_scheduler.waiting import Waiting
    from cotrain_store.messages.fleet import WorkerHeartbeat
    from cotrain_store.messages.ids import RequestId, TenantId
    from cotrain_store.messages.ops import QueuedOp, RunQueue

#: Tokens a tenant is served at a time; the least part that a pass is divided into. About what a device
#: runs at once: a smaller part costs it the time of a whole one.
QUANTUM_TOKENS = 2_048
#: A cycle holds so many quanta at least, where it is short.
QUANTA_PER_CYCLE = 16
#: A cycle holds no more than this many times the tokens of the one before it, or than FIRST_TOKENS: a
#: throughput that was measured on small cycles says little of one a hundred times as large.
GROWTH = 4
FIRST_TOKENS = 8 * QUANTUM_TOKENS


@dataclass(frozen=True)
class Selection:
    """The ops of one worker's step, grouped by run and in seq order, and whose turn it is after it."""

    ops: tuple[QueuedOp, ...]
    allowances: dict[RequestId, int]
    """Of passes that may stay open: their tokens in this step, as `Step` has them."""
    tokens: int
    """Of all that the step shall run."""
    fair_queue: FairQueue


def select(
    waiting: Waiting,
    fair_queue: FairQueue,
    budget_tokens: int,
    quantum_tokens: int = QUANTUM_TOKENS,
    *,
    takes_saves: bool = True,
    weights: Mapping[TenantId, float] = MappingProxyType({}),
) -> Selection:
    """Choose ops, and parts of passes, worth at most `budget_tokens`.

    `fair_queue` is what the last selection left; who is in `waiting.changed` is looked at again, and of all others
    nothing is read before it is their turn. Of tenants that wait, one gets tokens in proportion to its weight.

    Something is always chosen when something can run, so that nothing waits permanently. Without
    `takes_saves` no save can, nor what its run has behind it.
    """
    free = _free(waiting, takes_saves=takes_saves)
    backlogs = {
        tenant: Backlog(queues, _passes(waiting, tenant), takes_saves=takes_saves)
        for tenant, queues in free.items()
    }
    if waiting.is_one_run(takes_saves=takes_saves):
        for tenant in waiting.passes:
            backlogs[tenant] = Backlog((), _passes(waiting, tenant), takes_saves=takes_saves)
        return _selection(
            backlogs.values(), _all_alone(backlogs.values(), budget_tokens), FairQueue()
        )
    quantum = min(quantum_tokens, max(1, budget_tokens // QUANTA_PER_CYCLE))
    fair_queue = _up_to_date(fair_queue, waiting, quantum, weights)
    for tenant, backlog in backlogs.items():
        fair_queue.wait(tenant, part(backlog.rest, quantum))
    spent = 0
    while (next_ := fair_queue.next) and spent + next_[1] <= budget_tokens:
        tenant, tokens = next_
        spent += tokens
        if tenant not in backlogs:
            backlogs[tenant] = Backlog((), _passes(waiting, tenant), takes_saves=takes_saves)
        backlogs[tenant].take(tokens)
        fair_queue.serve(tenant, tokens, then_waits_for=part(backlogs[tenant].rest, quantum))
    fair_queue.end_cycle(one for each in backlogs.values() for one in each.planned_parts())
    return _selection(backlogs.values(), spent, fair_queue)


def _free(waiting: Waiting, *, takes_saves: bool) -> dict[TenantId, Iterable[RunQueue]]:
    """List, by tenant, the runs whose first op is taken in any case."""
    if not (takes_saves and waiting.saves):
        return {tenant: runs.values() for tenant, runs in waiting.free.items()}
    tenants = waiting.free.keys() | waiting.saves.keys()
    return {
        tenant: [*waiting.free.get(tenant, {}).values(), *waiting.saves.get(tenant, {}).values()]
        for tenant in sorted(tenants)
    }


def _passes(waiting: Waiting, tenant: TenantId) -> Iterable[RunQueue]:
    return waiting.passes.get(tenant, {}).values()


def _up_to_date(
    before: FairQueue, waiting: Waiting, quantum: int, weights: Mapping[TenantId, float]
) -> FairQueue:
    """Follow what waits now, and what ran."""
    fair_queue, changed = before.copy(), waiting.changed
    fair_queue.weigh(weights)
    if quantum != fair_queue.quantum:
        fair_queue.quantum, changed = quantum, changed | waiting.passes.keys() | fair_queue.waiting
    for tenant in changed:
        fair_queue.wait(tenant, first_part(waiting.first_pass(tenant), quantum))
    fair_queue.correct({
        (queue.run, queue.ops[0].seq): queue.begun_tokens
        for one in fair_queue.planned
        if (queue := waiting.passes.get(one.tenant, {}).get(one.run))
    })  # fmt: skip
    return fair_queue


def _all_alone(backlogs: Iterable[Backlog], budget_tokens: int) -> int:
    """Take what is worth a budget, and all that is left of the pass that exceeds it; return the tokens.

    It may be worth less than it seems, as long as little was measured; else the worker stops the pass
    after a clock period.
    """
    spent = 0
    for backlog in backlogs:
        while backlog.rest and spent < budget_tokens:
            spent += backlog.rest
            backlog.take(backlog.rest, may_stay_open=spent > budget_tokens)
    return spent


def _selection(backlogs: Iterable[Backlog], tokens: int, fair_queue: FairQueue) -> Selection:
    works = [work for backlog in backlogs for work in backlog.works]
    works.sort(key=lambda work: work.queue.run)
    ops = tuple(op for work in works for op in work.taken())
    allowances = {request: part for work in works for request, part in work.allowances.items()}
    return Selection(ops, allowances, tokens, fair_queue)


def budget(worker: WorkerHeartbeat, limit_s: float, last_tokens: int) -> int:
    """Count the tokens a worker does in one cycle of `limit_s`, at the throughput it measured.

    After a cycle of `last_tokens` no more than that has shown.
    """
    shown = max(FIRST_TOKENS, GROWTH * last_tokens)
    return max(1, min(shown, int(worker.tokens_per_s * limit_s)))
