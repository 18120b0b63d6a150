"""Decide what the next cycle of one worker holds. Pure: the queue in, a plan out.

Order: a run's ops are taken in seq order, as the longest prefix of the form
`(create | import)? (forward | forward_backward | reverse_kl)* optim_step? (save | load)*`, so that a
step submitted whole trains in one cycle, weights never change under a forward, and what is saved is
what the step left. A barrier holds back its own run only.

Fairness: deficit round robin by tokens between tenants (Shreedhar and Varghese, SIGCOMM 1995), op by
op over the runs of one tenant. Among tenants that always have work, the tokens served since they all
had work differ by at most one quantum and one op.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cotrain_store.messages.ops import OpKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from cotrain_store.messages.fleet import WorkerHeartbeat
    from cotrain_store.messages.ids import TenantId
    from cotrain_store.messages.ops import QueuedOp, RunQueue

#: Tokens a tenant may take per visit. Small against a cycle, so that a cycle visits all tenants.
QUANTUM_TOKENS = 2_048
#: These run last in a cycle, in order…
_TAIL = (OpKind.SAVE, OpKind.LOAD)
#: … and after one of these a cycle takes nothing else of their run.
_LAST = (OpKind.OPTIM_STEP, *_TAIL)


@dataclass(frozen=True)
class Fairness:
    """What one cycle hands to the next: whose turn it is, and what each tenant may still take.

    Losing it (a scheduler restart) costs at most one quantum of fairness, so it is not stored.
    """

    ring: tuple[TenantId, ...] = ()
    deficits: Mapping[TenantId, int] = field(default_factory=dict)
    in_visit: bool = False
    """The first tenant of the ring was cut off by the budget and takes no new quantum."""


@dataclass(frozen=True)
class Selection:
    """The ops of one worker's step, grouped by run and in seq order, and the fairness after it."""

    ops: tuple[QueuedOp, ...]
    fairness: Fairness


def select(
    waiting: Mapping[TenantId, Iterable[RunQueue]],
    fairness: Fairness,
    budget_tokens: int,
    quantum_tokens: int = QUANTUM_TOKENS,
    *,
    takes_saves: bool = True,
) -> Selection:
    """Choose ops worth at most `budget_tokens`; one op larger than that goes alone.

    `waiting` has the runs of each tenant, in the order in which they get their turns. Only those are read
    whose turn it is: a choice costs what it holds, however many wait.

    Something is always chosen when something can run, so that nothing waits permanently. Without
    `takes_saves` no save can, nor what its run has behind it.
    """
    ring = deque(_ring(fairness.ring, waiting))
    deficits = {tenant: left for tenant, left in fairness.deficits.items() if tenant in waiting}
    visited: dict[TenantId, _Backlog] = {}
    in_visit = fairness.in_visit and bool(ring) and ring[0] == fairness.ring[0]
    chosen: list[QueuedOp] = []
    spent = 0
    while ring:
        tenant = ring[0]
        if tenant not in visited:
            visited[tenant] = _Backlog(waiting[tenant], takes_saves=takes_saves)
        work = visited[tenant]
        if not in_visit:
            deficits[tenant] = deficits.get(tenant, 0) + quantum_tokens
        in_visit = False
        while work and cost(work.head) <= deficits[tenant]:
            if chosen and spent + cost(work.head) > budget_tokens:
                return Selection(_grouped(chosen), Fairness(tuple(ring), deficits, in_visit=True))
            op = work.take()
            deficits[tenant] -= cost(op)
            spent += cost(op)
            chosen.append(op)
        if work:
            ring.rotate(-1)
        else:
            ring.popleft()
            del deficits[tenant]  # an idle tenant saves nothing up
    return Selection(_grouped(chosen), Fairness())


def runnable_prefix(ops: Iterable[QueuedOp], *, takes_saves: bool = True) -> list[QueuedOp]:
    """Take the ops of one run that one cycle may hold."""
    prefix: list[QueuedOp] = []
    takes_only_tail = False
    for op in ops:
        if op.kind is OpKind.SAVE and not takes_saves:
            break
        if op.kind is not OpKind.REJECTED:
            if takes_only_tail and op.kind not in _TAIL:
                break
            takes_only_tail = op.kind in _LAST
        prefix.append(op)
    return prefix


def cost(op: QueuedOp) -> int:
    """Count what an op takes of a budget: its tokens, at least 1."""
    return max(1, op.tokens)


def budget(worker: WorkerHeartbeat, period_s: float) -> int:
    """Count the tokens a worker does in one clock period, at the throughput it measured."""
    return max(1, int(worker.tokens_per_s * period_s))


class _Backlog:
    """One tenant's runnable ops, taken from its runs in turn. A run is read when its turn comes."""

    def __init__(self, queues: Iterable[RunQueue], *, takes_saves: bool) -> None:
        self._unread = iter(queues)
        self._takes_saves = takes_saves
        self._read: deque[deque[QueuedOp]] = deque()
        self._first = self._next()

    def __bool__(self) -> bool:
        return bool(self._first)

    @property
    def head(self) -> QueuedOp:
        return self._first[0]

    def take(self) -> QueuedOp:
        op = self._first.popleft()
        if self._first:
            self._read.append(self._first)
        self._first = self._next()
        return op

    def _next(self) -> deque[QueuedOp]:
        for queue in self._unread:
            prefix = runnable_prefix(queue.ops, takes_saves=self._takes_saves)
            if prefix:
                return deque(prefix)
        return self._read.popleft() if self._read else deque()


def _ring(before: Sequence[TenantId], waiting: Iterable[TenantId]) -> list[TenantId]:
    """Keep the turn of those still waiting; newcomers join at the end, in the order they came."""
    known, still = set(before), set(waiting)
    staying = [tenant for tenant in before if tenant in still]
    return staying + [tenant for tenant in waiting if tenant not in known]


def _grouped(ops: Iterable[QueuedOp]) -> tuple[QueuedOp, ...]:
    return tuple(sorted(ops, key=lambda op: (op.run, op.seq)))
