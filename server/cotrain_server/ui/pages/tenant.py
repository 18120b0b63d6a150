"""One tenant: limits as bars that can be changed, usage by day, keys, pauses, weight; for the operator."""

from __future__ import annotations

from typing import Any

from cotrain_server.administration.tenant_grants import find_tenant
from cotrain_server.administration.tenant_view import show_tenant
from cotrain_server.ui.page import Look, Page
from cotrain_store.messages.pauses import LEAST_WEIGHT, MOST_WEIGHT


async def read(look: Look) -> dict[str, Any]:
    """Read the page's data; raises TenantNotFound."""
    tenant = await find_tenant(look.services, look.parts["tenant_id"])
    found = await show_tenant(look.services, tenant)
    return {
        "tenant": found.model_dump(),
        "weights": {"least": LEAST_WEIGHT, "most": MOST_WEIGHT},
    }


PAGE = Page(
    "/ui/tenants/{tenant_id}", "Tenant", "tenant.html", read, for_operator=True, in_navigation=False
)
