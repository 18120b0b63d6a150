"""Runnable runs of one worker, grouped by their first op. Pure; each change has constant cost.

The selection for a cycle reads all runs whose first op has no tokens, because it takes all of them. Of the runs
with a pass it reads only those that it takes. So waiting alone costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from cotrain_store.messages.ids import RunId, TenantId
from cotrain_store.messages.ops import PASSES, OpKind, RunQueue

#: Runs of each tenant, in round-robin order.
ByTenant: TypeAlias = "dict[TenantId, dict[RunId, RunQueue]]"


class Waiting:
    """Pending runs of one worker."""

    def __init__(self) -> None:
        self.passes: ByTenant = {}
        """Runs whose first op is a pass, which costs tokens."""
        self.free: ByTenant = {}
        """Runs whose first op has no tokens."""
        self.saves: ByTenant = {}
        """Runs whose first op is a save, which a worker does not always accept."""
        self.changed: set[TenantId] = set()
        """Tenants whose passes may have changed since the last cycle was planned."""

    def __bool__(self) -> bool:
        return bool(self.passes or self.free or self.saves)

    def __iter__(self) -> Iterator[RunQueue]:
        for group in (self.passes, self.free, self.saves):
            for runs in group.values():
                yield from runs.values()

    def put(self, queue: RunQueue) -> None:
        """Add a run with ops; a run already in the same group keeps its turn."""
        self._group(queue).setdefault(queue.tenant, {})[queue.run] = queue
        self.changed.add(queue.tenant)

    def remove(self, queue: RunQueue) -> None:
        """Remove a run, with the ops that it was added with."""
        group = self._group(queue)
        del group[queue.tenant][queue.run]
        if not group[queue.tenant]:
            del group[queue.tenant]
        self.changed.add(queue.tenant)

    def replace(self, known: RunQueue, queue: RunQueue) -> None:
        """Update a run."""
        if self._group(known) is not self._group(queue):
            self.remove(known)
        self.put(queue)

    def first_pass(self, tenant: TenantId) -> RunQueue | None:
        """Return the tenant's next run whose first op is a pass."""
        return next(iter(self.passes.get(tenant, {}).values()), None)

    def is_one_run(self, *, accepts_saves: bool) -> bool:
        """Return True if exactly one run can continue."""
        runs = 0
        for group in (self.passes, self.free, self.saves if accepts_saves else {}):
            for of_tenant in group.values():
                runs += len(of_tenant)
                if runs > 1:
                    return False
        return runs == 1

    def _group(self, queue: RunQueue) -> ByTenant:
        kind = queue.ops[0].kind
        if kind in PASSES:
            return self.passes
        return self.saves if kind is OpKind.SAVE else self.free
