"""What a tenant changed, shared or took away."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import APIRouter, Query

from cotrain.wire.usage import AuditLogEntry, AuditLogResponse
from cotrain_server.http.dependencies import ServicesDep, TenantDep, api_key
from cotrain_server.http.tenant_routes import TenantRoute

if TYPE_CHECKING:
    from collections.abc import Mapping

router = APIRouter(
    prefix="/api/v1", tags=["usage"], route_class=TenantRoute, dependencies=[api_key]
)

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
    services: ServicesDep,
    tenant: TenantDep,
    event_type: Annotated[EventType, Query()] = "all",
    day: date | None = None,
) -> AuditLogResponse:
    """Tell what was done on one day (UTC; today), oldest first. There are no teams or organizations."""
    asked = day or datetime.now(UTC).date()
    entries = await services.audit.entries(tenant.id, asked, _RESOURCE_BY_TYPE[event_type])
    return AuditLogResponse(
        entries=[
            AuditLogEntry(
                timestamp=entry.at,
                event=entry.event,
                event_details={
                    **entry.details,
                    "key_id": entry.key_id,
                    "key_name": entry.key_name,
                },
                tinker_path=entry.details.get("tinker_path"),
            )
            for entry in entries
        ]
    )
