"""The runs that can go on at one worker, by what they would do first. Pure; each change costs the same.

A choice for a cycle reads all runs that wait for something without tokens, since it takes them all, and of
those that wait for a pass the ones it takes. So nothing here is read again for being there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from cotrain_store.messages.ids import RunId, TenantId
from cotrain_store.messages.ops import PASSES, OpKind, RunQueue

#: The runs of each tenant, in the order of their turns.
ByTenant: TypeAlias = "dict[TenantId, dict[RunId, RunQueue]]"


class Waiting:
    """What waits for one worker."""

    def __init__(self) -> None:
        self.passes: ByTenant = {}
        """Runs whose first op is a pass, and so costs tokens."""
        self.free: ByTenant = {}
        """Runs whose first op costs none."""
        self.saves: ByTenant = {}
        """The like, whose first op is a save, which a worker does not always take."""
        self.changed: set[TenantId] = set()
        """Tenants whose passes may be others than when the last cycle was planned."""

    def __bool__(self) -> bool:
        return bool(self.passes or self.free or self.saves)

    def __iter__(self) -> Iterator[RunQueue]:
        for group in (self.passes, self.free, self.saves):
            for runs in group.values():
                yield from runs.values()

    def put(self, queue: RunQueue) -> None:
        """Take a run that has ops; one that is here, and would do the like first, keeps its turn."""
        self._group(queue).setdefault(queue.tenant, {})[queue.run] = queue
        self.changed.add(queue.tenant)

    def remove(self, queue: RunQueue) -> None:
        """Take a run away, as it was put."""
        group = self._group(queue)
        del group[queue.tenant][queue.run]
        if not group[queue.tenant]:
            del group[queue.tenant]
        self.changed.add(queue.tenant)

    def replace(self, known: RunQueue, queue: RunQueue) -> None:
        """Put a run as it is now."""
        if self._group(known) is not self._group(queue):
            self.remove(known)
        self.put(queue)

    def first_pass(self, tenant: TenantId) -> RunQueue | None:
        """Return the run of a tenant that is next, of those with a pass."""
        return next(iter(self.passes.get(tenant, {}).values()), None)

    def is_one_run(self, *, accepts_saves: bool) -> bool:
        """Tell whether no more than one run can go on."""
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
