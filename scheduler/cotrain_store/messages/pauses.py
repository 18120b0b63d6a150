"""What the operator holds back, and in which proportion tenants that wait are served."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cotrain_store.messages.ids import RunId, TenantId

#: Of every tenant that was given no other.
WEIGHT = 1.0
LEAST_WEIGHT, MOST_WEIGHT = 0.1, 10.0


@dataclass(frozen=True)
class Pause:
    """Since when a tenant or a run is held back, and what the operator said about it."""

    since: float
    """In s since 1970."""
    reason: str = ""
    tenant: TenantId | None = None
    """Of a run that is paused."""

    def notice(self, what: str) -> str:
        """Say to those who wait why; `what` is `tenant` or `run`."""
        suffix = f": {self.reason}" if self.reason else ""
        return f"the operator has paused this {what}{suffix}"


@dataclass(frozen=True)
class Pauses:
    """All tenants and runs that are held back: what they send is accepted, and waits."""

    tenants: Mapping[TenantId, Pause] = field(default_factory=dict)
    runs: Mapping[RunId, Pause] = field(default_factory=dict)

    def notice(self, tenant: TenantId, run: RunId | None = None) -> str | None:
        """Say why requests of a tenant, of one of its runs, wait; None where they are not held back."""
        if tenant in self.tenants:
            return self.tenants[tenant].notice("tenant")
        pause = self.runs.get(run) if run else None
        return pause.notice("run") if pause else None


@dataclass(frozen=True)
class PlanPolicy:
    """What the planner heeds of tenants when it chooses whose work is next."""

    weights: Mapping[TenantId, float] = field(default_factory=dict)
    """Of those that have another one than WEIGHT."""
    pauses: Pauses = field(default_factory=Pauses)
