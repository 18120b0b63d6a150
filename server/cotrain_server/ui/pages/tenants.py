"""Pages of tenants: the list, one tenant, a tenant's own usage, and the audit log.

The list, the detail page with editable limits, and the full audit log are for the operator.
"""

import re
from collections.abc import Mapping
from typing import Any

from cotrain_server.administration.tenant_grants import find_tenant
from cotrain_server.administration.tenant_view import list_tenants, show_quotas, show_tenant, show_usage
from cotrain_server.errors import Invalid
from cotrain_server.ui.page import Page, PageRequest
from cotrain_store.errors import Reason, Refused
from cotrain_store.messages.fleet import LEAST_WEIGHT, MAX_WEIGHT

SHOWN = 50
#: Meaning of each limit, in one sentence.
LIMITS: Mapping[str, str] = {
    "ops": "Requests of training that wait, per base model.",
    "tokens": "Tokens of these requests.",
    "bytes": "Bytes of these requests.",
    "runs": "Live runs.",
    "run_bytes": "Weights and optimizer states of live runs, in memory and on disk.",
    "unread_bytes": "Results that no client has fetched.",
    "record_bytes": "Records of sessions and runs, also of ended ones.",
    "history_points": "Points of the curves of all runs.",
    "sessions": "Sessions with a live client.",
    "samplers": "Samplers with a live client.",
    "sampler_bytes": "Weights of saves without a name.",
    "polls": "Open requests that wait for a result, per API process.",
    "samples": "Sample requests that wait or run.",
    "sample_tokens": "Maximum tokens of these sample requests: prompts and answers.",
    "checkpoints": "Stored checkpoints.",
    "checkpoint_bytes": "Bytes of stored checkpoints.",
}
_LONGEST_SEARCH = 64


async def read_tenants(look: PageRequest) -> dict[str, Any]:
    """Return the page's data."""
    search = look.query.get("search", "")[:_LONGEST_SEARCH]
    found = await list_tenants(look.services, search, offset_of(look.query), SHOWN)
    return {"search": search, **found.model_dump()}


def offset_of(query: Mapping[str, str]) -> int:
    """Return the number of rows to skip; 0 for an invalid number."""
    text = query.get("offset", "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


TENANTS_PAGE = Page("/ui/tenants", "Tenants", "tenants.html", read_tenants, for_operator=True)


async def read_tenant(look: PageRequest) -> dict[str, Any]:
    """Return the page's data. Raises TENANT_NOT_FOUND."""
    tenant = await find_tenant(look.services, look.parts["tenant_id"])
    found = await show_tenant(look.services, tenant)
    return {"tenant": found.model_dump(), "limits": LIMITS, "weights": {"least": LEAST_WEIGHT, "most": MAX_WEIGHT}}


TENANT_PAGE = Page(
    "/ui/tenants/{tenant_id}", "Tenant", "tenant.html", read_tenant, for_operator=True, in_navigation=False
)


async def read_usage(look: PageRequest) -> dict[str, Any]:
    """Return the page's data. Raises TENANT_NOT_FOUND for the operator."""
    if look.visitor.tenant is None:
        raise Refused(Reason.TENANT_NOT_FOUND)
    tenant = look.visitor.tenant.id
    return {
        "limits": LIMITS,
        "quotas": [quota.model_dump() for quota in await show_quotas(look.services, tenant)],
        "usage": [day.model_dump() for day in await show_usage(look.services, tenant)],
    }


USAGE_PAGE = Page("/ui/usage", "Usage", "usage.html", read_usage, for_tenant=True)


EVENTS_SHOWN = 100
_ID = re.compile(r"[0-9]{1,15}-[0-9]{1,15}")


async def read_audit(look: PageRequest) -> dict[str, Any]:
    """Return the page's data. Raises TENANT_NOT_FOUND, or Invalid for an address outside the links."""
    before, asked_for = look.query.get("before"), look.query.get("tenant", "")
    if before is not None and not _ID.fullmatch(before):
        raise Invalid("before must be the id of an event.")
    tenant = await find_tenant(look.services, asked_for) if asked_for else None
    found = await look.services.audit.page(tenant, before, EVENTS_SHOWN)
    return {
        "tenant": asked_for,
        "events": [entry.model_dump() for entry in found],
        "next": found[-1].id if len(found) == EVENTS_SHOWN else None,
    }


AUDIT_PAGE = Page("/ui/audit", "Audit", "audit.html", read_audit, for_operator=True)
