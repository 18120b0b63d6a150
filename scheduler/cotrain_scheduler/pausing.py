"""Decide whose work waits although a worker is free: the operator has paused it, or it is being moved. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cotrain_scheduler.waiting import Waiting

if TYPE_CHECKING:
    from collections.abc import Collection

    from cotrain_scheduler.waiting import ByTenant
    from cotrain_store.messages.ids import RunId
    from cotrain_store.messages.pauses import Pauses


def going_on(waiting: Waiting, pauses: Pauses, moving: Collection[RunId] = frozenset()) -> Waiting:
    """Leave out the tenants and runs that are paused, and runs that go elsewhere; where none is, this costs nothing."""
    if not pauses.tenants and not pauses.runs and not moving:
        return waiting
    left = Waiting()
    left.changed = waiting.changed
    left.passes, left.free, left.saves = (
        _going_on(group, pauses, moving) for group in (waiting.passes, waiting.free, waiting.saves)
    )
    return left


def _going_on(group: ByTenant, pauses: Pauses, moving: Collection[RunId]) -> ByTenant:
    owners = {pause.tenant for pause in pauses.runs.values()}
    left: ByTenant = {}
    for tenant, runs in group.items():
        if tenant in pauses.tenants:
            continue
        kept = runs
        if tenant in owners:
            kept = {run: queue for run, queue in runs.items() if run not in pauses.runs}
        if moving:
            kept = {run: queue for run, queue in kept.items() if run not in moving}
        if kept:
            left[tenant] = kept
    return left
