"""What a tenant may have, how much of it is used, and what it used by day; for the tenant."""

from __future__ import annotations

from typing import Any

from cotrain_server.administration.tenant_view import show_quotas, show_usage
from cotrain_server.ui.page import Look, Page
from cotrain_store.errors import TenantNotFound


async def read(look: Look) -> dict[str, Any]:
    """Read the page's data; raises TenantNotFound for the operator."""
    if look.visitor.tenant is None:
        raise TenantNotFound
    tenant = look.visitor.tenant.id
    return {
        "quotas": [quota.model_dump() for quota in await show_quotas(look.services, tenant)],
        "usage": [day.model_dump() for day in await show_usage(look.services, tenant)],
    }


PAGE = Page("/ui/usage", "Usage", "usage.html", read, for_tenant=True)
