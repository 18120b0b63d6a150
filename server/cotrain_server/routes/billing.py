"""Usage and audit log of a tenant, in the format of the hosted services' billing and in our own.

Nothing here has a price. Storage per hour is not reported, because checkpoints that were deleted or
have expired since would be missing. Current storage is reported.
"""

from collections import defaultdict
from collections.abc import Mapping
from datetime import UTC, date, datetime
from typing import Annotated, Literal

from fastapi import Query

from cotrain.wire import usage as wire
from cotrain.wire.model import Name
from cotrain_server.errors import Invalid
from cotrain_server.http.tenant_routes import ServicesDep, TenantDep, tenant_router
from cotrain_server.services import Services
from cotrain_server.views.records import text_by_name, utc
from cotrain_server.views.usage import events_of, last_day, sources_of, total_of, window
from cotrain_store.messages.ids import SessionId
from cotrain_store.messages.runs import Tenant
from cotrain_store.results.delivery import unread_bytes
from cotrain_store.tenants.lists import Stored
from cotrain_store.tenants.policies import run_bytes

router = tenant_router("usage")


@router.get("/billing/usage/events")
async def billing_usage(
    starting_on: datetime, ending_before: datetime, services: ServicesDep, tenant: TenantDep
) -> wire.BillingUsageResponse:
    """Return the usage of each session by the hour. Whole hours in UTC, at most 14 days."""
    asked = window(starting_on, ending_before, datetime.now(UTC))
    rows = await services.usage.rows(tenant.id, asked.start, asked.end)
    names = {SessionId(row.session) for row in rows if row.session}
    sessions = await services.catalog.session_records(names)
    return wire.BillingUsageResponse(
        data=events_of(rows, sessions, tenant),
        sessions={
            name: wire.UsageSession(user_metadata=text_by_name(session.user_metadata))
            for name, session in sessions.items()
        },
    )


@router.get("/billing/usage/checkpoints/current")
async def checkpoint_storage(
    services: ServicesDep, tenant: TenantDep, project_id: Name | None = None
) -> wire.StorageResponse:
    """Return the current checkpoint storage of each project. Each checkpoint counts in full, even if it shares files."""
    by_project = await _stored_by_project(services, tenant)
    return wire.StorageResponse(
        data=[
            wire.StorageItem(
                project_id=project,
                org_user_urn=tenant.id,
                user_name=tenant.name,
                checkpoint_count=stored.count,
                size_bytes=stored.size_bytes,
                size_gigabytes=stored.size_bytes / 1e9,
            )
            for project, stored in sorted(by_project.items(), key=lambda item: item[0] or "")
            if project_id in (None, project)
        ]
    )


@router.get("/usage")
async def usage(
    services: ServicesDep, tenant: TenantDep, starting_on: datetime | None = None, ending_before: datetime | None = None
) -> wire.UsageResponse:
    """Return your usage and accelerator seconds, in total and by run and sampler, and your current storage.

    Whole hours in UTC, at most 14 days. Without `starting_on` and `ending_before`, the last 24 hours.
    """
    now = datetime.now(UTC)
    if starting_on is None and ending_before is None:
        asked = last_day(now)
    elif starting_on is None or ending_before is None:
        raise Invalid("starting_on and ending_before are needed together.")
    else:
        asked = window(starting_on, ending_before, now)
    rows = await services.usage.rows(tenant.id, asked.start, asked.end)
    return wire.UsageResponse(
        starting_on=asked.start,
        ending_before=asked.end,
        total=total_of(rows),
        sources=sources_of(rows),
        stored=await _stored(services, tenant),
    )


async def _stored(services: Services, tenant: Tenant) -> wire.StoredBytes:
    _, checkpoints = await services.checkpoints.stored_bytes(tenant.id)
    unread = await unread_bytes(services.connection, [tenant.id])
    return wire.StoredBytes(
        runs=await run_bytes(services.connection, tenant.id), checkpoints=checkpoints, unread=unread[tenant.id]
    )


async def _stored_by_project(services: Services, tenant: Tenant) -> dict[str | None, Stored]:
    by_session = await services.session_search.stored(tenant.id)
    sessions = await services.catalog.session_records(by_session)
    by_project: defaultdict[str | None, Stored] = defaultdict(Stored)
    for session, stored in by_session.items():
        by_project[sessions[session].project_id] += stored
    return dict(by_project)


EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]
_RESOURCE_BY_TYPE: Mapping[EventType, str] = {
    "all": "",
    "checkpoints": "checkpoint",
    "projects": "project",
    "teams": "team",
    "organizations": "organization",
}


@router.get("/audit")
async def audit_log(
    services: ServicesDep, tenant: TenantDep, event_type: Annotated[EventType, Query()] = "all", day: date | None = None
) -> wire.AuditLogResponse:
    """Return the audit log of one day (UTC; default today), oldest first. There are no teams or organizations."""
    asked = day or datetime.now(UTC).date()
    entries = await services.audit.entries(tenant.id, asked, _RESOURCE_BY_TYPE[event_type])
    return wire.AuditLogResponse(
        entries=[
            wire.AuditLogEntry(
                timestamp=utc(entry.at),
                event=entry.event,
                event_details={**entry.details, "key_id": entry.key_id, "key_name": entry.key_name},
                tinker_path=entry.details.get("tinker_path"),
            )
            for entry in entries
        ]
    )
