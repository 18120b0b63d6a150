"""What was done, and by which key: of all, or of one tenant; for the operator."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from cotrain_server.administration.tenant_grants import find_tenant
from cotrain_server.errors import Invalid
from cotrain_server.ui.page import Look, Page

SHOWN = 100
_ID = re.compile(r"[0-9]{1,15}-[0-9]{1,15}")


async def read(look: Look) -> dict[str, Any]:
    """Read the page's data; raises TenantNotFound, or Invalid for an address that no link has."""
    before, asked_for = look.query.get("before"), look.query.get("tenant", "")
    if before is not None and not _ID.fullmatch(before):
        raise Invalid("before: the id of an event, as the link to earlier ones has it.")
    tenant = await find_tenant(look.services, asked_for) if asked_for else None
    found = await look.services.audit.page(tenant, before, SHOWN)
    events = [{**asdict(entry), "at": entry.at.timestamp()} for entry in found]
    return {
        "tenant": asked_for,
        "events": events,
        "next": found[-1].id if len(found) == SHOWN else None,
    }


PAGE = Page("/ui/audit", "Audit", "audit.html", read, for_operator=True)
