"""Quotas that are the same for every tenant."""

from __future__ import annotations

from cotrain_store.messages.ids import TenantId
from cotrain_store.tenants.quotas import Quotas, QuotasOf


def always(quotas: Quotas) -> QuotasOf:
    """Return the same quotas for every tenant."""

    async def quotas_of(_: TenantId) -> Quotas:
        return quotas

    return quotas_of
