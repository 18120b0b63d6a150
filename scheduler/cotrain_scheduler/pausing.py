"""Decide whose work waits although a worker is free: the operator has paused it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cotrain_scheduler.waiting import Waiting

if TYPE_CHECKING:
    from cotrain_scheduler.waiting import ByTenant
    from cotrain_store.messages.pauses import Pauses


def going_on(waiting: Waiting, pauses: Pauses) -> Waiting:
    """Leave out the tenants and runs that are paused; where none is, this costs nothing."""
    if not pauses.tenants and not pauses.runs:
        return waiting
    left = Waiting()
    left.changed = waiting.changed
    left.passes, left.free, left.saves = (
        _going_on(group, pauses) for group in (waiting.passes, waiting.free, waiting.saves)
    )
    return left


def _going_on(group: ByTenant, pauses: Pauses) -> ByTenant:
    owners = {pause.tenant for pause in pauses.runs.values()}
    left: ByTenant = {}
    for tenant, runs in group.items():
        if tenant in pauses.tenants:
            continue
        kept = runs
        if tenant in owners:
            kept = {run: queue for run, queue in runs.items() if run not in pauses.runs}
        if kept:
            left[tenant] = kept
    return left
