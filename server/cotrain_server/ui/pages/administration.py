"""Pages of administration: tenants and their limits, a tenant's own usage, the audit log, workers and settings.

The usage page is for tenants, all others are for the operator. The settings are those of the API process, without
secrets.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, SecretStr

from cotrain_server.administration import find_tenant, list_tenants, show_quotas, show_tenant, show_usage
from cotrain_server.errors import Invalid
from cotrain_server.services import Services
from cotrain_server.ui.page import Page, PageRequest
from cotrain_server.ui.run_tables import busiest, targets_of, tokens_of_runs
from cotrain_server.views.server_status import list_workers
from cotrain_store.errors import Reason, Refused
from cotrain_store.messages.fleet import LEAST_WEIGHT, MAX_WEIGHT
from cotrain_store.messages.ids import PoolId, WorkerId
from cotrain_store.monitoring.failures import recent_failures
from cotrain_store.monitoring.recent_activity import READ_AT_ONCE, cycle_records, owners
from cotrain_store.tenants.quotas import Quotas

SHOWN = 50
#: Meaning of each limit.
LIMITS = {name: field.description for name, field in Quotas.model_fields.items()}
_LONGEST_SEARCH = 64


HIDDEN = "hidden"
_SECRET_WORDS = ("key", "password", "secret", "token")
EVENTS_SHOWN = 100
_ID = re.compile(r"[0-9]{1,15}-[0-9]{1,15}")


@partial(Page, "/ui/tenants", "Tenants", "tenants.html", for_operator=True)
async def tenants(request: PageRequest) -> dict[str, Any]:
    """Return the tenants whose name or id has the searched text."""
    search = request.query.get("search", "")[:_LONGEST_SEARCH]
    found = await list_tenants(request.services, search, request.offset, SHOWN)
    return {"search": search, **found.model_dump()}


@partial(Page, "/ui/tenants/{tenant_id}", "Tenant", "tenant.html", for_operator=True, in_navigation=False)
async def one_tenant(request: PageRequest) -> dict[str, Any]:
    """Return the page's data. Raises TENANT_NOT_FOUND."""
    tenant = await find_tenant(request.services, request.parts["tenant_id"])
    found = await show_tenant(request.services, tenant)
    failures = (await recent_failures(request.services.connection, request.now)).get(tenant)
    return {
        "tenant": found.model_dump(),
        "newest_failure": failures.message if failures else "",
        "limits": LIMITS,
        "weights": {"least": LEAST_WEIGHT, "most": MAX_WEIGHT},
    }


@partial(Page, "/ui/usage", "Usage", "usage.html", for_tenant=True)
async def usage(request: PageRequest) -> dict[str, Any]:
    """Return the page's data. Raises TENANT_NOT_FOUND for the operator."""
    if request.visitor.tenant is None:
        raise Refused(Reason.TENANT_NOT_FOUND)
    tenant = request.visitor.tenant.id
    return {
        "limits": LIMITS,
        "quotas": [quota.model_dump() for quota in await show_quotas(request.services, tenant)],
        "usage": [day.model_dump() for day in await show_usage(request.services, tenant)],
    }


@partial(Page, "/ui/audit", "Audit", "audit.html", for_operator=True)
async def audit(request: PageRequest) -> dict[str, Any]:
    """Return the page's data. Raises TENANT_NOT_FOUND, or Invalid for an address outside the links."""
    before, tenant_id = request.query.get("before"), request.query.get("tenant", "")
    if before is not None and not _ID.fullmatch(before):
        raise Invalid("before must be the id of an event.")
    tenant = await find_tenant(request.services, tenant_id) if tenant_id else None
    found = await request.services.audit.page(tenant, before, EVENTS_SHOWN)
    return {
        "tenant": tenant_id,
        "events": [entry.model_dump() for entry in found],
        "next": found[-1].id if len(found) == EVENTS_SHOWN else None,
    }


@partial(Page, "/ui/workers", "Workers", "workers.html", poll_s=3, for_operator=True)
async def workers(request: PageRequest) -> dict[str, Any]:
    """Return the page's data. Runs are listed only for workers whose runs can move."""
    workers = await list_workers(request.services)
    targets = {(each.pool, each.id): targets_of(each, workers) for each in workers}
    pools = {PoolId(pool) for (pool, _), others in targets.items() if others}
    runs = {pool: await _busiest(request.services, pool) for pool in pools}
    return {
        "workers": [
            {
                **each.model_dump(),
                "targets": targets[each.pool, each.id],
                "busiest": runs.get(PoolId(each.pool), {}).get(WorkerId(each.id), []),
            }
            for each in workers
        ],
        "cycles_read": READ_AT_ONCE,
    }


async def _busiest(services: Services, pool: PoolId) -> dict[WorkerId, list[dict[str, Any]]]:
    tokens = tokens_of_runs(await cycle_records(services.connection, pool, READ_AT_ONCE))
    return busiest(tokens, await owners(services.connection, pool, list(tokens)))


@partial(Page, "/ui/settings", "Settings", "settings.html", for_operator=True)
async def settings(request: PageRequest) -> dict[str, Any]:
    """Return the settings of this process, without secrets."""
    settings = request.services.settings
    defaults = {name: field.default for name, field in type(settings).model_fields.items()}
    return {
        "settings": [
            {
                "name": f"COTRAIN_{name.upper()}",
                "value": shown(name, getattr(settings, name)),
                "is_default": getattr(settings, name) == default,
            }
            for name, default in defaults.items()
        ]
    }


def shown(name: str, value: Any) -> str:
    """Return a setting as text without secrets."""
    if value is None or value == ():
        return ""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, SecretStr):
        return HIDDEN
    if isinstance(value, tuple):
        return ", ".join(shown(name, each) for each in value)
    if isinstance(value, BaseModel):
        return " ".join(f"{quota}={number}" for quota, number in value)
    text = str(value)
    if isinstance(value, str) and any(word in name for word in _SECRET_WORDS):
        return HIDDEN
    parts = urlsplit(text) if "://" in text else None
    if parts and "@" in parts.netloc:
        where = parts.netloc.rpartition("@")[2]
        return parts._replace(netloc=f"{HIDDEN}@{where}").geturl()
    return text
