"""Labels for tenants, of which one process shows a hundred at most."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cotrain_store.messages.ids import TenantId

#: Tenants with a line of their own; the others are summed up, so that a scrape stays small.
TENANTS_SHOWN = 100
OTHERS = "other"


class TenantLabels:
    """The tenants that came first keep their label for the life of the process: a counter never goes back."""

    def __init__(self, most: int = TENANTS_SHOWN) -> None:
        self._most = most
        self._shown: set[TenantId] = set()

    def label(self, tenant: TenantId) -> str:
        """Return a tenant's label."""
        if tenant in self._shown:
            return tenant
        if len(self._shown) >= self._most:
            return OTHERS
        self._shown.add(tenant)
        return tenant
